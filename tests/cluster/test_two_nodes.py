"""A Ray cluster of several nodes on this machine, started by the scripts of deploy: a pool on each; one dies.

The tests share it, in their order: before a node joins for decode, with one, and after its death.
"""

import json
import os
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from cryptography import x509

from tests.cluster.ray_nodes import START_S, RayNodes, kill_raylet
from tests.cluster.served_cluster import ALWAYS, SHARED_MEMORY, ServedCluster, wait_until
from tests.harness.checkpoints import choose_prompt
from tests.harness.fork_server import ON_RAY, ForkServer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
NUM_TOKENS = 64
SETTINGS = "deploy/two-pools.example.toml"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    """Ray's head, which has a place for a prefill worker; for all tests."""
    with ExitStack() as ended:
        nodes = RayNodes(tmp_path_factory.mktemp("nodes"), ended)
        nodes.head(prefill=1)
        yield nodes


@pytest.fixture(scope="module")
def served(nodes: RayNodes, tmp_path_factory: pytest.TempPathFactory, forks: ForkServer) -> Iterator[ServedCluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in nodes.env.items():
            patch.setenv(name, value)
        cluster = ServedCluster(f"n{os.getpid()}", tmp_path_factory.mktemp("served"), forks=forks, target=ON_RAY)
        yield cluster
        cluster.run("down")


@pytest.fixture(scope="module")
def decode_node(served: ServedCluster, nodes: RayNodes, checkpoint: Path) -> psutil.Process:
    """A node that joins for decode, on which the cluster has then come up."""
    node = nodes.join("decode")
    started = up(served, nodes, checkpoint)
    assert started.returncode == 0, started.stdout + started.stderr
    return node


def up(served: ServedCluster, nodes: RayNodes, checkpoint: Path) -> "subprocess.CompletedProcess[str]":
    return served.run(
        "up",
        "--model",
        str(checkpoint),
        "--config",
        SETTINGS,
        "--ray-address",
        nodes.address,
        "--grpc-port",
        "0",
        *ALWAYS,
    )


def require_tls(run_dir: Path) -> None:
    """Asks the block port of each node for its certificate, which the cluster's own authority has signed."""
    authority = json.loads((run_dir / "authority.json").read_text())["certificate_pem"]
    homes = [json.loads(path.read_text()) for path in run_dir.glob("*.baseline")]
    assert len(homes) == 2
    for home in homes:
        host, _, port = home["block_address"].rpartition(":")
        shown = x509.load_pem_x509_certificate(ssl.get_server_certificate((host, int(port)), timeout=START_S).encode())
        shown.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.encode()))


def require_right(served: ServedCluster, checkpoint: Path, num_prompt: int) -> dict[str, Any]:
    """Asks for a continuation that one process computes alike; returns the whole answer."""
    expected = choose_prompt(checkpoint, num_prompt, NUM_TOKENS)
    answer = served.generate(expected.prompt_ids, "--max-tokens", str(NUM_TOKENS), "--ignore-eos")
    assert tuple(answer["token_ids"]) == expected.token_ids
    return answer


def test_a_resource_that_no_node_has_is_named_and_nothing_is_left(
    served: ServedCluster, nodes: RayNodes, checkpoint: Path
) -> None:
    refused = up(served, nodes, checkpoint)
    assert refused.returncode == 78
    assert "none of the 1 Ray nodes has decode: 1, which a worker asks for" in refused.stderr
    assert served.left_behind() == []


def test_a_foreign_cluster_of_the_name_on_the_same_ray_is_refused_and_the_first_serves_on(
    served: ServedCluster, nodes: RayNodes, decode_node: psutil.Process, checkpoint: Path, tmp_path: Path
) -> None:
    pids = {role: [worker["pid"] for worker in served.workers(role).values()] for role in ("prefill", "decode")}

    foreign = ServedCluster(served.name, tmp_path / "foreign")
    refused = up(foreign, nodes, checkpoint)
    assert refused.returncode == 78
    assert f"another cluster named {served.name} serves on this Ray" in refused.stderr
    assert foreign.run("down").stdout == f"no cluster named {served.name} is running\n"

    assert {role: [worker["pid"] for worker in served.workers(role).values()] for role in pids} == pids
    require_right(served, checkpoint, 17)


def test_a_pool_on_each_of_two_nodes_one_that_dies_and_others_that_join(
    served: ServedCluster, nodes: RayNodes, decode_node: psutil.Process, checkpoint: Path
) -> None:
    before = served.status()["tiers"]["peers"]["hits"]
    answer = require_right(served, checkpoint, 100)
    status = served.status()
    require_tls(Path(served.state()["run_dir"]))
    ((prefill,), (decode,)) = (status["pools"][role] for role in ("prefill", "decode"))
    assert prefill["node"] != decode["node"]
    assert {node["id"]: node["workers"] for node in status["nodes"]} == {
        prefill["node"]: [prefill["id"]],
        decode["node"]: [decode["id"]],
    }
    assert len({node["tiers"]["host"]["epoch"] for node in status["nodes"]}) == 2
    assert answer["workers"] == {"prefill": prefill["id"], "decode": decode["id"]}
    assert decode["computed_prompt_tokens"] == 0
    assert status["tiers"]["peers"]["hits"] - before == 7, "the prompt's blocks, its tail among them"
    assert len(list(SHARED_MEMORY.glob(f"baton-{served.name}-*"))) == 2

    kill_raylet(decode_node)
    nodes.join("decode")
    require_right(served, checkpoint, 17)
    after = served.workers("decode")
    assert decode["id"] not in after
    assert {worker["node"] for worker in after.values()}.isdisjoint({prefill["node"], decode["node"]})

    nodes.join("decode")
    served.do("scale", "--decode", "2")
    assert len({worker["node"] for worker in served.workers("decode").values()}) == 2
    require_right(served, checkpoint, 100)

    drained = next(iter(served.workers("decode").values()))["node"]
    num_arenas = len(list(SHARED_MEMORY.glob(f"baton-{served.name}-*")))
    served.do("drain", drained)
    assert [worker["node"] == drained for worker in served.workers("decode").values()] == [False]
    assert len(list(SHARED_MEMORY.glob(f"baton-{served.name}-*"))) == num_arenas - 1, "its arena is gone"
    nodes.join("decode")
    served.do("scale", "--decode", "2")
    assert drained not in {worker["node"] for worker in served.workers("decode").values()}
    require_right(served, checkpoint, 100)

    wait_until(served.is_sound, "all invariants hold")
    served.do("down")
    assert served.left_behind() == []
