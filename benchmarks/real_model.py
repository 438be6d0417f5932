"""SmolLM2 as `baton pull` fetches it: its file, the folder that is made of it, and the same weights dequantized."""

import json
import shutil
from pathlib import Path

from engine.checkpoint.gguf import TABLE_FILE
from engine.checkpoint.hub import find_folder
from engine.checkpoint.pulled import MODELS
from tests.engine.gguf.files import load_oracle

REAL_MODEL = MODELS["smollm2"]
_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def real_file() -> Path:
    """Returns the GGUF file; fetches it, which blocks, unless it is there."""
    return REAL_MODEL.pull(lambda *_: None)


def plain_checkpoint(folder: Path, source: Path | None = None) -> Path:
    """Makes a checkpoint in float32 of a file's weights, as the package gguf dequantizes them, unless it is there.

    source: the folder that Baton has made of the file, of which SmolLM2's is the default.
    """
    if not folder.exists():
        source = source or find_folder(str(real_file()))
        path = Path(json.loads((source / TABLE_FILE).read_text())["files"][0]["path"])
        load_oracle(path, source).save_pretrained(folder)
        for name in _TEXT_FILES:
            if (source / name).exists():
                shutil.copy(source / name, folder / name)
    return folder
