from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from deploy.plan.cluster_plan import NodeConfig, cold_settings, make_plan
from deploy.plan.config import ClusterConfig, RouterSettings
from deploy.plan.model import ModelFacts
from deploy.plan.sizing import Sizes
from router.config import AdmissionBounds, ServedModel, StreamBounds
from tests.kv_store.names import LAYOUT
from wire.tier import ColdSettings, Tier, Write
from worker.config import BatchSettings, StoreSettings

SERVED = ServedModel("m", "/m", "float32", 64, 300, bytes(32).hex(), LAYOUT.encode().hex())
MODEL = ModelFacts(SERVED, "cpu", 1000)
NODE = NodeConfig(StoreSettings("/run/d.sock", "00" * 32), "/dev/shm/a", LAYOUT.encode().hex(), 8)
SIZES = Sizes(num_pool_blocks=8, num_arena_slots=8, num_threads=1, num_gpus=0.0)
BOUNDS = {
    "max_open_requests": 11,
    "max_queued_requests": 12,
    "max_queued_bytes": 13 << 20,
    "retry_after_s": 14.0,
    "max_deadline_s": 15.0,
    "max_buffered_events": 16,
    "max_stall_s": 17.0,
    "max_worker_wait_s": 18.0,
    "decode_slowdown": 18.5,
}
LISTENERS = {"grpc_port": 19, "metrics_port": 20, "max_connections": 21, "reflection": False}


def test_what_is_not_set_is_as_each_part_has_it() -> None:
    plan = make_plan(ClusterConfig(), MODEL, SIZES, NODE, "token", b"secret")
    assert plan.router.admission == AdmissionBounds()
    assert plan.router.streams == StreamBounds()
    assert plan.worker.batch == BatchSettings()


def test_each_bound_of_the_router_is_passed_on() -> None:
    assert {one.name for one in fields(RouterSettings)} == {*BOUNDS, *LISTENERS}
    config = ClusterConfig.load(None, {"router": BOUNDS})
    plan = make_plan(config, MODEL, SIZES, NODE, "token", b"secret")
    assert asdict(plan.router.admission) | asdict(plan.router.streams) == BOUNDS


def test_where_and_how_the_router_listens_is_passed_on() -> None:
    config = ClusterConfig.load(None, {"router": LISTENERS})
    listeners = make_plan(config, MODEL, SIZES, NODE, "token", b"secret").router.listeners
    assert LISTENERS.items() <= asdict(listeners).items()


def test_each_bound_of_a_batch_is_passed_on() -> None:
    bounds = {"max_step_tokens": 100, "max_running": 21, "max_chunk_tokens": 22, "patience_tokens": 23}
    config = ClusterConfig.load(None, {"batch": bounds})
    assert asdict(make_plan(config, MODEL, SIZES, NODE, "token", b"secret").worker.batch) == bounds


@pytest.mark.parametrize(
    ("device", "asked_s", "given_s"),
    [("cpu", None, 120.0), ("cuda", None, 30.0), ("cpu", 7.0, 7.0), ("cuda", 7.0, 7.0)],
)
def test_how_long_a_step_may_take_depends_on_the_device(device: str, asked_s: float | None, given_s: float) -> None:
    config = ClusterConfig.load(None, {} if asked_s is None else {"worker": {"max_silence_s": asked_s}})
    plan = make_plan(config, replace(MODEL, device=device), SIZES, NODE, "token", b"secret")
    assert plan.worker.max_silence_s == given_s


def test_workers_have_the_tiers_of_their_node() -> None:
    cold = (ColdSettings(Tier.REDIS, "redis://a", Write.ALL, 0.7),)
    node = replace(NODE, store=StoreSettings("/run/d.sock", "00" * 32, cold))
    assert make_plan(ClusterConfig(), MODEL, SIZES, node, "token", b"secret").worker.store == node.store


@pytest.mark.parametrize(
    ("settings", "redis_url", "expected"),
    [
        ({}, "unix:///own", [(Tier.REDIS, "unix:///own", Write.DEMOTED)]),
        ({"redis": {"url": "redis://a"}}, "redis://a", [(Tier.REDIS, "redis://a", Write.ALL)]),
        ({"redis": {"write": "reused"}}, "unix:///own", [(Tier.REDIS, "unix:///own", Write.REUSED)]),
        ({"redis": {"url": "off"}}, None, []),
        (
            {"files": {"folder": "/f", "max_bytes": "1GiB"}},
            "unix:///own",
            [(Tier.REDIS, "unix:///own", Write.DEMOTED), (Tier.FILES, "/f", Write.ALL)],
        ),
        ({"redis": {"url": "off"}, "files": {"folder": "/f", "write": "demoted"}}, None,
         [(Tier.FILES, "/f", Write.DEMOTED)]),
    ],
)  # fmt: skip
def test_cold_tiers_follow_from_the_settings(
    settings: dict[str, Any], redis_url: str | None, expected: list[tuple[Tier, str, Write]]
) -> None:
    cold = cold_settings(ClusterConfig.load(None, settings), redis_url)
    assert [(one.tier, one.place, one.write) for one in cold] == expected
