"""The causes of a fetch's unread blocks."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from kv_store.tiers.cold_tier import BlockSource
from wire.block_names import BlockName
from wire.tier import Cause, Miss

_MAX_ASKED = 512
LEASE_LOST = Miss(Cause.LOAD_FAILED, "its lease in the arena ran out while it was read")
_PARTIAL, _BEHIND = Miss(Cause.PARTIAL), Miss(Cause.BEHIND)
UNREACHED = Miss(Cause.LOAD_FAILED, "the arena's directory was out of reach")


def failures(unread: Sequence[BlockSource | None], is_late: bool) -> list[Miss]:
    """Lists the causes of unread blocks, the first of which failed. unread: their sources; None is the arena."""
    if not unread:
        return []
    failure = "its checksum in the arena was wrong"
    if unread[0] is not None:
        failure = f"{unread[0].tier} gave none, or wrong bytes, which the log of the worker that read them names"
        failure = "reading took longer than computing" if is_late else failure
    return [Miss(Cause.LOAD_FAILED, failure), *[_BEHIND] * (len(unread) - 1)]


def unasked_cause(cold: Sequence[BlockSource], asked: Collection[BlockSource], is_late: bool) -> Miss | None:
    """Finds the reason why a cold tier was not asked for a missing block, or did not answer; else None."""
    if skipped := [source.tier for source in cold if source not in asked]:
        how = f"{' and '.join(skipped)} was not asked: a lookup there was expected to cost more time than it saves"
        return Miss(Cause.ELSEWHERE, how)
    if cold and is_late:
        return Miss(Cause.ELSEWHERE, "the lookup took longer than computing")
    broken = [source.tier for source in cold if source.status().state == "broken"]
    return Miss(Cause.LOAD_FAILED, f"{broken[0]} does not answer") if broken else None


def causes(
    names: Sequence[BlockName],
    unasked: Miss | None,
    ask: Callable[[Sequence[BlockName]], Sequence[Miss] | None],
) -> list[Miss]:
    """Finds the causes of blocks from a missing block on, the first of `names`.

    unasked: the reason why not every cold tier was asked. ask: asks the directory about full blocks; None if
    unreachable.
    """
    asked = [name for name in names if not name.is_tail][:_MAX_ASKED]
    told = ask(asked) if asked else []
    answers = iter([UNREACHED] * len(asked) if told is None else told)
    misses = [_PARTIAL if name.is_tail else next(answers, _BEHIND) for name in names]
    return [
        _copied(miss, unasked, place == 0) if miss.cause is Cause.ELSEWHERE else miss
        for place, miss in enumerate(misses)
    ]


def _copied(miss: Miss, unasked: Miss | None, is_hole: bool) -> Miss:
    """Finds the cause of a block that the arena has lost after a cold tier got a copy."""
    if unasked is not None:
        return replace(unasked, age_s=miss.age_s)
    if is_hole:
        gone = f"{miss.how}; its copy in a cold tier is gone: evicted, cleared or expired (ttl)"
        return Miss(Cause.EVICTED, gone, miss.age_s)
    return _BEHIND
