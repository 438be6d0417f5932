import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest

from deploy.plan.byte_size import format_bytes, parse_bytes
from deploy.plan.config import MAX_FILE_BYTES, ClusterConfig
from wire.errors import ConfigError
from wire.rpc import MAX_MESSAGE_BYTES

EXAMPLE = Path("deploy/baton.example.toml")


def test_the_example_holds_the_defaults() -> None:
    assert ClusterConfig.load(EXAMPLE, {}) == ClusterConfig()


def test_the_example_names_every_setting(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    for section in dataclasses.fields(ClusterConfig):
        value = getattr(ClusterConfig(), section.name)
        if dataclasses.is_dataclass(value):
            body = re.search(rf"^\[{section.name}\]\n(.*?)(?=^\[|\Z)", text, re.M | re.S)
            assert body is not None, section.name
            named = re.findall(r"^(?:# )?(\w+) = ", body[1], re.M)
            assert named == [one.name for one in dataclasses.fields(value)]


def test_the_example_loads_with_all_its_settings(tmp_path: Path) -> None:
    file = tmp_path / "all.toml"
    file.write_text(re.sub(r"^# (\w+ = )", r"\1", EXAMPLE.read_text(), flags=re.M))
    config = ClusterConfig.load(file, {"insecure": True})
    assert config.arena.size_bytes == 1 << 30
    assert config.worker.num_gpus == 1.0
    assert config.ray.address == "auto"


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text('[model]\npath = "a"\ndtype = "float16"\n[pools]\nprefill = 3\n')
    config = ClusterConfig.load(file, {"model": {"path": "b"}, "worker": {"pool_bytes": "64MiB"}})
    assert (config.model.path, config.model.dtype) == ("b", "float16")
    assert config.pools.prefill == 3
    assert config.worker.pool_bytes == 64 << 20


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("nmae = 'x'", "nmae: unknown"),
        ("[pools]\nprefil = 1", "pools.prefil: unknown"),
        ("[pools]\nprefill = '1'", "pools.prefill: must be a whole number, not"),
        ("[pools]\nprefill = true", "pools.prefill: must be a whole number, not"),
        ("[pools]\nprefill = -1", "pools.prefill must be between 0 and 64"),
        ("[pools]\ndecode = 0", "pools.decode must be between 1 and 64"),
        ("[slo]\nttft_ms = 500.0", "slo.max_prefill must be given with slo.ttft_ms"),
        ("[slo]\nitl_ms = 0.0\nmax_decode = 2", "slo.itl_ms must be between 0.1 and 100000"),
        ("[slo]\nitl_ms = nan\nmax_decode = 2", "slo.itl_ms must be between 0.1 and 100000"),
        (
            "[slo]\nitl_ms = 50\nmin_decode = 3\nmax_decode = 2",
            "slo.max_decode must be at least slo.min_decode, which is 3, not 2",
        ),
        (
            "[slo]\nitl_ms = 50\nmin_decode = 2\nmax_decode = 3",
            "pools.decode must be between slo.min_decode and slo.max_decode, 2 and 3, not 1",
        ),
        ("[slo]\ndwell_s = 30", "slo.dwell_s must be between 60 and 86400"),
        ("pools = 3", "pools: must be an object"),
        ("name = '../x'", "name must be"),
        ("name = ''", "name must be"),
        ("[model]\nblock_size = 17", "model.block_size must be one of"),
        ("[model]\ndtype = 'int8'", "model.dtype must be one of"),
        ("[model]\nkv_dtype = 'int3'", "model.kv_dtype must be one of auto, int8, fp8, int4"),
        ("[model]\nkv_policy = 'sinks=4'", "kv_policy 'sinks=4': known are full, sinks=4"),
        ("[model]\nallowed_kv_policies = ['h2o']", "kv_policy 'h2o': known are full"),
        ("[model]\nallowed_kv_policies = ['sinks=4+64']", "model.allowed_kv_policies must be without sinks"),
        ("[model]\nkv_policy = 'sinks=4+64'\nallowed_kv_policies = ['h2o=25%']", "must be without sinks"),
        (
            "[model]\nkv_policy = 'sinks=4+60'\n[speculation]\ndraft = 'x'",
            "speculation.draft must be left out with sinks",
        ),
        ("[arena]\nsize_bytes = '1 GB'", "arena.size_bytes must be a size like 512MiB, 1.5GiB or 4096, not '1 GB'"),
        pytest.param(f"[arena]\nsize_bytes = '{'9' * 400}'", "arena.size_bytes must be a size", id="400 digits in it"),
        ("[arena]\nsize_bytes = 1", "arena.size_bytes must be between"),
        ("[arena]\nsize_bytes = '0B'", "arena.size_bytes must be between"),
        ("[redis]\nurl = 'http://x'", "redis.url must be"),
        ("[http]\ngateways = 0", "http.gateways must be between 1 and 16"),
        ("[http]\ngateways = 17", "http.gateways must be between 1 and 16"),
        ("[http]\ngateways = true", "http.gateways: must be a whole number, not True"),
        ("[redis]\nwrite = 'some'", "redis.write must be one of"),
        ("[files]\nwrite = 'none'", "files.write must be one of"),
        ("[files]\nfolder = 'relative'", "files.folder must be an absolute path"),
        ("[files]\nfolder = ''", "files.folder must be text"),
        ("[files]\nmax_bytes = 1", "files.max_bytes must be between"),
        ("secret_file = ''", "secret_file must be text"),
        ("[redis]\ntimeout_ms = 0", "redis.timeout_ms must be between"),
        ("[router]\ngrpc_port = 70000", "router.grpc_port must be between"),
        ("[router]\nmax_buffered_tokens = 0", "router.max_buffered_tokens must be between"),
        ("[router]\nmax_stall_s = 0", "router.max_stall_s must be between"),
        (
            "[router]\nmax_queued_bytes = '1MiB'",  # a longer message would be refused for ever
            f"router.max_queued_bytes must be between {MAX_MESSAGE_BYTES} and {1 << 40}, not {1 << 20}",
        ),
        ("[batch]\nmax_running = 0", "batch.max_running must be positive"),
        ("[batch]\nmax_running = 4000", "batch.max_step_tokens must be at least"),
        ("[speculation]\nproposer = 'oracle'", "speculation.proposer must be one of off, ngram"),
        ("[speculation]\nmax_draft_len = 0", "speculation.max_draft_len must be between 1 and 15"),
        ("[speculation]\nmax_draft_len = 16", "speculation.max_draft_len must be between 1 and 15"),
        ("[speculation]\nmax_draft_len = 'all'", "speculation.max_draft_len: must be a whole number, not 'all'"),
        ("[speculation]\ndraft = ''", "speculation.draft must be text"),
        ("[speculation]\ndraft = 1", "speculation.draft: must be a text, not 1"),
        ("[speculation]\ndraft = '/d'\nproposer = 'ngram'", "speculation.proposer must be off where speculation.draft"),
        ("[worker]\nnum_gpus = 2", "worker.num_gpus must be between"),
        ("[worker]\nmax_silence_s = 0", "worker.max_silence_s must be between 3.0 and"),
        ("[worker]\nnum_threads = 0", "worker.num_threads must be between"),
        ("[worker]\npool_bytes = 0", "worker.pool_bytes must be between"),
        ("[worker]\npool_bytes = true", "worker.pool_bytes: must be a whole number, not True"),
        ("[worker]\nresources = { CPU = 1 }", "worker.resources must be names of letters, digits and ._-, other than"),
        ("[worker]\nresources = { 'a b' = 1 }", "worker.resources must be names of letters"),
        ("[worker.prefill]\nresources = { rack = 0 }", "worker.prefill.resources must be amounts above 0"),
        ("[worker.decode]\nresources = { rack = inf }", "worker.decode.resources must be amounts above 0"),
        ("[worker.decode]\nresources = { rack = 'a' }", "worker.decode.resources.rack: must be a number, not 'a'"),
        ("[worker.decode]\nnum_gpus = 2", "worker.decode.num_gpus must be between"),
        ("[worker.decode]\nmemory_bytes = '1 GB'", "worker.decode.memory_bytes must be a size like"),
        ("[worker.decode]\npool_bytes = 1", "worker.decode.pool_bytes: unknown"),
        ("name = ", "is not TOML"),
        ("[batch]\npatience_tokens = 0x1000000", "batch.patience_tokens must be between 1 and"),
        ('"a\\nb" = 1', r"a\nb: unknown"),
        ("[model]\npath = ''", "model.path must be text without control characters, and not empty: leave it out"),
        ("[model]\npath = '/m\\u0000'".replace("'", '"'), "model.path must be text"),
        ("[model]\ndtype = ''", "model.dtype must be one of"),
        ("[ray]\naddress = ''", "ray.address must be text"),
        ("[redis]\nurl = ''", "redis.url must be text"),
        pytest.param("name = " + "[" * 100_000, "is nested too deeply, or a number in it is", id="nested without end"),
        pytest.param(f"[{'.'.join('a' * 3000)}]", "a: unknown", id="3,000 tables in each other"),
        pytest.param("name = " + "9" * 5000, "is nested too deeply, or a number in it is", id="5,000 digits"),
        pytest.param(
            f"[pools]\ndecode = 0x{'f' * 5000}", "not a number of more than 300 digits", id="5,000 hex digits"
        ),
        pytest.param("#" * (MAX_FILE_BYTES + 1), f"must be a file of at most {MAX_FILE_BYTES} bytes", id="too large"),
        pytest.param(
            "[router]\nmax_stall_s = " + "9" * 400,
            "max_stall_s: must be a number, not a number of",
            id="400 digits",
        ),
        ("[router]\nmax_stall_s = nan", "router.max_stall_s must be between"),
        ("[router]\nmax_stall_s = inf", "router.max_stall_s must be between"),
        ("[router]\nmax_connections = 0", "router.max_connections must be between"),
        ("[router]\nreflection = 1", "router.reflection: must be true or false, not 1"),
        (
            "[router]\nhost = '0.0.0.0'",
            "router.host 0.0.0.0: without TLS, keys, prompts and answers can be read on",
        ),
        ("insecure = true\n[router]\nhost = 'localhost'", "router.host must be an IPv4 address, not 'localhost'"),
        ("[ray]\nplain_network = '10.0.0.0/24'", "ray.plain_network 10.0.0.0/24: KV and tokens cross it unencrypted"),
        ("insecure = true\n[ray]\nplain_network = '10.0.0.1/24'", "ray.plain_network must be like 10.0.0.0/24"),
        ("[router]\nrouters = 0", "router.routers must be between 1 and 16, not 0"),
        (
            "[router]\nrouters = 2\ngrpc_port = 7000\nmetrics_port = 7001",
            "router.metrics_port must be another port than router.grpc_port, of each router, not 7001",
        ),
        (
            "[router]\nrouters = 3\ngrpc_port = 7000\n[http]\nport = 7002",
            "http.port must be another port than those of the router, not 7002",
        ),
        (
            "[router]\nrouters = 2\n[ray]\nstandby_frontends = true",
            "ray.address must be given with ray.standby_frontends",
        ),
        (
            "[ray]\naddress = '10.0.0.1:6379'\nstandby_frontends = true",
            "router.routers must be 2 at least with ray.standby_frontends",
        ),
        (
            "insecure = true\n[router]\nrouters = 2\nhost = '10.0.0.1'\n"
            "[ray]\naddress = 'auto'\nstandby_frontends = true",
            "router.host must be 127.0.0.1 or 0.0.0.0 with ray.standby_frontends",
        ),
        ("[router]\nrouters = 2\ngrpc_port = 65535", "router.routers must be no more than there are ports"),
        ("insecure = 1", "insecure: must be true or false, not 1"),
    ],
)
def test_wrong_settings_are_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(named)):
        ClusterConfig.load(file, {})


