"""Decode reads blocks that prefill has released and others have overwritten, at every step: no wrong token leaves."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kv_store.device_pool import DevicePool
from tests.faults.rest import at_rest
from tests.harness.answer import ask
from tests.harness.faulty_cluster import FaultyCluster
from tests.harness.known_model import MODEL
from tests.harness.local_cluster import Sizes
from wire.ids import AttemptId, PageId

SIZES = Sizes(num_blocks=64, num_slots=16)
PROMPT = tuple(range(100))
STEPS = [f"{when} {call}" for call in ("lease", "release") for when in ("before", "after")]
COPIES = [f"{when} copy {nth}" for nth in range(7) for when in ("before", "after")]


def at_step(step: str, cluster: FaultyCluster, monkeypatch: pytest.MonkeyPatch, strike: Callable[[], None]) -> None:
    """Strikes once, around a call of the decode worker to the directory, or around the copy of a block to its pages."""
    left, num_copied = [strike], 0

    def strike_at(here: str) -> None:
        if here == step and left:
            left.pop()()

    cluster.gates["d0"].before = lambda call, _: strike_at(f"before {call}")
    cluster.gates["d0"].after = lambda call, _: strike_at(f"after {call}")
    write_pages = DevicePool.write_pages

    def write(self: DevicePool, page: PageId, payload: memoryview) -> None:
        nonlocal num_copied
        strike_at(f"before copy {num_copied}")
        write_pages(self, page, payload)
        strike_at(f"after copy {num_copied}")
        num_copied += 1

    monkeypatch.setattr(DevicePool, "write_pages", write)


async def answer(step: str, lease_is_over: bool, monkeypatch: pytest.MonkeyPatch, **broken: Any) -> list[int]:
    """Serves a prompt whose blocks lose their hold at a step, and their slots to other blocks."""
    async with FaultyCluster.running(MODEL, 1, 1, SIZES) as cluster:
        struck: list[str] = []
        held: list[AttemptId] = []

        def strike() -> None:
            struck.append(step)
            if lease_is_over:
                cluster.clock.now += 1000.0
            cluster.directory.release_holds(held)
            cluster.hold_all_slots()

        def note_hold(call: str, arguments: object) -> None:
            if call == "reserve" and isinstance(arguments, tuple) and arguments[2] is not None:
                held.append(arguments[2].attempt_id)

        cluster.gates["p0"].before = note_hold
        at_step(step, cluster, monkeypatch, strike)
        for name, value in broken.items():
            monkeypatch.setattr(cluster.directory, name, value)
        [choice] = await cluster.answer(ask(PROMPT, 20))
        assert struck
        monkeypatch.undo()
        if not broken:
            await at_rest(cluster)
        return list(choice.token_ids)


@pytest.mark.parametrize("lease_is_over", [False, True])
@pytest.mark.parametrize("step", STEPS + COPIES)
async def test_no_wrong_token_leaves(step: str, lease_is_over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await answer(step, lease_is_over, monkeypatch) == MODEL.oracle(PROMPT, 20)


class AnyChecksum(bytes):
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


async def test_without_the_end_of_leases_and_checksums_of_pages_wrong_tokens_would_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = DevicePool.begin_checksums

    def unchecked(pool: DevicePool, pages: Sequence[PageId]) -> Callable[[], list[bytes]]:
        checksums = begin(pool, pages)()
        return lambda: [AnyChecksum(one) for one in checksums]

    monkeypatch.setattr(DevicePool, "begin_checksums", unchecked)
    wrong = await answer("before copy 3", True, monkeypatch, release=lambda lease_id: True)
    assert wrong != MODEL.oracle(PROMPT, 20)


async def test_checksums_of_pages_alone_let_no_wrong_token_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = await answer("before copy 3", True, monkeypatch, release=lambda lease_id: True)
    assert tokens == MODEL.oracle(PROMPT, 20)
