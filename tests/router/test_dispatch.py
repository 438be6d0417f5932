"""Whole requests before fake workers: what the client gets, whatever breaks, and that nothing is left behind."""

import asyncio
import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest

from router.config import RouterConfig
from router.requests.dispatch import LAST_WORD_S, MAX_TOKENIZING
from tests.harness.cluster import Output, collect, until
from tests.harness.fake_cluster import CONFIG, PROMPT, expected, request, running
from tests.harness.fake_worker import FakeWorker
from text.byte_tokenizer import ByteTokenizer
from wire.convert import tiers_to_pb
from wire.errors import (
    AttemptsExhausted,
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RequestExists,
    RequestNotFound,
    Unavailable,
    WorkerNotFound,
)
from wire.ids import DEFAULT_TENANT, RequestId, WorkerId
from wire.pb import inference_pb2 as pb
from wire.pools import Role


def assert_is_whole(output: Output, length: int, num_choices: int = 1) -> None:
    """Tokens, text and counts are those of a run in which nothing broke."""
    for choice in range(num_choices):
        assert output.token_ids[choice] == expected(length, choice)
        assert output.text[choice] == bytes(expected(length, choice)).decode(errors="replace")
        assert output.complete.choices[choice].finish_reason == pb.FINISH_REASON_LENGTH
    assert output.complete.usage.completion_tokens == length * num_choices


def with_streams(**bounds: Any) -> RouterConfig:
    return replace(CONFIG, settings=replace(CONFIG.settings, **bounds))


async def test_a_request_goes_through_both_pools() -> None:
    async with running(1, 1) as cluster:
        output = await cluster.generate(request(max_tokens=9))
        assert_is_whole(output, 9)
        assert (output.complete.timeline.prefill_worker, output.complete.timeline.decode_worker) == ("p0", "d0")
        assert output.complete.usage.prompt_tokens == len(PROMPT)
        assert output.complete.usage.cached_tokens == tiers_to_pb({"host": 1})
        handed_over = cluster.workers["d0"].decodes[0]
        assert list(handed_over.choices[0].output.ids) == expected(9)[:1]
        assert handed_over.namespace_root == cluster.workers["p0"].prefills[0].namespace_root


async def test_a_version_of_the_model_is_forgotten_when_no_worker_has_it() -> None:
    async with running(1, 1) as cluster:
        await cluster.generate(request(max_tokens=9))
        ended = weakref.ref(cluster.router.versions.wanted)
        cluster.router.versions.replace([replace(CONFIG.model, fingerprint_hex="ab" * 32)])
        gc.collect()
        assert ended() is None


async def test_a_request_that_ends_at_its_first_token_never_goes_to_decode() -> None:
    async with running(1, 1) as cluster:
        output = await cluster.generate(request(max_tokens=1))
        assert_is_whole(output, 1)
        assert cluster.workers["d0"].decodes == []
        assert output.complete.timeline.decode_worker == ""


async def test_without_prefill_workers_decode_does_it_all() -> None:
    async with running(0, 1) as cluster:
        output = await cluster.generate(request(max_tokens=9))
        assert_is_whole(output, 9)
        assert output.complete.usage.cached_tokens == tiers_to_pb({"device": 2})
        assert output.complete.timeline.prefill_worker == ""


async def test_choices_decode_together_and_differ() -> None:
    async with running(1, 2) as cluster:
        output = await cluster.generate(request(max_tokens=7, n=4))
        assert_is_whole(output, 7, num_choices=4)
        assert len({tuple(tokens) for tokens in output.token_ids.values()}) == 4
        assert len([worker for worker in cluster.workers.values() if worker.decodes]) == 1


async def test_a_seed_is_drawn_and_told() -> None:
    async with running(1, 1) as cluster:
        message = pb.GenerateRequest(text=PROMPT, sampling_params=pb.SamplingParams(max_tokens=3))
        seeds = {(await cluster.generate(message)).complete.seed for _ in range(2)}
        assert len(seeds) == 2
        assert seeds == {sent.sampling_params.seed for sent in cluster.workers["p0"].prefills}


@pytest.mark.parametrize("num_tokens_out", range(17))
@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_a_decode_worker_dies_after_any_token(num_prefill: int, num_tokens_out: int) -> None:
    async with running(num_prefill, 2) as cluster:
        cluster.faults["d0"].fail_after = num_tokens_out
        output = await cluster.generate(request(max_tokens=16, n=2))
        assert_is_whole(output, 16, num_choices=2)
        await until(lambda: cluster.port.lost == ["d0"])


