from typing import Any

import pytest

from cli.status import memory_lines, render_status, to_object
from deploy.processes.process import ProcessRef
from wire.convert import tiers_to_pb
from wire.pb import cluster_pb2, worker_pb2
from wire.pb.worker_pb2 import BlockCounts
from wire.pools import Addresses

GONE = ProcessRef(pid=2**22 + 1, started=1.0, boot="none")


def worker(worker_id: str, role: str, state: str = "ready", **values: Any) -> worker_pb2.WorkerStatus:
    return worker_pb2.WorkerStatus(worker_id=worker_id, role=role, pid=4000, state=state, **values)


def test_load_time_and_memory_of_workers_and_of_their_nodes() -> None:
    one: dict[str, Any] = {"load_s": 0.12, "memory_bytes": 300 << 20, "mapped_bytes": 92 << 20}
    private: dict[str, Any] = {"load_s": 14.96, "memory_bytes": 400 << 20}
    workers = [
        worker("decode-0", "decode", node_id="head", **one),
        worker("prefill-0", "prefill", node_id="head", **one),
        worker("decode-1", "decode", node_id="other", **private),
    ]
    shared = "300 MiB of its own, 92 MiB of weights shared on its node"
    assert list(memory_lines(workers)) == [
        f"prefill-0: loaded in 0.1 s, {shared}",
        f"decode-0: loaded in 0.1 s, {shared}",
        "decode-1: loaded in 15.0 s, 400 MiB of its own",
        "node head: 692 MiB for 2 workers, without the arena",
        "node other: 400 MiB for 1 workers, without the arena",
    ]


def test_releases_are_shown_where_workers_differ() -> None:
    status = cluster_pb2.ClusterStatus()
    status.workers.extend(
        worker(name, "decode", release=release, protocol_version=4)
        for name, release in (("decode-0", "1.0.0"), ("decode-1", "1.0.0"))
    )
    assert "releases" not in render_status(status)
    status.workers.append(worker("decode-2", "decode", release="1.1.0", protocol_version=5))
    status.workers.append(worker("decode-3", "decode", "lost"))
    assert "releases  1.0.0: decode-0, decode-1; 1.1.0: decode-2" in render_status(status)
    told = to_object(status, Addresses(), {})["pools"]["decode"]
    assert [(one["release"], one["protocol_version"]) for one in told] == [
        ("1.0.0", 4),
        ("1.0.0", 4),
        ("1.1.0", 5),
        ("", 0),
    ]


def busy() -> cluster_pb2.ClusterStatus:
    """A cluster in the middle of its day: work, a worker lost, Redis away."""
    status = cluster_pb2.ClusterStatus(
        model="Qwen3-0.6B", address="127.0.0.1:50051", metrics_address="127.0.0.1:40211", num_running=31, num_queued=4
    )
    status.pools.add(role="prefill", size=1, num_ready=1)
    status.pools.add(role="decode", size=3, num_ready=1)
    status.prefix_cache.CopyFrom(
        cluster_pb2.PrefixCache(queries=1000, hits=tiers_to_pb({"device": 410, "host": 180, "redis": 20}))
    )
    decode = BlockCounts(free=12, owned=310, published=500, cached=202, total=1024)
    prefill = BlockCounts(free=700, owned=20, published=10, cached=294, total=1024)
    status.workers.extend(
        [
            worker("decode-10", "decode", "draining", blocks=BlockCounts(free=1024, total=1024)),
            worker(
                "decode-2",
                "decode",
                blocks=decode,
                num_running=18,
                num_waiting=3,
                num_preemptions=7,
                cached_prompt_tokens=901233,
                generated_tokens=402311,
            ),
            worker("decode-3", "decode", "", problems=["no answer in time"]),
            worker("prefill-0", "prefill", blocks=prefill, computed_prompt_tokens=390, cached_prompt_tokens=610),
        ]
    )
    status.tiers.add(
        tier="host",
        blocks=BlockCounts(free=100, owned=32, published=410, cached=1506, total=2048),
        block_bytes=1 << 18,
        counts={"leases": 2, "holds": 6},
    )
    counts = {"hits": 1504, "misses": 33, "errors": 5, "corrupt": 0, "written": 4012, "refused": 8}
    status.tiers.add(tier="redis", state="broken", counts=counts)
    status.tiers.add(tier="files", state="off")
    for age_s, text in (
        (172_800, "the cluster serves"),
        (130, "worker decode-0 was lost"),
        (9, "Redis does not answer"),
    ):
        status.events.add(age_s=age_s, text=text)
    status.problems.append("decode-3: no answer in time")
    return status


