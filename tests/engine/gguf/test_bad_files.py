"""GGUF files that lie: refused with file, tensor and reason, before memory is taken for them."""

import json
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deploy.plan.model import require_folders
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.gguf import TABLE_FILE
from engine.checkpoint.gguf.blocks import TYPES
from engine.checkpoint.gguf.conversion import convert
from engine.checkpoint.gguf.header import Header
from engine.checkpoint.hub import find_folder
from engine.model.weights import check_weights
from tests.engine.gguf.files import make_gguf, write_gguf
from tests.harness.checkpoints import VOCAB_SIZE
from wire.errors import ModelError

EMBEDDING = np.zeros((VOCAB_SIZE, 256), np.float32).view(np.uint8)
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
    "vocab_size": VOCAB_SIZE,
}
TOKENS = [f"t{index}" for index in range(VOCAB_SIZE)]


def converted(folder: Path, path: Path) -> Checkpoint:
    convert(folder, [path])
    return Checkpoint(folder)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def file_of(entries: list[bytes], tensors: list[bytes], data_bytes: int = 0, magic: bytes = b"GGUF\3\0\0\0") -> bytes:
    head = magic + struct.pack("<QQ", len(tensors), len(entries)) + b"".join([*entries, *tensors])
    return head + bytes(-len(head) % 32 + data_bytes) if tensors else head