def test_ports_are_opened_to_strangers_where_that_is_allowed() -> None:
    opened = {"router": {"host": "0.0.0.0"}, "ray": {"plain_network": "10.0.0.0/24"}}
    config = ClusterConfig.load(None, {"insecure": True, **opened})
    assert (config.router.host, config.ray.plain_network) == ("0.0.0.0", "10.0.0.0/24")
    assert ClusterConfig.load(None, {"router": {"host": "127.0.0.2"}}).router.host == "127.0.0.2"


def test_a_wrong_value_is_told_in_64_characters(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("[pools]\nprefill = " + "9" * 4000)
    with pytest.raises(ConfigError, match=r"pools\.prefill must be between") as raised:
        ClusterConfig.load(file, {})
    assert "9" * 65 not in raised.value.message


@pytest.mark.parametrize("name", ["no\nsuch.toml", "pipe", "folder"])
def test_only_a_regular_file_is_read(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"must be a (regular file|path without control characters)"):
        ClusterConfig.load(tmp_path / name, {})


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "baton.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(str(file))):
        ClusterConfig.load(file, {})


def test_a_password_in_a_wrong_redis_url_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as raised:
        ClusterConfig.load(None, {"redis": {"url": "redsi://:secret@host"}})
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("0", 0), ("4096", 4096), ("1KiB", 1024), ("1.5 MiB", 3 << 19), (" 2GiB ", 2 << 30)]
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text, "worker.pool_bytes") == num_bytes