def test_a_pool_that_follows_a_limit_has_a_line_with_its_last_order() -> None:
    status = busy()
    status.pools[0].limit = "slo.ttft_ms 2000 for 95% of requests, 1 to 4 workers"
    status.pools[1].limit = "slo.itl_ms 50 for 95% of requests, 1 to 4 workers"
    status.pools[1].last_order, status.pools[1].last_order_age_s = "decode 1 to 3: 900 tokens/s in 40 streams", 75.0
    lines = render_status(status).splitlines()
    assert lines[3] == "prefill   follows slo.ttft_ms 2000 for 95% of requests, 1 to 4 workers; no order yet"
    followed = "decode    follows slo.itl_ms 50 for 95% of requests, 1 to 4 workers"
    assert lines[4] == f"{followed}; 1 min ago decode 1 to 3: 900 tokens/s in 40 streams"
    assert to_object(status, Addresses(), {})["sizes"]["decode"]["last_order"] == status.pools[1].last_order


def test_everything_stands_in_its_place() -> None:
    assert (
        render_status(busy())
        == """\
Qwen3-0.6B at 127.0.0.1:50051
requests  31 running, 4 waiting for their first token
pools     prefill 1 of 1, decode 1 of 3 workers ready
hits      61 % of 1000 prompt tokens (device 41 %, host 18 %, redis 2 %)
metrics   http://127.0.0.1:40211/metrics

worker      pid  state      running  waiting  preempted  computed  cached   hits  generated
prefill-0  4000  ready            0        0          0       390     610   61 %          0
decode-2   4000  ready           18        3          7         0  901233  100 %     402311
decode-3   4000  no answer        -        -          -         -       -      -          -
decode-10  4000  draining         0        0          0         0       0      -          0
(running, waiting, preempted: answers; computed, cached: tokens of prompts; hits: the share that was cached;
generated: tokens; since the start of each worker)

KV blocks  total  in use  free  owned  published  cached  draining
prefill-0   1024     3 %   700     20         10     294         0
decode-2    1024    79 %    12    310        500     202         0
decode-10   1024     0 %  1024      0          0       0         0
arena       2048    22 %   100     32        410    1506         0

arena  512 MiB, 2 being read, 6 prompts held for decode
redis  does not answer, and is left alone: 1504 hits, 33 misses, 5 errors, 0 corrupt, 0 forged, 4012 written, \
8 refused, 0 write errors, 0 evicted
files  off

last events
     2 d ago  the cluster serves
   2 min ago  worker decode-0 was lost
     9 s ago  Redis does not answer

problems
  decode-3: no answer in time"""
    )


def test_two_arenas_of_a_node_are_told_apart_and_its_workers_show_its_name() -> None:
    host = worker_pb2.TierStatus(tier="host", blocks=BlockCounts(free=16, total=16), block_bytes=1 << 18, epoch="e")
    old = worker("decode-0", "decode", blocks=BlockCounts(free=8, total=8), node_id="a@h", tiers=[host])
    host.blocks.total = 32
    new = worker("decode-1", "decode", blocks=BlockCounts(free=8, total=8), node_id="a@h#0f1e2d", tiers=[host])
    status = cluster_pb2.ClusterStatus(workers=[old, new], tiers=[host])
    shown = render_status(status)
    assert "arena of a@h         4 MiB" in shown
    assert "arena of a@h#0f1e2d  8 MiB" in shown
    assert [line.split()[-1] for line in shown.splitlines() if line.startswith("worker ")] == ["generated"], "one node"
    described = to_object(status, Addresses(), {})
    assert [one["node"] for one in described["pools"]["decode"]] == ["a@h"] * 2
    assert [(node["id"], node["node"], node["workers"]) for node in described["nodes"]] == [
        ("a@h", "a@h", ["decode-0"]),
        ("a@h#0f1e2d", "a@h", ["decode-1"]),
    ]
    assert [*memory_lines([old, new])][-1].startswith("node a@h: ")


