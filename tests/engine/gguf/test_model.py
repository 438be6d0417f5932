"""A GGUF model is served as the plain checkpoint of its dequantized weights."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deploy.plan.config import ModelSettings
from deploy.plan.model import inspect_model, require_folders
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.config import ModelConfig
from engine.checkpoint.gguf import TABLE_FILE, folder
from engine.checkpoint.gguf.blocks import TYPES
from engine.checkpoint.hub import find_folder
from engine.engine import Engine
from engine.model.decoder import Decoder
from tests.engine.gguf.files import SHAPE, llama3_divisors, make_gguf, write_gguf
from tests.harness.checkpoints import ARCHITECTURES, VOCAB_SIZE, choose_prompt, make_checkpoint
from tests.harness.model_alone import generate
from tests.kernels.backends import lend_kernels
from text.template.template_processes import Template
from wire.errors import ModelError
from wire.sampling import SamplingParams

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lend_kernels(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def require_same_weights(found: Path, plain: Path) -> None:
    checkpoint, expected = Checkpoint(found), load_file(plain / "model.safetensors")
    for name, weight in expected.items():
        assert torch.equal(checkpoint.read(name, tuple(weight.shape), torch.float32, CPU), weight), name
        rounded = checkpoint.read(name, tuple(weight.shape), torch.bfloat16, CPU)
        assert torch.equal(rounded, weight.bfloat16()), name
    assert not checkpoint.unread


@pytest.mark.parametrize("kind", TYPES)
def test_each_type_is_what_the_gguf_package_dequantizes_and_answers_as_transformers(kind: str, tmp_path: Path) -> None:
    found = find_folder(str(make_gguf(tmp_path, kind)))
    require_same_weights(found, tmp_path / "plain")
    chosen = choose_prompt(tmp_path / "plain", 40, num_tokens=24)
    model = Decoder.load(found, "float32", CPU, block_size=16)
    assert generate(model, [chosen.prompt_ids], 24) == [list(chosen.token_ids)]


@pytest.mark.parametrize(
    "arch", ["llama-mha", "llama-mqa", "llama-tied", "llama-linear", "llama-yarn", "qwen2", "qwen3"]
)
def test_an_architecture_is_configured_as_its_checkpoint(arch: str, tmp_path: Path) -> None:
    windows = {"use_sliding_window": False} if arch == "qwen2" else {}
    size = {"head_dim": 64} if arch == "llama-mqa" else {}
    kv_heads = {"num_key_value_heads": ARCHITECTURES[arch][1].get("num_key_value_heads", 2)}
    found = find_folder(str(make_gguf(tmp_path, "Q8_0", arch, **kv_heads, **size, **windows)))
    require_same_weights(found, tmp_path / "plain")
    ours, theirs = (
        ModelConfig.parse(json.loads((one / "config.json").read_text()) | {"dtype": "float32", "eos_token_id": None})
        for one in (found, tmp_path / "plain")
    )
    assert ours == theirs


ROTATED_PART = {"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}
NEWER: dict[str, dict[str, Any]] = {
    "phi3": {},
    "phi3-part": {
        "rope_parameters": ROTATED_PART | {"short_factor": [1.0 + n / 8 for n in range(24)], "long_factor": [4.0] * 24}
    },
    "granite": {},
    "smollm3": {"no_rope_layer_interval": 4},
    "olmo2": {},
    "glm4": {"head_dim": 64, "attention_bias": True},
}
"""Architectures whose tensors and keys have other names than Llama's, with the sizes that files want."""


