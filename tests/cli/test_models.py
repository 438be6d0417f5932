"""`baton models` and docs/models.md, held to the tables that they are made of."""

from pathlib import Path

import pytest

from cli import models
from cli.__main__ import main
from engine.checkpoint.config import ModelConfig
from engine.checkpoint.families import FAMILIES
from engine.checkpoint.gguf.blocks import TYPES
from engine.checkpoint.gguf.config import ARCHITECTURES
from engine.checkpoint.text_part import TEXT_PARTS
from tests.harness import checkpoints

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
FIX = "run `python -m cli models --markdown > docs/models.md`"


def test_the_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--markdown"]) == 0
    assert capsys.readouterr().out == PAGE.read_text(), FIX


def test_every_row_of_the_tables_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    for name in (*FAMILIES, *ARCHITECTURES, *TEXT_PARTS, *TYPES):
        assert name in printed, name


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_refused_is_refused_for_its_own_field(name: str) -> None:
    """The small configuration itself is taken; and each probe is taken somewhere, or refused everywhere."""
    assert ModelConfig.parse({**models.SMALL, "architectures": [name]}).architecture == name


def test_features_of_a_family_are_not_listed_as_refused() -> None:
    rows, of_all = models.native_rows()
    refused = {row[0]: [*row[-1].split(", "), *of_all["refused of all"]] for row in rows}
    for name, probe in {
        "Gemma2ForCausalLM": "soft caps",
        "GraniteForCausalLM": "multipliers",
        "SmolLM3ForCausalLM": "layers without rope",
        "Glm4ForCausalLM": "partial rotary",
    }.items():
        assert probe not in refused[name]
        assert probe in refused["LlamaForCausalLM"]


def test_every_native_architecture_is_compared_with_transformers() -> None:
    compared = {
        config_class.__name__.replace("Text", "").replace("Config", "ForCausalLM")
        for config_class, _ in checkpoints.ARCHITECTURES.values()
    }
    assert compared == {*FAMILIES}
