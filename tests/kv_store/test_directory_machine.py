"""The directory against a model: who may touch which slot, whatever writers, readers, holders and the clock do."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_store.node.directory import Directory
from kv_store.node.messages import Block, Hold, KeepHint
from tests.harness.fake_clock import FakeClock
from tests.kv_store.names import ROOT, names_of
from wire.block_names import BlockName, digest_of
from wire.ids import AttemptId, BlockKey, SlotId
from wire.tier import COLD_TIERS, Tier, Write

NUM_SLOTS = 6
NAMES = [*names_of(14), *names_of(14, first=1000)]
writers = st.sampled_from(["one", "other", "third"])
holders = st.sampled_from([AttemptId("a"), AttemptId("b")])
ranges = st.tuples(st.integers(0, len(NAMES) - 1), st.integers(1, 4))


class DirectoryMachine(RuleBasedStateMachine):
    """`arena` is what a well-behaved writer has put into each slot: nobody else may do so while it is in use."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.directory = Directory(NUM_SLOTS, self.clock, high_water=0.5)
        self.arena: dict[SlotId, BlockKey] = {}
        self.writing: dict[str, list[tuple[SlotId, BlockName]]] = {}
        self.reading: dict[int, list[tuple[SlotId, BlockKey]]] = {}
        self.ends: dict[int, float] = {}

    @initialize(write=st.sampled_from(Write))
    def choose(self, write: Write) -> None:
        """FILES gets what the arena is about to lose, as a tier without a rule does."""
        self.directory = Directory(NUM_SLOTS, self.clock, high_water=0.5, writes={Tier.REDIS: write})

    @rule(writer=writers, part=ranges, holder=st.none() | holders)
    def reserve(self, writer: str, part: tuple[int, int], holder: AttemptId | None) -> None:
        names = NAMES[part[0] : part[0] + part[1]]
        hold = None if holder is None else Hold(holder, 3.0)
        self.writing.pop(writer, None)
        reservation = self.directory.reserve(writer, names, hold)
        given = [(slot, name) for slot, name in zip(reservation.slots, names, strict=True) if slot is not None]
        self.writing[writer] = given
        for slot, name in given:
            self.arena[slot] = name.key

    @rule(writer=writers, holder=st.none() | holders, num_blocks=st.integers(0, 4))
    def commit(self, writer: str, holder: AttemptId | None, num_blocks: int) -> None:
        written = self.writing.get(writer, [])
        blocks = [Block(slot, name, name.key[:16]) for slot, name in written[:num_blocks]]
        hold = None if holder is None else Hold(holder, 3.0)
        assert self.directory.commit(writer, blocks, hold) == len(blocks)
        self.writing[writer] = written[num_blocks:]

    @rule(writer=writers)
    def die(self, writer: str) -> None:
        self.directory.writer_died(writer)
        self.writing.pop(writer, None)

    @rule(part=ranges, ttl_s=st.sampled_from([1.0, 5.0]))
    def lease(self, part: tuple[int, int], ttl_s: float) -> None:
        keys = [name.key for name in NAMES[part[0] : part[0] + part[1]]]
        lease = self.directory.lease("reader", keys, ttl_s)
        found = [(entry.slot, key) for entry, key in zip(lease.entries, keys, strict=True) if entry is not None]
        assert all(self.arena[slot] == key for slot, key in found)
        self.reading[lease.lease_id] = found
        self.ends[lease.lease_id] = self.clock.now + ttl_s

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if not self.reading:
            return
        lease_id = data.draw(st.sampled_from(sorted(self.reading)))
        read = self.reading.pop(lease_id)
        if self.directory.release(lease_id):
            assert all(self.arena[slot] == key for slot, key in read)
        else:
            assert self.clock.now >= self.ends[lease_id]

    @rule(tier=st.sampled_from(COLD_TIERS), num_blocks=st.integers(1, 4))
    def write_cold(self, tier: Tier, num_blocks: int) -> None:
        batch = self.directory.lease_cold(tier, num_blocks, 5.0)
        assert all(self.arena[block.slot] == block.name.key for block in batch.blocks)
        assert not any(block.name.is_tail for block in batch.blocks)
        assert self.directory.release(batch.lease_id)
        assert self.directory.records.mark_cold(tier, [block.name.key for block in batch.blocks], []) == len(
            batch.blocks
        )

    @rule(
        part=ranges, session=st.sampled_from([b"", b"1" * 32, b"2" * 32]), keep_s=st.sampled_from([None, 0.0, 2.0, 9e9])
    )
    def keep(self, part: tuple[int, int], session: bytes, keep_s: float | None) -> None:
        keys = [name.key for name in NAMES[part[0] : part[0] + part[1]]]
        assert self.directory.records.keep(keys, KeepHint(digest_of(ROOT), session, keep_s)) <= len(keys)

    @rule(holder=holders)
    def release_hold(self, holder: AttemptId) -> None:
        self.directory.release_holds([holder])

    @rule(slot=st.integers(0, NUM_SLOTS - 1), name=st.sampled_from(NAMES))
    def withdraw(self, slot: int, name: BlockName) -> None:
        self.directory.reject([Block(SlotId(slot), name, name.key[:16])])

    @rule(step_s=st.sampled_from([0.5, 1.0, 4.0]))
    def wait(self, step_s: float) -> None:
        self.clock.now += step_s

    @invariant()
    def books_are_right(self) -> None:
        assert self.directory.records.check() == []
        written = Counter(slot for given in self.writing.values() for slot, _ in given)
        assert all(num == 1 for num in written.values())
        assert self.directory.records.status().counts.draining >= len(written)

    @invariant()
    def whoever_writes_or_reads_is_alone(self) -> None:
        for given in self.writing.values():
            assert all(self.arena[slot] == name.key for slot, name in given)
        for lease_id, read in self.reading.items():
            if self.clock.now < self.ends[lease_id]:
                assert all(self.arena[slot] == key for slot, key in read)

    def teardown(self) -> None:
        """At rest nothing is left in use."""
        for writer in list(self.writing):
            self.directory.abandon(writer)
        self.clock.now += 100.0
        counts = self.directory.records.status().counts
        assert counts.free + counts.cached == counts.total
        assert (self.directory.records.status().num_leases, self.directory.records.status().num_holds) == (0, 0)


TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
