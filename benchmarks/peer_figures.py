"""Figures of engines that took turns: rounds, their spread, and the refusal of one whose rounds spread too far."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

MAX_SPREAD = 0.2


def summarize(rates: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Summarizes a point by engine, and Baton over each peer: the median of the rounds' ratios, `best` the least.

    A figure whose rounds spread by more than MAX_SPREAD has no median, and no ratio is made with it. `best` is of peers
    with the checkpoint's own width of weights.
    """
    figures = {name: _figure(values) for name, values in rates.items()}
    steady = {name: rates[name] for name, figure in figures.items() if figure["median"] is not None}
    own = steady.pop("baton", None)
    ratios = {peer: median(map(float.__truediv__, own, values)) for peer, values in steady.items()} if own else {}
    same_width = [ratio for peer, ratio in ratios.items() if "-" not in peer]
    best = {"best": min(same_width)} if same_width else {}
    return {**figures, "baton_over": ratios | best}


def _figure(rounds: Sequence[float]) -> dict[str, Any]:
    spread = max(rounds) / min(rounds) - 1
    return {"median": median(rounds) if spread <= MAX_SPREAD else None, "spread": spread, "rounds": list(rounds)}


def describe(summary: Mapping[str, Any]) -> str:
    """Formats a point on one line: the median of each engine, Baton over a peer, and rounds with their spread."""
    ratios = summary["baton_over"]
    parts = [f"{name} {_describe(one, ratios.get(name))}" for name, one in summary.items() if name != "baton_over"]
    return ", ".join(parts) + (f"; over the best {ratios['best']:.2f}" if "best" in ratios else "")


def _describe(figure: Mapping[str, Any], ratio: float | None) -> str:
    shown = "refused" if figure["median"] is None else f"{figure['median']:.4g}"
    over = "" if ratio is None else f" ({ratio:.2f})"
    rounds = " ".join(f"{one:.4g}" for one in figure["rounds"])
    return f"{shown}{over} [{rounds}: {figure['spread']:.0%}]"


def num_refused(summaries: Iterable[Mapping[str, Any]]) -> int:
    return sum(figure["median"] is None for one in summaries for name, figure in one.items() if name != "baton_over")
