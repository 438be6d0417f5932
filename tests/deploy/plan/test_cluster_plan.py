from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from cryptography import x509

from deploy.plan.authority import Authority
from deploy.plan.cluster_plan import ClusterPlan, NodeBaseline, cold_settings, make_plan
from deploy.plan.config import ClusterConfig, HttpSettings
from deploy.plan.machine import Machine, RayNode
from deploy.plan.model import DraftFacts, ModelFacts
from router.config import RouterSettings
from tests.harness.served import served_model
from tests.kv_store.names import LAYOUT
from wire.errors import ConfigError, Unauthenticated
from wire.ids import WorkerId
from wire.pools import Role, Worker, node_name
from wire.tier import ColdSettings, Tier, Write
from wire.trust.identity import Identity
from wire.trust.key_ring import NO_KEYS, KeyRing, Scope
from worker.config import BatchSettings, WorkerConfig

SERVED = served_model(LAYOUT, max_context_len=64, fingerprint_hex=bytes(32).hex())
MODEL = ModelFacts(served=SERVED, device="cpu", weight_bytes=1000)
MACHINE = Machine(memory_bytes=8 << 30, shared_bytes=4 << 30, num_cores=4)
HEAD = NodeBaseline(RayNode("a" * 56, "10.0.0.1", {"CPU": 4.0}, is_head=True), MACHINE)
OTHER = NodeBaseline(
    RayNode("b" * 56, "10.0.0.2", {"CPU": 8.0, "decode": 1.0}), replace(MACHINE, num_cores=8), "10.0.0.2:7"
)
GPU_MACHINE = replace(MACHINE, gpus=(16 << 30,) * 2)
REDIS = ColdSettings(tier=Tier.REDIS, place="unix:///run/redis.sock", write=Write.ALL, timeout_s=0.7)
FILES = ColdSettings(tier=Tier.FILES, place="/f", write=Write.ALL, timeout_s=0.7)
BOUNDS = {
    "max_open_requests": 11,
    "max_queued_requests": 12,
    "max_queued_bytes": 13 << 20,
    "retry_after_s": 14.0,
    "max_deadline_s": 15.0,
    "max_buffered_tokens": 16,
    "max_stall_s": 17.0,
    "max_worker_wait_s": 18.0,
    "disaggregation": "never",
}
LISTENERS = {
    "host": "127.0.0.2",
    "grpc_port": 19,
    "metrics_port": 20,
    "metrics_compat": "vllm",
    "max_connections": 21,
    "reflection": False,
}


def planned(config: ClusterConfig, model: ModelFacts = MODEL, machine: Machine | None = MACHINE) -> ClusterPlan:
    return make_plan(config, model, machine, (REDIS, FILES), "/tmp/baton-a-12345678", "token", b"secret", "/none")


def with_codes(model: ModelFacts, quantization: str = "int8") -> ModelFacts:
    """Returns a model with another KV layout of the same block size."""
    layout_hex = replace(model.served.layout, quantization=quantization).encode().hex()
    return replace(model, served=replace(model.served, layout_hex=layout_hex))


def worker_of(plan: ClusterPlan, baseline: NodeBaseline = HEAD, role: Role = Role.DECODE) -> WorkerConfig:
    return plan.worker_config(Worker(WorkerId(f"{role.value}-0"), role), baseline)


def test_what_is_not_set_is_as_each_part_has_it() -> None:
    plan = planned(ClusterConfig())
    assert plan.router.settings == RouterSettings()
    assert worker_of(plan).batch == BatchSettings()


def test_gateways_know_hosts_and_origins() -> None:
    gateway = planned(ClusterConfig(http=HttpSettings(host_names=("a.example",), cors_origins=("*",)))).gateway
    assert gateway is not None
    assert (gateway.host_names, gateway.cors_origins) == (("a.example",), ("*",))


def test_a_public_door_without_keys_lets_no_caller_in() -> None:
    """As where the file of keys is lost while the cluster runs."""
    tls = {"certificate": "/c", "key": "/k"}
    for settings, is_open in (
        ({}, True),
        ({"router": {"host": "0.0.0.0"}, "tls": tls}, False),
        ({"router": {"host": "0.0.0.0"}, "insecure": True}, True),
    ):
        ring = KeyRing(planned(ClusterConfig.load(None, settings)).with_keys(NO_KEYS).router.keys)
        if is_open:
            assert ring.admit([], Scope.GENERATE).tenant == "default"
        else:
            with pytest.raises(Unauthenticated):
                ring.admit([], Scope.GENERATE)


def test_each_bound_of_the_router_is_passed_on() -> None:
    assert {one.name for one in fields(RouterSettings)} == {*BOUNDS, *LISTENERS, "routers", "public_prefixes"}
    config = ClusterConfig.load(None, {"router": {**BOUNDS, "public_prefixes": ["Once upon a time"]}})
    settings = planned(config).router.settings
    assert settings.public_prefixes == ("Once upon a time",)
    assert BOUNDS.items() <= asdict(settings).items()


