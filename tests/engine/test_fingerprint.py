import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint.fingerprint import DigestCache, fingerprint
from engine.checkpoint.tensor_file import TensorFile
from wire.errors import ModelError


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("config.json", "model.safetensors", "tokenizer.json")]
    for path in paths:
        path.write_bytes(path.name.encode() * 100)
    save_file({"weights": torch.arange(300, dtype=torch.uint8)}, paths[1])
    return paths


@pytest.fixture
def cache(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "cache" / "digests.json")


def kept(cache: DigestCache) -> dict[str, list[object]]:
    return dict(json.loads(cache.path.read_bytes()))


def test_is_the_same_for_the_same_model_wherever_it_stands(
    files: list[Path], cache: DigestCache, tmp_path: Path
) -> None:
    (tmp_path / "copy").mkdir()
    copies = [path.parent / "copy" / path.name for path in files]
    for path, copy in zip(files, copies, strict=True):
        copy.write_bytes(path.read_bytes())
    assert fingerprint(files, "float32", "reference-1", cache) == fingerprint(
        copies[::-1], "float32", "reference-1", cache
    )
    assert len(fingerprint(files, "float32", "reference-1", cache)) == 32


def test_every_part_counts(files: list[Path], cache: DigestCache) -> None:
    prints = {
        fingerprint(files, "float32", "reference-1", cache),
        fingerprint(files, "bfloat16", "reference-1", cache),
        fingerprint(files, "float32", "reference-2", cache),
        fingerprint(files[:-1], "float32", "reference-1", cache),
    }
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content[:-1] + b"!")
        os.utime(path, ns=(0, len(prints)))
        prints.add(fingerprint(files, "float32", "reference-1", cache))
        path.write_bytes(content)
    assert len(prints) == 7


def test_a_file_is_read_once_as_long_as_size_and_time_stay(files: list[Path], cache: DigestCache) -> None:
    """Shown by changing the content behind the cache's back."""
    path, found = files[2], files[2].stat()
    digest = cache.digest(path)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(b"x" * found.st_size)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert DigestCache(cache.path).digest(path) == digest
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 1))
    assert cache.digest(path) == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_with_nan_or_infinity_are_refused_each_time(
    files: list[Path], cache: DigestCache, dtype: torch.dtype, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of the second step in which a tensor is read; the verdict is kept with the digest."""
    tensors = {"a": torch.ones(3, dtype=torch.int8), "b": torch.zeros((1 << 21) + 5, dtype=dtype), "c": torch.ones(0)}
    save_file(tensors, files[1])
    assert cache.digest(files[1]) == hashlib.sha256(files[1].read_bytes()).hexdigest()
    tensors["b"][-1] = value
    save_file(tensors, files[1])
    os.utime(files[1], ns=(0, 7))
    for _ in range(2):
        with pytest.raises(ModelError, match=r"model.safetensors: tensor b has NaN or infinity"):
            fingerprint(files, "float32", "reference-1", cache)
        monkeypatch.setattr(TensorFile, "digest", lambda _: pytest.fail("the file is read again"))


def test_a_digest_of_earlier_times_tells_nothing_of_nan(files: list[Path], cache: DigestCache) -> None:
    """Such an entry has no verdict beside the digest."""
    save_file({"weights": torch.tensor([math.nan])}, files[1])
    found = files[1].stat()
    cache.path.parent.mkdir()
    cache.path.write_text(json.dumps({str(files[1].resolve()): [found.st_size, found.st_mtime_ns, "0" * 64]}))
    with pytest.raises(ModelError, match="NaN"):
        cache.digest(files[1])


def test_links_to_one_file_share_its_digest(files: list[Path], cache: DigestCache) -> None:
    link = files[0].with_name("link")
    link.symlink_to(files[0])
    assert cache.digest(link) == cache.digest(files[0])
    assert list(kept(cache)) == [str(files[0].resolve())]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[1]",
        b"{",
        b'{"%s": 7}',
        b'{"%s": [1, 2]}',
        b'{"%s": [1, 2, "3", 4]}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_cache_costs_only_time(files: list[Path], cache: DigestCache, content: bytes) -> None:
    cache.path.parent.mkdir()
    cache.path.write_bytes(content.replace(b"%s", str(files[0]).encode()))
    expected = hashlib.sha256(files[0].read_bytes()).hexdigest()
    assert cache.digest(files[0]) == expected
    assert kept(cache)[str(files[0])][-2:] == [expected, None]
    assert [path.name for path in cache.path.parent.iterdir()] == [cache.path.name]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_cache_that_is_no_file_costs_only_time(
    files: list[Path], cache: DigestCache, make: Callable[[Path], None]
) -> None:
    cache.path.parent.mkdir()
    make(cache.path)
    assert cache.digest(files[0]) == hashlib.sha256(files[0].read_bytes()).hexdigest()


def test_a_cache_that_cannot_be_written_is_no_error(
    files: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert DigestCache(tmp_path / "file" / "digests.json").digest(files[0])
    assert "cannot be kept" in caplog.text
    assert "set XDG_CACHE_HOME to another folder" in caplog.text


def test_a_missing_file_is_an_error(cache: DigestCache, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is missing"):
        fingerprint([tmp_path / "model.safetensors"], "float32", "reference-1", cache)


def test_the_users_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert DigestCache.of_user().path == tmp_path / "baton" / "digests.json"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for none in ("", "relative", "~nobody-of-this-name"):
        monkeypatch.setenv("XDG_CACHE_HOME", none)
        assert DigestCache.of_user().path == tmp_path / "home" / ".cache" / "baton" / "digests.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert DigestCache.of_user().path == tmp_path / "home" / ".cache" / "baton" / "digests.json"
