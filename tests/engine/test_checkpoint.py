import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.checkpoint import Checkpoint
from engine.model.decoder import Decoder
from kernels.torch_backend import TorchBackend
from tests.checkpoints import shard
from wire.errors import ModelError

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


def test_generation_config_overrules_the_end_of_text(folder: Path) -> None:
    reconfigure(folder, eos_token_id=3)
    replaced(folder / "generation_config.json").write_text("{}")
    assert Checkpoint(folder).config.eos_token_ids == (3,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert Checkpoint(folder).config.eos_token_ids == (5, 6)


def test_a_stored_head_is_used_even_if_the_embedding_is_said_to_be_tied(folder: Path) -> None:
    reconfigure(folder, tie_word_embeddings=True)
    stored = load_file(folder / "model.safetensors")["lm_head.weight"]
    model = Decoder.load(folder, None, CPU, 16, TorchBackend())
    assert torch.equal(model.weights.head.data, stored)


def test_code_of_the_model_is_ignored_with_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    reconfigure(folder, auto_map={"AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit")
    load(folder)
    assert "auto_map" in caplog.text


def test_tensors_of_no_use_are_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    reweigh(folder, lambda tensors: tensors.update({"model.extra": torch.ones(1)}))
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert "1 tensors are no part of the model: model.extra" in caplog.text


def test_a_missing_tensor_is_named(folder: Path) -> None:
    reweigh(folder, lambda tensors: tensors.pop(NAME))
    with pytest.raises(ModelError, match=f"lack the tensor {NAME}"):
        load(folder)


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    reweigh(folder, lambda tensors: tensors.update({NAME: torch.zeros(64, 32)}))
    with pytest.raises(ModelError, match=rf"{NAME} has shape \[64, 32\], config.json makes it \[64, 64\]"):
        load(folder)


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
