"""What tokenizer_config.json adds to tokenizer.json: which tokens are special, and whether BOS and EOS are put in."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from text.model_file import read_model_file
from wire.errors import ModelError

MAX_CONFIG_BYTES = 8 << 20


@dataclass(frozen=True)
class TokenizerConfig:
    """Fields as transformers 5 understands them; all empty where the file is missing."""

    added_tokens: tuple[AddedToken, ...] = ()
    special_tokens: tuple[AddedToken, ...] = ()
    bos_token: str | None = None
    eos_token: str | None = None
    adds_bos: bool = False
    adds_eos: bool = False
    states_bos_or_eos: bool = False
    chat_template: str | None = None

    @classmethod
    def load(cls, folder: Path) -> "TokenizerConfig":
        """Raises ModelError if the file is there and malformed."""
        content = read_model_file(folder, "tokenizer_config.json", MAX_CONFIG_BYTES)
        if content is None:
            return cls()
        try:
            return cls._parse(json.loads(content))
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise ModelError("tokenizer_config.json: malformed") from error

    @classmethod
    def _parse(cls, raw: dict[str, Any]) -> "TokenizerConfig":
        added = {int(index): _token(value) for index, value in raw.get("added_tokens_decoder", {}).items()}
        template = raw.get("chat_template")
        return cls(
            added_tokens=tuple(token for _, token in sorted(added.items())),
            special_tokens=tuple(_special_tokens(raw, {token.content: token for token in added.values()})),
            bos_token=_content(raw.get("bos_token")),
            eos_token=_content(raw.get("eos_token")),
            adds_bos=bool(raw.get("add_bos_token", False)),
            adds_eos=bool(raw.get("add_eos_token", False)),
            states_bos_or_eos="add_bos_token" in raw or "add_eos_token" in raw,
            chat_template=template if isinstance(template, str) else None,
        )


def _special_tokens(raw: dict[str, Any], declared: dict[str, AddedToken]) -> Iterator[AddedToken]:
    """Tokens in fields named *_token, and the extra ones; as declared among the added tokens where they are."""
    named = [value for name, value in raw.items() if name.endswith("_token") and isinstance(value, (str, dict))]
    extra = raw.get("extra_special_tokens") or raw.get("additional_special_tokens") or []
    for value in [*named, *(extra.values() if isinstance(extra, dict) else extra)]:
        token = _token(value)
        yield declared.get(token.content, token)


def _token(value: str | dict[str, Any]) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    return AddedToken(**{name: field for name, field in value.items() if name != "__type"})


def _content(value: str | dict[str, Any] | None) -> str | None:
    return value["content"] if isinstance(value, dict) else value
