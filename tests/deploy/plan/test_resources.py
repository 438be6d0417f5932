import pytest

from deploy.plan.machine import RayNode, Resources, num_fitting, require_node
from wire.errors import ConfigError

SMALL = RayNode("s", "10.0.0.1", {"CPU": 2.0, "memory": 4 << 30})
LARGE = RayNode("l", "10.0.0.2", {"CPU": 8.0, "GPU": 2.0, "prefill": 1.0, "memory": 64 << 30})


@pytest.mark.parametrize(
    "resources",
    [Resources(), Resources(num_cpus=8), Resources(num_gpus=0.5, custom={"prefill": 1.0}), Resources(memory_bytes=1)],
)
def test_one_node_that_has_all_will_do(resources: Resources) -> None:
    require_node(resources, [SMALL, LARGE])


@pytest.mark.parametrize(
    ("resources", "named"),
    [
        (Resources(num_cpus=9), "none of the 2 Ray nodes has CPU: 9, which a worker asks for"),
        (Resources(custom={"decode": 1.0}), "has decode: 1,"),
        (Resources(num_gpus=1, memory_bytes=65 << 30), "has GPU: 1, memory: 65 GiB,"),
    ],
)
def test_resources_that_no_node_has_are_named(resources: Resources, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        require_node(resources, [SMALL, LARGE])


@pytest.mark.parametrize(
    ("workers", "num"),
    [
        ([Resources()] * 5, 5),
        ([Resources(num_gpus=1)] * 4, 2),
        ([Resources(num_gpus=0.5)] * 5, 4),
        ([Resources(custom={"prefill": 1.0})] * 2 + [Resources(num_cpus=1)] * 2, 3),
        ([Resources(custom={"decode": 1.0})] * 2, 1),
    ],
)
def test_the_resources_of_a_node_bound_its_workers(workers: list[Resources], num: int) -> None:
    assert num_fitting(LARGE, workers) == num
