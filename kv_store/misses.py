"""The blocks that a store's last fetch has not brought, and why."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kv_store.tiers.cold_tier import BlockSource
from wire.block_names import BlockName
from wire.ids import BlockKey
from wire.tier import Cause, Miss, Tier

_MAX_ASKED = 512
_LEASE_LOST = Miss(Cause.LOAD_FAILED, "its lease in the arena ran out while it was read")
_UNREACHED = Miss(Cause.LOAD_FAILED, "the arena's directory was out of reach")


class FetchMisses:
    """Notes of one fetch after another; for one thread. clock: monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._causes: dict[BlockKey, Miss] = {}
        self._hole: BlockKey | None = None
        self._unasked: Miss | None = None

    def begin(self, names: Sequence[BlockName]) -> None:
        """Begins a fetch: unless more is noted, the directory was out of reach."""
        self._causes = {name.key: _UNREACHED for name in names}

    def note_lost_lease(self, names: Sequence[BlockName]) -> None:
        self._causes |= {name.key: _LEASE_LOST for name in names}

    def note_hole(
        self, behind: Sequence[BlockName], sources: Sequence[BlockSource], asked: Sequence[BlockSource], deadline: float
    ) -> None:
        """Notes the first block that no tier was found to have, and why not every cold tier was asked for it."""
        self._hole, self._unasked = (behind[0].key if behind else None), None
        cold = [source for source in sources if source.tier is not Tier.PEERS] if behind else []
        if skipped := [source.tier for source in cold if source not in asked]:
            self._unasked = Miss(
                Cause.ELSEWHERE,
                f"{' and '.join(skipped)} was not asked: a lookup there was expected to cost more time than it saves",
            )
        elif cold and self._clock() > deadline:
            self._unasked = Miss(Cause.ELSEWHERE, "the lookup took longer than computing")
        elif broken := [source.tier for source in cold if source.status().state == "broken"]:
            self._unasked = Miss(Cause.LOAD_FAILED, f"{broken[0]} does not answer")

    def note_reads(
        self, found: Sequence[BlockName], num_read: int, num_wanted: int, source: BlockSource | None, deadline: float
    ) -> None:
        """Notes what became of found blocks: a front was wanted, and the reads of it ended at one that failed.

        source: of the block that failed; None is the arena.
        """
        self._causes = {name.key: Miss(Cause.CHEAPER) for name in found[num_wanted:]}
        self._causes |= {name.key: Miss(Cause.BEHIND) for name in found[num_read:num_wanted]}
        if num_read < num_wanted:
            self._causes[found[num_read].key] = Miss(Cause.LOAD_FAILED, self._failure(source, deadline))

    def causes(
        self, names: Sequence[BlockName], ask: Callable[[Sequence[BlockName]], Sequence[Miss] | None]
    ) -> list[Miss]:
        """Finds the causes of blocks. ask: the directory, of full blocks that are new here; None if out of reach."""
        asked = [name for name in names if name.key not in self._causes and not name.is_tail][:_MAX_ASKED]
        told = ask(asked) if asked else []
        answers = iter([_UNREACHED] * len(asked) if told is None else told)
        causes = (
            self._causes.get(one.key) or (Miss(Cause.PARTIAL) if one.is_tail else next(answers, Miss(Cause.BEHIND)))
            for one in names
        )
        return [
            self._copied(one, miss) if miss.cause is Cause.ELSEWHERE else miss
            for one, miss in zip(names, causes, strict=True)
        ]

    def _failure(self, source: BlockSource | None, deadline: float) -> str:
        if source is None:
            return "its checksum in the arena was wrong"
        failure = f"{source.tier} gave none, or wrong bytes, which the log of the worker that read them names"
        return "reading took longer than computing" if self._clock() > deadline else failure

    def _copied(self, name: BlockName, miss: Miss) -> Miss:
        """Finds the cause of a block that the arena has lost, and of which a cold tier was given a copy."""
        if self._unasked is not None:
            return replace(self._unasked, age_s=miss.age_s)
        if name.key == self._hole:
            return Miss(
                Cause.EVICTED,
                f"{miss.how}; its copy in a cold tier is gone: evicted, cleared or expired (ttl)",
                miss.age_s,
            )
        return Miss(Cause.BEHIND)