async def test_only_unfinished_choices_are_replayed() -> None:
    only_in_first = next(token for token in expected(16) if token not in expected(16, choice=1))
    length = expected(16).index(only_in_first) + 1
    async with running(1, 2) as cluster:
        cluster.faults["d0"].fail_after = length + 2
        output = await cluster.generate(request(max_tokens=16, n=2, stop_token_ids=[only_in_first]))
        assert output.token_ids == {0: expected(16)[:length], 1: expected(16, choice=1)}
        assert output.complete.choices[0].stop_token_id == only_in_first
        assert [choice.index for choice in cluster.workers["d1"].decodes[0].choices] == [1]


@pytest.mark.parametrize("fail_after", range(12))
async def test_stop_strings_hold_across_the_seam(fail_after: int) -> None:
    stop = bytes(expected(40)).decode(errors="ignore")[6:9]
    async with running(1, 2) as cluster:
        whole = await cluster.generate(request(max_tokens=40, stop=[stop]))
        cluster.faults["d0"].fail_after = fail_after
        again = await cluster.generate(request(max_tokens=40, stop=[stop]))
        assert whole.complete.choices[0].stop_string == stop
        assert stop not in whole.text[0]
        assert (again.token_ids, again.text) == (whole.token_ids, whole.text)
        assert again.complete.choices == whole.complete.choices


async def test_a_stop_string_ends_the_call_on_the_worker() -> None:
    async with running(1, 1) as cluster:
        text = bytes(expected(1000)).decode(errors="ignore")
        output = await cluster.generate(request(max_tokens=1000, stop=[text[2:5]]))
        assert output.text[0] == text[:2]
        await cluster.come_to_rest()


@pytest.mark.parametrize("drop", [{0}, {1}, {3}, {1, 2, 3}])
async def test_updates_that_do_not_arrive_are_asked_for_again(drop: set[int]) -> None:
    async with running(1, 2) as cluster:
        cluster.faults["d0"].drop = frozenset(drop)
        assert_is_whole(await cluster.generate(request(max_tokens=12)), 12)


async def test_a_prefill_worker_dies_and_another_takes_over() -> None:
    async with running(2, 1) as cluster:
        cluster.faults["p0"].fail_after = 0
        output = await cluster.generate(request(max_tokens=5))
        assert_is_whole(output, 5)
        assert output.complete.timeline.prefill_worker == "p1"


async def test_the_last_prefill_worker_dies_and_decode_prefills() -> None:
    async with running(1, 1) as cluster:
        cluster.faults["p0"].fail_after = 0
        output = await cluster.generate(request(max_tokens=5))
        assert_is_whole(output, 5)
        assert output.complete.timeline.prefill_worker == ""


async def test_after_three_attempts_the_request_is_given_up() -> None:
    async with running(1, 4) as cluster:
        for index in range(4):
            cluster.faults[f"d{index}"].fail_after = 2
        with pytest.raises(AttemptsExhausted):
            await cluster.generate(request(max_tokens=30))
        assert [len(cluster.workers[f"d{index}"].decodes) for index in range(4)] == [1, 1, 1, 0]


async def test_a_request_waits_for_the_replacement_of_the_last_decode_worker() -> None:
    async with running(1, 1) as cluster:
        cluster.faults["d0"].fail_after = 4
        reading = asyncio.create_task(cluster.generate(request(max_tokens=12)))
        await until(lambda: cluster.port.lost)
        assert not reading.done()
        await cluster.resize(1, 2)
        assert_is_whole(await reading, 12)


async def test_a_worker_that_is_no_longer_listed_hands_over_its_requests() -> None:
    async with running(1, 2) as cluster:
        cluster.workers["d0"].may_go.clear()
        reading = asyncio.create_task(cluster.generate(request(max_tokens=12)))
        await until(lambda: cluster.workers["d0"].decodes)
        await cluster.enlist("p0", "d1")
        assert_is_whole(await reading, 12)


