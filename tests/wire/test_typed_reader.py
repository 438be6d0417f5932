"""What a reader makes of values from outside, and where it says that one does not fit."""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, NewType

import pytest

from wire.typed_reader import Between, HexOf, Misfit, by_place, not_empty, once, reader_of, shown

Id = NewType("Id", str)
Share = Annotated[float, Between(0, 1)]


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Part:
    id: Id
    share: Share = 0.5


READ: list[tuple[Any, Any, Any]] = [
    (int, 3, 3),
    (float, 3, 3.0),
    (int | float, 3, 3),
    (bytes, b"a", b"a"),
    (Colour, "red", Colour.RED),
    (Literal["a", 1], 1, 1),
    (int | str | None, None, None),
    (tuple[Id, ...], ["a"], ("a",)),
    (dict[str, Share], {"a": 1}, {"a": 1.0}),
    (list[Part | None], [{"id": "a"}, None], [Part(Id("a")), None]),
    (str | tuple[str, ...], ["a"], ("a",)),
    (Annotated[str, "a name"], "a", "a"),
]


@pytest.mark.parametrize(("hint", "given", "value"), READ)
def test_values_that_fit(hint: Any, given: Any, value: Any) -> None:
    read = reader_of(hint)(given)
    assert (read, type(read)) == (value, type(value))


WRONG: list[tuple[Any, Any, str]] = [
    (int, True, ": must be a whole number, not True"),
    (int, 1.0, ": must be a whole number, not 1.0"),
    (bool, 1, ": must be true or false, not 1"),
    (str, None, ": must be a text, not null"),
    (int | str, None, ": must be a whole number or a text, not null"),
    (int | str, [1], ": must be a whole number or a text, not a list"),
    (Share, 2, ": must be between 0 and 1, not 2.0"),
    (Share, float("nan"), ": must be between 0 and 1, not nan"),
    (float, 1 << 64, ": must be a number, not 18446744073709551616"),
    (Colour, "green", ": must be one of red, blue, not 'green'"),
    (Literal["a", 1], True, ": must be one of a, 1, not True"),
    (list[int], [1, "a"], "[1]: must be a whole number, not 'a'"),
    (dict[str, int], {"a\n": "a"}, "a\\n: must be a whole number, not 'a'"),
    (list[Part], [{"id": "a", "share": 3}], "[0].share: must be between 0 and 1, not 3.0"),
    (list[Part], [{"id": "a"}, {"share": 3}], "[1].id: missing"),
    (Part | None, {"id": "a", "colour": "red"}, "colour: unknown"),
    (str | tuple[str, ...], ["a", 3], "[1]: must be a text, not 3"),
]


@pytest.mark.parametrize(("hint", "given", "told"), WRONG)
def test_a_misfit_is_told_by_its_place_its_type_and_its_value(hint: Any, given: Any, told: str) -> None:
    with pytest.raises(Misfit) as refused:
        reader_of(hint)(given)
    assert f"{refused.value.under('')}: {refused.value}" == told


@pytest.mark.parametrize("text", ["0g" * 2, "000", "00" * 3, "0x00", " 0000", "0000\n", ""])
def test_hex_digits_that_are_none_are_refused_and_not_shown(text: str) -> None:
    assert reader_of(Annotated[str, HexOf(2)])("00fF") == "00fF"
    assert reader_of(Annotated[str, HexOf()])("") == ""
    with pytest.raises(Misfit, match=r"^must be 2 bytes in hex digits$"):
        reader_of(Annotated[str, HexOf(2)])(text)


def test_a_text_may_have_to_be_given() -> None:
    assert reader_of(Annotated[str, not_empty])("a") == "a"
    with pytest.raises(Misfit, match=r"^must not be empty$"):
        reader_of(Annotated[str, not_empty])("")


@dataclass(frozen=True, kw_only=True)
class Named:
    id: Id
    share: Share


@pytest.mark.parametrize("kind", [Part, Named])
def test_dataclasses_are_read_from_lists_by_place(kind: type[Any]) -> None:
    read = reader_of(list[kind], by_place)  # type: ignore[valid-type]
    assert read([["a", 1]]) == [kind(id="a", share=1.0)]
    for given in ([{"id": "a", "share": 1}], [["a"]], [["a", 1, 2]], [["a", "b"]]):
        with pytest.raises(Misfit):
            read(given)


def test_a_name_that_stands_twice_is_refused() -> None:
    assert json.loads('{"a": {"b": 1}}', object_pairs_hook=once) == {"a": {"b": 1}}
    with pytest.raises(Misfit) as refused:
        json.loads('{"a": {"b": 1, "c": 2, "b": 1}}', object_pairs_hook=once)
    assert refused.value.under("cart") == "cart.b"


def test_a_value_is_shown_in_part_and_on_one_line() -> None:
    for value in ("a\nb" * 100, b"\0" * 100, 10**5000, -(10**5000), {"a": 1}, [1]):
        assert len(shown(value)) <= 64
        assert "\n" not in shown(value)
