"""Small GGUF files of each type, written with the package `gguf`."""

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.gguf.blocks import TYPES

HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""The bytes of a block at which half-precision numbers stand; other types have one at its beginning."""


def drawn_blocks(name: str, rows: int, columns: int, seed: int, scale: float = 1.0) -> NDArray[np.uint8]:
    """Draws stored rows of a type: any bits for codes, normal numbers for floats and half-precision scales."""
    random, kind = np.random.default_rng(seed), TYPES[name]
    drawn = (scale * random.normal(size=(rows, columns))).astype(np.float32)
    match name:
        case "F32":
            return drawn.view(np.uint8)
        case "F16":
            return drawn.astype(np.float16).view(np.uint8)
        case "BF16":
            return np.ascontiguousarray(drawn.view(np.uint16)[:, 1::2]).view(np.uint8)
    blocks = random.integers(0, 256, (rows * columns // kind.numbers, kind.bytes), dtype=np.uint8)
    for at in HALVES.get(name, (0,)):
        halves = (scale * random.normal(size=(len(blocks), 1))).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(rows, -1)
