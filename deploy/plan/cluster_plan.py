"""The plan of a cluster, which starts its controller: made of settings, model, sizes and the node's paths. Pure."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from deploy.plan.config import ClusterConfig, RouterSettings
from deploy.plan.model import ModelFacts
from deploy.plan.sizing import Sizes
from router.config import AdmissionBounds, ClusterAccess, Listeners, RouterConfig, StreamBounds
from wire.layout import KVLayout
from wire.pools import PoolSizes
from wire.tier import ColdSettings, Tier, Write
from worker.config import CheckpointSettings, PageSettings, ServerSettings, StoreSettings, WorkerTemplate
from worker.engine_watch import MAX_SILENCE_S

CONTROLLER = "controller"
MAX_SILENCE_ON_GPU_S = 30.0
Part = TypeVar("Part", AdmissionBounds, Listeners, StreamBounds)


@dataclass(frozen=True)
class Resources:
    """The resources that an actor asks Ray for."""

    num_cpus: float = 0.0
    num_gpus: float = 0.0


@dataclass(frozen=True)
class NodeConfig:
    """The configuration of a node's service. The workers of the node share `store`."""

    store: StoreSettings
    arena_path: str
    layout_hex: str
    num_slots: int

    @property
    def layout(self) -> KVLayout:
        return KVLayout.decode(bytes.fromhex(self.layout_hex))

    @property
    def arena_bytes(self) -> int:
        return self.num_slots * self.layout.block_bytes


@dataclass(frozen=True)
class ClusterPlan:
    """All decisions of `baton up`. `resources`: of each worker.

    run_dir: the cluster's folder, where the controller keeps its records for a successor.
    """

    pools: PoolSizes
    node: NodeConfig
    router: RouterConfig
    worker: WorkerTemplate
    resources: Resources
    drain_grace_s: int
    run_dir: str


def namespace(cluster: str) -> str:
    """Returns the Ray namespace of all actors of a cluster."""
    return f"baton-{cluster}"


def make_plan(
    config: ClusterConfig, model: ModelFacts, sizes: Sizes, node: NodeConfig, token: str, secret: bytes
) -> ClusterPlan:
    return ClusterPlan(
        pools=config.pools,
        node=node,
        router=RouterConfig(
            model=model.served,
            cluster=ClusterAccess(token, secret.hex(), CONTROLLER, namespace(config.name)),
            listeners=_part(Listeners, config.router),
            admission=_part(AdmissionBounds, config.router),
            streams=_part(StreamBounds, config.router),
        ),
        worker=_worker(config, model, sizes, node, token),
        resources=Resources(config.worker.num_cpus, sizes.num_gpus),
        drain_grace_s=config.worker.drain_grace_s,
        run_dir=str(Path(node.store.directory_path).parent),
    )


def cold_settings(config: ClusterConfig, redis_url: str | None) -> tuple[ColdSettings, ...]:
    """Lists the cold tiers, nearest first. redis_url: of the server that there is, None without one."""
    redis, files = config.redis, config.files
    write = redis.write or (Write.DEMOTED if redis.url == "own" else Write.ALL)
    tiers = (
        (Tier.REDIS, redis_url, write, redis),
        (Tier.FILES, files.folder, files.write, files),
    )
    return tuple(
        ColdSettings(tier, place, Write(write), settings.timeout_ms / 1000, settings.max_bytes)
        for tier, place, write, settings in tiers
        if place is not None
    )


def _part(cls: type[Part], settings: RouterSettings) -> Part:
    """Picks a part's own settings; one that is off is None there."""
    given: dict[str, Any] = {one.name: getattr(settings, one.name, one.default) for one in fields(cls)}
    given |= {name: None for name, value in given.items() if value == "off"}
    return cls(**given)


def _worker(config: ClusterConfig, model: ModelFacts, sizes: Sizes, node: NodeConfig, token: str) -> WorkerTemplate:
    served = model.served
    # On a GPU only the first steps take more than a second, which compile kernels.
    default_silence_s = MAX_SILENCE_S if model.device == "cpu" else MAX_SILENCE_ON_GPU_S
    return WorkerTemplate(
        model=CheckpointSettings(served.folder, served.fingerprint_hex, served.dtype, model.device, model.kernels),
        pool=PageSettings(sizes.num_pool_blocks, served.layout.block_size),
        store=node.store,
        server=ServerSettings(token),
        batch=config.batch,
        num_threads=sizes.num_threads,
        max_silence_s=config.worker.max_silence_s or default_silence_s,
    )
