from dataclasses import dataclass
from typing import NewType

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire import codec
from wire.codec import LENGTH, MessageCodec, body_len
from wire.directory import MESSAGES, Commit, Hold, RenewHolds, Reserve, TakeLease
from wire.errors import WireError
from wire.ids import RequestId

Name = NewType("Name", str)


@dataclass(frozen=True)
class Inner:
    number: int
    data: bytes


@dataclass(frozen=True)
class Outer:
    name: Name
    ratio: float
    is_on: bool
    inner: Inner
    maybe: Inner | None
    many: list[Inner | None]


@dataclass(frozen=True)
class Empty:
    pass


CODEC = MessageCodec([Outer, Empty])
inners = st.builds(Inner, st.integers(-(2**63), 2**63 - 1), st.binary())
outers = st.builds(
    Outer,
    st.text(),
    st.floats(allow_nan=False),
    st.booleans(),
    inners,
    st.none() | inners,
    st.lists(st.none() | inners),
)


def body(message: object) -> bytes:
    return CODEC.encode(message)[LENGTH.size :]


@given(outers | st.builds(Empty))
def test_a_message_is_the_same_after_the_wire(message: object) -> None:
    data = CODEC.encode(message)
    assert body_len(data[: LENGTH.size]) == len(data) - LENGTH.size
    assert CODEC.decode(body(message)) == message


@given(st.binary())
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        assert isinstance(CODEC.decode(data), Outer | Empty)
    except WireError as error:
        assert error.message  # noqa: PT017


GOOD = ["Outer", "n", 0.5, True, [1, b"x"], None, []]


def changed(index: int, value: object) -> list[object]:
    return [*GOOD[:index], value, *GOOD[index + 1 :]]


@pytest.mark.parametrize(
    "plain",
    [
        [],
        "Outer",
        ["Inner", 1, b"x"],
        ["Nobody"],
        [["Outer"]],
        GOOD[:-1],
        [*GOOD, 1],
        changed(1, b"n"),
        changed(2, "half"),
        changed(2, True),
        changed(3, 1),
        changed(4, None),
        changed(4, [1]),
        changed(4, [True, b"x"]),
        changed(4, {"number": 1}),
        changed(5, []),
        changed(6, [1]),
        changed(6, None),
        changed(6, "abc"),
    ],
)
def test_what_has_another_shape_is_refused(plain: object) -> None:
    assert CODEC.decode(msgpack.packb(GOOD))
    with pytest.raises(WireError):
        CODEC.decode(msgpack.packb(plain))


def test_bytes_after_a_message_and_endless_nesting_are_refused() -> None:
    for data in (body(Empty()) + b"\x00", body(Empty())[:-1], b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff"):
        with pytest.raises(WireError):
            CODEC.decode(data)


def test_an_int_is_a_float_of_that_value() -> None:
    assert CODEC.decode(msgpack.packb(changed(2, 3))).ratio == 3.0


def test_messages_are_bounded_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 10)
    with pytest.raises(WireError):
        CODEC.encode(Outer(Name("x" * 20), 0.0, True, Inner(1, b""), None, []))
    assert body_len(LENGTH.pack(10)) == 10
    with pytest.raises(WireError):
        body_len(LENGTH.pack(11))


def test_the_directorys_messages_have_names_of_their_own() -> None:
    assert len({message.__name__ for message in MESSAGES}) == len(MESSAGES)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_time_to_live_is_positive_and_bounded(ttl_s: float) -> None:
    directory = MessageCodec(MESSAGES)
    for good in (
        TakeLease("r", [], 1.25),
        RenewHolds([], 1.25),
        Reserve("w", [], Hold(RequestId("q"), 1.25)),
        Commit("w", [], Hold(RequestId("q"), 1.25)),
    ):
        data = directory.encode(good)[LENGTH.size :]
        assert directory.decode(data) == good
        with pytest.raises(WireError):
            directory.decode(data.replace(msgpack.packb(1.25), msgpack.packb(ttl_s)))