async def test_a_draining_worker_gets_no_new_requests_and_finishes_what_it_has() -> None:
    async with running(1, 2) as cluster:
        cluster.workers["d0"].may_go.clear()
        reading = asyncio.create_task(cluster.generate(request(max_tokens=12)))
        await until(lambda: cluster.workers["d0"].decodes)
        await cluster.enlist("p0", "d0", "d1", draining="d0")
        assert (await cluster.generate(request(max_tokens=3))).complete.timeline.decode_worker == "d1"
        cluster.workers["d0"].may_go.set()
        assert (await reading).complete.timeline.decode_worker == "d0"


async def test_no_decode_worker_for_too_long_is_unavailable() -> None:
    config = with_streams(max_worker_wait_s=0.02)
    async with running(1, 0, config) as cluster:
        with pytest.raises(Unavailable):
            await cluster.generate(request())


@pytest.mark.parametrize("where", ["p0", "d0"])
async def test_the_deadline_ends_a_request_wherever_it_is(where: str) -> None:
    async with running(1, 1) as cluster:
        cluster.workers[where].may_go.clear()
        with pytest.raises(DeadlineExceeded):
            await collect(cluster.open(request(), time_left_s=0.05))


async def test_a_request_ends_a_moment_before_its_clients_deadline() -> None:
    """Else the client's own gRPC would answer first, and could not say why."""
    async with running(1, 1) as cluster:
        await collect(cluster.open(request(max_tokens=1), 5.0))
        assert 0 < cluster.workers["p0"].prefills[0].time_left_s <= 5.0 - LAST_WORD_S


async def test_a_workers_own_timer_is_told_as_the_deadline() -> None:
    async with running(1, 1) as cluster:
        late = DeadlineExceeded("the request's deadline has passed")
        for worker in cluster.workers.values():
            worker.refusal = late
        with pytest.raises(DeadlineExceeded, match=r"the deadline of 20 s passed at prefill\.call"):
            await cluster.generate(request(), 20.0)


async def test_a_deadline_is_at_most_the_longest_life() -> None:
    async with running(1, 1, with_streams(max_deadline_s=0.05)) as cluster:
        cluster.workers["p0"].may_go.clear()
        for time_left_s in (None, 1e9):
            with pytest.raises(DeadlineExceeded):
                await collect(cluster.open(request(), time_left_s))


@pytest.mark.parametrize("where", ["p0", "d0"])
async def test_an_abort_ends_a_request_on_the_worker_too(where: str) -> None:
    async with running(1, 1) as cluster:
        cluster.workers[where].may_go.clear()
        message = request()
        message.request_id = "mine"
        reading = asyncio.create_task(cluster.generate(message))
        await until(lambda: cluster.workers[where].open_calls)
        await cluster.router.dispatcher.abort(RequestId("mine"))
        with pytest.raises(Cancelled):
            await reading
        await cluster.come_to_rest()
        with pytest.raises(RequestNotFound):
            await cluster.router.dispatcher.abort(RequestId("mine"))


async def test_a_stop_at_any_moment_leaves_nothing_behind() -> None:
    """The moments are turns of the event loop, one more of them each time."""
    async with running(1, 1) as cluster:
        for num_turns in range(60):
            session = cluster.open(request(max_tokens=4))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            session.stop(Cancelled("enough"))
            await cluster.come_to_rest()


async def test_an_id_is_taken_while_its_request_runs_and_free_afterwards() -> None:
    async with running(1, 1) as cluster:
        message = request(max_tokens=3)
        message.request_id = "mine"
        cluster.workers["p0"].may_go.clear()
        reading = asyncio.create_task(cluster.generate(message))
        await until(lambda: cluster.workers["p0"].open_calls)
        with pytest.raises(RequestExists):
            cluster.open(message)
        cluster.workers["p0"].may_go.set()
        await reading
        assert_is_whole(await cluster.generate(message), 3)


async def test_a_reader_that_does_not_read_is_let_go() -> None:
    async with running(1, 1, with_streams(max_buffered_tokens=8)) as cluster:
        session = cluster.open(request(max_tokens=100))
        await cluster.come_to_rest()
        with pytest.raises(
            Overloaded,
            match=r"8 tokens wait for a client that reads more slowly .* the limit \(router.max_buffered_tokens\)",
        ):
            await collect(session)


