"""The release of this code, as commands and gateways name it to each other."""

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def release() -> str:
    """Returns the installed release, or the source tree's if nothing is installed."""
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return str(tomllib.loads(PROJECT.read_text())["project"]["version"])
