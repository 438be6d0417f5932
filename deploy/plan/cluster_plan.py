"""The plan of a cluster, which starts its controller, and the configuration of each process. Pure."""

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path

from deploy.plan.authority import Authority
from deploy.plan.config import ClusterConfig
from deploy.plan.machine import SHARED_MEMORY, Machine, RayNode, Resources, num_fitting, service_of
from deploy.plan.model import DraftFacts, ModelFacts
from deploy.plan.rules import is_within
from deploy.plan.sizing import Sizes, num_more, size
from gateway.config import GatewayConfig
from kv_store.frame import mac_key_of
from kv_store.node.sessions import DEFAULT_LIMITS, KeepLimits
from router.config import LOOPBACK, ClusterAccess, LatencyBounds, RouterConfig
from wire.block_names import digest_of
from wire.errors import ConfigError
from wire.pools import Role, Worker
from wire.served_model import ServedModel
from wire.tier import ColdSettings, Tier, Write
from wire.trust.identity import ROUTER, Identity
from wire.trust.key_ring import NO_CALLER, KeyList
from worker.config import MAX_SILENCE_S, CheckpointSettings, ServerSettings, StoreSettings, WorkerConfig

CONTROLLER = "controller"
TAG_LEN = 6
MAX_SILENCE_ON_GPU_S = 30.0
MAX_GAP_ON_GPU_MS = 50.0


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """The configuration of a node's service. The workers of the node that have its KV layout share `store`.

    model: a folder that must exist. block_address: HOST:PORT from which other nodes read the arena, port 0 for a free
    port; empty without other nodes. token: the cluster's. identity: the service's, for TLS. shares: a tenant's share of
    the arena, as in `wire.pools.Shares`. keeps: bounds on hints.
    """

    store: StoreSettings
    arena_path: str
    model: ServedModel
    num_slots: int
    block_address: str = ""
    token: str = ""
    identity: Identity | None = None
    shares: dict[str, float] = field(default_factory=dict)
    keeps: KeepLimits = DEFAULT_LIMITS