def test_where_and_how_the_router_listens_is_passed_on() -> None:
    config = ClusterConfig.load(None, {"router": LISTENERS})
    assert LISTENERS.items() <= asdict(planned(config).router.settings).items()


def test_each_bound_of_a_batch_is_passed_on() -> None:
    bounds = {
        "max_step_tokens": 100,
        "max_running": 21,
        "max_chunk_tokens": 22,
        "patience_tokens": 23,
        "max_gap_ms": 24.0,
    }
    config = ClusterConfig.load(None, {"batch": bounds})
    assert asdict(worker_of(planned(config)).batch) == bounds


def test_decode_workers_alone_have_the_draft() -> None:
    model = replace(MODEL, draft=DraftFacts("/resolved", 100, 4096))
    plan = planned(ClusterConfig.load(None, {"speculation": {"draft": "asked"}}), model)
    assert worker_of(plan).speculation.draft == "/resolved"
    assert worker_of(plan, role=Role.PREFILL).speculation.draft is None
    assert worker_of(planned(ClusterConfig())).speculation.draft is None


@pytest.mark.parametrize(
    ("device", "asked_s", "given_s"),
    [("cpu", None, 120.0), ("cuda", None, 30.0), ("cpu", 7.0, 7.0), ("cuda", 7.0, 7.0)],
)
def test_how_long_a_step_may_take_depends_on_the_device(device: str, asked_s: float | None, given_s: float) -> None:
    config = ClusterConfig.load(None, {} if asked_s is None else {"worker": {"max_silence_s": asked_s}})
    plan = planned(config, replace(MODEL, device=device), GPU_MACHINE)
    assert worker_of(plan, replace(HEAD, machine=GPU_MACHINE)).max_silence_s == given_s


@pytest.mark.parametrize(
    ("device", "asked", "max_gap_s", "most"),
    [
        pytest.param("cpu", {}, None, 256, id="a CPU: tokens"),
        pytest.param("cpu", {"max_chunk_tokens": 100}, None, 100, id="a CPU: given tokens"),
        pytest.param("cpu", {"max_gap_ms": 200}, 0.2, 2048, id="a CPU: given time"),
        pytest.param("cuda", {}, 0.05, 2048, id="a GPU: time"),
        pytest.param("cuda", {"max_gap_ms": 20.0}, 0.02, 2048, id="a GPU: given time"),
        pytest.param("cuda", {"max_chunk_tokens": 512}, 0.05, 512, id="a GPU: time, and given tokens"),
    ],
)
def test_what_bounds_chunks_beside_decoding_depends_on_the_device(
    device: str, asked: dict[str, float], max_gap_s: float | None, most: int
) -> None:
    plan = planned(ClusterConfig.load(None, {"batch": asked}), replace(MODEL, device=device), GPU_MACHINE)
    batch = worker_of(plan, replace(HEAD, machine=GPU_MACHINE)).batch
    assert (batch.max_gap_s, batch.most_chunk_tokens) == (max_gap_s, most)


def test_a_lone_node_is_reached_by_no_other() -> None:
    plan = planned(ClusterConfig())
    node, worker = plan.node_config(HEAD), worker_of(plan)
    assert node.arena_path == "/dev/shm/baton-a-12345678.aaaaaaaa"
    assert node.block_address == ""
    assert node.store.cold == (REDIS, FILES)
    assert worker.store == replace(node.store, node_id="aaaaaaaa@10.0.0.1")
    assert worker.server.host == "127.0.0.1"


def test_each_node_of_several_has_its_own_files_sizes_and_address() -> None:
    plan = planned(ClusterConfig.load(None, {"worker": {"decode": {"resources": {"decode": 1}}}}), machine=None)
    head, other = plan.node_config(HEAD), plan.node_config(OTHER)
    assert head.block_address == "10.0.0.1:0"
    assert other.block_address == "10.0.0.2:7"
    assert {head.arena_path, head.store.directory_path}.isdisjoint({other.arena_path, other.store.directory_path})
    assert (head.store.cold, other.store.cold) == ((REDIS, FILES), (FILES,)), "no socket reaches another machine"
    worker = worker_of(plan, OTHER)
    assert worker.store == replace(other.store, node_id="bbbbbbbb@10.0.0.2", block_address="10.0.0.2:7")
    assert worker.server.host == "10.0.0.2"
    assert worker_of(plan, HEAD, Role.PREFILL).server.host == "127.0.0.1"
    assert worker.num_threads == 4, "a prefill worker may come to that node, too"


