"""A model folder's chat template: messages to a prompt's text. Templates are code, so they run in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from text.tokenizer_config import TokenizerConfig
from wire.errors import InvalidRequest, ModelError
from wire.model_file import read_text

MAX_TEMPLATE_BYTES = 1 << 20
MAX_PROMPT_CHARS = 4 << 20


class ChatTemplate:
    """Renders as transformers' `apply_chat_template` with `add_generation_prompt` does."""

    def __init__(self, source: str, special_texts: Mapping[str, str]) -> None:
        """`special_texts` has the text of each special token by role, e.g. `eos_token`. Raises ModelError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        self._special_texts = dict(special_texts)
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError("chat template: malformed") from error

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate | None":
        """From chat_template.jinja, else tokenizer_config.json; None if the model has none. Raises ModelError."""
        config = TokenizerConfig.load(folder)
        source = read_text(folder / "chat_template.jinja", MAX_TEMPLATE_BYTES) or config.chat_template
        return None if source is None else cls(source, dict(config.special_texts))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt up to where the assistant speaks. Raises InvalidRequest if the template refuses `messages`."""
        parts: list[str] = []
        room = MAX_PROMPT_CHARS
        try:
            for part in self._template.generate(messages=messages, add_generation_prompt=True, **self._special_texts):
                parts.append(part)
                room -= len(part)
                if room < 0:
                    raise InvalidRequest("messages", f"the prompt would exceed {MAX_PROMPT_CHARS} characters")
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest("messages", "the model's chat template does not take them") from error
        return "".join(parts)


def _refuse(_message: str) -> NoReturn:
    raise jinja2.TemplateError("refused by the template")


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