@pytest.mark.parametrize("text", ["", "-1", "1e3", "1 GB", "MiB", "1MiBx"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text, "worker.pool_bytes")


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1 MiB"), (3 << 29, "1.5 GiB")]
)
def test_sizes_are_shown(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_settings_cannot_be_changed() -> None:
    config: Any = ClusterConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.name = "other"


@pytest.mark.parametrize("port", [0, 9090, "off"])
def test_metrics_have_a_port_or_none(port: int | str) -> None:
    assert ClusterConfig.load(None, {"router": {"metrics_port": port}}).router.metrics_port == port


@pytest.mark.parametrize("port", [-1, 70000, "on", 1.5, True])
def test_a_port_for_metrics_that_is_none(port: object) -> None:
    with pytest.raises(ConfigError, match=r"router\.metrics_port"):
        ClusterConfig.load(None, {"router": {"metrics_port": port}})


ORIGINS = ("https://chat.example.org", "http://localhost:3000", "http://[::1]:8080", "app://obsidian.md", "*")


@pytest.mark.parametrize("origin", ORIGINS)
def test_an_origin_is_taken_as_browsers_write_it(origin: str) -> None:
    assert ClusterConfig.load(None, {"http": {"cors_origins": [origin]}}).http.cors_origins == (origin,)


@pytest.mark.parametrize(
    "origin",
    [
        *("", "null", "chat.example.org", "https://", "https://*.example.org", "https://chat.example.org/"),
        *("https://Chat.example.org", "https://chat.example.org:443", "http://chat.example.org:80"),
        *(
            "http://chat.example.org:0",
            "http://chat.example.org:70000",
            "https://a@chat.example.org",
            "http://a b",
            "**",
        ),
    ],
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"http\.cors_origins must be \* or origins as browsers write them"):
        ClusterConfig.load(None, {"http": {"cors_origins": ["https://chat.example.org", origin]}})


def test_http_and_metrics_may_both_be_off() -> None:
    config = ClusterConfig.load(None, {"router": {"metrics_port": "off"}, "http": {"port": "off"}})
    assert config.http.port == config.router.metrics_port == "off"


@pytest.mark.parametrize(
    ("settings", "port"),
    [
        ({}, 8000),
        ({"router": {"grpc_port": 0}}, 0),
        ({"router": {"grpc_port": 0}, "http": {"port": 8001}}, 8001),
        ({"http": {"port": 0}}, 0),
        ({"http": {"port": "off"}}, None),
    ],
)
def test_http_has_a_port_unless_it_is_off(settings: dict[str, Any], port: int | None) -> None:
    assert ClusterConfig.load(None, settings).http_port == port


@pytest.mark.parametrize("port", [-1, 70000, "on", 1.5, True, 50051])
def test_a_port_for_http_that_is_none(port: object) -> None:
    with pytest.raises(ConfigError, match=r"http\.port"):
        ClusterConfig.load(None, {"http": {"port": port}})