@dataclass(frozen=True)
class NodeBaseline:
    """A node that hosts workers, and its machine as it was before them, from which all sizes follow.

    Each KV layout that workers have gives a node a service, an arena and a baseline of their own. block_address: the
    service's block port; empty before the service starts, and if no other node reads the arena. layout_tag: see
    ClusterPlan.
    """

    node: RayNode
    machine: Machine
    block_address: str = ""
    layout_tag: str = ""

    @property
    def node_id(self) -> str:
        """The id under which routers know the arena, whose node `node_name` tells."""
        return "#".join(filter(None, (self.node.name, self.layout_tag)))

    @property
    def label(self) -> str:
        """The name of the arena and of the directory's folder, behind that of the run folder."""
        return ".".join(filter(None, (self.node.label, self.layout_tag)))


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """All decisions of `baton up`.

    machine: the only node's; None for a joined Ray cluster, where each node is inspected. cold: the head's cold tiers.
    run_dir: the cluster's folder on the head, with the controller's records for its successor. authority: certifies an
    identity for each configuration; None without TLS. key_file: the file of callers' keys. versions: the served model
    in each of its versions, after a roll; none before.
    """

    config: ClusterConfig
    model: ModelFacts
    machine: Machine | None
    router: RouterConfig
    cold: tuple[ColdSettings, ...]
    mac_key_hex: str
    run_dir: str
    authority: Authority | None = None
    gateway: GatewayConfig | None = None
    key_file: str = ""
    versions: tuple[ServedModel, ...] = ()

    @property
    def token(self) -> str:
        return self.router.cluster.token

    @property
    def is_alone(self) -> bool:
        """Whether the head is the only node for ever."""
        return self.machine is not None

    @property
    def layout_tag(self) -> str:
        """The tag of the KV layout in the names of nodes' services; empty for the layout of `baton up`."""
        layout = self.model.served.layout
        return "" if layout == self.router.model.layout else hashlib.sha256(layout.encode()).hexdigest()[:TAG_LEN]

    @property
    def routers(self) -> list[str]:
        """The names of the routers' actors."""
        return [f"{ROUTER}-{index}" if index else ROUTER for index in range(self.config.router.routers)]

    @property
    def state_file(self) -> Path:
        """The file of the cluster's state, which `baton down` removes."""
        return Path(self.key_file).with_name(f"{self.config.name}.json")

    @property
    def num_gateways(self) -> int:
        return 0 if self.gateway is None else self.config.http.gateways

    @property
    def wants_tls(self) -> bool:
        return not self.is_alone and self.config.ray.plain_network is None

    def under(self, authority: Authority) -> "ClusterPlan":
        """Returns this plan with TLS between the nodes."""
        access = replace(self.router.cluster, identity=authority.issue(ROUTER, LOOPBACK))
        return replace(self, authority=authority, router=replace(self.router, cluster=access))

    def with_keys(self, listed: KeyList) -> "ClusterPlan":
        """Returns this plan with these keys for router and gateways.

        Without keys, a port that other machines reach admits no caller, unless `insecure` allows it.
        """
        if not listed.keys and self.config.is_public and not self.config.insecure:
            listed = NO_CALLER
        gateway = None if self.gateway is None else replace(self.gateway, keys=listed)
        return replace(self, router=replace(self.router, keys=listed), gateway=gateway)

    @property
    def shares(self) -> dict[str, float]:
        """Returns the tenants' shares of an arena, as `wire.pools.Shares` has them."""
        secret, versions = self.router.cluster.secret, self.versions or (self.model.served,)
        return {
            ",".join(digest_of(one.namespace.root_of(secret, tenant)).hex() for one in versions): share
            for tenant, share in self.router.keys.shares.items()
        }

    def resources(self, role: Role) -> Resources:
        """Returns the resources that each worker of a role asks Ray for."""
        worker = self.config.worker.of(role)
        num_gpus = float(self.model.device != "cpu") if worker.num_gpus is None else worker.num_gpus
        return Resources(worker.num_cpus, num_gpus, worker.memory_bytes or 0, worker.resources)

    @property
    def roles_are_alike(self) -> bool:
        """Whether a worker of one role has all that the other asks for, so that its process can serve either."""
        prefill, decode = Role.PREFILL, Role.DECODE
        return self._config_of(prefill) == self._config_of(decode) and self._model_of(prefill) == self._model_of(decode)

    def sizes(self, role: Role, baseline: NodeBaseline) -> Sizes:
        """Returns the sizes of a node's arena and of its workers of one role. Raises ConfigError, naming the node."""
        every = [self.resources(one) for one in Role for _ in range(self.config.pools[one])]
        num_workers = len(every) if self.is_alone else num_fitting(baseline.node, every)
        try:
            return size(self._config_of(role), self._model_of(role), baseline.machine, num_workers)
        except ConfigError as error:
            if self.is_alone:
                raise
            raise ConfigError(f"node {baseline.node.name}: {error.message}") from error

    def num_more(self, role: Role, machine: Machine) -> int:
        """Counts the further workers of a role for which a node has memory now."""
        return num_more(self._config_of(role), self._model_of(role), machine)

    def node_config(self, baseline: NodeBaseline) -> NodeConfig:
        """Returns the configuration of a node's service.

        Raises ConfigError if nothing fits on the node, or if it is outside the network for ports without TLS.
        """
        self._require_network(baseline.node)
        return NodeConfig(
            store=self._store(baseline),
            arena_path=str(SHARED_MEMORY / f"{Path(self.run_dir).name}.{baseline.label}"),
            model=self.model.served,
            num_slots=self.sizes(Role.DECODE, baseline).num_arena_slots,
            block_address="" if self.is_alone else baseline.block_address or f"{baseline.node.host}:0",
            token=self.token,
            identity=self._identity(service_of(baseline.node.id, baseline.layout_tag), baseline.node.host),
            shares=self.shares,
            keeps=KeepLimits(self.config.arena.max_keep_s, self.config.arena.keep_share),
        )

    def worker_config(self, worker: Worker, baseline: NodeBaseline) -> WorkerConfig:
        """Returns the configuration of a worker on a node. Raises the errors of `node_config`."""
        settings, sizes = self.config.model, self.sizes(worker.role, baseline)
        # On a GPU no step takes a second: kernels are compiled before the worker is ready.
        default_silence_s, batch = MAX_SILENCE_S, self.config.batch
        if self.model.device != "cpu":
            default_silence_s = MAX_SILENCE_ON_GPU_S
            batch = replace(batch, max_gap_ms=batch.max_gap_ms or MAX_GAP_ON_GPU_MS)
        # Workers of the head listen where its router is, unless another router has to reach them.
        is_local = baseline.node.is_head and not self.config.ray.standby_frontends
        host = LOOPBACK if is_local else baseline.node.host
        return WorkerConfig(
            model=CheckpointSettings(
                self.model.served, self.model.device, self.model.kernels, settings.kv_dtype, settings.weight_cache_bytes
            ),
            num_blocks=sizes.num_pool_blocks,
            store=replace(self._store(baseline), node_id=baseline.node_id, block_address=baseline.block_address),
            server=ServerSettings(self.token, host, identity=self._identity(worker.id, host)),
            batch=batch,
            speculation=replace(self.config.speculation, draft=self._model_of(worker.role).draft.folder),
            num_threads=sizes.num_threads,
            max_silence_s=self.config.worker.max_silence_s or default_silence_s,
            worker_id=worker.id,
            role=worker.role,
        )

    def _require_network(self, node: RayNode) -> None:
        network = self.config.ray.plain_network
        if not self.is_alone and network is not None and not is_within(node.host, network):
            problem = f"node {node.name} is not in ray.plain_network, which is {network}"
            raise ConfigError(f"{problem}: widen it, or stop Ray on the node")

    def _identity(self, name: str, host: str) -> Identity | None:
        return self.authority.issue(name, host) if self.authority else None

    def _config_of(self, role: Role) -> ClusterConfig:
        """Returns the settings for workers of a role."""
        worker = replace(self.config.worker.of(role), num_gpus=self.resources(role).num_gpus)
        return replace(self.config, worker=worker)

    def _model_of(self, role: Role) -> ModelFacts:
        """Returns the model for workers of a role: prefill workers have no draft."""
        return self.model if role is Role.DECODE else replace(self.model, draft=DraftFacts())

    def _store(self, baseline: NodeBaseline) -> StoreSettings:
        """Describes a node's store: the socket of its directory, in its service's folder, and the reachable tiers."""
        cold = tuple(one for one in self.cold if baseline.node.is_head or not one.place.startswith("unix:"))
        return StoreSettings(f"{self.run_dir}.{baseline.label}/directory.sock", self.mac_key_hex, cold)


