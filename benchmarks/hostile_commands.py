"""Rough handling of a cluster by its machine: commands that cannot be right, and harm to processes and files."""

import asyncio
import mmap
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from benchmarks.baton_service import BatonService
from benchmarks.fault_injector import Fault, FaultInjector, FaultKind
from benchmarks.hostile_calls import Answer
from deploy.local import run_dir
from deploy.local.client import call_operator
from deploy.plan.machine import SHARED_MEMORY, inspect_machine
from tests.cli.test_bad_arguments import WRONG
from tests.deploy.local.test_state import DAMAGE
from tests.engine.test_checkpoint import FAULTS, reconfigure
from tests.harness.checkpoints import make_checkpoint
from wire.errors import DeadlineExceeded, Unavailable
from wire.pb import cluster_pb2
from wire.tier import Tier

SMALL = ("--grpc-port", "0", "--pool-bytes", "32MiB", "--arena-bytes", "32MiB")
OTHER = "bench-other"
_ROOT = Path(__file__).resolve().parents[1]
_MAX_COMMAND_S = 150.0
_SOON_S = 15.0
"""A refusal takes a second, on a machine that does nothing else."""
_MAX_HEALING_S = 120.0
_PIPES: dict[str, Any] = {
    "stdin": asyncio.subprocess.DEVNULL,
    "stdout": asyncio.subprocess.PIPE,
    "stderr": asyncio.subprocess.PIPE,
}
_NOTICED_S = 3.0
_STATUS_TIMEOUT_S = 30.0
_LEAST_WORKER_BYTES = 250 << 20
_SIGNALS = ((signal.SIGINT,), (signal.SIGINT, signal.SIGINT), (signal.SIGHUP,), (signal.SIGTERM,))
_SETTINGS = (
    (("--redis-url", "redis://"), "redis.url"),
    (("--redis-url", "redis://h:99999"), "redis.url"),
    (("--redis-url", "redis://h:6379/x"), "redis.url"),
    (("--redis-url", "redis://h?x=1"), "option"),
    (("--redis-url", "unix:///no/socket"), "/no/socket is no Unix socket"),
    (("--ray-address", ""), "ray.address must be text"),
    (("--ray-address", "127.0.0.1:1"), "no Ray cluster answers"),
    (("--grpc-port", "50999", "--metrics-port", "50999"), "router.metrics_port must be another port"),
)


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    what: str
    status: int
    error: str
    took_s: float

    def answer(self, *expected: tuple[int, str], within_s: float = _MAX_COMMAND_S) -> Answer:
        """expected: exit statuses, each with a pattern for the one line on stderr; "" means no line."""
        lines = self.error.splitlines()
        is_right = any(
            self.status == status and (len(lines) == 1 and re.search(words, lines[0]) if words else not lines)
            for status, words in expected
        )
        problem = f"{self.what}: exit {self.status} after {self.took_s:.1f} s with {self.error[-600:]!r}"
        return Answer(f"exit {self.status}", "" if is_right and self.took_s < within_s else problem)


async def run(
    *command: str, env: Mapping[str, str] = MappingProxyType({}), interrupts: Sequence[tuple[float, int]] = ()
) -> Done:
    """Runs a command to its end, or kills it and raises TimeoutError. interrupts: pauses, and signals to send then."""
    began_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(*command, cwd=_ROOT, env={**os.environ, **env}, **_PIPES)
    try:
        async with asyncio.timeout(_MAX_COMMAND_S):
            ending = asyncio.create_task(process.communicate())
            for pause_s, number in interrupts:
                if not (await asyncio.wait([ending], timeout=pause_s))[0]:
                    process.send_signal(number)
            _, error = await ending
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    what = " ".join(command)[-120:].encode(errors="replace").decode()
    return Done(what, process.returncode or 0, error.decode(errors="replace"), time.monotonic() - began_s)


async def baton(*arguments: str, **how: Any) -> Done:
    return await run(sys.executable, "-m", "cli", *arguments, **how)


async def until_whole(service: BatonService) -> list[Answer]:
    """Waits until there is one ready worker of each role; returns a problem if that takes too long."""
    deadline_s = time.monotonic() + _MAX_HEALING_S
    states: list[tuple[str, str]] = []
    while time.monotonic() < deadline_s:
        with suppress(Unavailable, DeadlineExceeded):  # a router that is not back yet
            states = sorted((worker.role, worker.state) for worker in (await _status(service)).workers)
        if states == [("decode", "ready"), ("prefill", "ready")]:
            return []
        await asyncio.sleep(0.5)
    return [Answer("not whole", f"not whole after {_MAX_HEALING_S:.0f} s: {states}")]


