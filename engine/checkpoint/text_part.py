"""Checkpoints that see pictures, of which the text part is served: its configuration, and the names of its tensors.

The text part is whole: a decoder of engine/checkpoint/families under `text_config`, and its tensors behind a prefix.
What belongs to pictures is left unread.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.checkpoint.families.table import FAMILIES
from engine.checkpoint.json_fields import JsonFields

logger = logging.getLogger(__name__)
OF_WHOLE = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings", "quantization_config", "compression_config")
"""Fields beside `text_config` that describe the text part, too; they stand above its own."""
PREFIXES = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head.": "lm_head."}
"""Prefixes of the tensors of a text part, in files of transformers 4 and 5, and what a decoder calls them."""
UNREAD = "beside text: "


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """A row of TEXT_PARTS. architecture: the decoder of the text. defaults: fields that a `text_config` leaves out."""

    model_type: str
    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def config(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Makes the text part's object of the object in config.json. Raises ModelError for another kind of text."""
        fields = JsonFields(whole, "config.json")
        text, expected = fields.section("text_config"), FAMILIES[self.architecture].model_type
        if text.text("model_type", expected) != expected:
            raise text.wrong("model_type", expected)
        shared = {name: whole[name] for name in OF_WHOLE if name in whole}
        return {**self.defaults, **dict(text.items()), **shared, "architectures": [self.architecture]}


TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": TextPart(
        model_type="gemma3",
        architecture="Gemma3ForCausalLM",
        defaults={"vocab_size": 262208, "num_attention_heads": 8, "max_position_embeddings": 131072},
    ),
    "Mistral3ForConditionalGeneration": TextPart(
        model_type="mistral3", architecture="MistralForCausalLM", defaults={"tie_word_embeddings": True}
    ),
}


def find_text_part(values: Mapping[str, Any]) -> TextPart | None:
    """Finds the text part of the checkpoint that config.json describes; None where it is no row of TEXT_PARTS."""
    named = values.get("architectures")
    if isinstance(named, list) and named:
        return next((one for name, one in TEXT_PARTS.items() if named == [name]), None)
    return next((one for one in TEXT_PARTS.values() if values.get("model_type") == one.model_type), None)


def text_config(values: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json's object, or the text part's, with one line in the log. Raises ModelError."""
    if (part := find_text_part(values)) is None:
        return values
    logger.warning("%s: the text part alone is served, as %s; pictures are refused", part.model_type, part.architecture)
    return part.config(values)


def tensor_name(stored: str) -> str:
    """Returns what a decoder calls a tensor of such a checkpoint; UNREAD and its stored name for any other."""
    for prefix, ours in PREFIXES.items():
        if stored.startswith(prefix):
            return ours + stored.removeprefix(prefix)
    return stored if stored.startswith("lm_head.") else f"{UNREAD}{stored}"