COUNTS = struct.pack("<QQ", 0, 1)
V3 = b"GGUF\3\0\0\0"
TWO = (tensor("a", (8,), 0, 0), tensor("b", (8,), 0, 32))
LIES = {
    "another format": (b"PK\3\4" + bytes(99), "not a GGUF file"),
    "an old version": (b"GGUF\1\0\0\0" + bytes(99), "version 1 is not supported"),
    "big-endian": (b"GGUF\0\0\0\3" + bytes(99), "version 50331648 is not supported"),
    "an empty file": (b"", "ends amid the magic"),
    "a magic alone": (V3, "ends amid the tensors"),
    "2^60 tensors": (V3 + struct.pack("<QQ", 1 << 60, 0), "the tensors: a count of 1152921504606846976"),
    "2^60 entries": (V3 + struct.pack("<QQ", 0, 1 << 60), "the metadata: a count of 1152921504606846976"),
    "more entries than bytes": (V3 + struct.pack("<QQ", 0, 4000), "the metadata: a count of 4000"),
    "a key of 2^40 bytes": (V3 + COUNTS + struct.pack("<Q", 1 << 40) + bytes(99), "a key: a string of 1099511627776"),
    "a string of 2^40 bytes": (
        file_of([entry("k", 8, struct.pack("<Q", 1 << 40))], []),
        "k: a string of 1099511627776",
    ),
    "an array of 2^60": (file_of([entry("k", 9, struct.pack("<IQ", 4, 1 << 60))], []), "k: a count of 11529215046068"),
    "200,000 numbers in 113 bytes": (
        file_of([entry("k", 9, struct.pack("<IQ", 4, 200_000) + bytes(40))], []),
        "k: a count of 200000",
    ),
    "an array of arrays": (file_of([entry("k", 9, struct.pack("<IQ", 9, 1))], []), "k is an array of the type 9"),
    "an unknown kind of value": (file_of([entry("k", 99, bytes(8))], []), "k has the unknown type 99"),
    "text that is not UTF-8": (file_of([entry("k", 8, struct.pack("<Q", 2) + b"\xff\xfe")], []), "k: a string that is"),
    "a key twice": (file_of([entry("k", 0, b"\1")] * 2, []), "the key k occurs twice"),
    "a tensor twice": (file_of([], [TWO[0], tensor("a", (8,), 0, 32)], 64), "the tensor a occurs twice"),
    "an unknown type": (file_of([], [tensor("a", (8,), 99, 0)], 32), "tensor a has type 99, which is not supported"),
    "a type not served": (file_of([], [tensor("a", (256,), 10, 0)], 84), "tensor a has type Q2_K, which is not supp"),
    "no dimensions": (file_of([], [tensor("a", (), 0, 0)], 32), "tensor a has 0 dimensions"),
    "five dimensions": (file_of([], [tensor("a", (1,) * 5, 0, 0)], 32), "tensor a has 5 dimensions"),
    "an empty tensor": (file_of([], [tensor("a", (8, 0), 0, 0)], 32), r"tensor a has sizes \[8, 0\]"),
    "rows that are no blocks": (file_of([], [tensor("a", (2, 33), 8, 0)], 96), r"tensor a has sizes \[2, 33\]: rows"),
    "2^40 rows": (file_of([], [tensor("a", (1 << 40, 32), 8, 0)], 96), r"tensor a has sizes \[1099511627776, 32\]"),
    "more than the file has": (
        file_of([], [tensor("a", (1 << 20, 256), 0, 0)], 96),
        "tensor a ends at 1073741920, the",
    ),
    "overlapping tensors": (file_of([], [TWO[0], tensor("b", (8,), 0, 0)], 64), "tensor b is at 0, expected 32"),
    "a gap between tensors": (file_of([], [TWO[0], tensor("b", (8,), 0, 64)], 96), "tensor b is at 64, expected 32"),
    "an offset of 2^63": (file_of([], [tensor("a", (8,), 0, 1 << 63)], 32), "tensor a is at 9223372036854775808"),
    "an offset off the alignment": (file_of([], [TWO[0], tensor("b", (8,), 0, 40)], 96), "tensor b is at 40, expected"),
    "a truncated tensor": (file_of([], list(TWO), 63), "tensor b ends at 160, the file at 159"),
    "a padded file": (file_of([], list(TWO), 65), "1 bytes follow the last tensor"),
    "an alignment of 3": (file_of([entry("general.alignment", 4, struct.pack("<I", 3))], []), "general.alignment is 3"),
    "an alignment in words": (
        file_of([entry("general.alignment", 8, text("32"))], []),
        "general.alignment is 32, expected",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused_and_takes_no_memory(lie: str, tmp_path: Path) -> None:
    content, reason = LIES[lie]
    (tmp_path / "model.gguf").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=rf"^model\.gguf: .*{reason}"):
            Header.read(tmp_path / "model.gguf")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_tensors_in_any_order_of_the_table_are_read(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(file_of([], list(reversed(TWO)), 64))
    assert {name: one.offset for name, one in Header.read(tmp_path / "model.gguf").tensors.items()} == {
        "a": 96,
        "b": 128,
    }


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], "t3"]}, "model.gguf: the tokenizer has the token 't3' twice"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer: ggml.token_type is .*, expected a type for each of 0 tokens"),
        ({"tokenizer.ggml.token_type": [1] * 3}, "expected a type for each of 256 tokens"),
        ({"tokenizer.ggml.token_type": ["a"] * 256}, "ggml.token_type is .*, expected an array of int"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "ggml.merges is .*, expected two parts in each merge"),
        ({"tokenizer.ggml.eos_token_id": 256}, "ggml.eos_token_id is 256, expected a token id below 256"),
        ({"tokenizer.ggml.model": "bert"}, "ggml.model is bert, expected gpt2 or llama"),
        ({"tokenizer.ggml.model": "llama"}, "ggml.scores is missing, expected a score for each of 256 tokens"),
        ({"tokenizer.ggml.pre": "from-tomorrow"}, "ggml.pre is from-tomorrow, expected one of chatglm-bpe"),
        ({"llama.attention.head_count": None}, "llama: attention.head_count is missing"),
        ({"llama.attention.head_count": [4, 4]}, r"llama: attention.head_count is \[4, 4\], expected an integer"),
        ({"llama.rope.dimension_count": 32}, "rope.dimension_count is 32, expected 64, the whole head"),
        ({"llama.attention.value_length": 32}, "attention.value_length is 32, expected 64, the length of keys"),
        ({"llama.block_count": 1 << 20}, "num_hidden_layers is 1048576, expected an integer from 1 to 1024"),
        ({"llama.context_length": 1}, "max_position_embeddings is 1, expected an integer from 16"),
        (
            {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
            "rope.scaling.type is longrope, expected rope_factors_short.weight and rope_factors_long.weight beside it",
        ),
        ({"llama.rope.scaling.attn_factor": 2.0}, "rope.scaling.attn_factor is 2.0, expected 1"),
        ({"split.count": 2}, "model.gguf: says that it is part 0 of 2, counted from 0; expected 0 of 1"),
    ],
)
def test_metadata_that_cannot_be_served_are_refused_by_key(
    metadata: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", CONFIG, {"token_embd.weight": (EMBEDDING, "F32")}, metadata=metadata)
    (tmp_path / "made").mkdir()
    with pytest.raises(ModelError, match=reason):
        converted(tmp_path / "made", tmp_path / "model.gguf")


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_type_scales_linearly(key: str, tmp_path: Path) -> None:
    metadata = {f"llama.{key}": 8.0}
    write_gguf(tmp_path / "model.gguf", CONFIG, {"token_embd.weight": (EMBEDDING, "F32")}, metadata=metadata)
    convert(tmp_path, [tmp_path / "model.gguf"])
    rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    assert rope == {"rope_theta": 10_000.0, "rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize("kinds", [("short", "long"), ("long", "short")])
def test_one_tensor_of_longrope_without_the_other_is_refused(kinds: tuple[str, str], tmp_path: Path) -> None:
    given, missing = (f"rope_factors_{kind}.weight" for kind in kinds)
    factors = np.ones(32, np.float32).view(np.uint8)
    write_gguf(tmp_path / "model.gguf", CONFIG, {"token_embd.weight": (EMBEDDING, "F32"), given: (factors, "F32")})
    with pytest.raises(ModelError, match=f"the tensor {missing} is missing"):
        convert(tmp_path, [tmp_path / "model.gguf"])


MIXTURE = {"llama.expert_count": 4, "llama.expert_used_count": 2}


@pytest.mark.parametrize(
    ("config", "metadata", "num_experts", "reason"),
    [
        ("llama", MIXTURE, 3, r"tensor blk\.0\.ffn_up_exps\.weight has shape \[3, 8, 256\], expected 4 experts first"),
        (
            "llama",
            MIXTURE | {"llama.expert_used_count": 5},
            4,
            "num_experts_per_tok is 5, expected an integer from 1 to 4",
        ),
        ("llama", {"llama.expert_count": 4}, 4, "llama: expert_used_count is missing"),
        (
            "llama",
            MIXTURE | {"llama.expert_shared_count": 1},
            4,
            "expert_shared_count is 1, expected none: shared experts",
        ),
        ("qwen3", {"qwen3.expert_count": 4}, 4, "qwen3: expert_count is 4, expected none"),
        ("qwen3_moe", {"qwen3moe.expert_count": 0, "qwen3moe.expert_used_count": 1}, 4, "expert_count is 0"),
    ],
)
def test_experts_that_do_not_fit_are_refused(
    config: str, metadata: dict[str, Any], num_experts: int, reason: str, tmp_path: Path
) -> None:
    tensors = {
        "token_embd.weight": (EMBEDDING, "F32"),
        "blk.0.ffn_up_exps.weight": (np.zeros((num_experts, 8, 1024), np.uint8), "F32"),
    }
    write_gguf(tmp_path / "model.gguf", CONFIG | {"model_type": config}, tensors, metadata=metadata)
    with pytest.raises(ModelError, match=reason):
        converted(tmp_path, tmp_path / "model.gguf")


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": (EMBEDDING, "F32"), "model.embed_tokens.weight": (EMBEDDING, "F32")}
    write_gguf(tmp_path / "model.gguf", CONFIG, tensors)
    with pytest.raises(ModelError, match=r"two tensors are model\.embed_tokens\.weight"):
        convert(tmp_path, [tmp_path / "model.gguf"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"type": "Q9"}, "type is Q9"),
        ({"shape": ["a"]}, "expected numbers above 0"),
        ({"shape": [1 << 40, 256]}, "expected whole blocks of whole heads within the file"),
        ({"offset": -5}, "offset is -5"),
        ({"file": -1}, "file is -1"),
        ({"heads": 3}, "expected whole blocks of whole heads within the file"),
    ],
)
def test_a_table_that_lies_is_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", CONFIG, {"token_embd.weight": (EMBEDDING, "F32")})
    convert(tmp_path, [tmp_path / "model.gguf"])
    table = json.loads((tmp_path / TABLE_FILE).read_text())
    table["tensors"]["model.embed_tokens.weight"] |= change
    (tmp_path / TABLE_FILE).write_text(json.dumps(table))
    with pytest.raises(ModelError, match=reason):
        Checkpoint(tmp_path)