async def start_again(service: BatonService, rng: random.Random) -> list[Answer]:
    """Starts a cluster under the name of the one that runs, several times at once."""
    refused = ((78, "is running: stop it with `baton down"), (1, "another `baton up` or `baton down` of"))
    starts = await asyncio.gather(*(baton("up", "--name", service.name, *SMALL) for _ in range(3)))
    return [done.answer(*refused) for done in starts]


async def damage_arena(service: BatonService, rng: random.Random) -> list[Answer]:
    """Overwrites a byte of the arena's geometry, and kills a worker, whose successor maps the arena anew."""
    before = await _status(service)
    (arena,) = SHARED_MEMORY.glob(f"{run_dir.PREFIX}{service.name}-*")
    with arena.open("r+b") as file:
        file.seek(rng.randrange(8) - mmap.PAGESIZE, os.SEEK_END)
        file.write(b"?")
    os.kill(rng.choice(before.workers).pid, signal.SIGKILL)
    healing = await until_whole(service) or await _until_epoch(service, _epoch(before))
    return healing or [Answer("a new epoch")]


async def scale_too_far(service: BatonService, rng: random.Random) -> list[Answer]:
    """Asks for more workers than may be, for more than fit, and for one more, which is taken back."""
    scale = ("scale", "--name", service.name)
    answers = [(await baton(*scale, "--decode", "65")).answer((78, "between 1 and 64, not 65"), within_s=_SOON_S)]
    if inspect_machine().memory_bytes < 128 * _LEAST_WORKER_BYTES:
        done = await baton(*scale, "--prefill", "64", "--decode", "64")
        answers.append(done.answer((78, "at most .* fit"), within_s=_SOON_S))
        num_workers = len((await _status(service)).workers)
        answers += [] if num_workers == 2 else [Answer("started", f"{num_workers} workers after a refusal")]
    for size in ("2", "1"):
        answers.append((await baton(*scale, "--decode", size)).answer((0, "")))
    return answers


async def scale_at_once(service: BatonService, rng: random.Random) -> list[Answer]:
    """Gives two orders for one pool beside each other, and kills the controller amid a third."""
    scale = ("scale", "--name", service.name, "--decode")
    both = await asyncio.gather(*(baton(*scale, size) for size in rng.sample(("1", "2"), 2)))
    answers = [done.answer((0, ""), (1, "overtaken by a later order: decode [12]")) for done in both]
    third = asyncio.create_task(baton(*scale, rng.choice("12")))
    await asyncio.wait([third], timeout=rng.uniform(0.0, 5.0))
    os.kill(service.actor_pid("controller"), signal.SIGKILL)
    answers.append((await third).answer((0, ""), (1, "controller")))
    return [*answers, (await baton(*scale, "1")).answer((0, ""))]


async def spoil_state(service: BatonService, rng: random.Random) -> list[Answer]:
    """Gives `status` and `down` state files that are none, in a folder of their own."""
    answers = []
    for what in rng.sample(list(DAMAGE), 2):
        with tempfile.TemporaryDirectory() as home:
            file = Path(home) / "baton" / "one.json"
            file.parent.mkdir(mode=0o700)
            file.write_bytes(DAMAGE[what])
            env = {"XDG_STATE_HOME": home}
            done = await baton("status", "--name", "one", env=env)
            answers.append(done.answer((78, r"one\.json is not the state"), within_s=_SOON_S))
            done = await baton("down", "--name", "one", env=env)
            answers.append(done.answer((1, "is set aside as one.json.broken"), within_s=_SOON_S))
            if file.with_name("one.json.broken").read_bytes() != DAMAGE[what]:
                answers.append(Answer("changed", f"down has changed a state that is {what}"))
    return answers


async def start_broken_models(service: BatonService, rng: random.Random) -> list[Answer]:
    """Starts other clusters with models whose files are damaged, or do not fit together."""
    up = ("up", "--name", OTHER, *SMALL, "--redis-url", "off", "--model")
    answers = [(await baton(*up, "")).answer((78, "model.path must be text"), within_s=_SOON_S)]
    with tempfile.TemporaryDirectory() as folder:
        whole = await asyncio.to_thread(make_checkpoint, "llama-gqa", Path(folder) / "whole")
        for what in (*rng.sample(list(FAULTS), 2), "a theta of nothing"):
            spoil, words = FAULTS.get(what, (_without_theta, "rope_theta is 1e-300"))
            spoilt = Path(shutil.copytree(whole, Path(folder) / "spoilt"))
            spoil(spoilt)
            answers.append((await baton(*up, str(spoilt))).answer((78, words)))
            shutil.rmtree(spoilt)
    return answers