async def test_what_a_slow_reader_gets_is_a_beginning_of_the_output() -> None:
    async with running(1, 1, with_streams(max_buffered_tokens=8)) as cluster:
        session = cluster.open(request(max_tokens=100))
        await cluster.come_to_rest()
        tokens: list[int] = []

        async def read() -> None:
            async for response in session.outbox:
                tokens.extend(response.chunk.token_ids)

        with pytest.raises(Overloaded):
            await read()
        assert tokens == expected(100)[: len(tokens)]
        assert len(tokens) == 8


async def test_a_prompt_that_does_not_fit_is_refused_before_any_worker_sees_it() -> None:
    async with running(1, 1) as cluster:
        message = pb.GenerateRequest(text="x" * 1999, sampling_params=pb.SamplingParams(max_tokens=2))
        with pytest.raises(InvalidRequest):
            await cluster.generate(message)
        assert cluster.workers["p0"].prefills == []


async def test_a_prompt_larger_than_the_smallest_pool_is_refused() -> None:
    async with running(1, 1) as cluster:
        cluster.workers["d1"] = FakeWorker(WorkerId("d1"), Role.DECODE, num_blocks=3)
        await cluster.enlist("p0", "d0", "d1")
        with pytest.raises(InvalidRequest, match="pool"):
            await cluster.generate(pb.GenerateRequest(text="x" * 12))


@pytest.mark.parametrize("where", ["p0", "d0"])
async def test_an_error_of_the_request_itself_is_not_tried_elsewhere(where: str) -> None:
    async with running(2, 2) as cluster:
        cluster.workers[where].refusal = InvalidRequest("prompt", "is poison")
        with pytest.raises(InvalidRequest, match="poison"):
            await cluster.generate(request())
        assert cluster.port.lost == []


async def test_a_bug_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(1, 1) as cluster:
        with monkeypatch.context() as broken:
            broken.setattr("router.requests.prompt.encode", lambda *_: 1 / 0)
            with pytest.raises(BatonError, match="internal error, incident"):
                await cluster.generate(request())
        assert_is_whole(await cluster.generate(request(max_tokens=3)), 3)


async def test_prefills_wait_while_hand_offs_take_half_of_the_arena() -> None:
    async with running(0, 0) as cluster:
        cluster.workers["p0"] = FakeWorker(WorkerId("p0"), Role.PREFILL, num_arena_blocks=8)
        cluster.workers["d0"] = FakeWorker(WorkerId("d0"), Role.DECODE, num_arena_blocks=8)
        await cluster.enlist("p0", "d0")
        cluster.workers["p0"].may_go.clear()
        prompts = [bytes([65 + number] * 12).decode() for number in range(4)]
        reading = [asyncio.create_task(cluster.generate(pb.GenerateRequest(text=prompt))) for prompt in prompts]
        await until(lambda: len(cluster.workers["p0"].prefills) == 2)
        await asyncio.sleep(0.02)
        assert len(cluster.workers["p0"].prefills) == 2
        cluster.workers["p0"].may_go.set()
        await asyncio.gather(*reading)
        assert len(cluster.workers["p0"].prefills) == 4


async def test_holds_are_released_once_decode_has_fetched() -> None:
    async with running(1, 1) as cluster:
        message = request(max_tokens=50)
        message.request_id = "mine"
        await cluster.generate(message)
        await until(lambda: any(worker.released for worker in cluster.workers.values()))
        (released,) = (one for worker in cluster.workers.values() for one in worker.released)
        assert released.startswith("mine/")


async def test_the_queue_is_bounded() -> None:
    config = replace(CONFIG, settings=replace(CONFIG.settings, max_queued_requests=3))
    async with running(1, 1, config) as cluster:
        cluster.workers["p0"].may_go.clear()
        sessions = [cluster.open(request()) for _ in range(3)]
        with pytest.raises(Overloaded) as refused:
            cluster.open(request())
        assert refused.value.retry_after_s == 1.0
        for session in sessions:
            session.stop(Cancelled("enough"))


async def test_texts_that_are_tokenized_at_a_time_are_bounded() -> None:
    async with running(1, 1) as cluster:
        tokenize, asked = cluster.router.dispatcher.tokenize, pb.TokenizeRequest(text="ab")
        asking = [tokenize(asked) for _ in range(MAX_TOKENIZING + 1)]
        *answers, refusal = await asyncio.gather(*asking, return_exceptions=True)
        assert not [one for one in answers if isinstance(one, BaseException)]
        assert isinstance(refusal, Overloaded)
        assert refusal.message == "64 texts are being tokenized, the limit (fixed)"
        assert (await tokenize(asked)).tokens == [b"a", b"b"]


