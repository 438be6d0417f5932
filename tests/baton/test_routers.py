"""Clients of several routers: which one is asked, and what follows when it is gone."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest

import baton.routers
from baton import Client
from baton.routers import MAX_OUT_S, OUT_S, PAUSE_S, Resumption, Routers
from tests.baton.scripted_service import WAIT_S, ScriptedService, Step, served
from tests.baton.test_clients import CLIENTS, chunk, complete
from tests.harness.fake_clock import FakeClock
from wire.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RequestExists,
    RequestNotFound,
    RouterLeaving,
    Unavailable,
    Unreachable,
)
from wire.pb import inference_pb2 as pb
from wire.rpc import MAX_MESSAGE_BYTES
from wire.trust.key_ring import Allowance, make_key, place_of

NAMES = [f"10.0.0.{number}:1" for number in range(5)]
PLACES = [f"{number:04x}" for number in range(500)]


def test_each_place_has_its_router_and_all_have_some() -> None:
    first = [Routers(",".join(NAMES)).order(place)[0] for place in PLACES]
    others = Routers(",".join(name.replace(":1", ":2") for name in NAMES))
    assert [name.replace(":1", ":2") for name in first] == [others.order(place)[0] for place in PLACES]
    assert all(60 <= first.count(name) <= 140 for name in NAMES)


def test_a_router_that_is_gone_moves_its_own_places_alone() -> None:
    routers, fewer = (Routers(",".join(NAMES), FakeClock()) for _ in range(2))
    fewer.note(NAMES[0], answers=False)
    for place in PLACES:
        assert fewer.order(place) == [*(name for name in routers.order(place) if name != NAMES[0]), NAMES[0]]


def test_a_router_that_does_not_answer_is_left_out_longer_each_time_and_taken_back() -> None:
    clock = FakeClock()
    routers = Routers(",".join(NAMES), clock)
    first, second, *_ = routers.order("")
    for number in range(8):
        routers.note(first, answers=False)
        routers.note(first, answers=False)  # of a call that began before
        assert (routers.order("")[0], routers.order("")[-1]) == (second, first)
        clock.now += min(OUT_S * 2**number, MAX_OUT_S)
        assert routers.order("")[0] == first
    routers.note(first, answers=True)
    routers.note(first, answers=False)
    clock.now += OUT_S
    assert routers.order("")[0] == first


def test_all_keys_of_a_tenant_have_one_place() -> None:
    places = {place_of(make_key("acme", [], Allowance())[1]) for _ in range(9)}
    assert len(places) == 1
    assert places != {place_of(make_key("beta", [], Allowance())[1])}
    assert place_of("") == place_of("no key") == ""


def test_a_request_that_waited_long_for_its_first_token_goes_on_and_gives_up_in_the_dark() -> None:
    clock = FakeClock()
    resumption = Resumption(pb.GenerateRequest(text="hi"), Routers(",".join(NAMES[:2]), clock), "", 600.0)
    first = resumption.address
    clock.now += 100.0
    assert resumption.lost(Unreachable("gone")) == 0.0
    assert resumption.address != first
    clock.now += baton.routers.MAX_DARK_S - 0.1
    assert resumption.lost(Unreachable("gone")) is not None
    clock.now += 0.1
    assert resumption.lost(Unreachable("gone")) is None
    resumption.accept(pb.GenerateResponse())
    assert resumption.lost(Unreachable("gone")) is not None
    clock.now += 500.0
    resumption.accept(pb.GenerateResponse())
    assert resumption.lost(Unreachable("gone")) is None, "the caller's deadline has passed"


def test_a_refused_resumption_is_tried_again_when_the_router_says_or_ever_later() -> None:
    clock = FakeClock()
    resumption = Resumption(pb.GenerateRequest(text="hi"), Routers(",".join(NAMES[:2]), clock), "", 600.0)
    assert resumption.lost(Unreachable("gone")) == 0.0
    assert resumption.lost(Overloaded("full", 2.5)) == 2.5
    pauses_s = list[float]()
    while (pause_s := resumption.lost(RequestExists("it runs there yet"))) is not None:
        pauses_s.append(pause_s)
        clock.now += pause_s
    assert pauses_s == sorted(pauses_s[:-1]) + pauses_s[-1:], "the last one ends with the bound"
    assert len(pauses_s) < 25
    assert clock.now == pytest.approx(FakeClock().now + baton.routers.MAX_DARK_S)


def test_a_pause_before_a_refused_resumption_ends_by_the_bounds() -> None:
    clock = FakeClock()
    resumption = Resumption(pb.GenerateRequest(text="hi"), Routers(",".join(NAMES[:2]), clock), "", 9.0)
    assert resumption.lost(Unreachable("gone")) == 0.0
    assert resumption.lost(Overloaded("full", 60.0)) == 9.0
    resumption.accept(pb.GenerateResponse())
    assert resumption.lost(RequestExists("it runs there yet")) == PAUSE_S, "pauses begin anew behind an answer"


@dataclass
class Pair:
    """Two routers and a client of both. `first` is asked first."""

    first: ScriptedService
    second: ScriptedService
    end_first: Callable[[], None]
    client: Any


@pytest.fixture(params=CLIENTS, ids=["client", "async client"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[Sequence[Step], Sequence[Step]], Pair]]:
    with ExitStack() as stack:

        def start(first: Sequence[Step], second: Sequence[Step], timeout_s: float = WAIT_S) -> Pair:
            by_address, ends = dict[str, ScriptedService](), dict[str, Callable[[], None]]()
            for _ in range(2):
                service, own = ScriptedService(), stack.enter_context(ExitStack())
                address = own.enter_context(served(service))
                by_address[address], ends[address] = service, own.close
            one, other = Routers(",".join(by_address)).order("")
            by_address[one].script, by_address[other].script = first, second
            client = request.param(",".join(by_address), timeout_s=timeout_s, api_key="")
            stack.callback(client.close)
            return Pair(by_address[one], by_address[other], ends[one], client)

        yield start


STOP = pb.Choice(finish_reason=pb.FINISH_REASON_STOP)
ENDED = chunk("b", index=1, token_ids=[9], ended=pb.Choice(index=1, finish_reason=pb.FINISH_REASON_LENGTH))
REST = [chunk(" c", token_ids=[7]), complete(STOP, pb.Choice(index=1))]


def text_of(stream: Any) -> str:
    return "".join(one.text for one in stream if one.index == 0)


def test_an_answer_too_long_for_a_message_is_named_when_its_router_is_lost(make: Any) -> None:
    parts = [chunk("", token_ids=[1 << 20] * (MAX_MESSAGE_BYTES // 8)) for _ in range(3)]
    pair = make([*parts, RouterLeaving("it stops")], REST)
    with pytest.raises(Unavailable, match=r"^resume: .* bytes, at most 4194304"), pair.client.stream("hello") as stream:
        text_of(stream)
    assert pair.second.requests == []


@pytest.mark.parametrize("is_told", [False, True], ids=["killed", "stopping"])
def test_a_stream_goes_on_at_the_other_router_with_what_has_come(make: Any, is_told: bool) -> None:
    may_end = threading.Event()
    first = chunk("a", token_ids=[5, 6])
    first.fingerprint = "ab" * 32
    pair = make([first, ENDED, RouterLeaving("it stops") if is_told else may_end], REST)
    with pair.client.stream("hello", n=2, temperature=1) as stream:
        text = ""
        for one in stream:
            text += one.text if one.index == 0 else ""
            if one.index == 1 and not is_told:
                threading.Thread(target=pair.end_first).start()
        assert text == "a c"
        assert stream.completion.choices[0].token_ids == (5, 6, 7)
    may_end.set()
    ((before,), (after,)) = pair.first.requests, pair.second.requests
    assert after.resume == pb.Resume(
        choices=[pb.ResumedChoice(token_ids=[5, 6]), pb.ResumedChoice(token_ids=[9], ended=ENDED.chunk.ended)],
        fingerprint="ab" * 32,
    )
    after.ClearField("resume")
    assert after == before
    assert before.request_id
    assert before.sampling_params.HasField("seed")


def test_a_router_that_is_gone_is_passed_over_and_asked_no_more_for_a_while(make: Any) -> None:
    pair = make([], [complete()])
    pair.end_first()
    assert pair.client.list_models()[0].name == "small"
    for _ in range(2):
        with pair.client.stream("hello") as stream:
            assert text_of(stream) == ""
    assert [one.HasField("resume") for one in pair.second.requests] == [False, False], "the other one is asked at once"


def test_connections_of_one_gateway_leave_out_a_router_together() -> None:
    with served(ScriptedService()) as living:
        routers = Routers(f"127.0.0.1:9,{living}")
        place = next(one for one in PLACES if routers.order(one)[0] == "127.0.0.1:9")
        text = f"baton-{place}0000-{'0' * 64}"
        with Client(routers, timeout_s=WAIT_S, api_key=text) as client:
            client.list_models()
        assert routers.is_out("127.0.0.1:9")


def test_a_request_is_aborted_at_whichever_router_has_it(make: Any) -> None:
    pair = make([RequestNotFound("not here")], [])
    pair.client.abort("r1")
    assert pair.second.aborted == ["r1"]


def test_a_router_that_hangs_leaves_time_for_the_next_one(make: Any) -> None:
    may_end = threading.Event()
    pair = make([may_end], [], timeout_s=2.0)
    pair.client.abort("r1")
    may_end.set()
    assert pair.second.aborted == ["r1"]


def test_two_routers_that_hang_are_told_within_the_callers_own_time(make: Any) -> None:
    may_end = threading.Event()
    pair = make([may_end], [may_end], timeout_s=0.6)
    began_s = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"within the timeout of 0\.6 s"):
        pair.client.abort("r1")
    assert time.monotonic() - began_s == pytest.approx(0.6, abs=0.5)
    may_end.set()


@pytest.mark.parametrize(
    "error", [InvalidRequest("stop", "is wrong"), Unavailable("no worker"), Overloaded("full", 1.0)]
)
def test_what_a_router_says_of_a_request_is_no_loss_of_the_router(make: Any, error: Exception) -> None:
    pair = make([error], REST)
    with pytest.raises(type(error)), pair.client.stream("hello") as stream:
        text_of(stream)
    assert pair.second.requests == []


def test_a_refusal_of_a_stream_that_goes_on_is_asked_again(make: Any) -> None:
    pair = make([chunk("a", token_ids=[5]), RouterLeaving("it stops")], [RequestExists("it runs there yet")])
    threading.Timer(0.3, lambda: setattr(pair.second, "script", REST)).start()
    with pair.client.stream("hello", n=2) as stream:
        assert text_of(stream) == "a c"


def test_without_any_router_a_stream_ends_in_time(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.routers, "MAX_DARK_S", 0.5)
    leaving = [RouterLeaving("it stops")]
    pair = make(leaving, leaving)
    with pytest.raises(RouterLeaving), pair.client.stream("hello") as stream:
        text_of(stream)
    assert 2 <= len(pair.first.requests) + len(pair.second.requests) <= 20


def test_a_connection_that_takes_some_round_trips_is_waited_for() -> None:
    with served(ScriptedService()) as one, served(ScriptedService()) as other, ExitStack() as stack:
        slow = [stack.enter_context(relayed(address, after_s=0.9)) for address in (one, other)]
        with Client(",".join(slow), timeout_s=WAIT_S) as client:
            assert client.list_models()[0].name == "small"


@contextmanager
def relayed(address: str, after_s: float) -> Iterator[str]:
    """The address of a way to a server that is long: nothing comes through before that time."""
    host, _, port = address.partition(":")

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                pause.wait(after_s)
                far = socket.create_connection((host, int(port)))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=pump, args=ends, daemon=True).start()

    pause = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        pause.set()


@pytest.mark.parametrize("addresses", ["a:1,", ",a:1", "a:1,,b:1", "a:1, a:1", ","])
def test_addresses_that_are_empty_or_equal_are_refused(addresses: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^address: "):
        Client(addresses)


def test_spaces_around_addresses_are_no_part_of_them() -> None:
    assert Routers("a:1, b:1").addresses == ["a:1", "b:1"]


def test_one_router_alone_sees_requests_as_they_were_made() -> None:
    service = ScriptedService([complete()])
    with served(service) as address, Client(address, timeout_s=WAIT_S) as client:
        client.generate("hello")
    assert not service.requests[0].HasField("request_id")
