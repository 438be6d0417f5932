from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, NewType, Protocol

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_store.node import service
from kv_store.node.messages import Hold, TtlS
from kv_store.node.service import LENGTH, RefusedCall, ServiceCodec, WaitS, body_len
from wire.errors import WireError
from wire.ids import AttemptId

Name = NewType("Name", str)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    number: int
    data: bytes
    colour: Colour = Colour.RED


@dataclass(frozen=True)
class Outer:
    name: Name
    ratio: float
    is_on: bool
    inner: Inner
    maybe: Inner | None
    many: list[Inner | None]


def refuse_odd(number: int) -> None:
    if number % 2:
        raise WireError("odd")


class Service(Protocol):
    """Methods of all the types that a call may have."""

    def outer(self, outer: Outer, /) -> Outer: ...

    def several(self, names: Sequence[Name], even: Annotated[int, refuse_odd], ratio: float, /) -> list[bool]: ...

    def nothing(self) -> bool: ...

    def hold(self, hold: Hold | None, ttl_s: TtlS, /) -> int: ...

    def wait(self, name: Name, wait_s: WaitS, /) -> bool: ...

    def _private(self) -> bool: ...


CODEC = ServiceCodec(Service)
inners = st.builds(Inner, st.integers(-(2**63), 2**63 - 1), st.binary(), st.sampled_from(Colour))
outers = st.builds(
    Outer,
    st.text(),
    st.floats(allow_nan=False),
    st.booleans(),
    inners,
    st.none() | inners,
    st.lists(st.none() | inners),
)


EVEN = st.integers(-(2**62), 2**62 - 1).map(lambda number: 2 * number)
calls = (
    st.tuples(st.just("outer"), st.tuples(outers))
    | st.tuples(st.just("several"), st.tuples(st.lists(st.text()), EVEN, st.floats(allow_nan=False)))
    | st.just(("nothing", ()))
)


def call_body(method: str, *arguments: object) -> bytes:
    return CODEC.encode_call(method, arguments)[LENGTH.size :]


@given(calls)
def test_a_call_is_the_same_after_the_wire(asked: tuple[str, tuple[object, ...]]) -> None:
    data = CODEC.encode_call(*asked)
    assert body_len(data[: LENGTH.size]) == len(data) - LENGTH.size
    read = CODEC.decode_call(data[LENGTH.size :])
    assert (read.method, tuple(read.arguments)) == asked


@given(outers | st.builds(RefusedCall, st.text()))
def test_an_answer_is_the_same_after_the_wire(answer: object) -> None:
    data = CODEC.encode_answer(answer)
    assert body_len(data[: LENGTH.size]) == len(data) - LENGTH.size
    assert CODEC.decode_answer("outer", data[LENGTH.size :]) == answer


@given(st.binary())
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    for read in (CODEC.decode_call, lambda body: CODEC.decode_answer("outer", body)):
        try:
            assert read(data) is not None
        except WireError as error:
            assert error.message  # noqa: PT017


GOOD = ["n", 0.5, True, [1, b"x", "blue"], None, []]


def changed(index: int, value: object) -> list[object]:
    return [*GOOD[:index], value, *GOOD[index + 1 :]]


OTHER_SHAPES = [
    GOOD[:-1],
    [*GOOD, 1],
    changed(0, b"n"),
    changed(1, "half"),
    changed(1, True),
    changed(2, 1),
    changed(3, None),
    changed(3, [1]),
    changed(3, [True, b"x", "blue"]),
    changed(3, [1, b"x", "green"]),
    changed(3, [1, b"x", 3]),
    changed(3, {"number": 1}),
    changed(4, []),
    changed(5, [1]),
    changed(5, None),
    changed(5, "abc"),
]


@pytest.mark.parametrize("plain", OTHER_SHAPES)
def test_a_value_of_another_shape_is_refused(plain: object) -> None:
    assert CODEC.decode_call(msgpack.packb(["outer", GOOD])).method == "outer"
    with pytest.raises(WireError):
        CODEC.decode_call(msgpack.packb(["outer", plain]))
    assert isinstance(CODEC.decode_answer("outer", msgpack.packb([True, GOOD])), Outer)
    with pytest.raises(WireError):
        CODEC.decode_answer("outer", msgpack.packb([True, plain]))


@pytest.mark.parametrize(
    "plain",
    [
        [],
        "outer",
        ["outer"],
        ["nobody"],
        [["outer"]],
        ["nothing", 1],
        ["outer", GOOD, GOOD],
        ["_private"],
        ["__init__"],
        {"outer": GOOD},
        ["several", ["n"], 3, 0.5],
        ["several", "n", 2, 0.5],
    ],
)
def test_a_call_of_another_shape_is_refused(plain: object) -> None:
    with pytest.raises(WireError):
        CODEC.decode_call(msgpack.packb(plain))


@pytest.mark.parametrize("plain", [[], [True], [1, GOOD], [False, 1], [True, GOOD, 1], "no", {}, True])
def test_an_answer_of_another_shape_is_refused(plain: object) -> None:
    with pytest.raises(WireError):
        CODEC.decode_answer("outer", msgpack.packb(plain))


def test_bytes_after_a_message_and_endless_nesting_are_refused() -> None:
    body = call_body("nothing")
    for data in (body + b"\x00", body[:-1], b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff"):
        with pytest.raises(WireError):
            CODEC.decode_call(data)


def test_an_int_is_a_float_of_that_value() -> None:
    [outer] = CODEC.decode_call(msgpack.packb(["outer", changed(1, 3)])).arguments
    assert (outer.ratio, type(outer.ratio)) == (3.0, float)


def test_messages_are_bounded_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_MESSAGE_BYTES", 10)
    outer = Outer(Name("x" * 20), 0.0, True, Inner(1, b""), None, [])
    with pytest.raises(WireError):
        CODEC.encode_call("outer", (outer,))
    with pytest.raises(WireError):
        CODEC.encode_answer(outer)
    assert body_len(LENGTH.pack(10)) == 10
    with pytest.raises(WireError):
        body_len(LENGTH.pack(11))


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_time_to_live_is_positive_and_bounded(ttl_s: float) -> None:
    good = (Hold(AttemptId("q"), 1.25), 2.5)
    data = call_body("hold", *good)
    assert tuple(CODEC.decode_call(data).arguments) == good
    for known in good[1], 1.25:
        with pytest.raises(WireError):
            CODEC.decode_call(data.replace(msgpack.packb(known), msgpack.packb(ttl_s)))


def test_a_call_waits_if_it_is_declared_to() -> None:
    assert (CODEC.wait_s("wait", ("n", 2.5)), CODEC.wait_s("wait", ("n", 0.0))) == (2.5, 0.0)
    assert CODEC.wait_s("nothing", ()) is CODEC.wait_s("hold", (None, 2.5)) is None
    assert CODEC.decode_call(call_body("wait", "n", 10.0)).arguments == ["n", 10.0]
    for wait_s in (-0.1, 10.1, float("nan")):
        with pytest.raises(WireError):
            CODEC.decode_call(call_body("wait", "n", wait_s))
