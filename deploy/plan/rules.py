"""The rules of single settings: for each the values that it may have, in words that a message ends with."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from ipaddress import IPv4Address, ip_address, ip_network
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deploy.plan.machine import RESERVED
from router.config import METRICS_COMPAT
from text.answer.formats import AUTO, CALL_FORMATS, CHANNELS, OFF
from wire.errors import ConfigError
from wire.layout import KV_DTYPES
from wire.pools import Role
from wire.rpc import MAX_MESSAGE_BYTES
from wire.tier import Write
from wire.typed_reader import shown
from worker.config import MAX_DRAFT_LEN, MIN_SILENCE_S, PROPOSERS, BatchSettings

MIB = 1 << 20
DTYPES = ("auto", "float32", "bfloat16", "float16")
WEIGHTS = ("auto", "int8", "int4")
EXACT = ("auto", "on", "off")
WORKER_TABLES = ("worker", *(f"worker.{role.value}" for role in Role))
TEXTS = (
    *("model.path", "speculation.draft", "model.served_name", "redis.url", "ray.address", "files.folder"),
    *("secret_file", "tls.certificate", "tls.key", "tls.client_ca"),
)
MAX_RESOURCE = 1 << 20
MAX_TEXT_CHARS = 4096
"""The most that a path may have."""
MAX_NAME_CHARS = 256
TEXT = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]+")


@dataclass(frozen=True)
class SettingRule:
    """A check of a setting that is given, and its words. shows: whether the message has the value."""

    holds: Callable[[Any], object]
    what: str
    shows: bool = True

    def require(self, name: str, value: object) -> None:
        """Raises ConfigError for a value that breaks the rule; None breaks none."""
        if value is not None and not self.holds(value):
            given = f", not {shown(value)}" if self.shows and value != "" else ""
            raise ConfigError(f"{name} must be {self.what}{given}")


def _one_of(choices: Iterable[object]) -> SettingRule:
    known = (*choices,)
    return SettingRule(lambda value: value in known, f"one of {', '.join(map(str, known))}")


def _between(least: float, most: float) -> SettingRule:
    """Makes the rule of a number. A setting that is no number is not decided yet, or off."""
    return SettingRule(
        lambda value: not isinstance(value, int | float) or least <= value <= most, f"between {least} and {most}"
    )


def _of_at_most(most: int) -> SettingRule:
    return SettingRule(
        lambda value: all(len(one) <= most for one in _texts_of(value)), f"of at most {most} characters", False
    )


def _texts_of(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [*value]


RANGES: dict[str, tuple[float, float]] = {
    "model.max_chat_tokens": (1, 1 << 20),
    "model.weight_cache_bytes": (0, 1 << 50),
    "pools.prefill": (0, 64),
    "pools.decode": (1, 64),
    "slo.ttft_ms": (1, 1e6),
    "slo.itl_ms": (0.1, 1e5),
    "slo.share": (0.5, 0.999),
    "slo.dwell_s": (60, 86400),
    "slo.min_prefill": (0, 64),
    "slo.max_prefill": (1, 64),
    **{f"slo.{each}_decode": (1, 64) for each in ("min", "max")},
    "worker.pool_bytes": (MIB, 1 << 50),
    **{f"{each}.num_threads": (1, 1024) for each in WORKER_TABLES},
    **{f"{each}.num_gpus": (0, 1) for each in WORKER_TABLES},
    **{f"{each}.num_cpus": (0, 1024) for each in WORKER_TABLES},
    **{f"{each}.memory_bytes": (MIB, 1 << 50) for each in WORKER_TABLES},
    "worker.drain_grace_s": (0, 3600),
    "worker.max_silence_s": (MIN_SILENCE_S, 3600),
    **{f"batch.{each.name}": (1, 1 << 20) for each in fields(BatchSettings)},
    "speculation.max_draft_len": (1, MAX_DRAFT_LEN),
    "arena.size_bytes": (MIB, 1 << 50),
    "arena.max_keep_s": (0, 86400),
    "arena.keep_share": (0, 1),
    "redis.max_bytes": (16 * MIB, 1 << 50),
    "files.max_bytes": (16 * MIB, 1 << 60),
    **{f"{each}.timeout_ms": (1, 10_000) for each in ("redis", "files")},
    **{f"{each}.ttl_s": (1, 1e9) for each in ("redis", "files")},
    **{f"router.{each}_port": (0, 65535) for each in ("grpc", "metrics")},
    "http.port": (0, 65535),
    "http.gateways": (1, 16),
    "router.routers": (1, 16),
    "traces.ratio": (0, 1),
    "router.max_queued_bytes": (MAX_MESSAGE_BYTES, 1 << 40),
    **{f"router.max_{each}": (1, 1 << 20) for each in ("connections", "open_requests", "queued_requests")},
    "router.max_buffered_tokens": (1, 1 << 20),
    **{f"router.{each}_s": (0.1, 86400) for each in ("retry_after", "max_deadline", "max_stall", "max_worker_wait")},
}
"""Least and most of each number."""


def _is_made(make: Callable[[str], object], text: str) -> bool:
    try:
        make(text)
    except ValueError:
        return False
    return True


def _names_a_host(url: str) -> bool:
    """Tells whether a URL names a host and, if any, a valid port. A Unix socket's URL needs no host."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("", "unix") or (bool(parts.hostname) and parts.port != 0)
    except ValueError:
        return False


