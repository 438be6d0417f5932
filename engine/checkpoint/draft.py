"""The folder of a draft model: one that can guess the tokens of another model."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.checkpoint.checkpoint import Checkpoint
from wire.errors import ModelError

SETTING = "speculation.draft"


def open_draft(folder: Path, target: Checkpoint) -> Checkpoint:
    """Opens a draft's folder. Raises ModelError for one that cannot be served, or is no draft of the target.

    It has as many tokens and at least the context. A tokenizer.json of its own, which it need not have, may give no
    token of the target another id.
    """
    draft = Checkpoint(folder)
    ours, its = target.config, draft.config
    if its.vocab_size != ours.vocab_size:
        raise ModelError(f"config.json has a vocab_size of {its.vocab_size}, the model's is {ours.vocab_size}")
    if its.max_context_len < ours.max_context_len:
        problem = f"config.json has a max_position_embeddings of {its.max_context_len}"
        raise ModelError(f"{problem}, less than the model's context of {ours.max_context_len}")
    if os.path.lexists(folder / "tokenizer.json"):
        _require_same_tokens(draft.load_tokenizer().vocabulary, target.load_tokenizer().vocabulary)
    return draft


@contextmanager
def naming_the_draft() -> Iterator[None]:
    """Names the setting in a ModelError about the folder of a draft."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{SETTING}: {error.message}", **error.ids) from error


def _require_same_tokens(of_draft: dict[str, int], of_target: dict[str, int]) -> None:
    for token, token_id in sorted(of_draft.items()):
        if of_target.get(token, token_id) != token_id:
            raise ModelError(f"tokenizer.json gives {token[:32]!r} the id {token_id}, the model's {of_target[token]}")
