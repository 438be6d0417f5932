"""A draft model's folder, which has to fit the model that it guesses for."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.checkpoint.checkpoint import TOKENIZER_FILE, Checkpoint
from wire.errors import ModelError

SETTING = "speculation.draft"


def open_draft(folder: Path, target: Checkpoint) -> Checkpoint:
    """Opens a draft model's folder. Raises ModelError if it cannot be served, or does not fit the target.

    A draft has the target's vocabulary size and at least its context. Its tokenizer.json, if any, gives each token the
    target's id.
    """
    draft = Checkpoint(folder)
    ours, its = target.config, draft.config
    for config in (ours, its):
        if not config.is_native:
            raise ModelError(f"{config.architecture} runs by transformers' modules, with which nothing is guessed")
    if its.vocab_size != ours.vocab_size:
        raise ModelError(f"config.json has a vocab_size of {its.vocab_size}, the model's is {ours.vocab_size}")
    if its.max_context_len < ours.max_context_len:
        problem = f"config.json has a max_position_embeddings of {its.max_context_len}"
        raise ModelError(f"{problem}, less than the model's context of {ours.max_context_len}")
    if os.path.lexists(folder / TOKENIZER_FILE):
        _require_same_tokens(draft.load_tokenizer().vocabulary, target.load_tokenizer().vocabulary)
    return draft


@contextmanager
def naming_the_draft() -> Iterator[None]:
    """Adds the setting's name to a ModelError about a draft's folder."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{SETTING}: {error.message}", **error.ids) from error


def _require_same_tokens(of_draft: dict[str, int], of_target: dict[str, int]) -> None:
    for token, token_id in sorted(of_draft.items()):
        if of_target.get(token, token_id) != token_id:
            raise ModelError(f"tokenizer.json gives {token[:32]!r} the id {token_id}, the model's {of_target[token]}")
