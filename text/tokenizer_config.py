"""tokenizer_config.json: the tokens that it adds to tokenizer.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from text.model_file import read_text
from wire.errors import ModelError

MAX_CONFIG_BYTES = 8 << 20


@dataclass(frozen=True)
class TokenizerConfig:
    """What transformers 5 takes from the file where there is a tokenizer.json; `add_bos_token` and the like are not."""

    declared_tokens: tuple[AddedToken, ...] = ()
    """In order of their ids."""
    special_tokens: tuple[AddedToken, ...] = ()
    """Those with a role (`eos_token`, ...), and extra ones."""

    @classmethod
    def load(cls, folder: Path) -> "TokenizerConfig":
        """Empty where there is no such file. Raises ModelError if it is malformed."""
        content = read_text(folder / "tokenizer_config.json", MAX_CONFIG_BYTES)
        if content is None:
            return cls()
        try:
            return cls._parse(json.loads(content))
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise ModelError("tokenizer_config.json: malformed") from error

    @classmethod
    def _parse(cls, raw: dict[str, Any]) -> "TokenizerConfig":
        declared = {int(index): _token(value) for index, value in raw.get("added_tokens_decoder", {}).items()}
        extra = raw.get("extra_special_tokens") or raw.get("additional_special_tokens") or []
        named = {
            role: value for role, value in raw.items() if role.endswith("_token") and isinstance(value, str | dict)
        }
        named |= extra if isinstance(extra, dict) else {}
        unnamed = [] if isinstance(extra, dict) else extra
        return cls(
            declared_tokens=tuple(token for _, token in sorted(declared.items())),
            special_tokens=tuple(_token(value) for value in [*named.values(), *unnamed]),
        )


def _token(value: str | dict[str, Any]) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True)
    return AddedToken(**{name: field for name, field in value.items() if name != "__type"})