async def interrupt_start(service: BatonService, rng: random.Random) -> list[Answer]:
    """Starts another cluster, and interrupts that at any moment; nothing of it may be left."""
    first, *more = rng.choice(_SIGNALS)
    interrupts = [(rng.uniform(0.5, 10.0), first), *((0.3, number) for number in more)]
    done = await baton("up", "--name", OTHER, *SMALL, interrupts=interrupts)
    answers = [done.answer((130, ""), (-first, ""), (0, ""))]
    if done.status == 0:
        answers.append((await baton("down", "--name", OTHER)).answer((0, "")))
    left = await run("bash", "deploy/nothing_left.sh", OTHER)
    return [*answers, left.answer((0, ""))]


async def give_wrong_arguments(service: BatonService, rng: random.Random) -> list[Answer]:
    """Runs commands with arguments that are none, and with a stdout that takes nothing."""
    answers = []
    for arguments, status, words in rng.sample(WRONG, 6):
        free_port = ("--grpc-port", "0") if "--model" in arguments else ()
        done = await baton(*arguments, *free_port)
        answers.append(done.answer((status, re.escape(words)), within_s=_SOON_S))
    command = f"{sys.executable} -m cli status --name {service.name}"
    for output, words in ((">&-", "stdout: Bad file descriptor$"), (">/dev/full", "No space left on device$")):
        answers.append((await run("sh", "-c", f"{command} {output}")).answer((1, words)))
    return answers


async def give_wrong_settings(service: BatonService, rng: random.Random) -> list[Answer]:
    """Starts other clusters with settings that cannot work, or not with each other."""
    answers = []
    for flags, words in rng.sample(_SETTINGS, 4):
        done = await baton("up", "--name", OTHER, *SMALL, *flags)
        answers.append(done.answer((78, words), within_s=_SOON_S))
    return answers


async def harm_processes(service: BatonService, rng: random.Random) -> list[Answer]:
    """Kills or stops a worker, Redis or the controller, or the node's service."""
    fault = Fault(0.0, rng.choice(list(FaultKind)), rng.random(), pause_s=2.0)
    injector = FaultInjector(service)
    await injector.run([fault])
    await asyncio.sleep(_NOTICED_S)
    return [Answer(fault.kind.value)]


async def harm_router(service: BatonService, rng: random.Random) -> list[Answer]:
    """Kills or stops the router."""
    number = rng.choice((signal.SIGKILL, signal.SIGSTOP))
    pid = service.actor_pid("router")
    os.kill(pid, number)
    await asyncio.sleep(2.0)
    if number is signal.SIGSTOP:
        with suppress(ProcessLookupError):  # it may have been ended while it stood still
            os.kill(pid, signal.SIGCONT)
    await asyncio.sleep(_NOTICED_S)
    return [Answer(number.name)]


async def end_ray(service: BatonService) -> list[Answer]:
    """Kills Ray's own process of the node: the cluster has crashed, and `down` removes what is left."""
    head = service.state().head
    assert head is not None
    (raylet,) = (one for one in psutil.Process(head.pid).children(recursive=True) if one.name() == "raylet")
    raylet.kill()
    await asyncio.sleep(_NOTICED_S)
    crashed = await baton("status", "--name", service.name)
    stopped = await baton("down", "--name", service.name)
    left = await run("bash", "deploy/nothing_left.sh", service.name)
    return [crashed.answer((1, "crashed")), stopped.answer((0, "")), left.answer((0, ""))]


def _without_theta(folder: Path) -> None:
    reconfigure(folder, rope_parameters={"rope_type": "default", "rope_theta": 1e-300})


async def _until_epoch(service: BatonService, before: str) -> list[Answer]:
    deadline_s = time.monotonic() + _MAX_HEALING_S
    while time.monotonic() < deadline_s:
        if _epoch(await _status(service)) != before:
            return []
        await asyncio.sleep(0.5)
    return [Answer("the old epoch", "a damaged arena: the epoch is the old one")]


def _epoch(status: cluster_pb2.ClusterStatus) -> str:
    return str(next(tier.epoch for tier in status.tiers if tier.tier == Tier.HOST))


async def _status(service: BatonService) -> cluster_pb2.ClusterStatus:
    request = cluster_pb2.GetStatusRequest()
    status: cluster_pb2.ClusterStatus = await asyncio.to_thread(
        call_operator, service.state(), "GetStatus", request, _STATUS_TIMEOUT_S
    )
    return status
