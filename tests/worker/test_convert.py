import math
from dataclasses import replace
from typing import Any

import pytest

from engine.events import EngineStats
from engine.request import EngineRequest, HandOff
from kv_store.block_store import StoreStatus
from kv_store.node.messages import DirectoryStatus, KeepHint
from tests.harness.one_worker import PROMPT, VOCAB_SIZE, begin_of, greedy
from wire.block_names import PublicPart, cover, digest_of, session_of
from wire.errors import Cancelled, InvalidRequest
from wire.ids import AttemptId, NamespaceRoot
from wire.pb import inference_pb2, worker_pb2
from wire.tier import FarStatus, LedgerCounts, Tier
from worker.convert import MAX_AHEAD, ahead_from_pb, ended_with, request_from_pb, status_to_pb

BLOCK_SIZE = 16
COUNTS = LedgerCounts(free=1, owned=2, published=3, cached=4, draining=5, total=15)
STATS = EngineStats(
    blocks=COUNTS,
    num_running=6,
    num_waiting=0,
    computed_prompt_tokens=0,
    cached_prompt_tokens=0,
    generated_tokens=0,
    num_drafts=2,
    num_guessed_tokens=7,
    num_accepted_tokens=5,
    num_preemptions=0,
)
DIRECTORY = DirectoryStatus(
    counts=COUNTS,
    num_leases=2,
    num_holds=3,
    num_kept=4,
    epoch="e",
    hits=0,
    misses=0,
    evictions=0,
    cold=[FarStatus(tier=Tier.REDIS, state="up", written=5)],
)


def test_a_request_has_the_choices_with_what_was_emitted() -> None:
    request = request_from_pb(begin_of(outputs=[(1, 2), (3,)], sampling=greedy(40, n=2)), EngineRequest, VOCAB_SIZE)
    assert request.prompt_ids == PROMPT
    assert [(choice.index, choice.output_ids) for choice in request.choices] == [(0, (1, 2)), (1, (3,))]


def test_an_engine_knows_each_attempt_by_its_own_name() -> None:
    request = request_from_pb(begin_of(request_id="r", attempt=3), HandOff, VOCAB_SIZE)
    assert isinstance(request, HandOff)
    assert request.attempt_id == "r/3"


@pytest.mark.parametrize(
    ("after_s", "until_s", "deferred"), [(2.0, 4.0, [False, True, True, False]), (0.0, 3.0, [True, True, False, False])]
)
def test_a_prompt_is_deferred_between_two_times(after_s: float, until_s: float, deferred: list[bool]) -> None:
    times_s = iter([100.0, 101.5, 102.5, 103.5, 104.5])
    message = spoilt(begin_of(), deferred_after_s=after_s, deferred_until_s=until_s)
    request = request_from_pb(message, HandOff, VOCAB_SIZE, lambda: next(times_s))
    assert [request.precedence.is_deferred() for _ in range(4)] == deferred


def test_a_prompt_without_a_limit_is_never_deferred() -> None:
    assert not request_from_pb(begin_of(), HandOff, VOCAB_SIZE).precedence.is_deferred()


@pytest.mark.parametrize("keep_s", [None, 0.0, 2.5])
@pytest.mark.parametrize("session", ["", "agent"])
def test_a_session_is_named_under_the_root(session: str, keep_s: float | None) -> None:
    request = request_from_pb(spoilt(begin_of(), session=session, keep_s=keep_s), HandOff, VOCAB_SIZE)
    if not session and keep_s is None:
        assert request.hint is None
        return
    name = session_of(request.root, session) if session else b""
    assert request.hint == KeepHint(digest_of(request.root), name, keep_s)


def spoilt(message: worker_pb2.Begin, **fields: Any) -> worker_pb2.Begin:
    """A Begin with these fields in the place of its own."""
    for name in fields:
        message.ClearField(name)
    message.MergeFrom(worker_pb2.Begin(**fields))
    return message


