"""Streams in which no token comes for a while, on a clock that stands still while anything else is to do."""

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway import exchange
from gateway.exchange import BEGIN_AFTER_S, COMMENT, Events, Reply, Request, Streamed
from router.requests.prompt import PromptPreparer
from tests.gateway import local_gateway
from tests.gateway.local_gateway import Answer, LocalGateway, serving
from tests.harness.fake_cluster import CONFIG
from tests.harness.fake_worker import FakeWorker
from tests.simulator import virtual_time
from wire.errors import InvalidRequest, Unavailable
from wire.ids import RequestId

HI = [{"role": "user", "content": "hi"}]
COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello", "max_tokens": 3},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    MESSAGES: {"messages": HI, "max_tokens": 3},
}
BEGUN: dict[str, list[str]] = {
    MESSAGES: ["message_start", "ping"],
    "/v1/responses": ["response.created", "response.in_progress"],
}
"""Events before the first token, by path."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_gateway, "WAIT_S", 600.0)
    monkeypatch.setattr(local_gateway, "TIMEOUT_S", 600.0)


@asynccontextmanager
async def silent(name: str) -> AsyncIterator[tuple[LocalGateway, FakeWorker]]:
    """A gateway, and the worker of that name, which does nothing before `may_go`."""
    async with serving() as gateway:
        worker = gateway.cluster.workers[name]
        worker.may_go.clear()
        yield gateway, worker
        worker.may_go.set()


def asked(gateway: LocalGateway, path: str, **more: Any) -> asyncio.Task[Answer]:
    return asyncio.create_task(
        gateway.post(path, {**BODIES[path], "seed": 1, "stream": True, **more}, x_request_id="a")
    )


def times(answer: Answer) -> list[float]:
    """The times of the head and of each piece but the last, in tenths of a second."""
    return [round(at_s, 1) for at_s, _ in answer.pieces[:-1]]


def without_comments(answer: Answer) -> list[Any]:
    """The events, but for the times in them."""
    return [
        {name: value for name, value in json.loads(data).items() if name not in ("created", "response")}
        for event in answer.body.replace(COMMENT, b"").decode().split("\n\n")
        for data in [event.partition("data: ")[2]]
        if data not in ("", "[DONE]")
    ]


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_begins_before_its_first_token_and_says_something_every_ten_seconds(path: str) -> None:
    async def run() -> None:
        async with silent("p0") as (gateway, worker):
            asking = asked(gateway, path)
            await asyncio.sleep(59)
            worker.may_go.set()
            answer = await asking
            assert (answer.status, answer.is_whole) == (200, True)
            assert answer.headers["content-type"] == "text/event-stream"
            assert times(answer)[:8] == [5.0, 5.0, 15.0, 25.0, 35.0, 45.0, 55.0, 59.0]
            first, *silence = [piece for _, piece in answer.pieces[1:7]]
            assert silence == [COMMENT] * 5
            begun = [line[7:] for line in first.decode().splitlines() if line.startswith("event: ")]
            assert begun == BEGUN.get(path, [])
            assert (first == COMMENT) == (path not in BEGUN)
            prompt = await asked(gateway, path)
            assert without_comments(answer) == without_comments(prompt)
            assert COMMENT not in prompt.body

    virtual_time.run(run())


@pytest.mark.parametrize("silent_s", [0.0, 30.0])
def test_tokens_of_the_prompt_are_in_the_first_event_of_messages(silent_s: float) -> None:
    async def run() -> None:
        async with silent("p0") as (gateway, worker):
            asking = asked(gateway, MESSAGES)
            await asyncio.sleep(silent_s)
            worker.may_go.set()
            begun, *_, ended, _ = without_comments(await asking)
            counted = (await gateway.post(f"{MESSAGES}/count_tokens", {"messages": HI})).json["input_tokens"]
            usage, last = begun["message"]["usage"], ended["usage"]
            assert (usage["input_tokens"], usage["output_tokens"]) == (counted, 0)
            assert last["input_tokens"] + last["cache_read_input_tokens"] == counted

    virtual_time.run(run())


def test_silence_between_tokens_is_filled_and_a_slow_stream_is_not() -> None:
    async def run() -> None:
        async with silent("d0") as (gateway, worker):
            asking = asked(gateway, COMPLETIONS, max_tokens=2)
            await asyncio.sleep(25)
            worker.may_go.set()
            assert times(await asking)[1:5] == [0.0, 10.0, 20.0, 25.0]
            worker.may_go.clear()
            asking = asked(gateway, COMPLETIONS, max_tokens=5)
            for _ in range(4):
                await asyncio.sleep(9)
                worker.may_go.set()
                await asyncio.sleep(0)
                worker.may_go.clear()
            answer = await asking
            assert answer.is_whole
            assert COMMENT not in answer.body

    virtual_time.run(run())


@pytest.mark.parametrize("path", BODIES)
def test_a_failure_after_the_beginning_is_the_last_event_of_a_stream(path: str) -> None:
    async def run() -> None:
        async with silent("p0") as (gateway, _):
            asking = asked(gateway, path)
            await asyncio.sleep(7)
            await gateway.cluster.router.dispatcher.abort(RequestId("a"))
            answer = await asking
            assert (answer.status, answer.is_whole) == (200, False)
            last = without_comments(answer)[-1]
            assert last["error"]["message"] == "the request was aborted"

    virtual_time.run(run())


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_that_is_no_stream_says_nothing_before_it_is_whole(path: str) -> None:
    async def run() -> None:
        async with silent("p0") as (gateway, worker):
            asking = asked(gateway, path, stream=False)
            await asyncio.sleep(59)
            worker.may_go.set()
            answer = await asking
            assert (answer.status, set(times(answer))) == (200, {59.0})
            json.loads(answer.body)

    virtual_time.run(run())


@pytest.mark.parametrize(
    ("refused", "status"), [(InvalidRequest("max_tokens", "does not fit"), 400), (None, 200)], ids=["refused", "taken"]
)
def test_no_stream_begins_while_its_prompt_is_tokenized(
    monkeypatch: pytest.MonkeyPatch, refused: InvalidRequest | None, status: int
) -> None:
    prepare = PromptPreparer.prepare

    async def slowly(*given: Any) -> Any:
        await asyncio.sleep(20)
        if refused is not None:
            raise refused
        return await prepare(*given)

    async def run() -> None:
        monkeypatch.setattr(PromptPreparer, "prepare", slowly)
        async with serving() as gateway:
            answer = await asked(gateway, COMPLETIONS)
            assert (answer.status, times(answer)[0]) == (status, 20.0)

    virtual_time.run(run())


def test_no_stream_begins_before_there_is_a_worker() -> None:
    async def run() -> None:
        async with serving() as gateway:
            await gateway.cluster.enlist()
            refused = await asked(gateway, COMPLETIONS)
            assert (refused.status, refused.headers["retry-after"], times(refused)[0]) == (503, "1", 60.0)
            asking = asked(gateway, COMPLETIONS)
            await asyncio.sleep(20)
            await gateway.cluster.resize(1, 1)
            answer = await asking
            assert (answer.status, times(answer)[0]) == (200, 80.0)

    virtual_time.run(run())


def test_of_several_prompts_all_have_a_worker_before_the_stream_begins() -> None:
    async def run() -> None:
        async with silent("p0") as (gateway, worker):
            prepare = PromptPreparer.prepare

            async def slowly(preparer: PromptPreparer, valid: Any, *given: Any) -> Any:
                await asyncio.sleep(20 if valid.prompt == "slow" else 0)
                return await prepare(preparer, valid, *given)

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(PromptPreparer, "prepare", slowly)
                asking = asked(gateway, COMPLETIONS, prompt=["hello", "slow"])
                await asyncio.sleep(29)
            worker.may_go.set()
            assert times(await asking)[:3] == [20.0, 20.0, 29.0]

    virtual_time.run(run())


def gateway_tasks() -> list[str]:
    coroutines: list[Any] = [task.get_coro() for task in asyncio.all_tasks()]
    return [
        one.__qualname__ for one in coroutines if Path(one.cr_code.co_filename).parent == Path(exchange.__file__).parent
    ]


@pytest.mark.parametrize("gone_s", [3.0, 7.0, 27.0])
def test_a_client_that_goes_in_a_silence_leaves_no_task(gone_s: float) -> None:
    async def run() -> None:
        async with silent("p0") as (gateway, worker):
            asking = asked(gateway, COMPLETIONS)
            await asyncio.sleep(gone_s)
            assert "Reply._fill" in gateway_tasks()
            gateway.gone.set()
            await asking
            await asyncio.sleep(1)
            assert worker.open_calls == 0
            assert gateway_tasks() == []

    virtual_time.run(run())


class PiecesTaken:
    """A stream that fails while its client takes, in pieces, the beginning."""

    def __init__(self, piece_s: float) -> None:
        self._piece_s = piece_s
        self.sent: list[bytes] = []
        self._reply = Reply(Request({"method": "POST", "raw_path": b"/", "headers": []}, self._receive), self._send)

    async def answer(self) -> None:
        try:
            await self._reply.stream(Streamed(self._events(), self._open, lambda _: b"failed"))
        except Unavailable as error:
            await self._reply.fail(error)

    async def _receive(self) -> MutableMapping[str, Any]:
        raise NotImplementedError

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        for piece in message.get("body", b"").split():
            self.sent.append(piece)
            await asyncio.sleep(self._piece_s)

    async def _open(self) -> bytes:
        return b"a beginning of five pieces"

    async def _events(self) -> Events:
        await asyncio.sleep(BEGIN_AFTER_S + 2.5)
        if self.sent:
            raise Unavailable("the worker has gone")
        yield b"an event"


def test_a_failure_does_not_cut_the_beginning_that_a_client_takes_in_pieces() -> None:
    async def run() -> None:
        taken = PiecesTaken(1.0)
        await taken.answer()
        assert taken.sent == [*b"a beginning of five pieces".split(), b"failed"]

    virtual_time.run(run())


def test_a_stream_that_is_cancelled_again_amid_a_piece_leaves_no_task() -> None:
    async def run() -> None:
        taken = PiecesTaken(1e6)
        answering = asyncio.create_task(taken.answer())
        for wait_s in (BEGIN_AFTER_S + 1, 10):
            await asyncio.sleep(wait_s)
            answering.cancel()
        await asyncio.wait([answering])
        assert (answering.cancelled(), taken.sent, gateway_tasks()) == (True, [b"a"], [])

    virtual_time.run(run())


def test_a_full_router_is_told_with_its_status() -> None:
    async def run() -> None:
        admission = replace(CONFIG.settings, max_open_requests=1)
        async with serving(config=replace(CONFIG, settings=admission)) as gateway:
            worker = gateway.cluster.workers["p0"]
            worker.may_go.clear()
            first = asked(gateway, COMPLETIONS)
            await asyncio.sleep(7)
            refused = await gateway.post(COMPLETIONS, {**BODIES[COMPLETIONS], "stream": True})
            assert (refused.status, times(refused)[0]) == (429, 7.0)
            worker.may_go.set()
            assert (await first).is_whole

    virtual_time.run(run())