@pytest.mark.parametrize("arch", NEWER)
def test_newer_architectures_are_configured_and_answer_as_their_checkpoints(arch: str, tmp_path: Path) -> None:
    found = find_folder(str(make_gguf(tmp_path, "Q8_0", arch, **NEWER[arch])))
    plain = tmp_path / "plain"
    require_same_weights(found, plain)
    ours, theirs = (
        ModelConfig.parse(json.loads((one / "config.json").read_text()) | {"dtype": "float32", "eos_token_id": None})
        for one in (found, plain)
    )
    for rope, expected in zip(ours.ropes, theirs.ropes, strict=True):
        assert torch.equal(rope.frequencies(64), expected.frequencies(64))
        torch.testing.assert_close(rope.factors(64), expected.factors(64), rtol=1e-7, atol=0)
    assert replace(ours, layer_ropes=theirs.layer_ropes) == theirs
    chosen = choose_prompt(plain, 40, num_tokens=24)
    model = Decoder.load(found, "float32", CPU, block_size=16)
    assert generate(model, [chosen.prompt_ids], 24) == [list(chosen.token_ids)]


@pytest.mark.pairs(1)
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "MXFP4", "BF16"])
@pytest.mark.parametrize("arch", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_stacked_experts_are_the_experts_of_their_checkpoint(arch: str, kind: str, tmp_path: Path) -> None:
    """As configurations, weights and tokens; files of Qwen3-MoE have normed shares and no dense layers."""
    settings: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    if arch == "qwen3-moe":
        settings |= {"mlp_only_layers": [], "norm_topk_prob": True}
    path, plain = make_gguf(tmp_path, kind, arch, **settings), tmp_path / "plain"
    found = find_folder(str(path))
    ours, theirs = (
        ModelConfig.parse(json.loads((one / "config.json").read_text()) | {"dtype": "float32", "eos_token_id": None})
        for one in (found, plain)
    )
    assert replace(ours, intermediate_size=0) == replace(theirs, intermediate_size=0)
    model, chosen = Decoder.load(found, "float32", CPU, block_size=16), choose_prompt(plain, 40, num_tokens=24)
    assert generate(model, [chosen.prompt_ids], 24) == [list(chosen.token_ids)]
    expected = Decoder.load(plain, "float32", CPU, block_size=16)
    assert generate(model, [[1, 2, 3]], 24) == generate(expected, [[1, 2, 3]], 24)


def test_the_scaling_of_llama_3_is_known_by_its_divisors(tmp_path: Path) -> None:
    plain = make_checkpoint("llama-gqa", tmp_path / "plain", **SHAPE, rope_parameters=LLAMA3)
    config = json.loads((plain / "config.json").read_text())
    divisors = llama3_divisors(LLAMA3, 64)
    embedding = np.zeros((VOCAB_SIZE, 256), np.float32).view(np.uint8)
    tensors = {"token_embd.weight": (embedding, "F32"), "rope_freqs.weight": (divisors.view(np.uint8), "F32")}
    write_gguf(tmp_path / "model.gguf", config, tensors)
    found = json.loads((find_folder(str(tmp_path / "model.gguf")) / "config.json").read_text())
    ([ours], [theirs]) = ModelConfig.parse(found).ropes, ModelConfig.parse(config).ropes
    assert torch.equal(ours.frequencies(64), theirs.frequencies(64))
    assert not torch.equal(
        ours.frequencies(64),
        ModelConfig.parse(found | {"rope_parameters": {"rope_theta": 5e5}}).ropes[0].frequencies(64),
    )


def test_parts_are_one_model_whichever_is_named(tmp_path: Path) -> None:
    path = make_gguf(tmp_path, "Q4_0", num_parts=3)
    found = find_folder(str(path))
    require_same_weights(found, tmp_path / "plain")
    last = find_folder(str(tmp_path / "model-00003-of-00003.gguf"))
    assert (last / TABLE_FILE).read_bytes() == (found / TABLE_FILE).read_bytes()
    assert {file.name for file in Checkpoint(found).files} >= {f"model-0000{part}-of-00003.gguf" for part in (1, 2, 3)}


def in_a_hubs_cache(folder: Path, paths: list[Path]) -> list[Path]:
    """Moves files into blobs, under names of digests alone, with links to them in their places of a snapshot."""
    snapshot = folder / "hub" / "snapshots" / "c0ffee"
    (folder / "hub" / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in paths:
        blob = folder / "hub" / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(blob)
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", blob.name))
    return [snapshot / path.name for path in paths]


def test_a_link_to_a_file_without_a_suffix_is_the_file(tmp_path: Path) -> None:
    [link] = in_a_hubs_cache(tmp_path, [make_gguf(tmp_path, "Q4_0")])
    found = find_folder(str(link))
    assert found.name.startswith("model-")
    require_same_weights(found, tmp_path / "plain")
    assert inspect_model(ModelSettings(path=str(link)), "cpu").served.name == "model"
    require_folders(str(link), None)
    require_same_weights(find_folder(str(link.resolve())), tmp_path / "plain")
    link.rename(other := link.with_name("its other name"))
    require_same_weights(find_folder(str(other)), tmp_path / "plain")


def test_parts_are_found_by_the_names_that_their_links_have(tmp_path: Path) -> None:
    make_gguf(tmp_path, "Q4_0", num_parts=3)
    links = in_a_hubs_cache(tmp_path, sorted(tmp_path.glob("*.gguf")))
    for link in links:
        require_same_weights(find_folder(str(link)), tmp_path / "plain")
    links[1].unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.gguf is missing"):
        find_folder(str(links[0]))


def test_a_folder_is_made_once_and_anew_for_other_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_gguf(tmp_path, "Q4_0")
    found = find_folder(str(path))
    with monkeypatch.context() as patch:
        patch.setattr(folder, "_run_child", lambda *_: pytest.fail("made again"))
        assert find_folder(str(path)) == found
    make_gguf(tmp_path, "Q4_1")
    assert find_folder(str(path)) != found
    assert not [one for one in found.parent.iterdir() if one.name.startswith(".")]


def test_a_file_that_was_replaced_since_is_refused(tmp_path: Path) -> None:
    path = make_gguf(tmp_path, "Q4_0")
    found = find_folder(str(path))
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(ModelError, match=r"model\.gguf has changed since its folder was made: start again"):
        Checkpoint(found)


def test_template_ends_sampling_and_roles_come_from_the_metadata(tmp_path: Path) -> None:
    make_gguf(tmp_path, "Q8_0")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    embedding = np.zeros((VOCAB_SIZE, 256), np.float32).view(np.uint8)
    metadata: dict[str, Any] = {
        "tokenizer.chat_template": "{{ messages[0].content }}",
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.ggml.eot_token_id": 9,
        "tokenizer.ggml.bos_token_id": 5,
        "tokenizer.ggml.add_bos_token": True,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
    }
    write_gguf(tmp_path / "other.gguf", config, {"token_embd.weight": (embedding, "F32")}, metadata=metadata)
    found = find_folder(str(tmp_path / "other.gguf"))
    template = Template.load(found)
    assert template is not None
    assert template.source == "{{ messages[0].content }}"
    assert Checkpoint(found).config.eos_token_ids == (7, 9)
    generation = json.loads((found / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [7, 9], "temperature": 0.5, "top_k": 20}
    tokenizer = Checkpoint(found).load_tokenizer()
    assert template.variables["bos_token"] in tokenizer.special_tokens
    assert tokenizer.encode("ab")[0] == 5
    assert tokenizer.encode_rendered("ab") == tokenizer.encode("ab")[1:]


def test_a_file_that_names_no_end_has_none(tmp_path: Path) -> None:
    """And not that of its architecture, which is an id of another vocabulary."""
    found = find_folder(str(make_gguf(tmp_path, "Q8_0")))
    assert Checkpoint(found).config.eos_token_ids == ()


def test_an_engine_answers_from_a_file_alone(tmp_path: Path) -> None:
    path = make_gguf(tmp_path, "Q8_0")
    sampling = SamplingParams(temperature=0, max_tokens=8)
    ours, plain = (
        Engine.load(str(one), dtype="float32", num_blocks=64).generate(["some words"], sampling)[0].choices[0].token_ids
        for one in (path, tmp_path / "plain")
    )
    assert ours == plain