def set_to(**settings: Any) -> worker_pb2.Begin:
    """A Begin with these settings, whatever their range."""
    message = begin_of(sampling=greedy(40, n=4))
    message.sampling_params.MergeFrom(inference_pb2.SamplingParams(**settings))
    return message


def of_choices(*indices: int, n: int = 4) -> worker_pb2.Begin:
    choices = [worker_pb2.UnfinishedChoice(index=index) for index in indices]
    return spoilt(begin_of(sampling=greedy(40, n=n)), choices=choices)


NO_NUMBERS = (math.nan, math.inf, -math.inf)
OUT_OF_RANGE: dict[str, tuple[worker_pb2.Begin, ...]] = {
    "id": (
        *(begin_of(request_id=text) for text in ("", "A/1", "a/b/1", "/1", "r" * 65, "a b", "\0", "é")),
        *(
            spoilt(begin_of(), id=text)
            for text in ("r", "r/0", "r/01", "r/-1", "r/1/", "r/12345678901234567890", "r/x")
        ),
    ),
    "namespace_root": tuple(spoilt(begin_of(), namespace_root=bytes(size)) for size in (0, 31, 33)),
    "time_left_s": tuple(begin_of(time_left_s=value) for value in (0.0, -1.0, *NO_NUMBERS)),
    "prompt": (begin_of(prompt=()), begin_of(prompt=(1, VOCAB_SIZE)), begin_of(outputs=[(2**32 - 1,)])),
    "choices": (
        *(of_choices(*indices) for indices in ((), (0, 0), (4,), (77,), (2**32 - 1,), range(5))),
        of_choices(1, n=1),
        begin_of(sampling=greedy(2), outputs=[(1, 2)]),
    ),
    "n": tuple(set_to(n=value) for value in (0, -1, 17, 2**31 - 1)),
    "temperature": tuple(set_to(temperature=value) for value in (-0.01, 2.01, *NO_NUMBERS)),
    "top_p": tuple(set_to(top_p=value) for value in (-0.5, 1.01, *NO_NUMBERS)),
    "min_p": tuple(set_to(min_p=value) for value in (-0.1, 1.1, *NO_NUMBERS)),
    "top_k": tuple(set_to(top_k=value) for value in (-2, -(2**31))),
    "presence_penalty": tuple(set_to(presence_penalty=value) for value in (-2.01, 2.01, *NO_NUMBERS)),
    "frequency_penalty": tuple(set_to(frequency_penalty=value) for value in (-2.01, 2.01, *NO_NUMBERS)),
    "repetition_penalty": tuple(set_to(repetition_penalty=value) for value in (0.0, -1.0, 10.01, *NO_NUMBERS)),
    "seed": tuple(set_to(seed=value) for value in (-1, -(2**63))),
    "max_tokens": tuple(set_to(max_tokens=value) for value in (0, -1)),
    "min_tokens": tuple(set_to(min_tokens=value) for value in (-1, 41)),
    "logprobs": tuple(set_to(logprobs=value) for value in (-1, 21, 2**31 - 1)),
    "prompt_logprobs": tuple(set_to(prompt_logprobs=value) for value in (-1, 21, 2**31 - 1)),
    "public_root": (spoilt(begin_of(), num_public_blocks=1), spoilt(begin_of(), public_root=bytes(32))),
    "num_public_blocks": (spoilt(begin_of(), num_public_blocks=2**32 - 1, public_root=bytes(32)),),
    "num_scored": (spoilt(begin_of(), num_scored=1),),
    "session": (spoilt(begin_of(), session="s" * 129),),
    "keep_s": tuple(spoilt(begin_of(), keep_s=value) for value in (-1.0, *NO_NUMBERS)),
    "weight": tuple(spoilt(begin_of(), weight=value) for value in (-1.0, 1001.0, *NO_NUMBERS)),
    "priority": tuple(spoilt(begin_of(), priority=value) for value in (-(2**31) - 1, 2**63 - 1)),
    "output_cost": tuple(spoilt(begin_of(), output_cost=value) for value in (-1.0, *NO_NUMBERS)),
    "deferred_after_s": tuple(spoilt(begin_of(), deferred_after_s=value) for value in (-1.0, *NO_NUMBERS)),
    "deferred_until_s": tuple(spoilt(begin_of(), deferred_until_s=value) for value in (-1.0, *NO_NUMBERS)),
    "kv_policy": tuple(spoilt(begin_of(), kv_policy=text) for text in ("h2o", "full", "sinks=4+64", "snapkv=0%", "\0")),
    "stop": tuple(set_to(stop=value) for value in ([""], ["a"] * 9, ["a" * 257])),
    "response_format": tuple(
        set_to(response_format=inference_pb2.ResponseFormat(**given))
        for given in ({}, {"regex": ""}, {"json_schema": "x" * 65_537})
    ),
    "block_addresses": (spoilt(begin_of(), block_addresses=["h:1"] * 17),),
    "logit_bias": tuple(set_to(logit_bias=value) for value in ({VOCAB_SIZE: 1.0}, {1: math.nan}, {1: -101.0})),
    "stop_token_ids": tuple(set_to(stop_token_ids=value) for value in ([1] * 17, [VOCAB_SIZE])),
}


