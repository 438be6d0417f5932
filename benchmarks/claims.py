"""The claims of articles about KV caches, each beside the arithmetic, and beside a measurement here with its baseline.

    python benchmarks/claims.py --only cache_speed
    OMP_NUM_THREADS=1 python benchmarks/claims.py --write --trace TRACE
    OMP_NUM_THREADS=1 python benchmarks/claims.py --write --real --trace TRACE

--write keeps the results in benchmarks/results/claims.json, and makes docs/claims.md of all that are kept; --only
renews a part. With --real, families run on SmolLM2, and claims_real.json keeps their results. Claims about traces need
a published one; all but disaggregation run in one process.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
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
from benchmarks.machine import MachineState, commit, processor
from benchmarks.peers import default_cache
from benchmarks.real_model import plain_checkpoint

PAGE = ROOT / "docs" / "claims.md"
RESULTS = ROOT / "benchmarks" / "results" / "claims.json"
REAL_RESULTS = RESULTS.with_name("claims_real.json")
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
ON_REAL = ("caching", "batching", "sharing", "disaggregation", "speculation")


def choose(only: str | None, has_trace: bool, is_real: bool = False) -> list[str]:
    """Picks the families of a name, which is a claim's or a family's; without one all that can be measured."""
    if only is None:
        return [name for name in (ON_REAL if is_real else FAMILIES) if has_trace or name not in NEED_TRACE]
    chosen = [name for name, family in FAMILIES.items() if only == name or only in family.claims]
    if not chosen:
        claims = (claim for family in FAMILIES.values() for claim in family.claims)
        sys.exit(f"no claim and no family is named {only}; there are {', '.join([*FAMILIES, *claims])}")
    if not has_trace and chosen[0] in NEED_TRACE:
        sys.exit(f"{only} needs a published trace: --trace FILE")
    if is_real and chosen[0] not in ON_REAL:
        sys.exit(f"{only} has no real model; {', '.join(ON_REAL)} have")
    return chosen


def measure(names: Sequence[str], trace: Path | None, real: Path | None = None) -> dict[str, Kept]:
    """Measures families one after another."""
    kept = {}
    with TemporaryDirectory() as scratch:
        for name in names:
            print(f"{name} ...", file=sys.stderr, flush=True)
            machine = "" if name in UNMEASURED else describe_machine()
            report = FAMILIES[name].measure(Inputs(trace, Path(scratch), real))
            kept[name] = Kept.of(FAMILIES[name], report, machine, f"{datetime.now(UTC):%Y-%m-%d}", f"commit {commit()}")
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
    if options.write and find_spec("matplotlib") is None:
        sys.exit("--write draws charts: pip install .[benchmarks]")
    real = plain_checkpoint(default_cache() / "smollm2-float32") if options.real else None
    kept = measure(choose(options.only, options.trace is not None, options.real), options.trace, real)
    rows = rows_of(kept, options.only)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for claim, row in rows.items():
            print(claim, *(f"  {key:<10} {value}" for key, value in row.items()), sep="\n")
    if options.write:
        results = REAL_RESULTS if options.real else RESULTS
        everything = {**read(results), **kept}
        ordered = {name: asdict(everything[name]) for name in FAMILIES if name in everything}
        results.write_text(json.dumps(ordered, indent=1) + "\n")
        write_page(PAGE, FAMILIES, read(RESULTS), read(REAL_RESULTS))


def read(results: Path) -> dict[str, Kept]:
    """Reads kept results, without claims that a family had once."""
    kept: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    return {name: Kept(**one).only(FAMILIES[name]) for name, one in kept.items()}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", help="a claim, or a family of claims (default: all)")
    parser.add_argument("--trace", type=Path, help="Mooncake .jsonl or Azure .csv")
    parser.add_argument("--real", action="store_true", help="on SmolLM2, which is fetched, in place of random weights")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--write", action="store_true", help="keep the results, and make docs/claims.md")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
