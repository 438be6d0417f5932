import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray.util
from ray._private.node import Node

from deploy.controller import ray_head
from deploy.controller.ray_head import HEAD_RESOURCE, NEEDLESS, SERVICES, controller_options, watch_services
from deploy.local import run_dir
from wire.errors import ConfigError

WAIT_S = 60.0


@pytest.mark.parametrize("name", NEEDLESS)
def test_each_start_that_the_head_leaves_out_is_a_method_of_rays_node(name: str) -> None:
    """A private name of Ray: where a release renames it, the head would start that program in silence."""
    assert callable(getattr(Node, name))


@pytest.fixture
def services(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Programs under the names of Ray's services, as children of this process."""
    started = {}
    for name in (*SERVICES, "helper"):
        shutil.copy("/bin/sleep", tmp_path / name)
        started[name] = subprocess.Popen([tmp_path / name, "600"])
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", SERVICES)
def test_the_end_of_a_service_of_ray_is_recorded_and_nothing_less(
    services: dict[str, subprocess.Popen[bytes]], name: str, tmp_path: Path
) -> None:
    watch = threading.Thread(target=watch_services, args=(tmp_path,), daemon=True)
    watch.start()
    services["helper"].kill()
    for process in services.values():
        process.send_signal(signal.SIGSTOP)
    watch.join(0.2)
    assert watch.is_alive()
    assert run_dir.crash(tmp_path) is None
    services[name].kill()
    watch.join(WAIT_S)
    crash = run_dir.crash(tmp_path)
    assert crash is not None
    assert crash.startswith("at 20")
    assert crash.endswith(f" (Ray's {name} ended)")


@pytest.mark.parametrize(
    ("name", "namespace", "is_refused"),
    [
        ("controller", "baton-hn-00000000", True),
        ("router", "baton-hn-00000000", False),
        ("controller", "baton-hn-x-00000000", False),
        ("controller", "baton-hn-00000000-00000000", False),
        ("controller", "another's", False),
    ],
)
def test_another_clusters_controller_keeps_its_name(
    name: str, namespace: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [{"name": name, "namespace": namespace}]
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: listed)
    if not is_refused:
        ray_head.require_free_name("baton-hn-abcdefgh")
        return
    with pytest.raises(ConfigError, match=r"another cluster named hn serves on this Ray .*baton-hn-00000000"):
        ray_head.require_free_name("baton-hn-abcdefgh")


def test_a_controller_follows_rays_head_and_stays_on_any_other_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gives a head that is started again another id, and would wait for ever for the earlier one."""
    monkeypatch.setattr(ray_head, "actor_options", lambda _, resources, node_id: {"place": (resources.custom, node_id)})
    on_head = controller_options("a1", {"CPU": 2.0, HEAD_RESOURCE: 1.0})
    assert on_head == {"place": ({HEAD_RESOURCE: 0.001}, None), "max_restarts": -1}
    assert controller_options("b2", {"CPU": 2.0}) == {"place": ({}, "b2"), "max_restarts": -1}
