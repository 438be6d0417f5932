import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.tensor_file import TensorFile
from engine.engine import Engine
from engine.model.decoder import Decoder
from kernels.torch_backend import TorchBackend
from tests.engine.gguf.files import make_gguf
from tests.harness.checkpoints import make_checkpoint, shard
from tests.kernels.backends import lend_kernels
from wire.errors import ModelError
from wire.sampling import SamplingParams

CPU = torch.device("cpu")
NAME = "model.layers.0.self_attn.q_proj.weight"
SHAPE = (64, 64)

Checkpoints = Callable[[str], Path]


@pytest.fixture
def folder(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    """A checkpoint to spoil. Its files are links, as in a snapshot of the hub's cache."""
    for file in checkpoint("llama-gqa").iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def replaced(path: Path) -> Path:
    path.unlink(missing_ok=True)
    return path


def reconfigure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    replaced(folder / "config.json").write_text(json.dumps(config | changes))


def reweigh(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, replaced(folder / "model.safetensors"))


def load(folder: Path) -> Decoder:
    return Decoder.load(folder, None, CPU, 16)


def test_reads_tensors_in_the_dtype_that_is_asked_for(folder: Path) -> None:
    expected = load_file(folder / "model.safetensors")[NAME]
    read = Checkpoint(folder).read(NAME, SHAPE, torch.bfloat16, CPU)
    assert read.dtype == torch.bfloat16
    assert torch.equal(read, expected.bfloat16())


def test_sharded_checkpoint_has_the_same_tensors(checkpoint: Checkpoints, tmp_path: Path) -> None:
    single = Checkpoint(checkpoint("llama-gqa"))
    sharded = Checkpoint(shard(checkpoint("llama-gqa"), tmp_path))
    assert sharded.unread == single.unread
    assert torch.equal(*(one.read(NAME, SHAPE, torch.float32, CPU) for one in (single, sharded)))


def test_files_are_configuration_weights_and_tokenizer(checkpoint: Checkpoints, tmp_path: Path) -> None:
    names = [path.name for path in Checkpoint(checkpoint("llama-gqa")).files]
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    sharded = Checkpoint(shard(checkpoint("llama-gqa"), tmp_path)).files
    assert {path.name for path in sharded} >= {path.name for path in tmp_path.glob("model-*.safetensors")}


def test_sampling_is_what_generation_config_advises(folder: Path) -> None:
    assert Checkpoint(folder).sampling == SamplingParams()
    advised = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    replaced(folder / "generation_config.json").write_text(json.dumps(advised))
    expected = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05)
    assert Checkpoint(folder).sampling == expected
    assert Engine.load(str(folder), num_blocks=8).defaults == expected


@pytest.mark.parametrize(
    "advised", [{"temperature": 3}, {"top_p": 1.5}, {"top_k": 1.5}, {"min_p": "a"}, {"repetition_penalty": -1}]
)
def test_sampling_out_of_its_range_is_refused_by_name(folder: Path, advised: dict[str, Any]) -> None:
    replaced(folder / "generation_config.json").write_text(json.dumps(advised))
    with pytest.raises(ModelError, match=rf"generation_config\.json: {min(advised)}"):
        Checkpoint(folder)


