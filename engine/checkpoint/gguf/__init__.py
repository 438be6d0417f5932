"""GGUF files, served as model folders.

A GGUF file becomes a folder in the user's cache once; every process reads the folder. It has config.json,
generation_config.json, tokenizer.json, tokenizer_config.json and chat_template.jinja as any checkpoint, and
tensors.json in place of model.safetensors. The data stays in the GGUF files; tensors.json is the table of it:

    {"version": 1,
     "files": [{"path": "/absolute/model.gguf", "bytes": 98888128}],   the parts of a split model, in their order
     "tensors": {"model.layers.0.self_attn.q_proj.weight":             names as in Hugging Face's layout
         {"type": "Q4_1",                                              a key of `blocks.TYPES`
          "shape": [576, 576],                                         [rows, columns]; [columns] of a vector
          "file": 0, "offset": 124928, "bytes": 207360,                offset from the beginning of the file
          "heads": 9}}}                                                0 where rows are stored in our order

With `heads`, each head's rows are in llama.cpp's order of rotation, dimensions i and i + head_dim / 2 side by side, and
`GgufPart` puts them in our order: whole rows move, and no block crosses a row.

`GgufPart.read(name, dtype)` dequantizes and rounds once. `GgufPart.read_stored(name)` returns the bytes, uint8 [rows,
bytes of a row], rows in our order; `blocks.unpack(type, bytes)` makes `CodedRows` of them:

    value[row, column] = scale[row, column // group] * code[row, column] + offset[row, column // group]

Codes are int8, scales and offsets float32. In every type the product is exact in float32: only the sum rounds, so that
a fused multiply-add gives the same bits as two operations. `GgufPart.read_codes(name)` returns them as
`Quantized`, which kernels multiply.
"""

from pathlib import Path

from text.model_file import open_regular
from wire.errors import ModelError

TABLE_FILE = "tensors.json"
SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSION = 1
"""Version of the folder's format; a new version converts a file again."""


def is_gguf(path: Path) -> bool:
    """Tells by its first bytes whether a file is a GGUF file. Raises the ModelError of `open_regular`."""
    with open_regular(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def require_gguf(path: Path) -> None:
    """Raises ModelError for a file that is missing, or is no GGUF file."""
    if not is_gguf(path):
        raise ModelError(f"{path.name[:64]}: not a GGUF file", folder=str(path.parent))
