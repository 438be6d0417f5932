"""The counterfactuals of a request: the times that it would have taken otherwise, folded from its journal.

no wait at a gate    the longest wait takes no time, nor do others at the same worker, nor what took longer beside them
co-located           its decode worker computes the prompt: no gate of prefill, no publishing, a call and a fetch less
on the device        its workers have the prompt's full blocks: only the tail is computed, and handed over

Spans follow one another without a gap, so what changes some of them moves all later ones by the sum. A size that the
journal does not have is scaled by learned durations; without them there is no counterfactual.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

from router.observe.journal import NETWORK, OK, RequestJournal
from router.sized_durations import SizedDurations
from wire.journal import CO_LOCATED, DECODE, GATES, ON_DEVICE, PREFILL, Kind
from wire.pb import inference_pb2 as pb
from wire.tier import FAR_TIERS, Cause, Tier

MIN_SHARE = 0.05
"""Least part of the time that its longest gate took, for a counterfactual without it."""
MIN_LIKE = 8
"""Least requests that tell what is expected of another request."""
FETCHES = PREFILL_FETCH, DECODE_FETCH = Kind.FETCH.names
PREFILL_COMPUTE, DECODE_COMPUTE, GENERATE = (kind.names[0] for kind in (Kind.COMPUTE, Kind.RECOMPUTE, Kind.GENERATE))
COMPUTES = PREFILL_COMPUTE, DECODE_COMPUTE
PUBLISH = Kind.PUBLISH.names[0]
_BESIDE_OTHERS = (*FETCHES, *COMPUTES)
"""Spans that last longer while a step runs, or the step has others' prompts, too."""
_OF_PREFILL = {*Kind.WAIT_ROOM.names, *Kind.PUBLISH.names, *(gate for gate in GATES if gate.startswith(*PREFILL))}
_FAR = tuple(f"tokens_{tier}" for tier in FAR_TIERS)
_FETCHED = (f"tokens_{Tier.HOST}", *_FAR)
NewMs = Callable[[pb.Span], float]
"""The duration that a span would have had."""


class NotLearned(Exception):
    """The durations of a kind of span are not learned yet."""


