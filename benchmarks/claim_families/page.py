"""The page of claims, docs/claims.md, and its charts: from the kept results of all families."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.claim_families.finding import Chart, Family, Finding, Report

INTRODUCTION = """\
# The claims, measured

Articles about KV caches give round numbers. Each stands here beside the arithmetic, and beside a measurement of Baton
and a baseline that is code in this repository. This command makes the page; TRACE is a published trace of requests:

    OMP_NUM_THREADS=1 python benchmarks/claims.py --write --trace TRACE

A gain *holds* where the measurement reaches the lower number said, a share of a peak where it lies within the range:
*no* may mean above it. Where there are several cases, it names the one that decides. A claim with `-` waits: its rounds
disagree or are too few. Ratios are medians, with the least and the greatest round. The models are small and
run on a CPU: figures tell whether an effect is there and which way it points, not how large it is on a GPU."""
ON_REAL = "With `--real` it measures families on SmolLM2 (`baton pull smollm2`); its rows stand below the others."
KERNELS_OF = "2026-11-23"
"""The day of the last change to kernels/cpu that models of these families see: c7f7d877."""
HOLDS = {True: "yes", False: "no", None: "-"}


@dataclass(frozen=True)
class Kept:
    """The results of a family as they are kept in JSON. commit: the measured code's, or `added by` the results' own."""

    machine: str
    date: str
    commit: str
    setting: str
    rows: dict[str, dict[str, Any]]
    chart: dict[str, Any] | None

    @classmethod
    def of(cls, family: Family, report: Report, machine: str, date: str, commit: str) -> "Kept":
        """Raises KeyError where a claim has no finding."""
        rows = {name: {"said": said, **asdict(report.findings[name])} for name, said in family.claims.items()}
        return cls(machine, date, commit, report.setting, rows, None if report.chart is None else asdict(report.chart))

    def only(self, family: Family) -> "Kept":
        """Leaves out claims that a family had once."""
        return replace(self, rows={name: row for name, row in self.rows.items() if name in family.claims})


def write_page(
    page: Path, families: Mapping[str, Family], kept: Mapping[str, Kept], real: Mapping[str, Kept] | None = None
) -> None:
    """Writes the page, and a chart for each family that has one into a folder of the page's name.

    real: results of families on a real model, each beside the same on random weights.
    """
    folder = page.with_suffix("")
    folder.mkdir(exist_ok=True)
    parts = [INTRODUCTION, *([ON_REAL] if real else []), _summary(kept), *_to_measure_again(families, kept)]
    for name, family in families.items():
        if name in kept:
            parts.append(_section(name, family, kept[name]))
            if (chart := kept[name].chart) is not None:
                draw(Chart(**chart), folder / f"{name}.svg")
        if real and name in real:
            parts.append(_beside(real[name]))
    page.write_text("\n\n".join(parts) + "\n")


def _summary(kept: Mapping[str, Kept]) -> str:
    held = Counter(row["holds"] for one in kept.values() for row in one.rows.values())
    verbs = {True: ("hold", "holds"), False: ("do not", "does not"), None: ("wait", "waits")}
    hold, fail, wait = (f"{held[key]} {plural if held[key] != 1 else one}" for key, (plural, one) in verbs.items())
    return f"Of {held.total()} claims {hold}, {fail}, and {wait}."


def _to_measure_again(families: Mapping[str, Family], kept: Mapping[str, Kept]) -> list[str]:
    """Names the families that a machine measured before the kernels of today."""
    old = [families[name].title for name, one in kept.items() if one.machine and one.date < KERNELS_OF]
    return (
        [f"**Older than the kernels of today** ({KERNELS_OF}), and to be made again: {', '.join(old)}."] if old else []
    )


def _section(name: str, family: Family, kept: Kept) -> str:
    picture = [] if kept.chart is None else [f"![{kept.chart['title']}](claims/{name}.svg)"]
    return "\n\n".join([f"## {family.title}", _table(kept), *picture])


def _beside(kept: Kept) -> str:
    return f"On a real model: {_table(kept)}"


def _table(kept: Kept) -> str:
    rows = ["| claim | said | arithmetic | measured | holds |", "|---|---|---|---|---|"]
    rows += [
        _row(claim, Finding(**{key: value for key, value in row.items() if key != "said"}), row["said"])
        for claim, row in kept.rows.items()
    ]
    machine = f"Machine: {kept.machine}, " if kept.machine else "On any machine, "
    place = f"{machine}{kept.date}, {kept.commit}."
    return "\n\n".join([f"{kept.setting} {place}", "\n".join(rows)])


def _row(claim: str, finding: Finding, said: str) -> str:
    holds = ": ".join(filter(None, (HOLDS[finding.holds], finding.decided_by)))
    return f"| `{claim}` | {said} | {finding.arithmetic} | {finding.measured} | {holds} |"


def draw(chart: Chart, path: Path) -> None:
    """Draws lines, or bars side by side where x is a name. The same figures make the same file."""
    import matplotlib  # the benchmarks' extra has it

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "baton", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3))
    if _has_names(chart):
        _draw_bars(axes, chart)
    else:
        for name, points in chart.series.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set_xlabel(chart.x_label)
    most = max(y for points in chart.series.values() for _, y in points)
    axes.set(title=chart.title, ylabel=chart.y_label, ylim=(0, 1.1 * most))
    if len(chart.series) > 1:
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def _has_names(chart: Chart) -> bool:
    return any(isinstance(x, str) for points in chart.series.values() for x, _ in points)


def _draw_bars(axes: Any, chart: Chart) -> None:
    """Puts the bars of all series at each name beside one another."""
    names: Sequence[Any] = list(dict.fromkeys(x for points in chart.series.values() for x, _ in points))
    width = 0.8 / len(chart.series)
    for number, (label, points) in enumerate(chart.series.items()):
        at = [names.index(x) + (number + 0.5) * width - 0.4 for x, _ in points]
        axes.bar(at, [y for _, y in points], width, label=label)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlabel(chart.x_label)