_IS_TEXT = SettingRule(
    lambda value: all(map(TEXT.fullmatch, _texts_of(value))),
    "text without control characters, and not empty: leave it out for the default",
    shows=False,
)
_PORT_OR_OFF = SettingRule(lambda port: isinstance(port, int) or port == OFF, "a port or `off`")
RULES: tuple[tuple[str, SettingRule], ...] = (
    *((name, _IS_TEXT) for name in TEXTS),
    *((name, _of_at_most(MAX_NAME_CHARS if name == "model.served_name" else MAX_TEXT_CHARS)) for name in TEXTS),
    ("model.dtype", _one_of(DTYPES)),
    ("model.weights", _one_of(WEIGHTS)),
    ("model.exact", _one_of(EXACT)),
    ("model.kv_dtype", _one_of(KV_DTYPES)),
    ("model.block_size", _one_of((8, 16, 32, 64, 128))),
    ("model.generation_config", _one_of((AUTO, OFF))),
    ("model.tool_format", _one_of((AUTO, OFF, *CALL_FORMATS))),
    ("model.reasoning_format", _one_of((AUTO, OFF, *CHANNELS))),
    ("worker.cpu_kernels", _one_of(("auto", "amx", "reproducible", "avx512", "avx2", "portable", "torch"))),
    ("speculation.proposer", _one_of(PROPOSERS)),
    ("router.metrics_compat", _one_of((OFF, *METRICS_COMPAT))),
    ("redis.write", _one_of(Write)),
    ("files.write", _one_of(Write)),
    *((name, _between(*span)) for name, span in RANGES.items()),
    *(
        (f"{name}.resources", rule)
        for name in WORKER_TABLES
        for rule in (
            SettingRule(
                lambda amounts: all(
                    re.fullmatch(r"[A-Za-z0-9._-]{1,64}", key) and key not in RESERVED for key in amounts
                ),
                f"names of letters, digits and ._-, other than {RESERVED}",
                shows=False,
            ),
            SettingRule(
                lambda amounts: all(0 < amount <= MAX_RESOURCE for amount in amounts.values()),
                f"amounts above 0, at most {MAX_RESOURCE}",
                shows=False,
            ),
        )
    ),
    (
        "redis.url",
        SettingRule(
            lambda url: (
                re.fullmatch(r"own|off|rediss?://[^\s/]+(/[0-9]*)?(\?\S*)?|unix://[^\s/]*/\S+", url)
                and _names_a_host(url)
            ),
            "own, off, or a URL: redis://HOST:PORT/DB, rediss://..., unix:///PATH",
            shows=False,  # it may have a password
        ),
    ),
    ("files.folder", SettingRule(lambda folder: Path(folder).is_absolute(), "an absolute path")),
    (
        "ray.address",
        SettingRule(
            lambda address: re.fullmatch(r"auto|[^\s/]+:[0-9]+", address) and _names_a_host(f"ray://{address}"),
            "HOST:PORT or auto (without it, Ray is started)",
        ),
    ),
    (
        "http.cors_origins",
        SettingRule(
            lambda origins: all(
                re.fullmatch(
                    r"\*|(?!http://.*:80$|https://.*:443$)[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?",
                    one,
                )
                and _names_a_host(one)
                for one in origins
            ),
            "* or origins as browsers write them, like https://chat.example.org: lower case, no path, no default port",
        ),
    ),
    (
        "http.host_names",
        SettingRule(
            lambda names: all(map(re.compile(r"[A-Za-z0-9._-]{1,253}").fullmatch, names)), "names without ports"
        ),
    ),
    (
        "traces.endpoint",
        SettingRule(
            lambda url: re.fullmatch(r"https?://[^\s/?#@]+/?", url) and _names_a_host(url),
            "a URL without a path: http://HOST:PORT, https://HOST:PORT",
        ),
    ),
    ("router.host", SettingRule(lambda host: _is_made(IPv4Address, host), "an IPv4 address")),
    ("ray.plain_network", SettingRule(lambda network: _is_made(ip_network, network), "like 10.0.0.0/24")),
    ("router.metrics_port", _PORT_OR_OFF),
    ("http.port", _PORT_OR_OFF),
)


def require_all(settings: object) -> None:
    """Raises ConfigError for the first setting that breaks a rule."""
    for name, rule in RULES:
        rule.require(name, attrgetter(name)(settings))


def range_problem(name: str, value: object) -> str:
    """Returns the reason for which a number may not be a setting, in words; "" for one in range, and for no number."""
    rule = _between(*RANGES[name])
    return "" if rule.holds(value) else f"must be {rule.what}, not {shown(value)}"


def is_within(host: str, network: str) -> bool:
    """Tells whether a host is an address of a network."""
    return _is_made(ip_address, host) and ip_address(host) in ip_network(network)
