"""The counterfactuals of requests beside the same requests served again without the cause, on the virtual clock.

    python benchmarks/counterfactual.py

A whole cluster in this process, as in benchmarks/conditional.py: real router, workers, engines and store, a prefill and
a decode worker. A warm-up teaches the costs. Then 50 causes are planted, each in a cluster of its own: others ahead of
a request, too few places, pages or slots, a decode worker that is late, the other pool, a cold cache. The request is
served again in a new cluster without the cause. An error is the greater one of both times, to the first token and in
all, as a share of the second run's.
"""

import argparse
import asyncio
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.conditional import LAYOUT, MAX_CONTEXT_LEN, VOCAB_SIZE, PacedCluster
from benchmarks.result_file import write_result
from cli.bench.plan.paced_worker import PacedRecords
from engine.model.hash_model import HashModel
from router.config import Disaggregation, RouterSettings
from router.observe.counterfactual import RequestCosts, counterfactuals
from router.observe.journal import RequestJournal
from tests.harness.answer import ask
from tests.harness.cluster import collect
from tests.harness.local_cluster import Sizes
from tests.simulator import virtual_time
from wire.journal import CO_LOCATED, ON_DEVICE
from worker.config import BatchSettings

WARM_UP_LENS = 20, 24, 28, 100, 110, 120, 450, 480, 500, 1500, 1600, 1700
OUTPUT_LEN = 40
ROOMY = Sizes(num_blocks=4096, num_slots=16384, settings=RouterSettings(disaggregation=Disaggregation.ALWAYS))
FLOOR, GOAL = 0.3, 0.1


@dataclass(frozen=True)
class Sent:
    """A request of a scene. name: tells its prompt apart from others."""

    at_s: float
    prompt_len: int
    name: int
    output_len: int = OUTPUT_LEN

    @property
    def prompt(self) -> list[int]:
        return [1 + (self.name * 7919 + place * (self.name + 3)) % (VOCAB_SIZE - 1) for place in range(self.prompt_len)]


@dataclass(frozen=True)
class Scene:
    """A cluster's life: its sizes, its requests, the time at which its decode worker is there."""

    requests: Sequence[Sent]
    sizes: Sizes = ROOMY
    decode_at_s: float = 0.0

    async def play(self) -> list[RequestJournal]:
        """Serves the requests with a cluster of their own; returns their journals."""
        now_s = asyncio.get_running_loop().time
        cluster = PacedCluster(HashModel(LAYOUT, VOCAB_SIZE, MAX_CONTEXT_LEN), self.sizes, clock=now_s)
        cluster.directory.records = PacedRecords(cluster.directory.state)
        await cluster.start(1, 0 if self.decode_at_s else 1)
        began_s = now_s()

        async def serve(number: int, sent: Sent) -> None:
            await asyncio.sleep(began_s + sent.at_s - now_s())
            request = ask(sent.prompt, sent.output_len, ignore_eos=True)
            request.request_id = f"r{number}"
            await collect(cluster.router.dispatcher.open(request, None))

        async def join() -> None:
            await asyncio.sleep(self.decode_at_s)
            await cluster.resize(1, 1)

        await asyncio.gather(join(), *(serve(*one) for one in enumerate(self.requests)))
        found = (cluster.router.dispatcher.recent.find(number + 1) for number in range(len(self.requests)))
        by_id = {journal.request_id: journal for journal in found if journal is not None}
        await cluster.stop()
        return [by_id[name] for name in sorted(by_id, key=lambda one: int(one.rpartition("r")[2]))]


@dataclass(frozen=True)
class Planted:
    """A planted cause: what the change has in its name that undoes it, and the scenes with and without it."""

    cause: str
    change: str
    given: Scene
    otherwise: Scene


def probe(at_s: float, prompt_len: int) -> Sent:
    return Sent(at_s, prompt_len, name=200)