def test_workers_and_arenas_of_several_nodes_are_told_apart() -> None:
    host = worker_pb2.TierStatus(tier="host", blocks=BlockCounts(free=16, total=16), block_bytes=1 << 18, epoch="e")
    blocks = BlockCounts(free=8, total=8)
    on_a = [worker(f"prefill-{number}", "prefill", blocks=blocks, node_id="a", tiers=[host]) for number in range(2)]
    host.blocks.total = 32
    on_b = worker("decode-0", "decode", blocks=blocks, node_id="b", tiers=[host])
    status = cluster_pb2.ClusterStatus(workers=[on_b, *on_a], tiers=[host])
    shown = render_status(status)
    table = [line.split() for line in shown.splitlines()]
    assert [(line[0], line[-1]) for line in table if line[1:2] == ["pid"] or line[1:2] == ["4000"]] == [
        ("worker", "node"),
        ("prefill-0", "a"),
        ("prefill-1", "a"),
        ("decode-0", "b"),
    ]
    assert "arena of a  4 MiB, 0 being read" in shown
    assert "arena of b  8 MiB, 0 being read" in shown
    described = to_object(status, Addresses(), {})
    assert [one["node"] for one in described["pools"]["prefill"]] == ["a", "a"]
    assert [(node["id"], node["workers"]) for node in described["nodes"]] == [
        ("b", ["decode-0"]),
        ("a", ["prefill-0", "prefill-1"]),
    ]
    assert [node["tiers"]["host"]["blocks"]["total"] for node in described["nodes"]] == [32, 16]


def test_a_cluster_that_has_just_come_up() -> None:
    assert (
        render_status(cluster_pb2.ClusterStatus(model="m", address="a:1"))
        == """\
m at a:1
requests  0 running, 0 waiting for their first token
hits      no prompts yet

no workers

arena  -
redis  -
files  -"""
    )


def test_tokens_that_depend_on_other_requests_are_told() -> None:
    status = cluster_pb2.ClusterStatus(model="m", address="a:1", batch_invariant=False)
    told = "tokens    may depend on other requests: a failover goes on, and does not promise the very same tokens\n"
    assert told in render_status(status)
    status.batch_invariant = True
    assert "tokens    may" not in render_status(status)
    assert "tokens    may" not in render_status(cluster_pb2.ClusterStatus(model="m", address="a:1"))


def test_several_gateways_are_named() -> None:
    status = cluster_pb2.ClusterStatus(model="m", address="a:1")
    assert "gateways  gateway-0, gateway-1 (gone)\n" in render_status(
        status, "a:2", {"gateway-0": True, "gateway-1": False}
    )
    assert "gateway" not in render_status(status, "a:2", {"gateway-0": True})


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ("off", "redis  off"),
        ("up", "redis  up: 0 hits"),
        ("full", "redis  full, and refuses blocks (set its maxmemory-policy"),
        ("full", "files  full, and refuses blocks (its disk or quota has no room)"),
    ],
)
def test_a_tier_as_it_is(state: str, shown: str) -> None:
    tier = shown.partition(" ")[0]
    status = cluster_pb2.ClusterStatus(tiers=[worker_pb2.TierStatus(tier=tier, state=state)])
    assert shown in render_status(status)


def test_only_the_last_events_are_shown() -> None:
    status = cluster_pb2.ClusterStatus()
    for number in range(50):
        status.events.add(age_s=50 - number, text=f"event {number}")
    shown = render_status(status)
    assert "event 49" in shown
    assert "event 39" not in shown


def test_scripts_get_all_of_it() -> None:
    described = to_object(busy(), Addresses(http="h:1", operator="h:2"), {"gateway-0": GONE})
    assert described["metrics_address"] == "127.0.0.1:40211"
    assert (described["http_address"], described["operator_address"]) == ("h:1", "h:2")
    assert described["gateways"] == [{"id": "gateway-0", "pid": GONE.pid, "is_alive": False}]
    assert described["prefix_cache"] == {"queries": 1000, "device": 410, "host": 180, "redis": 20}
    assert [one["id"] for one in described["pools"]["decode"]] == ["decode-10", "decode-2", "decode-3"]
    assert described["sizes"] == {"prefill": {"size": 1, "num_ready": 1}, "decode": {"size": 3, "num_ready": 1}}
    assert described["tiers"]["host"]["num_holds"] == 6
    assert described["tiers"]["redis"]["state"] == "broken"
    assert described["problems"] == ["decode-3: no answer in time"]
