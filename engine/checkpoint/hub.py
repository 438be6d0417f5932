"""The place of a model: a folder, a GGUF file, a name of `baton pull`, or the Hugging Face hub.

Apart from engine/checkpoint/checkpoint.py, because workers get a folder.
"""

import os
import re
from pathlib import Path

from engine.checkpoint.gguf.folder import folder_of
from engine.checkpoint.pulled import MODELS
from kernels.user_cache import user_home
from wire.errors import ModelError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILES = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]


def find_folder(model: str) -> Path:
    """Finds the folder of a model by path, else by its name here or on the hub. Raises ModelError if there is none.

    For a GGUF file: the converted folder in the user's cache; blocks while the file is converted.
    """
    path = Path(os.path.expanduser(model))  # which leaves the home of a user who does not exist as it is
    if path.is_file():
        return folder_of(path)
    if os.path.lexists(path):
        return path
    if model in MODELS:
        return folder_of(MODELS[model].find() or MODELS[model].pull(lambda *_: None))
    return _download(model)


def _download(name: str) -> Path:
    """Finds `owner/model` in the hub's cache, or fetches configuration, weights and tokenizer into it.

    Blocks meanwhile. Raises ModelError if the hub lacks the model or cannot be reached.
    """
    if not _NAME.fullmatch(name):
        raise ModelError(f"{name[:64]} is no folder, GGUF file, name of `baton pull` or name on the hub")
    os.environ["HOME"] = str(user_home())
    # Imported here since it takes long, and looks for its cache in the home.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except GatedRepoError as error:
        raise ModelError(f"{name[:64]} is gated on the hub: ask for access, then set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{name[:64]} is no folder here, and the hub knows no such model") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(f"{name[:64]} is no folder here, and the hub cannot be reached") from error
    except Exception as error:  # of the hub client's HTTP library, which is another in each of its major versions
        raise ModelError(f"{name[:64]} could not be fetched from the hub: {type(error).__name__}") from error
