"""The same ids and texts as transformers' AutoTokenizer for the same folder, and no surprise from a bad one."""

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tokenizers
from transformers import AutoTokenizer

from tests.text.backends import (
    byte_fallback,
    byte_fallback_unstripped,
    byte_level,
    metaspace,
    with_bos,
    write_folder,
)
from text import tokenizer as tokenizer_module
from text.byte_tokenizer import ByteTokenizer
from text.token_bound import TokenBound
from text.tokenizer import Tokenizer
from text.tokenizer_protocol import TextCodec, TokenKind
from wire.errors import InvalidRequest, ModelError

BOS_EOS = {"bos_token": "<s>", "eos_token": "</s>"}
TEXTS = [
    "hello world",
    "  hell hello €你😀 ",
    "hello <s> x</s> y <pad><|im_end|> z <|x|><img> <tool> q  <|e|>a",
    "nul \0, controls \x01\x7f\r\n\t, replacement \ufffd",
    "",
]


def declare(content: str, **flags: bool) -> dict[str, Any]:
    unset = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": content, **unset, **flags}


def truncating_and_padding() -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    return backend


FOLDERS: dict[str, tuple[Callable[[], tokenizers.Tokenizer], dict[str, Any]]] = {
    "no special tokens": (byte_level, {}),
    "bos by the post-processor": (lambda: with_bos(byte_level()), BOS_EOS),
    "bos denied by the config": (lambda: with_bos(byte_level()), BOS_EOS | {"add_bos_token": False}),
    "bos claimed by the config": (byte_level, BOS_EOS | {"add_bos_token": True, "add_eos_token": True}),
    "roles that are new tokens": (byte_level, BOS_EOS | {"pad_token": "<pad>", "image_token": "<img>"}),
    "additional special tokens": (
        byte_level,
        {"additional_special_tokens": ["<|x|>", {"__type": "AddedToken", **declare("<|im_end|>")}]},
    ),
    "extra special tokens": (byte_level, {"extra_special_tokens": ["<|x|>"]}),
    "extra special tokens by role": (byte_level, {"extra_special_tokens": {"video_token": "<|x|>"}}),
    "declared tokens": (
        byte_level,
        {
            "added_tokens_decoder": {"341": declare("<|e|>", lstrip=True), "340": declare("<tool>", special=False)},
            "eos_token": "<|e|>",
        },
    ),
    "a piece declared special": (byte_level, {"added_tokens_decoder": {"258": declare("hello")}}),
    "truncation and padding in the file": (truncating_and_padding, {}),
    "llama": (
        lambda: with_bos(byte_fallback()),
        BOS_EOS | {"unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"},
    ),
    "gemma": (byte_fallback_unstripped, BOS_EOS),
    "metaspace": (metaspace, BOS_EOS),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_same_as_transformers(name: str, tmp_path: Path) -> None:
    make, config = FOLDERS[name]
    folder = write_folder(tmp_path, make(), **config)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_special_tokens_and_unknown_ids_are_silent() -> None:
    tokenizer = Tokenizer(byte_level())
    (bos,) = tokenizer.encode("<s>")
    unknown = tokenizer.vocab_size + 5
    assert tokenizer.kind(bos) is tokenizer.kind(unknown) is TokenKind.SILENT
    assert tokenizer.decode([bos, *tokenizer.encode("fox"), unknown]) == "fox"


def test_raw_bytes_are_known_as_such() -> None:
    tokenizer = Tokenizer(byte_fallback())
    space, *smile = tokenizer.encode("😀")
    assert [tokenizer.kind(token_id) for token_id in smile] == [TokenKind.BYTE] * 4
    assert tokenizer.kind(space) is TokenKind.TEXT


@pytest.mark.parametrize("codec", [Tokenizer(byte_level()), ByteTokenizer()])
def test_codecs_agree_on_the_contract(codec: TextCodec) -> None:
    text = "nul \0, 你好 😀\n"
    ids = codec.encode(text)
    assert codec.decode(ids) == text
    assert max(ids) < codec.vocab_size
    assert codec.decode([*ids, codec.vocab_size]) == text
    assert codec.kind(codec.vocab_size) is TokenKind.SILENT
    with pytest.raises(InvalidRequest, match=r"^text: "):
        codec.encode("lone \ud800")


def test_the_whole_vocabulary_is_read_for_the_first_bound_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = Mock(wraps=TokenBound)
    monkeypatch.setattr(tokenizer_module, "TokenBound", bounds)
    backend = byte_level()
    tokenizer = Tokenizer(backend)
    assert tokenizer.definition
    assert tokenizer.decode(tokenizer.encode("fox")) == "fox"
    assert bounds.call_count == 0
    assert [tokenizer.min_tokens("a fox", 9) for _ in range(2)] == [TokenBound(backend).min_tokens("a fox", 9)] * 2
    assert bounds.call_count == 1


def test_other_threads_run_while_it_encodes() -> None:
    """`encode` may take seconds for megabytes; the event loop beside it must go on."""
    tokenizer = Tokenizer(byte_level())
    started = threading.Event()
    text = "hello world " * 50_000
    num_turns = 0

    def encode() -> list[int]:
        started.set()
        return tokenizer.encode(text)

    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(encode)
        assert started.wait(10)
        while not future.done():
            num_turns += 1
            threading.Event().wait(0.001)
    assert tokenizer.decode(future.result()) == text
    assert num_turns > 10


class TestBadFolder:
    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"tokenizer\.json: missing"):
            Tokenizer.load(tmp_path)

    @pytest.mark.parametrize(
        "content",
        [b"", b"{", b"{}", b"[]", b"\xff\xfe", b'{"model": {"type": "BPE", "vocab": 3}}', b"[" * 100_000],
    )
    def test_malformed_definition(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(ModelError, match=r"^tokenizer\.json"):
            Tokenizer.load(tmp_path)

    @pytest.mark.parametrize(
        "config",
        [
            "",
            "[]",
            "[" * 100_000,
            json.dumps({"added_tokens_decoder": ["<a>"]}),
            json.dumps({"added_tokens_decoder": {"x": "<a>"}}),
            json.dumps({"eos_token": {"content": 3}}),
            json.dumps({"extra_special_tokens": [3]}),
        ],
    )
    def test_malformed_config(self, tmp_path: Path, config: str) -> None:
        write_folder(tmp_path, byte_level())
        (tmp_path / "tokenizer_config.json").write_text(config)
        with pytest.raises(ModelError, match=r"^tokenizer_config\.json: malformed"):
            Tokenizer.load(tmp_path)

    def test_too_large(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = write_folder(tmp_path, byte_level())
        size = (folder / "tokenizer.json").stat().st_size
        monkeypatch.setattr(tokenizer_module, "MAX_TOKENIZER_BYTES", size)
        Tokenizer.load(folder)
        monkeypatch.setattr(tokenizer_module, "MAX_TOKENIZER_BYTES", size - 1)
        with pytest.raises(ModelError, match="larger than"):
            Tokenizer.load(folder)

    def test_links_are_followed_but_pipes_and_cycles_are_not_read(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        write_folder(tmp_path / "real", byte_level())
        link = tmp_path / "tokenizer.json"
        link.symlink_to(tmp_path / "real" / "tokenizer.json")
        Tokenizer.load(tmp_path)
        link.unlink()
        link.symlink_to(link)
        with pytest.raises(ModelError, match="cannot be read"):
            Tokenizer.load(tmp_path)
        link.unlink()
        os.mkfifo(link)
        with pytest.raises(ModelError, match="not a regular file"):
            Tokenizer.load(tmp_path)
