import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from deploy.local import run_dir, startup
from deploy.local.shutdown import tear_down
from deploy.local.startup import Startup
from deploy.local.state import ClusterPhase, ClusterState, StateFile
from deploy.plan.cluster_plan import ClusterPlan
from deploy.plan.config import ClusterConfig
from deploy.processes.process import ProcessRef, spawn_leader
from tests.checkpoints import make_checkpoint
from wire.errors import ConfigError
from wire.pools import PoolSizes
from wire.settings import from_json, to_json

GONE = ProcessRef(pid=2**22 + 1, started=1.0, boot="none")
NAME = f"u{os.getpid()}"


class FakeHead:
    """A head whose process sleeps."""

    plans: ClassVar[list[ClusterPlan]] = []

    def __init__(self, folder: Path, namespace: str, ray_address: str | None) -> None:
        self.namespace = namespace
        self.process = spawn_leader([sys.executable, "-c", "import time; time.sleep(60)"], folder / "log")

    def wait_for_ray(self) -> str:
        return "ray:1"

    def launch(self, plan: ClusterPlan, on_wait: Callable[[], None]) -> dict[str, str]:
        self.plans.append(plan)
        with open(plan.node.arena_path, "wb") as arena:
            os.posix_fallocate(arena.fileno(), 0, 8192)
        on_wait()
        self.on_launch()
        return {"address": "public:1", "operator_address": "operator:2", "metrics_address": "metrics:3"}

    @staticmethod
    def on_launch() -> None:
        """What becomes of the launch."""

    def close(self) -> None: ...


class Silent:
    """A Reporter that remembers."""

    def __init__(self) -> None:
        self.told: dict[str, str] = {}

    def tell(self, part: str, text: str) -> None:
        self.told[part] = text

    def show_progress(self, part: str, done_bytes: int, total_bytes: int) -> None:
        self.told["progress"] = f"{done_bytes} of {total_bytes}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-gqa", tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[FakeHead]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(startup, "RayProcess", FakeHead)
    monkeypatch.setattr(FakeHead, "plans", [])
    return FakeHead


def _config(checkpoint: Path, **tables: Any) -> ClusterConfig:
    settings = {"name": NAME, "model": {"path": str(checkpoint)}, "redis": {"url": "off"}, "router": {"grpc_port": 0}}
    return ClusterConfig.load(None, {**settings, **tables})


def _left_behind() -> list[Path]:
    return [path for root in (Path("/tmp"), Path("/dev/shm")) for path in root.glob(f"baton-{NAME}-*")]


def _end(state: ClusterState) -> None:
    assert tear_down(state) == []
    assert _left_behind() == []


def test_a_cluster_that_serves_is_known_by_its_state(checkpoint: Path, head: type[FakeHead]) -> None:
    reporter = Silent()
    state = Startup(_config(checkpoint, pools={"prefill": 2}), reporter).run()
    try:
        assert StateFile(NAME).read() == state
        assert state.phase is ClusterPhase.RUNNING
        addresses = (state.address, state.operator_address, state.metrics_address)
        assert addresses == ("public:1", "operator:2", "metrics:3")
        assert state.head is not None
        assert state.head.is_alive
        (plan,) = head.plans
        assert plan.pools == PoolSizes(2, 1)
        assert plan.worker.server.token == plan.router.cluster.token == state.token
        assert plan.worker.model.fingerprint_hex == plan.router.model.fingerprint_hex
        assert plan.router.cluster.ray_namespace == f"baton-{NAME}"
        assert from_json(ClusterPlan, to_json(plan), "plan") == plan
        assert reporter.told["progress"] == f"8192 of {plan.node.num_slots * plan.node.layout.block_bytes}"
    finally:
        _end(state)


def test_the_same_model_has_the_same_fingerprint_and_secret_each_time(checkpoint: Path, head: type[FakeHead]) -> None:
    for _ in range(2):
        state = Startup(_config(checkpoint), Silent()).run()
        _end(state)
        StateFile(NAME).remove()
    first, second = head.plans
    assert first.router.model == second.router.model
    assert first.router.cluster.secret_hex == second.router.cluster.secret_hex
    assert first.router.cluster.token != second.router.cluster.token


@pytest.mark.parametrize("failure", [ConfigError("no"), KeyboardInterrupt()])
def test_a_start_that_ends_early_leaves_nothing(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    heads: list[ProcessRef] = []

    def fail() -> None:
        state = StateFile(NAME).read()
        assert state is not None
        assert state.phase is ClusterPhase.STARTING
        assert state.head is not None
        heads.append(state.head)
        raise failure

    monkeypatch.setattr(FakeHead, "on_launch", staticmethod(fail))
    with pytest.raises(type(failure)):
        Startup(_config(checkpoint), Silent()).run()
    assert not heads[0].is_alive
    assert StateFile(NAME).read() is None
    assert _left_behind() == []


def test_what_a_crashed_cluster_left_is_removed(checkpoint: Path) -> None:
    folder = run_dir.create(NAME)
    arena = Path("/dev/shm") / folder.name
    arena.touch()
    crashed = ClusterState(NAME, ClusterPhase.RUNNING, GONE, str(folder), "t", arena_path=str(arena), head=GONE)
    StateFile(NAME).write(crashed)
    reporter = Silent()
    state = Startup(_config(checkpoint), reporter).run()
    assert "cleanup" in reporter.told
    assert not folder.exists()
    assert not arena.exists()
    _end(state)


def test_a_cluster_that_lives_keeps_its_name(checkpoint: Path) -> None:
    me = ProcessRef.of(os.getpid())
    living = ClusterState(NAME, ClusterPhase.RUNNING, GONE, f"/tmp/baton-{NAME}-none", "t", head=me)
    StateFile(NAME).write(living)
    with pytest.raises(ConfigError, match=f"is running: stop it with `baton down --name {NAME}`"):
        Startup(_config(checkpoint), Silent()).run()
    assert StateFile(NAME).read() == living
    StateFile(NAME).write(dataclasses.replace(living, phase=ClusterPhase.STARTING))
    with pytest.raises(ConfigError, match="is starting"):
        Startup(_config(checkpoint), Silent()).run()
    assert _left_behind() == []
