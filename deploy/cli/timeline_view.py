"""The timeline of a request, for people."""

from collections.abc import Mapping

from baton.results import Completion, Span
from deploy.cli.table import render
from wire.tier import Tier

MIN_WAIT_MS = 1.0


def render_timeline(completion: Completion) -> str:
    """Renders a row for each step, with its time, worker and blocks by tier; then a summary of the request.

    Gates that the request passed at once have no row.
    """
    timeline = completion.timeline
    steps = [span for span in timeline.spans if "." in span.name]
    rows = [
        (f"{span.start_ms:.1f}", f"{span.duration_ms:.1f}", span.worker, span.name.partition(".")[2], _describe(span))
        for span in steps
        if not (_is_gate(span) and span.duration_ms < MIN_WAIT_MS)
    ]
    between_ms = timeline.total_ms - sum(span.duration_ms for span in steps)
    head = ("at ms", "took ms", "worker", "step", "")
    return "\n".join([render(head, rows), "", _summary(completion, between_ms)])


def _is_gate(span: Span) -> bool:
    return span.name.partition(".")[2].startswith("wait_")


def _summary(completion: Completion, between_ms: float) -> str:
    usage, timeline = completion.usage, completion.timeline
    num_cached = sum(usage.cached_tokens.values())
    sources = ", ".join(f"{tokens} {tier}" for tier, tokens in usage.cached_tokens.items()) or "none"
    return (
        f"{usage.prompt_tokens} prompt tokens ({num_cached} cached: {sources}), "
        f"{usage.completion_tokens} generated, {timeline.total_ms:.1f} ms "
        f"({max(0.0, between_ms):.1f} ms of it between processes)"
    )


def _describe(span: Span) -> str:
    counts = span.counts
    blocks = [f"{_numbered(count, 'blocks')} from {tier}" for tier in Tier if (count := counts.get(f"blocks_{tier}"))]
    return ", ".join(blocks + _others(counts))


def _others(counts: Mapping[str, int]) -> list[str]:
    known = {f"{unit}_{tier}" for unit in ("tokens", "blocks") for tier in Tier}
    return [_count(name, value) for name, value in sorted(counts.items()) if name not in known]


def _count(name: str, value: int) -> str:
    unit, _, what = name.partition("_")
    return f"{_numbered(value, unit)} {what}".rstrip()


def _numbered(value: int, units: str) -> str:
    return f"{value} {units.removesuffix('s') if value == 1 else units}"