def namespace(run_dir: str) -> str:
    """Returns the Ray namespace of a cluster's actors, which no other cluster has, even of the same name."""
    return Path(run_dir).name


def make_plan(
    config: ClusterConfig,
    model: ModelFacts,
    machine: Machine | None,
    cold: tuple[ColdSettings, ...],
    run_dir: str,
    token: str,
    secret: bytes,
    key_file: str,
) -> ClusterPlan:
    return ClusterPlan(
        config=config,
        model=model,
        machine=machine,
        router=RouterConfig(
            model=model.served,
            cluster=ClusterAccess(token, secret.hex(), CONTROLLER, namespace(run_dir)),
            settings=config.router,
            tls=config.tls.files,
            traces=config.traces,
            limits=LatencyBounds(config.slo.ttft_ms, config.slo.itl_ms),
        ),
        cold=cold,
        mac_key_hex=mac_key_of(secret).hex(),
        run_dir=run_dir,
        gateway=None
        if config.http_port is None
        else GatewayConfig(
            host=config.router.host,
            port=config.http_port,
            host_names=config.http.host_names,
            cors_origins=config.http.cors_origins,
            tls=config.tls.files,
        ),
        key_file=key_file,
    )


def cold_settings(config: ClusterConfig, redis_url: str | None) -> tuple[ColdSettings, ...]:
    """Lists the cold tiers, nearest first. redis_url: the URL of the Redis server, None without one."""
    redis, files = config.redis, config.files
    write = redis.write or (Write.DEMOTED if redis.url == "own" else Write.ALL)
    tiers = (
        (Tier.REDIS, redis_url, write, redis),
        (Tier.FILES, files.folder, files.write, files),
    )
    return tuple(
        ColdSettings(
            tier=tier,
            place=place,
            write=Write(write),
            timeout_s=settings.timeout_ms / 1000,
            max_bytes=settings.max_bytes,
            ttl_s=settings.ttl_s or 0.0,
        )
        for tier, place, write, settings in tiers
        if place is not None
    )
