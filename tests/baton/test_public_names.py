"""The names that programs import."""

import subprocess
import sys

import baton
from engine.engine import Engine

NAMES = {"AsyncClient", "BatonError", "Chunk", "Client", "Completion", "Engine", "SamplingParams", "errors"}


def test_names_are_pinned() -> None:
    assert set(baton.__all__) == NAMES
    assert len(baton.__all__) == len(NAMES)


def test_every_name_is_there() -> None:
    assert [name for name in NAMES if getattr(baton, name, None) is None] == []
    assert baton.Engine is Engine


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(baton, "Cluster")


def test_importing_baton_loads_neither_torch_nor_ray() -> None:
    script = "import baton, sys; print([name for name in ('torch', 'ray', 'redis', 'engine') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"