@pytest.mark.parametrize("param", OUT_OF_RANGE)
def test_no_field_of_an_attempt_may_be_out_of_its_range(param: str) -> None:
    for message in OUT_OF_RANGE[param]:
        with pytest.raises(InvalidRequest) as raised:
            request_from_pb(message, EngineRequest, VOCAB_SIZE)
        assert raised.value.ids["param"] == param, message


def test_every_field_of_an_attempt_has_a_range() -> None:
    """But for booleans, and a prompt's and an attempt's parts, which the table names by themselves."""
    fields = [*worker_pb2.Begin.DESCRIPTOR.fields_by_name, *inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name]
    booleans = {"ignore_eos", "computes_all", "echo", "skip_special_tokens", "include_stop_str_in_output"}
    assert set(fields) - {"sampling_params"} - booleans == set(OUT_OF_RANGE)


def test_the_end_of_an_attempt_has_its_error() -> None:
    message = ended_with(AttemptId("r/3"), Cancelled("gone", request_id="r"))
    assert (message.id, [field.name for field, _ in message.ListFields()]) == ("r/3", ["id", "end"])
    assert message.end == worker_pb2.End(
        error=worker_pb2.Error(reason="CANCELLED", message="gone", ids={"request_id": "r"})
    )


def test_status_shows_every_tier() -> None:
    store = StoreStatus(
        directory=DIRECTORY,
        cold=[FarStatus(tier=Tier.REDIS, state="up", hits=4)],
        block_bytes=4096,
        prefill_token_s=0.25,
    )
    status = status_to_pb(worker_pb2.WorkerInfo(worker_id="w"), "ready", 1.5, STATS, store, ["a"])
    assert (status.blocks.cached, status.blocks.total, status.num_running) == (4, 15, 6)
    assert (status.num_drafts, status.num_guessed_tokens, status.num_accepted_tokens) == (2, 7, 5)
    host, peers, redis, files = status.tiers
    assert (peers.state, files.state) == ("off", "off")
    assert (host.blocks.published, host.counts["holds"], host.counts["kept"], host.block_bytes) == (3, 3, 4, 4096)
    assert (redis.state, redis.counts["hits"], redis.counts["written"]) == ("up", 4, 5)
    assert (list(status.problems), status.prefill_token_s) == (["a"], 0.25)


