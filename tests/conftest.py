import asyncio
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.groups import group_of, is_alone, place_of
from tests.harness.event_loop import LoopPolicy
from tests.pairs import RUNS_ALL, left_out

YIELDING = 10
"""The niceness of tests that neither start clusters nor measure time, where processes run side by side."""

asyncio.set_event_loop_policy(LoopPolicy())

# Kernels run interpreted where there is no GPU. Set here because Triton looks once, when any test first imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


# Drawn cases have no limit of time: a busy machine is no fault. A machine with a GPU may have no such package.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the cases that pairs make up for; one of several processes begins with the longest groups."""
    dropped = set() if RUNS_ALL else set(left_out(items))
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: place_of(item.nodeid))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Lets tests that start clusters or measure time have the processors before tests of other processes."""
    if "PYTEST_XDIST_WORKER" in os.environ and not is_alone(nodeid) and os.nice(0) < YIELDING:
        os.nice(YIELDING - os.nice(0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Makes a process run whole groups (pytest -n 3), unless tests are to be dealt one by one (--dist worksteal)."""
    if config.getvalue("dist") == "worksteal":
        return None
    from xdist.scheduler import LoadScopeScheduling  # here, for a machine with a GPU may have no such package

    class Grouped(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return Grouped(config, log)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis server for all tests that mark themselves `redis`; its keys are everybody's."""
    from tests.harness.redis_process import RedisProcess  # here, for a machine with a GPU may have no redis package

    server = RedisProcess(
        tmp_path_factory.mktemp("redis"), ["--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru"]
    )
    try:
        server.start()
        yield server.url
    finally:
        server.kill()
