import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NewType

import pytest

from wire.errors import ConfigError
from wire.typed_reader import from_json, from_object, to_json, to_message

Name = NewType("Name", str)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Wheel:
    name: Name
    colour: Colour = Colour.RED


@dataclass(frozen=True)
class Cart:
    wheels: tuple[Wheel, ...]
    spare: Wheel | None = None
    weight: float | None = None
    load: dict[str, float] = field(default_factory=dict)


CART = Cart((Wheel(Name("left")), Wheel(Name("right"), Colour.BLUE)), Wheel(Name("third")), 1.5, {"hay": 2.0})


@pytest.mark.parametrize("cart", [CART, Cart(())])
def test_what_is_written_is_read_again(cart: Cart) -> None:
    assert from_json(Cart, to_json(cart), "cart") == cart


@pytest.mark.parametrize("cart", [CART, Cart(()), Cart((Wheel(Name("left"), Colour.BLUE),), weight=0.0)])
def test_a_message_is_read_again(cart: Cart) -> None:
    assert from_json(Cart, to_message(cart), "cart") == cart


def test_a_message_without_new_fields_is_read_by_a_release_that_does_not_have_them() -> None:
    spare = Wheel(Name("third"))
    assert json.loads(to_message(Cart((spare,), spare))) == {"wheels": [{"name": "third"}], "spare": {"name": "third"}}
    assert json.loads(to_message(Cart((), load={"hay": 0.0}))) == {"wheels": [], "load": {"hay": 0.0}}
    assert json.loads(to_json(Cart(())))["weight"] is None, "settings and records are whole"


def test_enums_are_written_by_their_values_and_tuples_as_lists() -> None:
    assert json.loads(to_json(Cart(CART.wheels[1:])))["wheels"] == [{"name": "right", "colour": "blue"}]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"wheels": {}}, "cart.wheels: must be a list, not an object"),
        ({"wheels": [3]}, r"cart.wheels\[0\]: must be an object, not 3"),
        ({"wheels": [{"name": 3}]}, r"cart.wheels\[0\].name: must be a text, not 3"),
        (
            {"wheels": [{"name": "left", "colour": "green"}]},
            r"cart.wheels\[0\].colour: must be one of red, blue, not 'green'",
        ),
        (
            {"wheels": [{"name": "left", "colour": []}]},
            r"cart.wheels\[0\].colour: must be one of red, blue, not an empty list",
        ),
        ({"spare": 3}, "cart.spare: must be an object, not 3"),
        ({"spare": {"name": "third", "size": 3}}, "cart.spare.size: unknown"),
        ({"weight": True}, "cart.weight: must be a number, not True"),
        ({"load": [1]}, "cart.load: must be an object, not a list"),
        ({"load": {"hay\n": "much"}}, r"cart.load.hay\\n: must be a number, not 'much'"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_path(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        from_object(Cart, {"wheels": [], **changes}, "cart")


@pytest.mark.parametrize(
    ("raw", "named"),
    [({}, "wheels: missing"), ({"wheels": 3}, "wheels: must be a list, not 3"), ({"a\nb": 3}, r"a\\nb: unknown")],
)
def test_at_the_root_a_name_is_the_whole_path_and_stays_on_one_line(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}$"):
        from_object(Cart, raw, "")
