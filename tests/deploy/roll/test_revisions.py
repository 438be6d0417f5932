from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.plan.config import ClusterConfig
from deploy.processes.atomic_file import AtomicFile
from deploy.roll.revisions import Revision, Revisions, changes, read_revisions, rolled
from deploy.roll.roll import Roll
from tests.deploy.plan.test_cluster_plan import MODEL, SERVED, planned, worker_of
from tests.kv_store.names import LAYOUT
from wire.errors import ConfigError, Unavailable
from wire.sampling import SamplingParams

PRESENT = Revision(config=ClusterConfig(), model=MODEL)


def in_layout(**changes: Any) -> str:
    """Returns an encoded KV layout that differs in these fields."""
    return replace(LAYOUT, **changes).encode().hex()


def changed(**tables: Any) -> ClusterConfig:
    return ClusterConfig.load(None, tables)


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"worker": {"num_threads": 2, "drain_grace_s": 7, "decode": {"num_cpus": 1.0}}},
        {"batch": {"max_running": 3}, "speculation": {"proposer": "ngram"}},
        {"model": {"path": "/elsewhere", "weight_cache_bytes": 0}},
    ],
)
def test_settings_of_workers_are_rolled(tables: dict[str, Any]) -> None:
    config = changed(**tables)
    version = replace(SERVED, folder="/elsewhere", fingerprint_hex="ab" * 32, sampling=SamplingParams(top_k=3))
    revision = rolled(PRESENT, config, replace(MODEL, served=replace(version, name="elsewhere")))
    assert (revision.config, revision.model.served) == (config, version)


@pytest.mark.parametrize(
    "fields",
    [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"dtype": "bfloat16", "quantization": "int4"}, {"num_layers": 3}],
)
def test_a_model_with_another_kv_layout_of_the_same_block_size_is_rolled(fields: dict[str, Any]) -> None:
    served = replace(SERVED, dtype=fields.get("dtype", "float32"), layout_hex=in_layout(**fields))
    config = changed(model={"dtype": served.dtype})
    assert rolled(PRESENT, config, replace(MODEL, served=served)).model.served == served


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"router": {"grpc_port": 7}}, "router.grpc_port: a roll does not change it: `baton down` and `baton up` do"),
        ({"name": "b"}, "name: a roll does not change it"),
        ({"redis": {"url": "redis://:password@h/0"}}, "redis.url: a roll"),
        ({"arena": {"size_bytes": 1 << 30}}, "arena.size_bytes"),
        ({"secret_file": "/s"}, "secret_file"),
        ({"insecure": True}, "insecure"),
        ({"tls": {"certificate": "/c", "key": "/k"}}, "tls.certificate"),
        ({"pools": {"decode": 3}}, "pools.decode: a roll does not change it: `baton scale` changes it"),
        ({"model": {"served_name": "other"}}, "model.served_name"),
        ({"model": {"max_chat_tokens": 3}}, "model.max_chat_tokens: a roll"),
    ],
)
def test_any_other_setting_is_refused_by_name(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        rolled(PRESENT, changed(**tables), MODEL)
    assert refused.value.message.startswith(words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text_hex": "ab" * 32}, r"the model's tokenizer or chat template \(model.path\): `baton down` and"),
        (
            {"layout_hex": in_layout(block_size=32)},
            r"the model's block size of KV \(model.block_size\): `baton down` and",
        ),
        ({"layout_hex": in_layout(window=8)}, r"the model's attention window \(model.path, model.kv_policy\)"),
        ({"layout_hex": in_layout(window=8, num_sinks=4)}, r"attention window \(.*\) and attention sinks \("),
        ({"max_context_len": 65}, "the model's context:"),
        ({"vocab_size": 7}, r"the model's vocabulary size \(model.path\): `baton down` and"),
        ({"batch_invariant": False}, r"the model's batch invariance \(.*, model.exact, speculation.proposer\):"),
        ({"max_context_len": 65, "vocab_size": 7}, "the model's context and vocabulary size"),
        ({"kv_policies": ("full", "snapkv")}, "the model's KV policies"),
    ],
)
def test_a_model_that_cannot_be_served_beside_the_present_one_is_refused(change: dict[str, Any], words: str) -> None:
    present = replace(PRESENT, model=replace(MODEL, served=replace(SERVED, text_hex="cd" * 32)))
    with pytest.raises(ConfigError, match=words):
        rolled(present, present.config, replace(MODEL, served=replace(SERVED, **change)))


