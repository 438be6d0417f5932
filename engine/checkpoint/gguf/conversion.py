"""The conversion of GGUF files, in a process of its own: `python -m engine.checkpoint.gguf.conversion FOLDER PART...`.

The process imports no torch and has bounded memory: a hostile file ends only this process. A refusal is one JSON object
on standard output, and exit status 1.
"""

import json
import resource
import sys
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoint.gguf import TABLE_FILE, VERSION
from engine.checkpoint.gguf.blocks import Floats, StoredTensor
from engine.checkpoint.gguf.config import DIVISORS, GgufConfig
from engine.checkpoint.gguf.header import Header
from engine.checkpoint.gguf.tokenizer import GgufTokenizer
from text.model_file import open_regular
from wire.errors import ModelError

MEMORY_BYTES = 4 << 30
_STEP_BLOCKS = 1 << 14


def convert(folder: Path, parts: Sequence[Path]) -> None:
    """Writes the files of a model's folder. Raises ModelError, naming file, tensor and reason, if it is unfit."""
    headers = [Header.read(part) for part in parts]
    metadata, source = headers[0].metadata, headers[0].path.name
    _require_whole(headers)
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    if len(tensors) != sum(len(header.tensors) for header in headers):
        raise ModelError(f"{source}: two of its parts have a tensor of the same name")
    config, tokenizer = GgufConfig(metadata, tensors, source), GgufTokenizer(metadata, source)
    contents = {
        "config.json": config.config(_divisors(headers)) | {"eos_token_id": list(tokenizer.end_ids)},
        "generation_config.json": config.generation_config(tokenizer.end_ids),
        "tokenizer.json": tokenizer.definition(),
        "tokenizer_config.json": tokenizer.config(),
        TABLE_FILE: _table(headers, config),
    }
    for header in headers:
        for name, tensor in header.tensors.items():
            _require_finite(header.path, name, tensor)
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False))
    if tokenizer.template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.template)


def _require_whole(headers: Sequence[Header]) -> None:
    """Raises ModelError for parts of different models, or parts out of order."""
    for index, header in enumerate(headers):
        number, count = (header.metadata.get(f"split.{name}") or 0 for name in ("no", "count"))
        if (number, count or 1) != (index, len(headers)):
            found = f"part {str(number)[:16]} of {str(count)[:16]}, counted from 0"
            raise ModelError(f"{header.path.name}: says that it is {found}; expected {index} of {len(headers)}")


def _table(headers: Sequence[Header], config: GgufConfig) -> dict[str, Any]:
    files = [{"path": str(header.path), "bytes": header.path.stat().st_size} for header in headers]
    rows = {}
    for index, header in enumerate(headers):
        for name, tensor in header.tensors.items():
            if name in DIVISORS:
                continue
            for ours, part in config.places(name, tensor).items():
                if ours in rows:
                    raise ModelError(f"{header.path.name}: two tensors are {ours}, one of them {name[:64]}")
                place = {"file": index, "offset": part.offset, "bytes": part.num_bytes}
                rows[ours] = {"type": part.kind.name, "shape": list(part.shape), **place, "heads": part.heads}
    return {"version": VERSION, "files": files, "tensors": rows}


def _divisors(headers: Sequence[Header]) -> dict[str, Floats]:
    """Reads the tensors of DIVISORS that there are. Raises ModelError for another type than F32."""
    found = {}
    for header in headers:
        for name in (one for one in DIVISORS if one in header.tensors):
            tensor = header.tensors[name]
            if tensor.kind.dtype != "float32":
                raise ModelError(f"{header.path.name}: tensor {name} is {tensor.kind.name}, expected F32")
            with BufferedReader(open_regular(header.path)) as file:
                file.seek(tensor.offset)
                found[name] = np.frombuffer(file.read(tensor.num_bytes), np.float32)
    return found


def _require_finite(path: Path, name: str, tensor: StoredTensor) -> None:
    """Raises ModelError for a tensor with NaN or infinity among its values or scales."""
    step = _STEP_BLOCKS * tensor.kind.bytes
    with BufferedReader(open_regular(path)) as file:
        file.seek(tensor.offset)
        for start in range(0, tensor.num_bytes, step):
            data = file.read(min(step, tensor.num_bytes - start))
            if len(data) % tensor.kind.bytes or not data:
                raise ModelError(f"{path.name} ended while {name[:64]} was being read")
            if not tensor.kind.is_finite(np.frombuffer(data, np.uint8).reshape(-1, tensor.kind.bytes)):
                raise ModelError(f"{path.name}: tensor {name[:64]} has NaN or infinity")


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    folder, *parts = map(Path, sys.argv[1:])
    try:
        convert(folder, parts)
    except (ModelError, OSError, MemoryError) as error:
        reason = error.message if isinstance(error, ModelError) else f"{parts[0].name}: {error or 'out of memory'}"
        json.dump({"failure": reason}, sys.stdout)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