def test_a_table_names_gguf_files_alone(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", CONFIG, {"token_embd.weight": (EMBEDDING, "F32")})
    convert(tmp_path, [tmp_path / "model.gguf"])
    (tmp_path / "passwd").write_text("root:x:0:0\n")
    table = (tmp_path / TABLE_FILE).read_text().replace("model.gguf", "passwd")
    (tmp_path / TABLE_FILE).write_text(table)
    with pytest.raises(ModelError, match="passwd: not a GGUF file"):
        Checkpoint(tmp_path)


def test_an_architecture_that_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    config = CONFIG | {"model_type": "mamba2"}
    write_gguf(tmp_path / "model.gguf", config, {"token_embd.weight": (EMBEDDING, "F32")})
    with pytest.raises(ModelError, match="architecture mamba2 is not supported; supported: llama, qwen2, qwen3"):
        convert(tmp_path, [tmp_path / "model.gguf"])


@pytest.mark.parametrize("kind", TYPES)
def test_a_number_that_is_none_is_refused_by_tensor(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_gguf(tmp_path, kind)
    place = Header.read(path).tensors["blk.1.ffn_up.weight"]
    nan = {"float32": b"\0\0\xc0\x7f", "bfloat16": b"\xc0\x7f"}.get(place.kind.dtype or "", b"\0\x7e")
    nan = b"\xff" if kind == "MXFP4" else nan  # its exponents are bytes
    with path.open("r+b") as file:
        file.seek(place.offset + place.num_bytes - place.kind.bytes + max(place.kind.halves, default=0))
        file.write(nan)
    with pytest.raises(ModelError, match=r"model\.gguf: tensor blk\.1\.ffn_up\.weight has NaN or infinity"):
        find_folder(str(path))
    assert not list((tmp_path / "cache" / "baton" / "models").iterdir())


def test_tensors_that_are_missing_or_left_over_are_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", CONFIG, {"token_embd.weight": (EMBEDDING, "F32")})
    convert(tmp_path, [tmp_path / "model.gguf"])
    with pytest.raises(ModelError, match=r"the weights lack the tensor model\.layers\.0\.input_layernorm\.weight"):
        check_weights(Checkpoint(tmp_path))
    path = make_gguf(tmp_path / "other", "Q8_0")
    config = json.loads((tmp_path / "other" / "plain" / "config.json").read_text())
    tensors = Header.read(path).tensors.items()
    stored = {name: (np.zeros((*one.shape[:-1], one.row_bytes), np.uint8), one.kind.name) for name, one in tensors}
    write_gguf(path, config, stored | {"blk.0.attn_rot_embd.weight": (EMBEDDING, "F32")})
    convert(tmp_path / "other", [path])
    with pytest.raises(ModelError, match=r"model\.layers\.0\.attn_rot_embd\.weight, which is no part of the model"):
        check_weights(Checkpoint(tmp_path / "other"))


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_missing_part_is_named(missing: int, tmp_path: Path) -> None:
    make_gguf(tmp_path, "Q8_0", num_parts=3)
    (tmp_path / f"model-0000{missing}-of-00003.gguf").unlink()
    other = tmp_path / f"model-0000{missing % 3 + 1}-of-00003.gguf"
    with pytest.raises(ModelError, match=f"model-0000{missing}-of-00003.gguf is missing"):
        find_folder(str(other))


def test_a_part_of_another_place_is_refused(tmp_path: Path) -> None:
    make_gguf(tmp_path, "Q8_0", num_parts=2)
    parts = [tmp_path / f"model-0000{part}-of-00002.gguf" for part in (1, 2)]
    with pytest.raises(ModelError, match="says that it is part 1 of 2, counted from 0; expected 0 of 2"):
        convert(tmp_path, parts[::-1])
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(ModelError, match="says that it is part 0 of 2, counted from 0; expected 1 of 2"):
        convert(tmp_path, parts)


def test_a_file_that_is_cut_while_it_is_served_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_gguf(tmp_path, "Q8_0")
    checkpoint, place = Checkpoint(find_folder(str(path))), Header.read(path).tensors["blk.0.ffn_up.weight"]
    path.write_bytes(path.read_bytes()[: place.offset + 1])
    with pytest.raises(ModelError, match=r"model\.gguf ended while model\.layers\.0\.mlp\.up_proj\.weight was being"):
        checkpoint.read("model.layers.0.mlp.up_proj.weight", (512, 256), torch.float32, torch.device("cpu"))


def test_a_process_that_dies_of_a_file_leaves_a_sentence_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_gguf(tmp_path, "Q8_0")
    monkeypatch.setattr("engine.checkpoint.gguf.folder.CONVERSION", "no.such.module")
    with pytest.raises(ModelError, match=r"model\.gguf: the process that read it ended: .*no\.such|No module named"):
        find_folder(str(path))
    assert not list((tmp_path / "cache" / "baton" / "models").iterdir())


def test_a_cache_that_takes_no_folder_is_told_with_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "baton").mkdir(parents=True)
    (tmp_path / "cache" / "baton" / "models").touch()
    path = make_gguf(tmp_path, "Q8_0")
    with pytest.raises(
        ModelError, match=r"model\.gguf: its folder cannot be written: .* set XDG_CACHE_HOME to another"
    ):
        find_folder(str(path))


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors", "config.json", "notes"])
def test_a_file_of_another_kind_is_refused_before_it_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.checkpoint.fingerprint._digest", lambda *_: pytest.fail("read"))
    (tmp_path / name).write_text("{}")
    for look in (find_folder, lambda path: require_folders(path, None)):
        with pytest.raises(ModelError, match=f"^{name}: not a GGUF file"):
            look(str(tmp_path / name))


@pytest.mark.parametrize("seed", range(4))
def test_damaged_headers_are_served_or_refused_and_nothing_else(seed: int, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", CONFIG, {"token_embd.weight": (EMBEDDING, "F32")})
    whole, draw, refused = (tmp_path / "model.gguf").read_bytes(), random.Random(seed), 0
    end = Header.read(tmp_path / "model.gguf").tensors["token_embd.weight"].offset
    for _ in range(100):
        damaged, at = bytearray(whole), draw.randrange(end)
        damage = draw.choice((bytes([draw.randrange(256)]), draw.randbytes(8), b"\0\0\0\0", b"\xff\xff\xff\xff"))
        damaged[at : at + len(damage)] = damage
        (tmp_path / "model.gguf").write_bytes(damaged[: draw.choice((len(damaged), draw.randrange(len(damaged))))])
        try:
            convert(tmp_path, [tmp_path / "model.gguf"])
        except ModelError:
            refused += 1
    assert refused > 20
