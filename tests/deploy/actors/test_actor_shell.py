import asyncio
import gc
import os
import pkgutil
from pathlib import Path

import pytest

from deploy.actors import ray_host
from deploy.actors.ray_host import ActorShell
from deploy.processes.process import ProcessRef, recorded, recorded_living
from wire.errors import ConfigError, Unavailable


class Clerk:
    """What a shell is around; refuses the configuration `bad`."""

    num_made = 0

    def __init__(self, config_json: str) -> None:
        Clerk.num_made += 1
        if config_json == "bad":
            raise ConfigError("no")

    async def start(self) -> str:
        await asyncio.sleep(0)
        return f"number {Clerk.num_made}"

    async def add(self, one: int, other: int) -> str:
        return str(one + other)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ActorShell:
    monkeypatch.setattr(Clerk, "num_made", 0)
    monkeypatch.setattr(ray_host, "start_logging", lambda _name: None)  # which is that of the whole process
    monkeypatch.setattr(gc, "freeze", lambda: None)  # likewise
    return ActorShell("clerk", f"{__name__}:Clerk", str(tmp_path))


async def test_its_process_is_written_down(shell: ActorShell, tmp_path: Path) -> None:
    process = recorded(tmp_path, "clerk")
    assert process == ProcessRef.of(os.getpid())
    assert recorded_living(tmp_path) == [process]
    assert recorded(tmp_path, "another") is None


@pytest.mark.usefixtures("shell")
def test_garbage_is_looked_for_again_once_all_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    was_enabled = []
    monkeypatch.setattr(pkgutil, "resolve_name", lambda _target: was_enabled.append(gc.isenabled()))
    ActorShell("clerk", f"{__name__}:Clerk", str(tmp_path))
    assert (was_enabled, gc.isenabled()) == ([False], True)


async def test_calls_are_passed_on_once_it_has_started(shell: ActorShell) -> None:
    with pytest.raises(Unavailable):
        await shell.call("add", 1, 2)
    await shell.start("")
    assert await shell.call("add", 1, 2) == "3"


async def test_a_second_start_gets_the_first_answer(shell: ActorShell) -> None:
    both = await asyncio.gather(shell.start(""), shell.start(""))
    assert [*both, await shell.start("")] == ["number 1"] * 3


async def test_a_start_that_is_given_up_goes_on_for_the_next_caller(shell: ActorShell) -> None:
    impatient = asyncio.create_task(shell.start(""))
    await asyncio.sleep(0)
    impatient.cancel()
    assert await shell.start("") == "number 1"


async def test_a_start_that_failed_fails_again(shell: ActorShell) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError):
            await shell.start("bad")
    assert Clerk.num_made == 1
