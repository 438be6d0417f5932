"""The compiled kernels' place: made once, private to their user, and refused where they may be another's."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.cpu import library
from kernels.cpu.library import ISA_TO_FEATURES, NoKernels, load_library, prebuild

QUICK = """#!/bin/sh
[ "$1" = --version ] && exec echo quick 1
for output; do :; done
exec gcc -shared -o "$output" -x c /dev/null
"""
"""A compiler whose every output, the last argument, is an empty library."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of compiled kernels, with a compiler that takes no time: an empty library."""
    program = tmp_path / "quick"
    program.write_text(QUICK)
    program.chmod(0o755)
    monkeypatch.setattr(library, "COMMON_FLAGS", ())
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "baton" / "kernels"


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


def test_a_library_is_compiled_once_and_only_its_user_can_write_it(folder: Path) -> None:
    load_library("portable")
    [made] = libraries(folder)
    before = made.stat()
    load_library("portable")
    assert libraries(folder) == [made]
    assert made.stat().st_mtime_ns == before.st_mtime_ns
    assert (before.st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o700, 0o700)


def test_processes_that_start_at_once_share_one_compilation(folder: Path) -> None:
    program = "import kernels.cpu.library as it; it.COMMON_FLAGS = (); it.load_library('portable')"
    started = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(4)]
    assert [one.wait(timeout=120) for one in started] == [0] * 4
    assert len(libraries(folder)) == 1


def empty(library: bytes) -> bytes:
    return b""


def cut(library: bytes) -> bytes:
    return library[: len(library) // 2]


def without_its_head(library: bytes) -> bytes:
    return bytes(4) + library[4:]


def flipped_in_its_code(library: bytes) -> bytes:
    middle = len(library) // 2
    return library[:middle] + bytes([library[middle] ^ 1]) + library[middle + 1 :]


def longer(library: bytes) -> bytes:
    return library + b"more"


@pytest.mark.parametrize("damage", [empty, cut, without_its_head, flipped_in_its_code, longer])
def test_a_damaged_library_is_named_and_compiled_again(
    folder: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """Under the name a new file: a worker that runs has the old one mapped."""
    load_library("portable")
    [made] = libraries(folder)
    good, damaged = made.read_bytes(), made.with_name("damaged")
    damaged.write_bytes(damage(good))  # a file of its own, for this process has the good one mapped
    damaged.replace(made)
    inode = made.stat().st_ino
    load_library("portable")
    assert (libraries(folder), made.read_bytes()) == ([made], good)
    assert made.stat().st_ino != inode
    compiling = f"compiling kernels for this machine, once, about a minute ({folder})"
    again = [f"{made} is damaged, and compiled again", compiling]
    assert [record.message for record in caplog.records] == [compiling, *again]
    load_library("portable")
    assert len(caplog.records) == 3


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_file_that_others_may_write_is_refused(folder: Path, mode: int) -> None:
    load_library("portable")
    libraries(folder)[0].chmod(mode)
    with pytest.raises(NoKernels, match="is not this user's alone: remove it"):
        load_library("portable")


def test_a_folder_that_others_may_write_is_refused(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(NoKernels, match="is not this user's alone: remove it"):
        load_library("portable")


def test_a_link_in_place_of_the_library_is_refused(folder: Path, tmp_path: Path) -> None:
    load_library("portable")
    [made] = libraries(folder)
    made.rename(tmp_path / "elsewhere.so")
    made.symlink_to(tmp_path / "elsewhere.so")
    with pytest.raises(NoKernels, match="cannot be used"):
        load_library("portable")


@pytest.mark.parametrize("place", ["cache", "cache/baton/kernels"])
def test_a_cache_that_is_no_folder_is_refused(folder: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("")
    with pytest.raises(NoKernels, match=r"cannot be used .* set XDG_CACHE_HOME to another folder"):
        load_library("portable")


def test_a_compiler_that_fails_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(os.environ["CXX"]).write_text("#!/bin/sh\necho 'no such header' >&2\nexit 1\n")
    with pytest.raises(NoKernels, match="quick failed: no such header"):
        load_library("portable")
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_an_instruction_set_that_the_machine_has_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_features", lambda: {"avx2"})
    with pytest.raises(NoKernels, match="this machine has no avx512: it has portable"):
        load_library("avx512")


def test_another_compiler_is_another_library(folder: Path) -> None:
    load_library("portable")
    program = Path(os.environ["CXX"])
    program.write_text(program.read_text().replace("quick 1", "quick 2"))
    load_library("portable")
    assert len(libraries(folder)) == 2


@pytest.fixture
def prebuilt(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of libraries beside the source; the compiler is gone, and so is the cache, once they are made."""
    monkeypatch.setattr(library, "PREBUILT", tmp_path / "prebuilt")
    prebuild()
    monkeypatch.setattr(library, "COMPILERS", ())
    monkeypatch.delenv("CXX")
    return tmp_path / "prebuilt"


def test_prebuilt_libraries_want_no_compiler_and_no_cache(prebuilt: Path, folder: Path) -> None:
    made = {path.name.partition("-")[0]: path.stat().st_mode & 0o777 for path in libraries(prebuilt)}
    assert made == dict.fromkeys(ISA_TO_FEATURES, 0o755)
    load_library("portable")
    assert not folder.exists()


def test_prebuilt_libraries_of_other_flags_are_not_taken(prebuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "COMMON_FLAGS", ("-O1",))
    with pytest.raises(NoKernels, match="there is no C\\+\\+ compiler"):
        load_library("portable")


def test_a_prebuilt_library_that_cannot_be_loaded_is_named(prebuilt: Path) -> None:
    for path in libraries(prebuilt):
        path.write_bytes(b"none")
    with pytest.raises(NoKernels, match=f"the prebuilt kernels cannot be loaded .*{prebuilt}"):
        load_library("portable")
