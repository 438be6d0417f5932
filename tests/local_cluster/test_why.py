"""Causes of uncached blocks against a history of the arena that forgets nothing."""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import pytest

from kv_store.node.directory import Directory
from kv_store.node.directory_state import DirectoryState
from kv_store.node.messages import Block, Hold, Reservation
from kv_store.node.records import Records
from kv_store.node.tombstones import Loss, Tombstones
from kv_store.tiers.memory_tier import MemoryTier
from tests.harness.local_cluster import LocalCluster, Sizes
from tests.kv_store.names import put_one
from tests.local_cluster.test_local_cluster import LAYOUT, MODEL, ask, at_rest
from wire.block_names import BlockName, cover
from wire.convert import misses_from_pb
from wire.ids import DEFAULT_TENANT, BlockKey
from wire.pb import cluster_pb2
from wire.served_model import ServedNamespace
from wire.tier import Cause, MissRun, Tier

SIZE = LAYOUT.block_size
NUM_SLOTS = 24
T = TypeVar("T")


class OrderedTombstones(Tombstones):
    """Tombstones that tell the order of losses."""

    def __init__(self, num_places: int, num_slots: int, policy: str, clock: Callable[[], float]) -> None:
        super().__init__(num_places, num_slots, policy, clock)
        self.order: list[BlockKey] = []

    def bury(self, key: bytes, parent: bytes, loss: Loss, copies: Iterable[Tier]) -> None:
        self.order.append(BlockKey(key))
        super().bury(key, parent, loss, copies)


class JudgedRecords(Records):
    """Records whose causes are judged by a historian."""

    def __init__(self, state: DirectoryState, historian: "Historian") -> None:
        super().__init__(state)
        self._historian = historian

    def why(self, keys: Sequence[BlockKey], parents: Sequence[bytes]) -> list[MissRun]:
        runs = super().why(keys, parents)
        self._historian.judge(keys, parents, runs)
        return runs


class Historian(Directory):
    """A directory whose history is told by what is indexed before and after each call, in dicts that only grow."""

    def __init__(self) -> None:
        super().__init__(NUM_SLOTS, block_bytes=LAYOUT.block_bytes)
        self.records = JudgedRecords(self.state, self)
        self.state.tombstones = OrderedTombstones(NUM_SLOTS, NUM_SLOTS, "least recent use", time.monotonic)
        self.parent_of: dict[BlockKey, bytes] = {}
        self.lost: list[BlockKey] = []
        self.last_loss: dict[BlockKey, int] = {}
        self.has_forgotten = False
        self.answers: list[list[Cause]] = []
        self.wrong: list[tuple[Cause, Cause]] = []

    def _resident(self) -> dict[BlockKey, bytes]:
        return {one.name.key: one.name.parent for one in self.state.blocks() if not one.name.is_tail}

    def _watched(self, call: Callable[[], T]) -> T:
        order = self.state.tombstones.order  # type: ignore[attr-defined]
        order.clear()
        before = self._resident()
        answer = call()
        after = self._resident()
        self.parent_of |= after
        for key in after.keys() - before.keys():
            self.last_loss.pop(key, None)
        gone = before.keys() - after.keys()
        assert gone <= {*order}
        for key in sorted(gone, key=order.index):
            self.last_loss[key] = len(self.lost)
            self.lost.append(key)
        oldest = len(self.lost) - NUM_SLOTS
        self.has_forgotten |= any(self.last_loss[key] < oldest for key in self.last_loss)
        return answer

    def reserve(self, writer: str, names: Sequence[BlockName], hold: Hold | None) -> Reservation:
        return self._watched(lambda: super(Historian, self).reserve(writer, names, hold))

    def commit(self, writer: str, blocks: Sequence[Block], hold: Hold | None) -> int:
        return self._watched(lambda: super(Historian, self).commit(writer, blocks, hold))

    def judge(self, keys: Sequence[BlockKey], parents: Sequence[bytes], runs: list[MissRun]) -> None:
        """Compares the causes that the directory has found with those of the history."""
        self.answers.append([])
        told = [run.miss.cause for run in runs for _ in range(run.num_blocks)]
        differing: set[bytes] = set()
        for key, parent, cause in zip(keys, parents, told, strict=True):
            right = self._cause(key, parent, differing)
            self.answers[-1].append(right)
            if cause is not right:
                self.wrong.append((cause, right))

    def _cause(self, key: BlockKey, parent: bytes, differing: set[bytes]) -> Cause:
        resident = self._resident()
        reach = {one for one, loss in self.last_loss.items() if loss >= len(self.lost) - NUM_SLOTS}
        if key in resident:
            return Cause.BEHIND
        if key in reach:
            return Cause.EVICTED
        known = {self.parent_of[one] for one in (*resident, *reach)}
        if parent in differing or parent in known:
            differing.add(key)
            return Cause.DIFFERS
        return Cause.NO_LONGER_KNOWN if self.has_forgotten else Cause.NEVER_SEEN


