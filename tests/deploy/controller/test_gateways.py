import asyncio
import json
from pathlib import Path

import pytest

from deploy.actors.actor_host import LocalHost
from deploy.actors.liveness import Liveness
from deploy.controller import singleton
from deploy.controller.event_log import EventLog
from deploy.controller.gateways import Gateways
from deploy.controller.tasks import Tasks
from gateway.config import GatewayConfig
from wire.errors import ConfigError
from wire.settings import from_json

PORT = 4321


class GatewayHost(LocalHost):
    """A host whose gateways take PORT where any free one is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[GatewayConfig] = []

    async def start(self, name: str, config_json: str, timeout_s: float) -> str:
        await super().start(name, config_json, timeout_s)
        config = from_json(GatewayConfig, config_json, "gateway")
        assert config.name == name
        self.started.append(config)
        return json.dumps({"http_address": f"{config.host}:{config.joined_port or config.port or PORT}"})


def make(host: GatewayHost, run_dir: Path, number: int = 3) -> Gateways:
    gateways = Gateways(number, "head", host, run_dir, EventLog(lambda: 0.0))
    gateways.configure(GatewayConfig("router:1"))
    return gateways


async def test_the_first_takes_the_port_and_the_others_join_it(tmp_path: Path) -> None:
    host = GatewayHost()
    assert json.loads(await make(host, tmp_path).start()) == {"http_address": f"127.0.0.1:{PORT}"}
    assert [(one.name, one.port, one.joined_port) for one in host.started] == [
        ("gateway-0", 0, None),
        ("gateway-1", 0, PORT),
        ("gateway-2", 0, PORT),
    ]
    assert {one.metrics_folder for one in host.started} == {str(tmp_path)}


async def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    host = GatewayHost()
    host.failures = [ConfigError("port 1 cannot be had")]
    with pytest.raises(ConfigError):
        await make(host, tmp_path).start()
    assert host.started == []


async def test_no_gateways(tmp_path: Path) -> None:
    assert await make(GatewayHost(), tmp_path, 0).start() == "{}"


@pytest.mark.parametrize("dead", ["gateway-0", "gateway-2"])
async def test_one_that_dies_joins_again_and_no_other_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: str
) -> None:
    monkeypatch.setattr(singleton, "PROBE_EVERY_S", 0.001)
    host, tasks, back = GatewayHost(), Tasks(), asyncio.Queue[str]()
    gateways = make(host, tmp_path)
    await gateways.start()
    gateways.configure(GatewayConfig("router:2"))
    gateways.watch(tasks, on_restart=back.put_nowait)
    host.actors[dead] = Liveness.DEAD
    async with asyncio.timeout(5):
        assert await back.get() == dead
    tasks.cancel()
    await tasks.wait()
    assert host.launched == [*gateways.names, dead]
    assert [(one.name, one.joined_port, one.address) for one in host.started[3:]] == [(dead, PORT, "router:2")]


async def test_a_later_controller_finds_them_and_their_port(tmp_path: Path) -> None:
    host = GatewayHost()
    await make(host, tmp_path).start()
    del host.actors["gateway-0"]
    await make(host, tmp_path).take_over()
    assert host.launched == ["gateway-0", "gateway-1", "gateway-2", "gateway-0"]
    assert {one.joined_port for one in host.started[3:]} == {PORT}
