"""What a controller is started with, as one JSON text: all that `baton up` has decided."""

from dataclasses import dataclass

from deploy.plan.node_config import NodeConfig
from router.config import RouterConfig
from wire.settings import from_json, to_json
from worker.config import WorkerConfig


@dataclass(frozen=True)
class ClusterPlan:
    """`worker` is that of any worker, but for id and role. CPUs and GPUs are what each worker asks Ray for.

    run_dir: the cluster's folder, where the controller keeps what another would have to know if it died.
    """

    prefill: int
    decode: int
    node: NodeConfig
    router: RouterConfig
    worker: WorkerConfig
    num_cpus: float
    num_gpus: float
    drain_grace_s: int
    run_dir: str

    def to_json(self) -> str:
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "ClusterPlan":
        """Raises ConfigError."""
        return from_json(cls, text, "plan")