def drawn_prompt(drawn: random.Random) -> tuple[int, ...]:
    """A path of blocks in a tree: prompts share beginnings, differ in one token, and come again."""
    tokens: list[int] = []
    branch = drawn.randrange(4)
    for depth in range(drawn.randrange(1, 7)):
        fork = drawn.choice((0, 0, 0, 1))
        tokens += [(branch * 50 + depth * 7 + at + fork * (at == 9)) % 300 for at in range(SIZE)]
    return tuple(tokens[: len(tokens) - drawn.choice((0, 0, 3, SIZE - 1))])


class Before:
    """Blocks that were kept before an upgrade: of drawn prompts of the tenant, and of all prompts of another one."""

    NAMESPACE = ServedNamespace("twin", "aa" * 32, LAYOUT.encode().hex())

    def __init__(self, drawn: random.Random, cold: MemoryTier) -> None:
        self.own: set[tuple[int, ...]] = set()
        for _ in range(40):
            prompt = drawn_prompt(drawn)
            self._keep(cold, "acme", prompt)
            if drawn.random() < 0.3:
                self._keep(cold, DEFAULT_TENANT, prompt)
                self.own |= {prompt[:end] for end in range(SIZE, len(prompt) + 1, SIZE)}

    def _keep(self, cold: MemoryTier, tenant: str, prompt: tuple[int, ...]) -> None:
        for name in cover(self.NAMESPACE.root_of(bytes(32), tenant), prompt, SIZE):
            assert name.is_tail or put_one(cold, name)

    def cause(self, told: MissRun, prompt: tuple[int, ...]) -> Cause:
        """The cause of a run whose cause in this namespace is told."""
        is_kept = prompt[: told.first_token + SIZE] in self.own
        is_unknown = told.miss.cause in (Cause.NEVER_SEEN, Cause.NO_LONGER_KNOWN, Cause.DIFFERS)
        return Cause.OTHER_NAMESPACE if is_unknown and is_kept else told.miss.cause


@pytest.mark.parametrize("seed", [1, 2])
async def test_no_cause_is_wrong_by_a_full_history(seed: int) -> None:
    drawn, history = random.Random(seed), Historian()
    cluster = LocalCluster(MODEL, Sizes(num_blocks=24, num_slots=NUM_SLOTS, earlier=(Before.NAMESPACE,)))
    cluster.directory = history
    before = Before(random.Random(-seed), cluster.cold)
    await cluster.start(1, 1)
    num_misses, seen = 0, set[Cause]()
    for _ in range(450):
        history.answers.clear()
        prompt = drawn_prompt(drawn)
        output = await cluster.generate(ask(prompt, 2))
        await at_rest(cluster)
        listed = cluster.router.dispatcher.recent.list(cluster_pb2.ListRequestsRequest(limit=1))
        runs = misses_from_pb(listed.requests[-1].misses)
        told = [run.miss.cause for run in runs for _ in range(run.num_blocks)]
        num_cached = sum(one.tokens for one in output.complete.usage.cached_tokens)
        assert len(told) == -(-len(prompt) // SIZE) - num_cached // SIZE - (num_cached % SIZE > 0)
        own = [cause for cause in told if cause not in (Cause.PARTIAL, Cause.BEHIND)]
        answered = [cause for cause in (history.answers or [[]])[0] if cause is not Cause.BEHIND]
        if own:
            assert own == answered
        num_misses += len(own)
        seen.update(told)
        explained = await explain(cluster, listed.requests[-1])
        assert explained[1:] == [run.miss.cause for run in runs[1:]]
        if runs:
            assert explained[0] is before.cause(runs[0], prompt)
        seen.update(explained)
    await cluster.stop()
    assert history.wrong == []
    assert num_misses >= 500, num_misses
    assert seen >= {Cause.NEVER_SEEN, Cause.NO_LONGER_KNOWN, Cause.EVICTED, Cause.DIFFERS, Cause.PARTIAL}, seen
    assert Cause.OTHER_NAMESPACE in seen


async def explain(cluster: LocalCluster, ended: cluster_pb2.EndedRequest) -> list[Cause]:
    """The causes of runs, of which the first is looked for in other namespaces."""
    asked = cluster_pb2.ExplainMissesRequest(request_id=ended.request_id)
    explained = await cluster.router.administration.explain(asked)
    return [run.miss.cause for run in misses_from_pb(explained.request.misses)]
