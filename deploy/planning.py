"""From what was asked for, what the model is and what the machine has, to what each part is started with. Pure."""

from deploy.cluster_plan import ClusterPlan
from deploy.config import ClusterConfig
from deploy.model import ModelFacts
from deploy.names import CONTROLLER, namespace
from deploy.node_config import NodeConfig
from deploy.sizing import Sizes
from router.admission import Bounds
from router.config import ClusterAccess, Listeners, RouterConfig, ServedModel
from worker.config import ModelSettings, PoolSettings, ServerSettings, StoreSettings, WorkerConfig


def make_plan(
    config: ClusterConfig,
    model: ModelFacts,
    sizes: Sizes,
    node: NodeConfig,
    token: str,
    secret: bytes,
) -> ClusterPlan:
    return ClusterPlan(
        prefill=config.pools.prefill,
        decode=config.pools.decode,
        node=node,
        router=_router(config, model, token, secret),
        worker=_worker(model, sizes, node, token),
        num_cpus=config.worker.num_cpus,
        num_gpus=sizes.num_gpus,
        drain_grace_s=config.worker.drain_grace_s,
    )


def _router(config: ClusterConfig, model: ModelFacts, token: str, secret: bytes) -> RouterConfig:
    return RouterConfig(
        model=ServedModel(
            name=model.name,
            folder=model.folder,
            dtype=model.dtype,
            max_context_len=model.max_context_len,
            vocab_size=model.vocab_size,
            fingerprint_hex=model.fingerprint.hex(),
            layout_hex=model.layout.encode().hex(),
        ),
        cluster=ClusterAccess(token, secret.hex(), CONTROLLER, namespace(config.name)),
        listeners=Listeners(
            grpc_port=config.router.grpc_port,
            metrics_port=config.router.metrics_port if isinstance(config.router.metrics_port, int) else None,
        ),
        admission=Bounds(config.router.max_open_requests, config.router.max_queued_requests),
    )


def _worker(model: ModelFacts, sizes: Sizes, node: NodeConfig, token: str) -> WorkerConfig:
    return WorkerConfig(
        worker_id="any",
        role="decode",
        model=ModelSettings(model.folder, model.fingerprint.hex(), model.dtype, model.device),
        pool=PoolSettings(sizes.num_pool_blocks, model.layout.block_size),
        store=StoreSettings(node.directory_path, node.redis_url),
        server=ServerSettings(token),
        num_threads=sizes.num_threads,
    )
