"""The user's folders: absolute whatever the environment says, private where the user has no home."""

import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.local.state import state_dir
from engine.checkpoint.hub import find_folder
from kernels import user_cache as module
from kernels.accelerator import Cuda
from kernels.cpu.library import NoKernels
from kernels.user_cache import NotOwn, own_folder, user_cache
from wire.errors import ConfigError

Place = Callable[[], Path]
PLACES = pytest.mark.parametrize(("place", "below"), [(user_cache, ".cache/baton"), (state_dir, ".local/state/baton")])


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The private folder of a user whose id has no entry among the users, and who has neither HOME nor XDG variables.

    The working directory is an empty folder.
    """

    def unknown(user_id: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {user_id}")

    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(module, "TEMPORARY", tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / f".baton-{os.getuid()}"


@PLACES
def test_a_user_without_a_home_has_a_private_folder(private: Path, place: Place, below: str) -> None:
    assert place() == private / below
    assert private.stat().st_mode & 0o777 == 0o700
    assert place() == private / below, "made by an earlier process"
    assert not list(Path().iterdir())


@PLACES
@pytest.mark.parametrize("given", ["", "relative", "./here", "~", "~/cache", "~nobody-of-this-name"])
def test_a_relative_path_of_a_variable_counts_for_nothing(
    private: Path, place: Place, below: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, given)
    assert place() == private / below
    for home in ("relative", "~"):
        monkeypatch.setenv("HOME", home)
        assert place() == private / below
    assert not list(Path().iterdir())


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_folder_without_a_home_that_is_open_to_others_is_refused(private: Path, mode: int) -> None:
    private.mkdir()
    private.chmod(mode)
    require_refused(private)


def test_a_link_in_place_of_the_folder_is_refused(private: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    private.symlink_to(tmp_path / "elsewhere")
    require_refused(private)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_another_users_folder_is_refused(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    another = os.getuid() + 1
    private.with_name(f".baton-{another}").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: another)
    require_refused(private.with_name(f".baton-{another}"))


def require_refused(private: Path) -> None:
    with pytest.raises(NotOwn, match="it is not this user's alone: remove it") as caught:
        user_cache()
    assert caught.value.filename == str(private)
    with pytest.raises(ConfigError, match=f"^{private} cannot be read or written .it is not this .*XDG_STATE_HOME"):
        state_dir()


def test_the_hubs_client_finds_a_home(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps models, and a token, in the home."""
    homes: list[str] = []

    def download(*_: object, **__: object) -> str:
        homes.append(os.path.expanduser("~"))
        return str(private)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    find_folder("owner/model")
    assert homes == [str(private)]


def test_what_triton_compiles_is_kept_in_a_cache_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "~/relative")
    Cuda().backend()
    assert knobs.cache.dir == str(tmp_path / "baton" / "triton")
    assert Path(knobs.cache.dir).stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    Cuda().backend()
    assert knobs.cache.dir == str(tmp_path / "own"), "the user's own choice"


def test_a_cache_that_triton_cannot_use_is_told_with_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    own_folder("triton").chmod(0o777)
    with pytest.raises(NoKernels, match=r"cannot be used .*it is not this user's alone.*XDG_CACHE_HOME"):
        Cuda().backend()
