"""Sizes in bytes, as people write them."""

import re

from wire.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL_UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([KMGT]iB|B|)")
_DECIMAL_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([kMGT]B)")


def parse_bytes(text: str, name: str) -> int:
    """Reads a setting such as `1GiB`, `512 MiB` or `4096`. Raises ConfigError, with the text, for anything else."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{name} must be a size like 512MiB, 1.5GiB or 4096, not {text[:64]!r}")
    number, unit = found.groups()
    return int(float(number) * _UNITS[unit])


def parse_any_bytes(text: str, name: str) -> int:
    """Reads a size as `parse_bytes` does, or in decimal units, such as a GPU's `80GB`."""
    found = _DECIMAL_SIZE.fullmatch(text.strip())
    return int(float(found[1]) * _DECIMAL_UNITS[found[2]]) if found else parse_bytes(text, name)


def format_bytes(num_bytes: int) -> str:
    """Writes a size with four digits, in the largest unit with a whole part."""
    unit = max((unit for unit in _UNITS if unit and _UNITS[unit] <= max(num_bytes, 1)), key=_UNITS.__getitem__)
    return f"{num_bytes / _UNITS[unit]:.4g} {unit}"