def copy_embeddings(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def test_a_head_beside_embeddings_that_config_json_ties_has_to_be_their_copy(folder: Path) -> None:
    reconfigure(folder, tie_word_embeddings=True)
    with pytest.raises(
        ModelError, match=r"tie_word_embeddings is true, and tensor lm_head\.weight differs from model\."
    ):
        load(folder)
    reweigh(folder, copy_embeddings)
    model = load(folder)
    assert model.weights.head is model.weights.embedding
    reweigh(folder, lambda tensors: tensors["lm_head.weight"].view(-1)[-1:].add_(0.25))
    with pytest.raises(ModelError, match="differs"):
        load(folder)


def test_a_stored_head_is_used_where_only_a_default_ties_it(tmp_path: Path) -> None:
    """As in Gemma by default, and in files of Mistral 3, whose wrapper says true beside a head of its own."""
    make_checkpoint("gemma3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    stored = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    del config["tie_word_embeddings"]
    replaced(tmp_path / "config.json").write_text(json.dumps(config))
    model = Decoder.load(tmp_path, None, CPU, 16, TorchBackend())
    assert model.config.tied_embeddings
    assert torch.equal(model.weights.head.data, stored)


def test_code_of_the_model_is_ignored_with_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    reconfigure(folder, auto_map={"AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit")
    load(folder)
    assert "auto_map" in caplog.text


def test_tensors_of_no_use_are_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    reweigh(folder, lambda tensors: tensors.update({"v_head.weight": torch.ones(1)}))
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert "1 tensors are no part of the model: v_head.weight" in caplog.text


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: reweigh(folder, lambda tensors: tensors.update({name: tensor}))


def without_tensor(name: str) -> Callable[[Path], None]:
    return lambda folder: reweigh(folder, lambda tensors: tensors.pop(name))


def with_element(value: float, dtype: torch.dtype = torch.float32) -> Callable[[Path], None]:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[NAME] = tensors[NAME].to(dtype)
        tensors[NAME].view(-1)[-1] = value

    return lambda folder: reweigh(folder, spoil)


def with_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: reconfigure(folder, **changes)


BIAS, NORM = "model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.q_norm.weight"
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a layer fewer": (with_config(num_hidden_layers=1), r"have model.layers.1.input_layernorm.weight, .* of 1 layers"),
    "a layer more": (with_config(num_hidden_layers=3), r"lack the tensor model\.layers\.2\."),
    "a tensor missing": (without_tensor(NAME), f"lack the tensor {NAME}"),
    "a norm missing": (without_tensor("model.norm.weight"), "lack the tensor model.norm.weight"),
    "no head, and not tied": (without_tensor("lm_head.weight"), "lack the tensor lm_head.weight"),
    "biases missing": (with_config(attention_bias=True), f"lack the tensor {BIAS}"),
    "biases too many": (with_tensor(BIAS, torch.ones(64)), f"have {BIAS}, which is no part of the model"),
    "norms of another architecture": (with_tensor(NORM, torch.ones(16)), f"have {NORM}, which is no part"),
    "a scale of quantized weights": (with_tensor(f"{NAME}_scale", torch.ones(1)), f"have {NAME}_scale, which"),
    "another shape": (with_tensor(NAME, torch.ones(64, 32)), rf"{NAME} has shape \[64, 32\], .* it \[64, 64\]"),
    "as many elements": (with_tensor(NAME, torch.ones(32, 128)), rf"{NAME} has shape \[32, 128\]"),
    "a dimension more": (with_tensor(NAME, torch.ones(1, 64, 64)), rf"{NAME} has shape \[1, 64, 64\]"),
    "a smaller vocabulary": (with_config(vocab_size=255), "model.embed_tokens.weight has shape"),
    "a larger vocabulary": (with_config(vocab_size=257), "model.embed_tokens.weight has shape"),
    "another hidden_size": (with_config(hidden_size=32, head_dim=16), "model.embed_tokens.weight has shape"),
    "another intermediate_size": (with_config(intermediate_size=127), "mlp.gate_proj.weight has shape"),
    "more KV heads": (with_config(num_key_value_heads=4), "k_proj.weight has shape"),
    "fewer KV heads": (with_config(num_key_value_heads=1), "k_proj.weight has shape"),
    "larger heads": (with_config(head_dim=32), "q_proj.weight has shape"),
    "NaN": (with_element(math.nan), f"{NAME} has NaN or infinity"),
    "infinity": (with_element(math.inf), f"{NAME} has NaN or infinity"),
    "NaN in bfloat16": (with_element(math.nan, torch.bfloat16), f"{NAME} has NaN or infinity"),
    "-infinity in float16": (with_element(-math.inf, torch.float16), f"{NAME} has NaN or infinity"),
    "a float64 too large": (with_element(1e300, torch.float64), f"{NAME} has NaN or infinity as float32"),
}


@pytest.mark.parametrize(("spoil", "message"), FAULTS.values(), ids=FAULTS)
def test_weights_that_do_not_fit_are_refused_by_name(folder: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(folder)
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_no_content_is_read_before_all_tensors_are_known_to_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reconfigure(folder, num_hidden_layers=1)
    monkeypatch.setattr(TensorFile, "read", lambda *_: pytest.fail("a tensor is read"))
    with pytest.raises(ModelError, match="no part of the model"):
        load(folder)


def test_what_a_dtype_cannot_hold_is_refused(folder: Path) -> None:
    with_element(1e6, torch.bfloat16)(folder)
    load(folder)
    with pytest.raises(ModelError, match=f"{NAME} has NaN or infinity as float16"):
        Decoder.load(folder, "float16", CPU, 16)


def mix_dtypes(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name] = tensors[name].double()


HARMLESS: dict[str, Callable[[Path], None]] = {
    "buffers of rope": with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8)),
    "one buffer of rope": with_tensor("model.rotary_emb.inv_freq", torch.ones(8)),
    "another head": with_tensor("v_head.summary.weight", torch.ones(1, 64)),
    "several dtypes": lambda folder: reweigh(folder, mix_dtypes),
    "a sliding window that the architecture has not": with_config(sliding_window=0, layer_types="none"),
    "no end of text": with_config(eos_token_id=None),
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_what_is_harmless_changes_no_token(folder: Path, change: Callable[[Path], None]) -> None:
    def answer() -> list[int]:
        sampling = SamplingParams(max_tokens=20, ignore_eos=True)
        (completion,) = Engine.load(str(folder), num_blocks=8).generate([[1, 2, 3]], sampling)
        return completion.choices[0].token_ids

    before = answer()
    change(folder)
    assert answer() == before


OUTLINED = """
import sys, torch
from pathlib import Path
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.hub import find_folder
from engine.model.weights import check_weights, count_bytes
from kernels.selection import select_backend
checkpoint = Checkpoint(find_folder(sys.argv[1]))
check_weights(checkpoint)
count_bytes(checkpoint, torch.bfloat16, select_backend(torch.device("cpu")))
print(sorted({"sympy", "torch._dynamo", "huggingface_hub", "transformers"} & set(sys.modules)))
"""


def test_shapes_are_read_without_torchs_compiler(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """It has 900 modules, which take two seconds to import."""
    cache = tmp_path_factory.mktemp("cache")
    lend_kernels(cache)
    gemma = make_checkpoint("gemma3", tmp_path_factory.mktemp("gemma3"))
    for model in (folder, gemma, make_gguf(cache, "Q4_K")):
        command, env = [sys.executable, "-c", OUTLINED, str(model)], {**os.environ, "XDG_CACHE_HOME": str(cache)}
        assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("where", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_with_tokens_that_the_model_does_not_know_is_refused(folder: Path, where: str) -> None:
    Checkpoint(folder).load_tokenizer()
    token = {"id": 256, "content": "<more>", "special": True}
    if where == "tokenizer.json":
        tokenizer = json.loads((folder / where).read_bytes())
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        replaced(folder / where).write_text(json.dumps(tokenizer | {"added_tokens": [token | flags]}))
    else:
        (folder / where).write_text(json.dumps({"added_tokens_decoder": {"256": {"content": "<more>"}}}))
    with pytest.raises(ModelError, match=r"the tokenizer has a token 256, config\.json a vocab_size of 256"):
        Engine.load(str(folder))


def test_an_end_of_text_that_is_no_token_is_refused(folder: Path) -> None:
    replaced(folder / "generation_config.json").write_text('{"eos_token_id": [5, 256]}')
    with pytest.raises(ModelError, match=r"generation_config.json: eos_token_id is \[5, 256\], expected .* below 256"):
        Checkpoint(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_tensors_are_refused(folder: Path, dtype: torch.dtype) -> None:
    reweigh(folder, lambda tensors: tensors.update({NAME: torch.zeros(SHAPE).to(dtype)}))
    with pytest.raises(ModelError, match="quantized"):
        load(folder)


def test_pickles_are_never_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ModelError, match="convert them to safetensors"):
        Checkpoint(folder)


def test_pickles_beside_the_weights_are_not_even_opened(folder: Path) -> None:
    """Pipes, which whoever opened them would wait for, or refuse."""
    for name in ("pytorch_model.bin", "consolidated.pt", "model.pkl", "modeling_evil.py"):
        os.mkfifo(folder / name)
    assert {path.suffix for path in Checkpoint(folder).files} <= {".json", ".safetensors"}
    load(folder)


def test_the_only_shard_wants_no_index(folder: Path) -> None:
    known = Checkpoint(folder).unread
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    assert Checkpoint(folder).unread == known
    load(folder)


def test_a_shard_of_several_without_an_index_is_no_model(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelError, match="has neither"):
        Checkpoint(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has neither"):
        Checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
class TestFilesThatAreNoFiles:
    """They are refused at once: none of them is waited for or read to its end."""

    def test_pipe(self, folder: Path, name: str) -> None:
        os.mkfifo(replaced(folder / name))
        with pytest.raises(ModelError, match=f"{name} is not a regular file"):
            Checkpoint(folder)

    def test_device(self, folder: Path, name: str) -> None:
        replaced(folder / name).symlink_to("/dev/zero")
        with pytest.raises(ModelError, match=f"{name} is not a regular file"):
            Checkpoint(folder)

    def test_folder(self, folder: Path, name: str) -> None:
        replaced(folder / name).mkdir()
        with pytest.raises(ModelError, match=f"{name} is not a regular file"):
            Checkpoint(folder)

    def test_cycle_of_links(self, folder: Path, name: str) -> None:
        replaced(folder / name).symlink_to("other")
        (folder / "other").symlink_to(name)
        with pytest.raises(ModelError, match=f"{name} cannot be read"):
            Checkpoint(folder)

    def test_link_to_nothing(self, folder: Path, name: str) -> None:
        replaced(folder / name).symlink_to("nowhere")
        with pytest.raises(ModelError, match=f"{name} is missing"):
            Checkpoint(folder)


def test_a_config_of_a_gigabyte_is_not_read(folder: Path) -> None:
    with replaced(folder / "config.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ModelError, match="larger than"):
        Checkpoint(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_what_is_no_json_object_is_refused(folder: Path, name: str, text: str) -> None:
    replaced(folder / name).write_text(text)
    with pytest.raises(ModelError, match=f"{name} is not"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "no weight_map"),
        ({"weight_map": {}}, "no weight_map"),
        ({"weight_map": ["model.safetensors"]}, "no weight_map"),
        ({"weight_map": {NAME: 1}}, "names 1"),
        ({"weight_map": {NAME: "../model.safetensors"}}, "no .safetensors file of the folder"),
        ({"weight_map": {NAME: "/etc/passwd"}}, "no .safetensors file of the folder"),
        ({"weight_map": {NAME: "weights.bin"}}, "no .safetensors file of the folder"),
        ({"weight_map": {NAME: "missing.safetensors"}}, "missing.safetensors is missing"),
        ({"weight_map": {"model.nothing": "shard.safetensors"}}, "places model.nothing in shard.safetensors"),
    ],
)
def test_a_wrong_index_is_refused(folder: Path, index: dict[str, Any], message: str) -> None:
    (folder / "model.safetensors").rename(folder / "shard.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message):
        Checkpoint(folder)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "missing"):
        with pytest.raises(ModelError, match="not a folder"):
            Checkpoint(path)
