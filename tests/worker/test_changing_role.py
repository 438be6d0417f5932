"""A worker changes its role: its attempts go back, its lines end, and the same engine serves the other pool."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.actors.worker import PoolWorker
from engine.core import EngineCore
from engine.model.hash_model import HashModel
from tests.harness.assembled_worker import behaviour_of
from tests.harness.known_model import LAYOUT
from tests.harness.node import Node
from tests.harness.one_worker import (
    PROMPT,
    VOCAB_SIZE,
    Caller,
    Worker,
    begin_of,
    greedy,
    prompt_source,
    serving,
    timeless_node,
    tokens_of,
)
from tests.worker.test_worker_actor import config_of
from wire.convert import tiers_from_pb
from wire.errors import Unavailable, WorkerLeaving
from wire.pools import Role
from wire.typed_reader import to_json

ORACLE = HashModel(LAYOUT, VOCAB_SIZE)


@pytest.fixture
def node() -> Node:
    return timeless_node()


@pytest.fixture
async def prefill(node: Node) -> AsyncIterator[Worker]:
    async with serving(Role.PREFILL, node) as worker:
        yield worker


@pytest.fixture
async def decode(node: Node) -> AsyncIterator[Worker]:
    async with serving(Role.DECODE, node) as worker:
        yield worker


async def test_a_prefill_worker_decodes_with_the_pages_that_it_has(prefill: Worker) -> None:
    first = list((await prefill.caller.prefill(begin_of())).choices[0].token_ids)
    assert await prefill.service.serve_as(behaviour_of(Role.DECODE), 1.0) == 0
    other = Caller(prefill.service)
    updates = await other.decode(begin_of(attempt=2, outputs=[first]))
    await other.close()
    assert first + tokens_of(updates) == ORACLE.oracle(PROMPT, 40)
    cached = tiers_from_pb(prompt_source(updates).cached_tokens)
    assert cached["device"] == 96, "the blocks that it computed as a prefill worker"
    status = await prefill.status()
    assert (status.role, status.state) == ("decode", "ready")


async def test_a_decode_worker_prefills(decode: Worker) -> None:
    await decode.caller.decode(begin_of(request_id="before"))
    await decode.service.serve_as(behaviour_of(Role.PREFILL), 1.0)
    other = Caller(decode.service)
    answer = await other.prefill(begin_of())
    await other.close()
    assert (answer.num_held_blocks, await decode.num_holds()) == (7, 1)
    assert (await decode.status()).role == "prefill"


async def test_attempts_end_within_the_grace_and_others_go_back(decode: Worker) -> None:
    short, long = (
        decode.caller.begin(begin_of(request_id=name, sampling=greedy(num))) for name, num in (("s", 2), ("l", 3000))
    )
    await long.first()
    assert await decode.service.serve_as(behaviour_of(Role.PREFILL), 0.2) == 1
    assert tokens_of(await short.end()) == ORACLE.oracle(PROMPT, 2)
    with pytest.raises(WorkerLeaving):
        await long.end()
    assert (await decode.at_rest()).state == "ready"


async def test_prompts_that_outlast_the_grace_leave_no_hold(prefill: Worker) -> None:
    prefill.model.may_go.clear()
    attempt = prefill.caller.begin(begin_of())
    await prefill.at_work()
    changing = asyncio.create_task(prefill.service.serve_as(behaviour_of(Role.DECODE), 0.0))
    with pytest.raises(WorkerLeaving):
        await attempt.end()
    prefill.model.may_go.set()
    assert await changing == 1
    assert (await prefill.at_rest()).role == "decode"


async def test_the_lines_to_the_role_before_end_and_begin_nothing_more(prefill: Worker) -> None:
    await prefill.service.serve_as(behaviour_of(Role.DECODE), 0.0)
    with pytest.raises(Unavailable, match="closed the line"):
        await prefill.caller.prefill(begin_of())
    assert prefill.service.check() == []


async def test_the_same_role_again_disturbs_nothing(decode: Worker) -> None:
    attempt = decode.caller.begin(begin_of())
    await attempt.first()
    assert await decode.service.serve_as(behaviour_of(Role.DECODE), 0.0) == 0
    assert tokens_of(await attempt.end()) == ORACLE.oracle(PROMPT, 40)


async def test_orders_of_two_controllers_are_carried_out_one_after_the_other(decode: Worker) -> None:
    await decode.caller.begin(begin_of(sampling=greedy(3000))).first()
    orders = [decode.service.serve_as(behaviour_of(role), 0.1) for role in (Role.PREFILL, Role.PREFILL, Role.DECODE)]
    assert await asyncio.gather(*orders) == [1, 0, 0]
    assert (await decode.at_rest()).role == "decode"


async def test_a_worker_that_drains_keeps_its_role(decode: Worker) -> None:
    await decode.service.drain(0.0)
    with pytest.raises(Unavailable, match="the worker is draining"):
        await decode.service.serve_as(behaviour_of(Role.PREFILL), 0.0)
    assert (await decode.status()).role == "decode"


async def test_a_drain_behind_a_change_lasts(decode: Worker) -> None:
    changing = asyncio.create_task(decode.service.serve_as(behaviour_of(Role.PREFILL), 0.0))
    await asyncio.sleep(0)
    await decode.service.drain(0.0)
    await changing
    status = await decode.status()
    assert (status.role, status.state) == ("prefill", "draining")


async def test_a_worker_whose_books_are_wrong_changes_nothing(decode: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCore, "check", lambda _: ["a page is lost"])
    with pytest.raises(Unavailable, match="a page is lost"):
        await decode.service.serve_as(behaviour_of(Role.PREFILL), 0.0)
    assert (decode.service.info.role, decode.service.attempts.state.value) == ("decode", "draining")


@pytest.mark.parametrize("role", Role)
def test_an_actor_begins_in_either_role(role: Role) -> None:
    config = config_of("decode", Path("model"), "")
    assert PoolWorker(to_json(config)).make_behaviour(config, role).role is role