def test_another_kv_layout_has_files_names_and_sizes_of_its_own_on_a_node() -> None:
    plan = planned(ClusterConfig(), machine=None).under(Authority.make())
    other = replace(plan, model=with_codes(MODEL))
    tag = other.layout_tag
    assert (plan.layout_tag, len(tag)) == ("", 6)
    assert replace(plan, model=with_codes(MODEL, "fp8")).layout_tag not in ("", tag)
    assert replace(other, model=MODEL).layout_tag == ""
    baseline = replace(OTHER, layout_tag=tag)
    node, worker = other.node_config(baseline), worker_of(other, baseline)
    assert node.arena_path == f"/dev/shm/baton-a-12345678.bbbbbbbb.{tag}"
    assert node.store.directory_path == f"/tmp/baton-a-12345678.bbbbbbbb.{tag}/directory.sock"
    assert names_of(node.identity) == [f"node-bbbbbbbb-{tag}", "10.0.0.2"]
    assert worker.store == replace(node.store, node_id=f"bbbbbbbb@10.0.0.2#{tag}", block_address="10.0.0.2:7")
    assert node_name(worker.store.node_id) == OTHER.node.name
    assert node_name(worker_of(plan, OTHER).store.node_id) == OTHER.node.name
    given = replace(other, config=ClusterConfig.load(None, {"arena": {"size_bytes": "1MiB"}}))
    assert given.node_config(baseline).num_slots == (1 << 20) // other.model.served.layout.block_bytes


def test_workers_of_the_head_listen_for_routers_of_another_node_too() -> None:
    standbys = {"router": {"routers": 2}, "ray": {"address": "10.0.0.1:6379", "standby_frontends": True}}
    plan = planned(ClusterConfig.load(None, standbys), machine=None)
    assert worker_of(plan, HEAD).server.host == "10.0.0.1"


def test_settings_of_a_role_win_over_common_ones() -> None:
    tables = {"num_threads": 2, "num_cpus": 1, "resources": {"rack": 1}, "prefill": {"num_threads": 3, "num_cpus": 2.5}}
    plan = planned(ClusterConfig.load(None, {"worker": {**tables, "decode": {"memory_bytes": "1GiB"}}}))
    assert worker_of(plan).num_threads == 2
    assert worker_of(plan, role=Role.PREFILL).num_threads == 3
    assert plan.resources(Role.PREFILL).asked == {"CPU": 2.5, "rack": 1}
    assert plan.resources(Role.DECODE).asked == {"CPU": 1, "memory": 1 << 30, "rack": 1}


def test_a_node_on_which_nothing_fits_is_named() -> None:
    small = replace(OTHER, machine=replace(MACHINE, shared_bytes=0))
    with pytest.raises(ConfigError, match=r"^node bbbbbbbb@10.0.0.2: arena.size_bytes: 0 B is too little"):
        planned(ClusterConfig(), machine=None).node_config(small)


def names_of(identity: Identity | None) -> list[str]:
    assert identity is not None
    certificate = x509.load_pem_x509_certificate(identity.certificate_pem.encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def test_each_process_of_several_nodes_has_a_certificate_for_its_address() -> None:
    plan = planned(ClusterConfig(), machine=None)
    assert plan.wants_tls
    authority = Authority.make()
    encrypted = plan.under(authority)
    identities = [
        encrypted.router.cluster.identity,
        encrypted.node_config(HEAD).identity,
        worker_of(encrypted).server.identity,
        worker_of(encrypted, OTHER).server.identity,
    ]
    assert [names_of(identity) for identity in identities] == [
        ["router", "127.0.0.1"],
        ["node-aaaaaaaa", "10.0.0.1"],
        ["decode-0", "127.0.0.1"],
        ["decode-0", "10.0.0.2"],
    ]
    keys = {authority.key_pem, *(identity.key_pem for identity in identities if identity)}
    assert len(keys) == 5
    assert not any(key in repr((encrypted, identities)) for key in keys)


def test_a_host_that_is_no_address_is_certified_by_its_name() -> None:
    assert names_of(Authority.make().issue("decode-0", "node-2.local")) == ["decode-0", "node-2.local"]


@pytest.mark.parametrize("machine", [MACHINE, None])
def test_one_machine_and_a_plain_network_want_no_certificates(machine: Machine | None) -> None:
    config = ClusterConfig.load(None, {"insecure": True, "ray": {"plain_network": "10.0.0.0/24"}})
    plan = planned(config, machine=machine)
    assert not plan.wants_tls
    assert plan.node_config(OTHER).identity is None


def test_a_node_outside_of_the_plain_network_is_refused() -> None:
    config = ClusterConfig.load(None, {"insecure": True, "ray": {"plain_network": "10.0.0.0/31"}})
    plan = planned(config, machine=None)
    assert plan.node_config(HEAD).block_address == "10.0.0.1:0"
    for host in ("10.0.0.2", "node-2.local"):
        with pytest.raises(ConfigError, match=r"^node bbbbbbbb@\S+ is not in ray.plain_network, which is 10.0.0.0/31"):
            plan.node_config(replace(OTHER, node=replace(OTHER.node, host=host)))


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