def planted() -> Iterator[Planted]:
    """Yields the causes, 50 in all."""
    for other_len in (800, 1200, 1600, 2000):
        for length in (200, 900):
            last = probe(0.05, length)
            yield Planted(
                f"{length} tokens behind a step of {other_len}",
                ".queue",
                Scene([Sent(0.0, other_len, 1, output_len=1), last]),
                Scene([last]),
            )
    for number in (3, 5, 7, 9):
        for length in (700, 1800):
            others = [Sent(0.0, 500, place, output_len=1) for place in range(number)]
            last = probe(0.0, length)
            yield Planted(f"{length} tokens behind {number} prompts", "prefill.", Scene([*others, last]), Scene([last]))
    for places in (1, 2, 3):
        for length in (100, 600, 1500):
            others = [Sent(0.0, 60, place, 150) for place in range(places)]
            scene = Scene([*others, probe(0.3, length)], few(max_running=places))
            yield Planted(
                f"{places} places for {places + 1} sequences, {length} tokens",
                ".wait_slot",
                scene,
                replace(scene, sizes=ROOMY),
            )
    for length in (300, 700, 1200):
        for num_blocks in (80, 85):
            others = [Sent(0.0, 1000, 1, 120)]
            scene = Scene([*others, probe(0.6, length)], replace(ROOMY, num_blocks=num_blocks))
            yield Planted(
                f"{num_blocks} pages, {length} tokens beside 1000", ".wait_pages", scene, replace(scene, sizes=ROOMY)
            )
    for length in (400, 800, 1200):
        others = [Sent(0.0, 30, 1, 120), Sent(0.01, 1000, 2, 10)]
        sizes = replace(few(max_running=1), num_slots=120)
        scene = Scene([*others, probe(0.7, length)], sizes)
        yield Planted(f"120 slots, {length} tokens behind 1000", ".wait_room", scene, replace(scene, sizes=ROOMY))
    for late_s in (1.0, 2.0, 4.0):
        for length in (100, 800):
            scene = Scene([probe(0.1, length)], decode_at_s=late_s)
            yield Planted(
                f"{length} tokens, a decode worker after {late_s:.0f} s",
                ".wait_decode",
                scene,
                replace(scene, decode_at_s=0.0),
            )
    never = replace(ROOMY, settings=RouterSettings(disaggregation=Disaggregation.NEVER))
    for length in (50, 300, 900, 2000):
        scene = Scene([probe(0.1, length)])
        yield Planted(f"{length} tokens handed off", CO_LOCATED, scene, replace(scene, sizes=never))
    for length in (300, 900):
        others = [Sent(0.0, 60, place, 150) for place in range(4)]
        scene = Scene([*others, probe(0.4, length)])
        yield Planted(f"{length} tokens handed off, beside 4 streams", CO_LOCATED, scene, replace(scene, sizes=never))
    for length in (100, 500, 1000, 2000):
        last = probe(3.0, length)
        yield Planted(
            f"{length} tokens that are nowhere", ON_DEVICE, Scene([last]), Scene([replace(last, at_s=0.0), last])
        )


def few(**batch: int) -> Sizes:
    return replace(ROOMY, batch=BatchSettings(**batch))


@dataclass(frozen=True)
class Error:
    """A counterfactual beside the second run: milliseconds to the first token, and in all."""

    cause: str
    change: str
    was: tuple[float, float]
    told: tuple[float, float]
    is_so: tuple[float, float]

    @property
    def share(self) -> float:
        """The greater error of both times."""
        return max(abs(told - so) / so for told, so in zip(self.told, self.is_so, strict=True))


def times_of(journal: RequestJournal) -> tuple[float, float]:
    assert journal.ttft_s is not None
    return journal.ttft_s * 1000, journal.timeline.total_ms


def judge(one: Planted, costs: RequestCosts) -> Error:
    """Plays both scenes of a cause. Raises LookupError if the request's counterfactuals do not have its change."""
    [*_, given] = virtual_time.run(one.given.play())
    [*_, otherwise] = virtual_time.run(one.otherwise.play())
    found = [told for told in counterfactuals(given, costs, LAYOUT.block_size) if one.change in told.change]
    if not found:
        raise LookupError(f"{one.cause}: waited {dict(given.waits_s)}")
    told = found[0]
    error = Error(one.cause, told.change, times_of(given), (told.ttft_ms, told.total_ms), times_of(otherwise))
    print(f"{error.cause}: {error.change}, {error.share:.1%}", file=sys.stderr, flush=True)
    return error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="counterfactual", help="name of the result in benchmarks/results")
    options = parser.parse_args()
    costs = RequestCosts()
    lens = enumerate(sorted(WARM_UP_LENS * 2))
    warm_up = Scene([Sent(3.0 * place, length, place // 2, output_len=8) for place, length in lens])
    for journal in virtual_time.run(warm_up.play()):
        costs.compare(journal, LAYOUT.block_size)
    errors = [judge(one, costs) for one in planted()]
    by_change = defaultdict[str, list[float]](list)
    for error in errors:
        by_change[error.change].append(error.share)
    table: list[list[object]] = [["change", "causes", "median error", "greatest error"]]
    table += [
        [change, len(shares), f"{median(shares):.1%}", f"{max(shares):.1%}"] for change, shares in by_change.items()
    ]
    figures = {
        "planted causes": len(errors),
        "within 10 %": sum(error.share <= GOAL for error in errors),
        "within 30 %": sum(error.share <= FLOOR for error in errors),
        "median error": f"{median(error.share for error in errors):.1%}",
        "greatest error": f"{max(error.share for error in errors):.1%}",
    }
    write_result(options.out, figures, {"errors": [asdict(error) for error in errors]}, table)


if __name__ == "__main__":
    main()
