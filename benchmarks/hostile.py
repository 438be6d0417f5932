"""Handles one cluster as roughly as the world outside may, while good clients run beside; tells what was answered.

    python benchmarks/hostile.py --seed 1 --minutes 5
    python benchmarks/hostile.py --kinds "emoji,state files" --end

Each kind of rough handling comes once, in an order that the seed draws, then any by its weight, until the time is over.
The answers of good clients are compared, token by token, with the answers before the first kind. At the end the books
must be whole, memory as it was, and no log or command may hold a traceback.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import grpc.aio
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import hostile_calls as calls
from benchmarks import hostile_commands as commands
from benchmarks.baton_service import BatonService, num_in_use
from benchmarks.chaos_client import ChaosClient
from benchmarks.chaos_tally import Stream, Tally
from benchmarks.hostile_calls import Answer
from benchmarks.question import Question
from benchmarks.result_file import write_result
from cli.bench.schedule import PROMPT_IDS
from deploy.local import run_dir
from tests.harness.answer import Reader
from wire.pb.inference_pb2_grpc import InferenceStub
from wire.sampling import SamplingParams

_NUM_CLIENTS = 3
_NUM_QUESTIONS = 48
_NUM_TOKENS = 32
_CLIENT_TIMEOUT_S = 180.0
_WARM_UP_S = 10.0
_REST_TIMEOUT_S = 90.0
_MAX_KIND_S = 600.0
_MAX_GROWTH_MB = 64.0
_MAX_NEW_FILES = 32


@dataclass(frozen=True)
class Kind:
    """A kind of rough handling. loses: the statuses with which good clients may lose streams meanwhile."""

    name: str
    weight: float
    harm: Callable[[BatonService, random.Random], Awaitable[list[Answer]]]
    loses: tuple[str, ...] = ()


KINDS = (
    Kind("a second `up`", 1, commands.start_again),
    Kind("emoji", 1, calls.flood_with_emoji),
    Kind("damaged arena", 1, commands.damage_arena),
    Kind("scale too far", 1, commands.scale_too_far),
    Kind("scale at once", 1, commands.scale_at_once),
    Kind("state files", 1, commands.spoil_state),
    Kind("broken models", 0.5, commands.start_broken_models),
    Kind("bad messages", 2, calls.send_bad_messages),
    Kind("orders to workers", 2, calls.order_workers_about),
    Kind("interrupted `up`", 1, commands.interrupt_start),
    Kind("wrong arguments", 1, commands.give_wrong_arguments),
    Kind("wrong settings", 1, commands.give_wrong_settings),
    Kind("HTTP/2", 2, calls.break_transport),
    Kind("processes", 2, commands.harm_processes),
    Kind("router", 1, commands.harm_router, loses=("UNAVAILABLE",)),
    Kind("clients leave", 2, calls.leave_amid_streams),
)


@dataclass
class Outcome:
    """The answers to one kind, counted; problems: the answers that are not as expected, and wrong streams meanwhile."""

    times: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def add(self, answers: Sequence[Answer], streams: Sequence[Stream], loses: Sequence[str]) -> None:
        """loses: see `Kind`."""
        self.times += 1
        self.answers.update(answer.got for answer in answers)
        self.problems += [answer.problem for answer in answers if answer.problem]
        for stream in streams:
            code = (stream.error or "").partition(":")[0]
            if not stream.is_right or (code and code not in loses):
                self.problems.append(f"a good client: {stream.describe()}")

    def describe(self) -> str:
        """Lists the answers, and how often each came."""
        return ", ".join(f"{got} ({number})" for got, number in self.answers.most_common())


@dataclass(frozen=True)
class Footprint:
    """The private memory of a process, and its open files."""

    private_mb: float
    num_files: int

    @classmethod
    def of(cls, pid: int) -> "Footprint":
        process = psutil.Process(pid)
        return cls(process.memory_full_info().uss / 1e6, process.num_fds())

    def growth(self, before: "Footprint") -> str:
        """Tells of a growth beyond the bounds; empty where there is none."""
        grown_mb, new_files = self.private_mb - before.private_mb, self.num_files - before.num_files
        is_bounded = grown_mb <= _MAX_GROWTH_MB and new_files <= _MAX_NEW_FILES
        return "" if is_bounded else f"grew by {grown_mb:.0f} MB and {new_files} open files"

    def __str__(self) -> str:
        return f"{self.private_mb:.0f} MB, {self.num_files} files"


def draw(kinds: Sequence[Kind], seed: int) -> Iterator[tuple[Kind, random.Random]]:
    """Yields each kind once, in any order, then any by its weight, without end; with dice for its own details."""
    rng = random.Random(seed)
    order = rng.sample(kinds, len(kinds))
    while True:
        yield from ((kind, random.Random(rng.random())) for kind in order)
        order = rng.choices(kinds, [kind.weight for kind in kinds], k=len(kinds))


def main() -> None:
    options = _parse(sys.argv[1:])
    names = options.kinds.split(",") if options.kinds else [kind.name for kind in KINDS]
    kinds = [kind for kind in KINDS if kind.name in names]
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"XDG_STATE_HOME": f"{folder}/state", "XDG_CACHE_HOME": f"{folder}/cache"}
        with BatonService("hostile", None, 1, 1, commands.SMALL) as service:
            try:
                sys.exit(asyncio.run(_run(service, kinds, options)))
            finally:
                asyncio.run(commands.baton("down", "--name", commands.OTHER))


async def _run(service: BatonService, kinds: Sequence[Kind], options: argparse.Namespace) -> int:
    """Returns the exit status: 1 if there was any problem."""
    client = ChaosClient(service.address, await _ask_quietly(service, options.seed), _CLIENT_TIMEOUT_S)
    streams = await _beside(client, asyncio.create_task(asyncio.sleep(_WARM_UP_S)))
    before = _footprints(service)
    outcomes = {kind.name: Outcome() for kind in kinds}
    deadline_s = time.monotonic() + options.minutes * 60
    for kind, rng in draw(kinds, options.seed):
        if time.monotonic() > deadline_s:
            break
        harming = asyncio.create_task(_harm(service, kind, rng))
        meanwhile = await _beside(client, harming)
        outcomes[kind.name].add(harming.result(), meanwhile, kind.loses)
        streams += meanwhile
    status = await asyncio.to_thread(service.wait_for_rest, _REST_TIMEOUT_S)
    after = _footprints(service)
    problems = [f"{name} {grown}" for name in before if (grown := after[name].growth(before[name]))]
    problems += [*status["problems"], *_tracebacks(service)]
    problems += [f"{num_in_use(status)} pages, leases and holds are in use at rest"] if num_in_use(status) else []
    if options.end:
        outcomes["the end of Ray"] = Outcome()
        outcomes["the end of Ray"].add(await commands.end_ray(service), (), ())
    problems += [f"{name}: {problem}" for name, one in outcomes.items() for problem in one.problems]
    memory = {name: f"{before[name]}; at the end {after[name]}" for name in before}
    _tell(options.out, outcomes, Tally.of(streams), memory, problems)
    return 1 if problems else 0


def _tell(
    out: str, outcomes: Mapping[str, Outcome], tally: Tally, memory: Mapping[str, str], problems: Sequence[str]
) -> None:
    figures = {
        "good streams": f"{tally.sent}, {tally.replayed} of them replayed, {tally.lost} lost, {tally.wrong} wrong",
        **memory,
        "bound of growth": f"{_MAX_GROWTH_MB:.0f} MB, {_MAX_NEW_FILES} files",
        "problems": len(problems),
    }
    rows = [(name, one.times, one.describe(), len(one.problems)) for name, one in outcomes.items()]
    write_result(out, figures, {"problems": problems}, [("kind", "times", "answers", "wrong"), *rows])
    print(*problems, sep="\n", file=sys.stderr)


async def _harm(service: BatonService, kind: Kind, rng: random.Random) -> list[Answer]:
    """Does one kind, and waits until the cluster is whole again. A failure is an answer that is not as expected."""
    try:
        async with asyncio.timeout(_MAX_KIND_S):
            return [*await kind.harm(service, rng), *await commands.until_whole(service)]
    except Exception as error:
        return [Answer("failed", repr(error))]


async def _beside(client: ChaosClient, task: "asyncio.Task[object]") -> list[Stream]:
    """Keeps good streams open until a task is done."""
    streams: list[Stream] = []
    try:
        while not task.done():
            streams += await client.keep_open(_NUM_CLIENTS, 0.1)
    finally:
        task.cancel()
    return streams


async def _ask_quietly(service: BatonService, seed: int) -> list[Question]:
    """Asks questions one after another, and takes the answers for the right ones."""
    rng = random.Random(seed)
    questions = []
    async with grpc.aio.insecure_channel(service.address) as channel:
        for number in range(_NUM_QUESTIONS):
            sampling = SamplingParams(temperature=number % 2, max_tokens=_NUM_TOKENS, seed=number, ignore_eos=True)
            question = Question(tuple(rng.choices(PROMPT_IDS, k=rng.randint(20, 120))), sampling, (), "")
            call = InferenceStub(channel).Generate(question.request(), timeout=_CLIENT_TIMEOUT_S)
            [choice] = await Reader(call).read_all()
            questions.append(replace(question, token_ids=tuple(choice.token_ids), text=choice.text))
    return questions


def _footprints(service: BatonService) -> dict[str, Footprint]:
    """By process; the first worker of each role stands for all."""
    pids = {name: service.actor_pid(name) for name in ("router", "node", "controller")}
    pids |= {role: workers[0]["pid"] for role, workers in service.status()["pools"].items()}
    return {name: Footprint.of(pid) for name, pid in pids.items()}


def _tracebacks(service: BatonService) -> list[str]:
    """Returns the tracebacks in the logs of all actors, cut short."""
    texts = (
        (log.name, log.read_text(errors="replace"))
        for log in run_dir.ray_logs(Path(service.state().run_dir)).glob("worker-*")
    )
    found = (f"{name}: {part[:600]!r}" for name, text in texts for part in text.split("Traceback (most recent")[1:])
    return list(islice(found, 20))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0, help="a kind that has begun is brought to its end")
    parser.add_argument("--kinds", help=f"of {', '.join(kind.name for kind in KINDS)}, joined by commas")
    parser.add_argument("--end", action="store_true", help="kill Ray's own process of the node at last")
    parser.add_argument("--out", default="hostile", help="name of the result in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