async def test_requests_are_spread_over_the_workers() -> None:
    async with running(2, 2) as cluster:
        for worker in cluster.workers.values():
            worker.may_go.clear()
        messages = [pb.GenerateRequest(text=f"{number} is a number") for number in range(8)]
        reading = [asyncio.create_task(cluster.generate(message)) for message in messages]
        await until(lambda: sum(len(worker.prefills) for worker in cluster.workers.values()) == 8)
        assert [len(cluster.workers[name].prefills) for name in ("p0", "p1")] == [4, 4]
        for worker in cluster.workers.values():
            worker.may_go.set()
        await asyncio.gather(*reading)
        assert [len(cluster.workers[name].decodes) for name in ("d0", "d1")] == [4, 4]


@pytest.mark.parametrize("name", ["p0", "p1", "d0", "d1"])
async def test_a_request_on_one_worker_meets_no_other_of_its_role_and_no_cache(name: str) -> None:
    async with running(2, 2) as cluster:
        outputs = [
            await collect(cluster.router.dispatcher.open_on(WorkerId(name), request(max_tokens=5), 20.0))
            for _ in range(2)
        ]
        for output in outputs:
            assert_is_whole(output, 5)
        role = cluster.workers[name].role
        prefills = {one: worker.prefills for one, worker in cluster.workers.items() if worker.prefills}
        decodes = {one: worker.decodes for one, worker in cluster.workers.items() if worker.decodes}
        assert list(prefills) == ([name] if role is Role.PREFILL else [])
        assert role is Role.PREFILL or list(decodes) == [name]
        begun = (prefills or decodes)[name]
        usual = cluster.router.dispatcher.root_of(DEFAULT_TENANT)
        assert len({begin.namespace_root for begin in begun} | {usual}) == 3


@pytest.mark.parametrize("name", ["p0", "d0"])
async def test_a_request_on_one_worker_takes_nothing_of_a_tenants_fair_share(name: str) -> None:
    async with running(1, 1) as cluster:
        shares = cluster.router.shares
        shares.enter(DEFAULT_TENANT)
        before = shares.spent(DEFAULT_TENANT)
        assert_is_whole(
            await collect(cluster.router.dispatcher.open_on(WorkerId(name), request(max_tokens=5), 20.0)), 5
        )
        assert shares.spent(DEFAULT_TENANT) == before
        shares.leave(DEFAULT_TENANT)


@pytest.mark.parametrize("name", ["d0", "d9"])
async def test_a_worker_that_takes_no_work_is_asked_for_none(name: str) -> None:
    async with running(1, 2) as cluster:
        await cluster.enlist("p0", "d0", "d1", draining="d0")
        with pytest.raises(WorkerNotFound):
            cluster.router.dispatcher.open_on(WorkerId(name), request(), 20.0)


async def test_a_prompt_goes_where_its_prefix_went() -> None:
    async with running(3, 1) as cluster:
        first = await cluster.generate(pb.GenerateRequest(text="one long prefix"))
        longer = await cluster.generate(pb.GenerateRequest(text="one long prefix and its end"))
        assert longer.complete.timeline.prefill_worker == first.complete.timeline.prefill_worker


async def test_the_timeline_accounts_for_every_millisecond() -> None:
    async with running(1, 1) as cluster:
        timeline = (await cluster.generate(request(max_tokens=20))).complete.timeline
        names = [span.name for span in timeline.spans]
        assert {"router.check", "router.tokenize", "router.wait_room", "prefill.compute", "decode.run"} <= set(names)
        covered_ms = 0.0
        for span in timeline.spans:
            assert span.start_ms <= covered_ms + 1e-6
            covered_ms = max(covered_ms, span.start_ms + span.duration_ms)
        assert covered_ms == pytest.approx(timeline.total_ms)


async def test_a_text_that_cannot_fit_is_refused_before_it_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(codec: ByteTokenizer, text: str) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    async with running(1, 1) as cluster:
        with pytest.raises(InvalidRequest) as raised:
            cluster.open(pb.GenerateRequest(text="a" * (4 << 20)))
        assert str(raised.value) == "prompt: at least 4194304 tokens leave no room in a context of 2000"
        assert cluster.router.dispatcher.num_queued == 0
