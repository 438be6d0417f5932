"""From what was asked for, what the model is and what the machine has, to what each part is started with. Pure."""

from pathlib import Path

from deploy.cluster_plan import ClusterPlan
from deploy.config import ClusterConfig, RouterSettings
from deploy.model import ModelFacts
from deploy.names import CONTROLLER, namespace
from deploy.node_config import NodeConfig
from deploy.sizing import Sizes
from router.config import AdmissionBounds, ClusterAccess, Listeners, RouterConfig, ServedModel, StreamBounds
from worker.config import CheckpointSettings, PageSettings, ServerSettings, StoreSettings, WorkerConfig
from worker.engine_watch import MAX_SILENCE_S

MAX_SILENCE_ON_GPU_S = 30.0


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
        worker=_worker(config, model, sizes, node, token),
        num_cpus=config.worker.num_cpus,
        num_gpus=sizes.num_gpus,
        drain_grace_s=config.worker.drain_grace_s,
        run_dir=str(Path(node.directory_path).parent),
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
            max_connections=config.router.max_connections,
            reflection=config.router.reflection,
        ),
        admission=_admission(config.router),
        streams=_streams(config.router),
    )


def _admission(settings: RouterSettings) -> AdmissionBounds:
    return AdmissionBounds(
        max_open_requests=settings.max_open_requests,
        max_queued_requests=settings.max_queued_requests,
        max_queued_bytes=settings.max_queued_bytes,
        retry_after_s=settings.retry_after_s,
    )


def _streams(settings: RouterSettings) -> StreamBounds:
    return StreamBounds(
        max_deadline_s=settings.max_deadline_s,
        max_buffered_events=settings.max_buffered_events,
        max_stall_s=settings.max_stall_s,
        max_worker_wait_s=settings.max_worker_wait_s,
    )


def _worker(config: ClusterConfig, model: ModelFacts, sizes: Sizes, node: NodeConfig, token: str) -> WorkerConfig:
    return WorkerConfig(
        worker_id="any",
        role="decode",
        model=CheckpointSettings(model.folder, model.fingerprint.hex(), model.dtype, model.device),
        pool=PageSettings(sizes.num_pool_blocks, model.layout.block_size),
        store=StoreSettings(node.directory_path, node.redis_url, node.redis_timeout_s),
        server=ServerSettings(token),
        batch=config.batch,
        num_threads=sizes.num_threads,
        max_silence_s=config.worker.max_silence_s or _max_silence_s(model.device),
    )


def _max_silence_s(device: str) -> float:
    """On a GPU only the first steps take more than a second, which compile kernels."""
    return MAX_SILENCE_S if device == "cpu" else MAX_SILENCE_ON_GPU_S
