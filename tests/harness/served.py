"""Descriptions of models that are served."""

from typing import Any

from wire.layout import KVLayout
from wire.served_model import ServedModel

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")


def served_model(layout: KVLayout = LAYOUT, **given: Any) -> ServedModel:
    """Describes a model of this layout, with a value for all that is not given."""
    parts = {"name": "m", "folder": "/m", "dtype": layout.dtype, "max_context_len": 2048, "vocab_size": 300}
    parts |= {"fingerprint_hex": "ab" * 32, "layout_hex": layout.encode().hex()}
    return ServedModel(**{**parts, **given})
