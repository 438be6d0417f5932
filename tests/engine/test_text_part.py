"""Checkpoints that see pictures: their text part gives the tokens of transformers' whole model."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.text_part import TEXT_PARTS
from engine.engine import Engine
from engine.model.weights import check_weights
from tests.harness.checkpoints import ARCHITECTURES, SHAPE, byte_level_tokenizer
from wire.errors import ModelError
from wire.sampling import SamplingParams

VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
WHOLES: dict[str, Callable[[], Any]] = {
    "Gemma3ForConditionalGeneration": lambda: transformers.Gemma3Config(
        text_config={**SHAPE, **ARCHITECTURES["gemma3"][1]},
        vision_config={**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_index=255,
        boi_token_index=254,
        eoi_token_index=253,
        tie_word_embeddings=True,
    ),
    "Mistral3ForConditionalGeneration": lambda: transformers.Mistral3Config(
        text_config={**SHAPE, "model_type": "mistral", "sliding_window": 64},
        vision_config={**VISION, "head_dim": 16, "model_type": "pixtral"},
        image_token_index=255,
        tie_word_embeddings=False,
    ),
}
PROMPT = [*range(40, 140)]
NUM_TOKENS = 24


def make_whole(name: str, folder: Path) -> list[int]:
    """Writes a checkpoint; returns transformers' greedy tokens after PROMPT."""
    torch.manual_seed(0)
    model = getattr(transformers, name)(WHOLES[name]()).float().eval()
    for one in model.parameters():
        if one.ndim == 2:
            torch.nn.init.normal_(one, std=0.15)
    model.save_pretrained(folder)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    output = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
    )
    return [int(token) for token in output[0, len(PROMPT) :]]


def answer(folder: Path) -> list[int]:
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    (completion,) = Engine.load(str(folder), dtype="float32", num_blocks=32).generate([PROMPT], sampling)
    return completion.choices[0].token_ids


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def rename(folder: Path, before: str, after: str) -> None:
    stored = load_file(folder / "model.safetensors")
    save_file({name.replace(before, after): one for name, one in stored.items()}, folder / "model.safetensors")


def test_every_row_is_compared_with_transformers() -> None:
    assert WHOLES.keys() == TEXT_PARTS.keys()


@pytest.mark.parametrize("name", WHOLES)
def test_the_text_part_gives_the_tokens_of_transformers(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = make_whole(name, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(one.startswith("language_model.model.layers.0") for one in stored)
    with caplog.at_level(logging.WARNING):
        assert answer(tmp_path) == expected
    text = TEXT_PARTS[name]
    assert f"{text.model_type}: the text part alone is served, as {text.architecture}; pictures" in caplog.text
    rename(tmp_path, "language_model.model.", "model.language_model.")
    rename(tmp_path, "language_model.lm_head.", "lm_head.")
    change(tmp_path, architectures=None)
    assert answer(tmp_path) == expected


def test_a_text_part_of_another_kind_is_refused(tmp_path: Path) -> None:
    make_whole("Mistral3ForConditionalGeneration", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    change(tmp_path, text_config={**text, "model_type": "ministral3"})
    with pytest.raises(ModelError, match=r"config\.json: text_config: model_type is ministral3, expected mistral"):
        Checkpoint(tmp_path)
    change(tmp_path, text_config=[])
    with pytest.raises(ModelError, match="text_config"):
        Checkpoint(tmp_path)


def test_a_tensor_that_the_text_part_lacks_is_named(tmp_path: Path) -> None:
    make_whole("Gemma3ForConditionalGeneration", tmp_path)
    rename(tmp_path, "language_model.model.layers.1.", "language_model.model.layers.7.")
    with pytest.raises(ModelError, match=r"lack the tensor model\.layers\.1\."):
        check_weights(Checkpoint(tmp_path))


def test_fields_that_a_text_config_leaves_out_have_the_defaults_of_transformers() -> None:
    """Released files of Gemma 3 name five fields of their text."""
    few: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "model_type": "gemma3_text",
    }
    theirs = transformers.Gemma3TextConfig(**few).to_dict()
    part = TEXT_PARTS["Gemma3ForConditionalGeneration"].config({"text_config": few})
    assert {name: theirs[name] for name in part if name in theirs} == part | {"architectures": theirs["architectures"]}