@pytest.mark.parametrize(
    ("read", "written", "told"),
    [("up", "up", "up"), ("up", "full", "full"), ("up", "broken", "broken"), ("broken", "full", "broken")],
)
def test_redis_is_as_its_readers_and_its_writer_find_it(read: str, written: str, told: str) -> None:
    directory = replace(DIRECTORY, cold=[FarStatus(tier=Tier.REDIS, state=written, refused=7, errors=2)])
    store = StoreStatus(directory=directory, cold=[FarStatus(tier=Tier.REDIS, state=read, errors=5)], block_bytes=4096)
    _, _, redis, _ = status_to_pb(worker_pb2.WorkerInfo(), "ready", 0.0, STATS, store, []).tiers
    assert (redis.state, redis.counts["refused"]) == (told, 7)
    assert (redis.counts["errors"], redis.counts["write_errors"]) == (5, 2)


def test_status_of_a_worker_without_a_store_in_reach() -> None:
    status = status_to_pb(
        worker_pb2.WorkerInfo(), "ready", 0.0, STATS, StoreStatus(directory=None, cold=[], block_bytes=4096), []
    )
    host, *far = status.tiers
    assert [tier.state for tier in far] == ["off"] * 3
    assert host.epoch == ""
    assert not status.HasField("prefill_token_s"), "no prompt has been computed"


AHEAD_PROMPT = tuple(range(3, 3 + 9 * BLOCK_SIZE))
AHEAD_ROOT = NamespaceRoot(b"r" * 32)


def ahead_of(start: int, stop: int, public: PublicPart | None = None, **fields: Any) -> worker_pb2.Prefetch:
    """An order to read the blocks `start` to `stop` - 1 of a prompt."""
    names = cover(AHEAD_ROOT, AHEAD_PROMPT, BLOCK_SIZE, public)
    message = worker_pb2.Prefetch(
        id="r/1",
        namespace_root=AHEAD_ROOT,
        tokens=inference_pb2.TokenIds(ids=AHEAD_PROMPT[start * BLOCK_SIZE : stop * BLOCK_SIZE]),
        first_block=start,
        parent=names[start - 1].key if start else b"",
        public_root=public.root if public else b"",
        num_public_blocks=public.num_blocks if public else 0,
        block_addresses=["h:1"],
    )
    for name in fields:
        message.ClearField(name)
    message.MergeFrom(worker_pb2.Prefetch(**fields))
    return message


@pytest.mark.parametrize("public", [None, PublicPart(NamespaceRoot(b"p" * 32), 4)])
@pytest.mark.parametrize(("start", "stop"), [(0, 9), (0, 4), (3, 5), (4, 9), (5, 5)])
def test_blocks_to_read_ahead_have_the_names_of_the_prompts_blocks(
    start: int, stop: int, public: PublicPart | None
) -> None:
    ahead = ahead_from_pb(ahead_of(start, stop, public), BLOCK_SIZE)
    assert ahead.names == cover(AHEAD_ROOT, AHEAD_PROMPT, BLOCK_SIZE, public)[start:stop]
    assert (ahead.attempt_id, ahead.peers) == (AttemptId("r/1"), ("h:1",))


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("id", {"id": "a b"}),
        ("namespace_root", {"namespace_root": b"short"}),
        ("tokens", {"tokens": inference_pb2.TokenIds(ids=range(BLOCK_SIZE + 1))}),
        ("tokens", {"tokens": inference_pb2.TokenIds(ids=range((MAX_AHEAD + 1) * BLOCK_SIZE))}),
        ("first_block", {"first_block": 2**32 - 1}),
        ("parent", {"parent": b""}),
        ("public_root", {"num_public_blocks": 1}),
        ("num_public_blocks", {"num_public_blocks": 2**32 - 1, "public_root": bytes(32)}),
        ("block_addresses", {"block_addresses": ["h:1"] * 17}),
    ],
)
def test_no_field_of_an_order_to_read_ahead_may_be_out_of_its_range(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        ahead_from_pb(ahead_of(2, 4, **fields), BLOCK_SIZE)
    assert raised.value.ids["param"] == param
