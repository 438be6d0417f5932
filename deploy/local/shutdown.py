"""The end of a cluster: ends what its state names, and nothing else."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from deploy.deadlines import ACTORS_END_IN_DOWN_S
from deploy.local import run_dir
from deploy.local.client import call_operator, connection_problem
from deploy.local.state import ClusterPhase, ClusterState, StateFile
from deploy.plan.cluster_plan import namespace
from deploy.processes.process import ProcessRef, end_session, recorded_living, wait_for_end, wait_or_kill
from wire.errors import BatonError
from wire.pb import cluster_pb2

ASK_TIMEOUT_S = 10.0
RAY_GRACE_S = 15.0
REDIS_GRACE_S = 5.0
COMMAND_GRACE_S = 60.0
ACTOR_GRACE_S = 10.0
JOIN_TIMEOUT_S = 60.0


def shut_down(file: StateFile, state: ClusterState) -> list[str]:
    """Ends a cluster, gently unless its Ray has crashed, and the rest by force. Returns the problems, in words.

    Without problems it removes the state, too, unless that is a later cluster's. Raises Unavailable while another
    command works with the name.
    """
    _interrupt(state)
    with file.lock(COMMAND_GRACE_S):
        now = file.read()
        if now is None or now.token != state.token:
            return []
        if now.phase is ClusterPhase.RUNNING and now.crash is None:
            with suppress(BatonError):
                _end_gently(now)
        problems = tear_down(now)
        if not problems:
            file.remove()
    return problems


def tear_down(state: ClusterState) -> list[str]:
    """Ends a cluster by force. Blocks until all is gone; returns the problems, in words. Idempotent."""
    problems: list[str] = []
    if state.head is not None:
        problems += _end(state.head, RAY_GRACE_S, "Ray")
    elif state.ray_address:
        problems += _end_joined(state)
    if state.redis is not None:
        problems += _end(state.redis, REDIS_GRACE_S, "Redis")
    return problems + [f"{path} could not be removed" for path in run_dir.remove(Path(state.run_dir))]


def _interrupt(state: ClusterState) -> None:
    """Interrupts a `baton up` that is still at work, and lets it clean up."""
    if state.phase is ClusterPhase.STARTING and state.command.is_alive:
        os.kill(state.command.pid, signal.SIGTERM)
        wait_for_end(state.command.pid, COMMAND_GRACE_S)


def _end_gently(state: ClusterState) -> None:
    call_operator(state, "Shutdown", cluster_pb2.ShutdownRequest(), ASK_TIMEOUT_S)
    for actor in recorded_living(Path(state.run_dir)):
        wait_for_end(actor.pid, ACTORS_END_IN_DOWN_S)


def _end(leader: ProcessRef, grace_s: float, what: str) -> list[str]:
    try:
        end_session(leader, grace_s)
    except TimeoutError as error:
        return [f"{what}: {error}"]
    return []


def _end_joined(state: ClusterState) -> list[str]:
    """Ends actors through Ray, and stopped ones (SIGSTOP) by SIGKILL."""
    command = [sys.executable, "-m", "deploy.actors.end_actors", state.ray_address, namespace(state.run_dir)]
    if connection_problem(state.ray_address) is not None:
        return []  # its actors have ended with it, or end once a supervised head is back
    try:
        subprocess.run(command, timeout=JOIN_TIMEOUT_S, capture_output=True, check=False, start_new_session=True)
    except subprocess.TimeoutExpired:
        return [f"Ray at {state.ray_address} did not end the actors within {JOIN_TIMEOUT_S:.0f} s"]
    actors = recorded_living(Path(state.run_dir))
    return [f"actor process {actor.pid} does not end" for actor in actors if not wait_or_kill(actor, ACTOR_GRACE_S)]