class RequestCosts:
    """The learned costs of spans by their tokens, and the times to the first token by uncached tokens: milliseconds.

    Requests teach them that ended well at the first attempt.
    """

    def __init__(self) -> None:
        self._spans = defaultdict[str, SizedDurations](SizedDurations)
        self._ttft_ms = SizedDurations()

    def compare(self, journal: RequestJournal, block_size: int) -> None:
        """Writes counterfactuals and expectation into the timeline of an ended request, then learns from it."""
        if journal.outcome != OK or journal.ttft_s is None:
            return
        journal.timeline.counterfactuals.extend(counterfactuals(journal, self, block_size))
        like = self._ttft_ms.like(_num_uncached(journal))
        if len(like) >= MIN_LIKE:
            expected = journal.timeline.expected_ttft
            expected.p50_ms, expected.p90_ms = (like[len(like) * percent // 100] for percent in (50, 90))
        if journal.num_attempts == 1 and not journal.num_resumed_tokens:
            self._ttft_ms.learn(_num_uncached(journal), journal.ttft_s * 1000)
            self._learn(journal)

    def _learn(self, journal: RequestJournal) -> None:
        published_ms = sum(span.duration_ms for span in journal.spans if span.name in (PREFILL_COMPUTE, PUBLISH))
        for span in journal.spans:
            if span.name in _BESIDE_OTHERS and not _is_far(span):
                self._spans[span.name].learn(_size(span, journal), span.duration_ms)
            elif span.name == PUBLISH and _is_cached(journal):
                self._spans[PUBLISH].learn(journal.num_prompt_tokens, published_ms)

    def scaled_ms(self, span: pb.Span, journal: RequestJournal, size: int, name: str = "") -> float:
        """Returns the duration of a computation at another size, or under another name. Raises NotLearned."""
        at_ms = self.ms(span.name, _size(span, journal))
        return span.duration_ms * self.ms(name or span.name, size) / max(at_ms, 1e-6)

    def fetch_ms(self, span: pb.Span, journal: RequestJournal, size: int) -> float:
        """Returns the duration of a fetch of fewer tokens. Raises NotLearned.

        What it waited for a step stays. From another node or a cold tier, none of it stays.
        """
        usual_ms = span.duration_ms if _is_far(span) else self.ms(span.name, _size(span, journal))
        return max(span.duration_ms - max(usual_ms - self.ms(span.name, size), 0.0), 0.0)

    def unwaited_ms(self, span: pb.Span, journal: RequestJournal) -> float:
        """Returns the duration without others: 0 of a gate, the usual one of a computation or a fetch in the node."""
        if span.name not in _BESIDE_OTHERS or _is_far(span) or not self.knows(span.name):
            return 0.0 if span.name in GATES else span.duration_ms
        return min(span.duration_ms, self.ms(span.name, _size(span, journal)))

    def knows(self, name: str) -> bool:
        return name in self._spans and self._spans[name].line is not None

    def ms(self, name: str, size: int) -> float:
        """Returns the learned duration of a kind of span. Raises NotLearned."""
        took_ms = self._spans[name].at(size) if name in self._spans else None
        if took_ms is None:
            raise NotLearned(name)
        return took_ms


def counterfactuals(journal: RequestJournal, costs: RequestCosts, block_size: int) -> list[pb.Counterfactual]:
    """Folds the journal of a request that ended well into its counterfactuals."""
    found: list[pb.Counterfactual] = []
    for fold in (_without_a_gate, _co_located, _on_device):
        try:
            found += fold(journal, costs, block_size)
        except NotLearned:
            continue
    return found


def _without_a_gate(journal: RequestJournal, costs: RequestCosts, block_size: int) -> Sequence[pb.Counterfactual]:
    """Takes the longest wait out, unless that took hardly any time.

    The waits at one worker go together, since the same others are ahead of it in each; its name is the longest one's.
    """
    waits_ms, groups_ms = defaultdict[str, float](float), defaultdict[str, float](float)
    for span in journal.spans:
        wait_ms = span.duration_ms - costs.unwaited_ms(span, journal)
        waits_ms[span.name] += wait_ms
        groups_ms[_group(span.name)] += wait_ms
    group = max(groups_ms, key=groups_ms.__getitem__)
    without = _changed(
        journal,
        max((name for name in waits_ms if _group(name) == group), key=waits_ms.__getitem__),
        lambda span: costs.unwaited_ms(span, journal) if _group(span.name) == group else span.duration_ms,
    )
    least = 1 - MIN_SHARE
    is_long = without.ttft_ms < least * _ttft_ms(journal) or without.total_ms < least * journal.timeline.total_ms
    return [without] if is_long else []


def _co_located(journal: RequestJournal, costs: RequestCosts, block_size: int) -> Sequence[pb.Counterfactual]:
    """Lets the decode worker compute the prompt of a request that was handed off. Its first token ends that."""
    spans, names = journal.spans, [span.name for span in journal.spans]
    if journal.num_attempts > 1 or not {PREFILL_COMPUTE, DECODE_FETCH, GENERATE}.issubset(names):
        return []

    def new_ms(span: pb.Span) -> float:
        if span.name in _OF_PREFILL or span.name == DECODE_FETCH:
            return 0.0
        if span.name == PREFILL_COMPUTE and costs.knows(DECODE_COMPUTE):
            return costs.scaled_ms(span, journal, _size(span, journal), DECODE_COMPUTE)
        return span.duration_ms

    saved_ms, first = [span.duration_ms - new_ms(span) for span in spans], names.index(GENERATE)
    call_ms = sum(span.duration_ms for span in spans[: names.index(DECODE_FETCH)] if span.name == NETWORK)
    return [
        pb.Counterfactual(
            change=CO_LOCATED,
            ttft_ms=spans[first].start_ms - sum(saved_ms[:first]),
            total_ms=journal.timeline.total_ms - sum(saved_ms) - call_ms,
        )
    ]


def _on_device(journal: RequestJournal, costs: RequestCosts, block_size: int) -> Sequence[pb.Counterfactual]:
    """Gives its workers the prompt's full blocks, unless they had them, or it was not to read any."""
    num_rest = (journal.num_prompt_tokens - 1) % block_size + 1
    is_handed_off = bool(journal.timeline.prefill_worker)
    has_all = not any(_size(span, journal) > num_rest for span in journal.spans)
    if has_all or journal.num_attempts > 1 or any(run.cause == Cause.NOT_READ for run in journal.misses):
        return []

    def new_ms(span: pb.Span) -> float:
        if span.name in FETCHES:
            return costs.fetch_ms(span, journal, num_rest)
        if span.name == PUBLISH:
            return max(costs.ms(PUBLISH, journal.num_prompt_tokens) - costs.ms(PREFILL_COMPUTE, num_rest), 0.0)
        if span.name == DECODE_COMPUTE and is_handed_off:
            return 0.0
        if span.name in COMPUTES and _size(span, journal) > num_rest:
            return min(costs.scaled_ms(span, journal, num_rest), span.duration_ms)
        return span.duration_ms

    return [_changed(journal, ON_DEVICE, new_ms)]


def _changed(journal: RequestJournal, change: str, new_ms: NewMs) -> pb.Counterfactual:
    """Moves the first token and the end by what spans before them save."""
    ttft_ms = _ttft_ms(journal)
    saved_ms = [(span.start_ms, span.duration_ms - new_ms(span)) for span in journal.spans]
    return pb.Counterfactual(
        change=change,
        ttft_ms=ttft_ms - sum(saved for start_ms, saved in saved_ms if start_ms < ttft_ms),
        total_ms=journal.timeline.total_ms - sum(saved for _, saved in saved_ms),
    )


def _group(name: str) -> str:
    """Returns the place of a worker's span, the name of another one."""
    place = name.partition(".")[0]
    return place if (place,) in (PREFILL, DECODE) else name


def _size(span: pb.Span, journal: RequestJournal) -> int:
    """Counts the tokens that the duration of a span depends on; of a fetch, all that its device did not have."""
    beside = {PREFILL_FETCH: PREFILL_COMPUTE, DECODE_FETCH: DECODE_COMPUTE}.get(span.name)
    computed = [other for other in journal.spans if other.name == beside]
    return _num_computed([span, *computed]) + sum(span.counts.get(name, 0) for name in _FETCHED)


def _is_cached(journal: RequestJournal) -> bool:
    """Tells whether most of the prompt was cached: its blocks are published while the rest is computed, or after."""
    return _num_computed(journal.spans) * 4 <= journal.num_prompt_tokens


def _is_far(span: pb.Span) -> bool:
    """Tells whether a span fetched blocks from beyond its node."""
    return any(span.counts.get(name) for name in _FAR)


def _num_computed(spans: Sequence[pb.Span]) -> int:
    return sum(span.counts.get(Kind.COMPUTE.unit, 0) for span in spans)


def _num_uncached(journal: RequestJournal) -> int:
    return journal.num_prompt_tokens - sum(journal.cached.values())


def _ttft_ms(journal: RequestJournal) -> float:
    return (journal.ttft_s or 0.0) * 1000
