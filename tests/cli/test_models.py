"""`baton models` and docs/models.md, held to the tables that they are made of."""

from pathlib import Path

import pytest
import transformers

from cli import models
from cli.__main__ import main
from engine.checkpoint.config import ModelConfig
from engine.checkpoint.families.table import FAMILIES
from engine.checkpoint.gguf.blocks import TYPES
from engine.checkpoint.gguf.config import ARCHITECTURES
from engine.checkpoint.text_part import TEXT_PARTS
from tests.harness import checkpoints

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
FIX = "run `python -m cli models --markdown > docs/models.md`"


@pytest.fixture(scope="module")
def others() -> models.Rows:
    """The dry runs, once: they import all decoders of transformers, and take some 10 s."""
    return models.other_rows()


@pytest.mark.timeout(300)
def test_page_and_list_are_the_tables_of_the_code(
    others: models.Rows, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "other_rows", lambda: others)
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    for name in (*FAMILIES, *ARCHITECTURES, *TEXT_PARTS, *TYPES):
        assert name in printed, name
    assert main(["models", "--markdown"]) == 0
    if f"- transformers: {transformers.__version__}\n" not in PAGE.read_text():
        pytest.skip(f"the page is of another transformers than {transformers.__version__}")
    assert capsys.readouterr().out == PAGE.read_text(), FIX


@pytest.mark.timeout(300)
def test_every_row_of_transformers_that_has_a_test_is_listed(others: models.Rows) -> None:
    rows, _ = others
    tested = {config_class.model_type for config_class, _ in checkpoints.MODULES.values()}
    assert tested <= {row[1] for row in rows}
    assert {row[2] for row in rows} == {"transformers"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mamba", "state that is not KV"),
        ("falcon", "attention of its own"),
        ("deepseek_v3", "attention is latent"),
        ("whisper", "it has an encoder"),
        ("llama4", "vision_config"),
    ],
)
def test_what_is_refused_has_its_reason(others: models.Rows, model_type: str, reason: str) -> None:
    _, reasons = others
    [found] = [one for one, names in reasons.items() if model_type in names]
    assert reason in found


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_refused_is_refused_for_its_own_field(name: str) -> None:
    """The small configuration itself is taken; and each probe is taken somewhere, or refused everywhere."""
    assert ModelConfig.parse({**models.SMALL, "architectures": [name]}).architecture == name


def test_features_of_a_family_are_not_listed_as_refused() -> None:
    rows, of_all = models.native_rows()
    refused = {row[0]: [*row[-1].split(", "), *of_all["refused of all native ones"]] for row in rows}
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
