"""Tables of settings, as a TOML file and the command line give them."""

from collections.abc import Mapping
from typing import Any

from deploy.plan.byte_size import parse_bytes


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables united; where both have a value, `over` has its way."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merge(below, value)
        merged[key] = value
    return merged


def count_bytes(table: Mapping[str, Any]) -> dict[str, Any]:
    """Turns each text under a name that ends in `_bytes` into a number. Raises ConfigError for what is no size."""
    return {key: _count(key, value) for key, value in table.items()}


def _count(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return count_bytes(value)
    return parse_bytes(value) if key.endswith("_bytes") and isinstance(value, str) else value
