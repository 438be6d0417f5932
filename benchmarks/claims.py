"""The claims of articles about KV caches, each beside the arithmetic, and beside a measurement here with its baseline.

    python benchmarks/claims.py --only cache_speed
    OMP_NUM_THREADS=1 python benchmarks/claims.py --write --trace TRACE

--write keeps the results in benchmarks/results/claims.json, and makes docs/claims.md of all that are kept; --only
renews a part. Claims about traces need a published one; all but disaggregation run in one process.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.claim_families import (
    arithmetic,
    batching,
    block_tables,
    caching,
    disaggregating,
    peaks,
    reservation,
    sizes,
    smaller,
    speculating,
)
from benchmarks.claim_families.finding import Family, Inputs
from benchmarks.claim_families.page import Kept, write_page
from benchmarks.machine import MachineState, processor

PAGE = ROOT / "docs" / "claims.md"
RESULTS = ROOT / "benchmarks" / "results" / "claims.json"
FAMILIES: dict[str, Family] = {
    "arithmetic": arithmetic.FAMILY,
    "sizes": sizes.FAMILY,
    "caching": caching.FAMILY,
    "reservation": reservation.FAMILY,
    "batching": batching.BATCHING,
    "sharing": batching.SHARING,
    "block_tables": block_tables.FAMILY,
    "peaks": peaks.FAMILY,
    "disaggregation": disaggregating.FAMILY,
    "speculation": speculating.SPECULATIVE,
    "smaller_caches": smaller.SMALLER_CACHES,
}
UNMEASURED = ("arithmetic", "smaller_caches")
"""Families that depend on no machine."""
NEED_TRACE = ("reservation", "batching")


def choose(only: str | None, has_trace: bool) -> list[str]:
    """Picks the families of a name, which is a claim's or a family's; without one all that can be measured."""
    if only is None:
        return [name for name in FAMILIES if has_trace or name not in NEED_TRACE]
    chosen = [name for name, family in FAMILIES.items() if only == name or only in family.claims]
    if not chosen:
        claims = (claim for family in FAMILIES.values() for claim in family.claims)
        sys.exit(f"no claim and no family is named {only}; there are {', '.join([*FAMILIES, *claims])}")
    if not has_trace and chosen[0] in NEED_TRACE:
        sys.exit(f"{only} needs a published trace: --trace FILE")
    return chosen


def measure(names: Sequence[str], trace: Path | None) -> dict[str, Kept]:
    """Measures families one after another."""
    kept = {}
    with TemporaryDirectory() as scratch:
        for name in names:
            print(f"{name} ...", file=sys.stderr, flush=True)
            machine = "" if name in UNMEASURED else describe_machine()
            report = FAMILIES[name].measure(Inputs(trace, Path(scratch)))
            kept[name] = Kept.of(FAMILIES[name], report, machine, f"{datetime.now(UTC):%Y-%m-%d}")
    return kept


def describe_machine() -> str:
    """Names the processor, and the state of the machine."""
    return f"{processor()}, {MachineState.measure().describe()}"


def rows_of(kept: Mapping[str, Kept], only: str | None) -> dict[str, dict[str, Any]]:
    """Gathers claims of all families, or of a name."""
    rows = {claim: row for one in kept.values() for claim, row in one.rows.items()}
    return {only: rows[only]} if only in rows else rows


def main() -> None:
    options = parse(sys.argv[1:])
    kept = measure(choose(options.only, options.trace is not None), options.trace)
    rows = rows_of(kept, options.only)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for claim, row in rows.items():
            print(claim, *(f"  {key:<10} {value}" for key, value in row.items()), sep="\n")
    if options.write:
        before = {name: Kept(**one).only(FAMILIES[name]) for name, one in _read().items()}
        everything = {name: {**before, **kept}[name] for name in FAMILIES if name in {**before, **kept}}
        RESULTS.write_text(json.dumps({name: asdict(one) for name, one in everything.items()}, indent=1) + "\n")
        write_page(PAGE, FAMILIES, everything)


def _read() -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return kept


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", help="a claim, or a family of claims (default: all)")
    parser.add_argument("--trace", type=Path, help="Mooncake .jsonl or Azure .csv")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--write", action="store_true", help="keep the results, and make docs/claims.md")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