@pytest.mark.parametrize(("was", "now"), [("", "ab" * 32), ("ab" * 32, ""), ("ab" * 32, "ab" * 32)])
def test_a_model_of_a_release_that_did_not_tell_its_text_is_rolled(was: str, now: str) -> None:
    present = replace(PRESENT, model=replace(MODEL, served=replace(SERVED, text_hex=was)))
    revision = rolled(present, changed(worker={"num_threads": 2}), replace(MODEL, served=replace(SERVED, text_hex=now)))
    assert revision.model.served.text_hex == "ab" * 32


def test_changes_name_the_settings() -> None:
    now = Revision(config=changed(worker={"num_threads": 2}, batch={"max_running": 3}), model=MODEL)
    assert changes(PRESENT, now) == "worker.num_threads 2, batch.max_running 3"
    assert changes(PRESENT, PRESENT) == "the same settings"


def test_settings_that_are_not_named_stay_as_they_are(tmp_path: Path) -> None:
    config = changed(worker={"num_threads": 2, "resources": {"a": 1}}, model={"served_name": ["a", "b"]})
    assert config.changed(None, {}) == config
    file = tmp_path / "new.toml"
    file.write_text("[worker]\nnum_threads = 3\npool_bytes = '1MiB'\n[batch]\nmax_running = 5\n")
    now = config.changed(file, {"batch": {"max_running": 6}})
    assert (now.worker.num_threads, now.worker.pool_bytes, now.batch.max_running) == (3, 1 << 20, 6)
    assert replace(now, worker=config.worker, batch=config.batch) == config
    with pytest.raises(ConfigError, match=r"worker.threads: unknown"):
        config.changed(None, {"worker": {"threads": 1}})


def test_each_revision_has_its_plan_and_the_next_controller_finds_them(tmp_path: Path) -> None:
    plan, file = planned(ClusterConfig()), AtomicFile(tmp_path / "revisions.json")
    revisions = Revisions(plan, file)
    assert read_revisions(file) == (Revision(config=plan.config, model=plan.model),)
    new = Revision(config=changed(worker={"num_threads": 2}), model=replace(MODEL, weight_bytes=7), number=4)
    revisions.add(new)
    for known in (revisions, Revisions(plan, file)):
        assert worker_of(known.plan_of(4)).num_threads == 2
        assert (known.plan_of(4).model.weight_bytes, known.plan_of(0)) == (7, plan)
        assert known.recovered == Roll(wanted=0, last=4)
    revisions.keep([4])
    assert Revisions(plan, file).recovered == Roll(wanted=4, last=4)


def test_a_damaged_record_is_that_of_baton_up(tmp_path: Path) -> None:
    plan, file = planned(ClusterConfig()), AtomicFile(tmp_path / "revisions.json")
    file.write(b"{}")
    assert Revisions(plan, file).plan_of(3) == plan
    assert [one.number for one in read_revisions(file)] == [0]


def test_a_revision_that_cannot_be_recorded_is_none(tmp_path: Path) -> None:
    plan = planned(ClusterConfig())
    revisions = Revisions(plan, AtomicFile(tmp_path / "gone" / "revisions.json"))
    other = Revision(config=changed(worker={"num_threads": 2}), model=MODEL, number=1)
    with pytest.raises(Unavailable, match="cannot be written: nothing is rolled"):
        revisions.add(other)
    assert revisions.plan_of(1).config == plan.config
