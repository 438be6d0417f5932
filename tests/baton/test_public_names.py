"""The names that programs import."""

import subprocess
import sys

import baton
from engine.engine import Engine
from kv_store.prefix_store import PrefixStore

NAMES = {
    "AsyncClient",
    "BatonError",
    "Chunk",
    "Client",
    "Completion",
    "Engine",
    "KVLayout",
    "PrefixStore",
    "SamplingParams",
    "errors",
    "tiers",
}


def test_names_are_pinned() -> None:
    assert set(baton.__all__) == NAMES
    assert len(baton.__all__) == len(NAMES)


def test_every_name_is_there() -> None:
    assert [name for name in NAMES if getattr(baton, name, None) is None] == []
    assert baton.Engine is Engine
    assert baton.PrefixStore is PrefixStore


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(baton, "Cluster")


def loaded_by(statement: str, *names: str) -> list[str]:
    """Names of modules that a process has loaded after a statement."""
    run = subprocess.run(
        [sys.executable, "-c", f"{statement}; import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return sorted({*names} & {*run.stdout.split()})


def test_importing_baton_loads_neither_torch_nor_ray() -> None:
    assert loaded_by("import baton", "torch", "ray", "redis", "engine", "kv_store", "wire") == ["wire"]


def test_a_store_loads_no_engine_router_or_ray() -> None:
    names = ("ray", "engine", "router", "worker", "deploy", "kv_store")
    assert loaded_by("from baton import PrefixStore", *names) == ["kv_store"]
