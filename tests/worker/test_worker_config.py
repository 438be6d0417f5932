import json
from typing import Any

import pytest

from tests.harness.served import served_model
from wire.errors import ConfigError
from wire.pools import Role
from wire.typed_reader import from_json, to_json
from worker.config import BatchSettings, CheckpointSettings, ServerSettings, StoreSettings, WorkerConfig

CONFIG = WorkerConfig(
    worker_id="prefill-0",
    role=Role.PREFILL,
    model=CheckpointSettings(served_model()),
    num_blocks=64,
    store=StoreSettings("/run/directory", "00" * 32),
    server=ServerSettings(token="secret"),
)


def changed(path: str, value: Any) -> str:
    """The JSON of CONFIG with one value set, or removed if it is `...`."""
    whole = json.loads(to_json(CONFIG))
    *outer, last = path.split(".")
    table = whole
    for name in outer:
        table = table[name]
    if value is ...:
        del table[last]
    else:
        table[last] = value
    return json.dumps(whole)


def test_goes_to_json_and_back() -> None:
    assert from_json(WorkerConfig, to_json(CONFIG), "worker") == CONFIG
    assert CONFIG.model.served.fingerprint == b"\xab" * 32


def test_what_has_a_default_may_be_left_out() -> None:
    assert from_json(WorkerConfig, changed("batch", ...), "worker").batch == BatchSettings()


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("colour", "blue", "worker.colour: unknown"),
        ("batch.colour", "blue", "worker.batch.colour: unknown"),
        ("worker_id", ..., "worker.worker_id: missing"),
        ("model", ..., "worker.model: missing"),
        ("model", 3, "worker.model: must be an object"),
        ("num_blocks", "64", "worker.num_blocks: must be a whole number"),
        ("num_blocks", True, "worker.num_blocks: must be a whole number"),
        ("num_blocks", 0, "worker.num_blocks: must be between 1 and"),
        ("store.mac_key_hex", ..., "worker.store.mac_key_hex: missing"),
        ("store.cold", [{}], "worker.store.cold[0].place: missing"),
        ("store.mac_key_hex", 5, "worker.store.mac_key_hex: must be a text"),
        ("store.mac_key_hex", "00", "worker.store.mac_key_hex: must be 32 bytes"),
        ("store.mac_key_hex", "xx", "worker.store.mac_key_hex: must be 32 bytes in hex digits"),
        ("model.served.fingerprint_hex", "ab", "worker.model.served.fingerprint_hex: must be 32 bytes"),
        ("model.served.fingerprint_hex", "xy" * 32, "worker.model.served.fingerprint_hex: must be 32 bytes"),
        ("model.served.layout_hex", "00", "worker.model.served.layout_hex: must be an encoded layout"),
        ("model.kv_dtype", "int3", "worker.model.kv_dtype must be one of auto, int8, fp8"),
        ("model.served.kv_policies", ["sinks=0+1"], "kv_policy sinks=0+1: wants a sink at least"),
        ("server.port", 1 << 16, "worker.server.port: must be between 0 and 65535"),
        ("server.token", "", "worker.server.token: must not be empty"),
        ("role", "judge", "worker.role: must be one of prefill, decode"),
        ("num_threads", 0, "worker.num_threads: must be between 1 and"),
        ("max_silence_s", 2, "worker.max_silence_s: must be between 3"),
        (
            "batch.max_step_tokens",
            300,
            "batch.max_step_tokens must be at least batch.max_running + batch.max_chunk_tokens, which is 256 if left",
        ),
        ("batch.max_gap_ms", 0, "batch.max_gap_ms must be positive"),
    ],
)
def test_refuses_what_is_wrong_and_names_it(path: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_json(WorkerConfig, changed(path, value), "worker")
    assert raised.value.message.startswith(said)


def test_refuses_what_is_not_json() -> None:
    with pytest.raises(ConfigError):
        from_json(WorkerConfig, "{", "worker")
