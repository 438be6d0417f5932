"""Beginnings of prompts that the operator has declared public: their blocks have names that all tenants share."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from router.config import RouterConfig
from text.chat import Chat, ChatTurn, Rendered, Renderer
from text.codec import TextCodec
from wire.errors import ConfigError, InvalidRequest, Unsupported
from wire.ids import NamespaceRoot
from wire.names import PublicPart

PUBLIC = "*"
"""Stands for the tenant in the root of public names; no tenant is called so."""
MAX_ADDED_CHARS = 1 << 20
_QUESTIONS = ("a", "1")
"""Two turns of a user: the tokens before the first that differs are the system message's alone."""


@dataclass(frozen=True)
class PublicPrefixes:
    """The token ids of public prefixes, in whole blocks, and the root of their blocks' names."""

    root: NamespaceRoot
    token_ids: tuple[tuple[int, ...], ...] = ()

    @classmethod
    async def make(cls, config: RouterConfig, codec: TextCodec, renderer: Renderer) -> "PublicPrefixes":
        """Tokenizes each text as a prompt begins with it, and as the system message of a chat. Raises ConfigError."""
        size, found = config.model.layout.block_size, []
        for number, text in enumerate(config.public_prefixes):
            known = [tuple(codec.encode(text)), await _system_tokens(text, codec, renderer)]
            whole = [one[: len(one) // size * size] for one in known if len(one) >= size]
            if not whole:
                raise ConfigError(f"router.public_prefixes[{number}] must have {size} tokens, which are a block")
            found += whole
        return cls(config.root_of(PUBLIC), tuple(found))

    def part_of(self, prompt_ids: Sequence[int], block_size: int) -> PublicPart | None:
        """Finds the longest public prefix that a prompt has whole."""
        begun = [len(one) for one in self.token_ids if tuple(prompt_ids[: len(one)]) == one]
        return PublicPart(self.root, max(begun) // block_size) if begun else None


NO_PREFIXES = PublicPrefixes(NamespaceRoot(b""))


async def _system_tokens(text: str, codec: TextCodec, renderer: Renderer) -> tuple[int, ...]:
    """Returns the tokens of all chats with that system message; none where the template takes no such message."""
    try:
        one, other = [await _chat_tokens(text, question, codec, renderer) for question in _QUESTIONS]
    except (InvalidRequest, Unsupported):
        return ()
    return tuple(token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


async def _chat_tokens(text: str, question: str, codec: TextCodec, renderer: Renderer) -> list[int]:
    chat = Chat((ChatTurn("system", text), ChatTurn("user", question)))
    rendered: Rendered = await chat.render(renderer, codec.special_tokens, MAX_ADDED_CHARS)
    return [token for piece in rendered.pieces(codec) for token in codec.encode_rendered(piece)]
