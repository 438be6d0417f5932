"""SmolLM2 as `baton pull` fetches it: its file, the folder that is made of it, and the same weights dequantized."""

import shutil
from pathlib import Path

from engine.checkpoint.hub import find_folder
from engine.checkpoint.pulled import MODELS
from tests.engine.gguf.files import load_oracle

REAL_MODEL = MODELS["smollm2"]
_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def real_file() -> Path:
    """Returns the GGUF file; fetches it, which blocks, unless it is there."""
    return REAL_MODEL.pull(lambda *_: None)


def plain_checkpoint(folder: Path) -> Path:
    """Makes a checkpoint in float32 of the file's weights, as the package gguf dequantizes them, unless it is there."""
    if not folder.exists():
        source = find_folder(str(real_file()))
        load_oracle(real_file(), source).save_pretrained(folder)
        for name in _TEXT_FILES:
            shutil.copy(source / name, folder / name)
    return folder
