"""The way of a request's prompt to token ids and names of blocks, before any worker hears of it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from router.requests.tokenizing import NO_PREFIXES, PieceCache, PublicPrefixes, TokenizerThreads
from router.requests.validator import (
    PreparedPrompt,
    ServingLimits,
    ValidPrompt,
    ValidRequest,
    encode,
    prepare,
)
from text.answer.frame import NO_FRAME
from text.chat import Chat, NoRenderer, Rendered, Renderer
from text.grammar import GrammarProcesses, in_sources
from text.tokenizer_protocol import TextCodec
from wire.errors import InvalidRequest
from wire.ids import NamespaceRoot
from wire.pb import inference_pb2 as pb

MAX_ADDED_CHARS_PER_TOKEN = 4
"""Characters that a chat template may add to a conversation for each token of the context."""
MAX_TINY_LEN = 256
"""Characters or tokens of a prompt that is prepared on the event loop: a thread would take longer to begin."""


@dataclass(frozen=True)
class PromptPreparer:
    """Renders chats, checks grammars, tokenizes and names blocks, for all requests. Made within an event loop."""

    codec: TextCodec
    renderer: Renderer = field(default_factory=NoRenderer)
    prefixes: PublicPrefixes = NO_PREFIXES
    threads: TokenizerThreads = field(default_factory=TokenizerThreads)
    known: PieceCache = field(default_factory=PieceCache)
    grammars: GrammarProcesses = field(default_factory=GrammarProcesses)

    async def close(self) -> None:
        """Ends the threads and processes; work under way ends by itself."""
        self.threads.close()
        await self.renderer.close()
        await self.grammars.close()

    async def render(self, prompt: Chat, limits: ServingLimits) -> Rendered:
        """Renders a chat. Raises InvalidRequest or Unsupported."""
        max_added_chars = MAX_ADDED_CHARS_PER_TOKEN * limits.max_context_len
        return await prompt.render(self.renderer, self.codec.special_tokens, max_added_chars)

    async def check_grammar(self, valid: ValidRequest, limits: ServingLimits) -> ValidRequest:
        """Checks the grammar of an answer, and makes it the response format. Raises InvalidRequest or Unsupported."""
        frame = valid.prompt.frame if isinstance(valid.prompt, Rendered) else NO_FRAME
        content = valid.sampling.response_format
        grammar, checked = frame.grammar(content, self.codec), frame.grammar(content)
        if grammar is None or checked is None:
            return valid
        sampling, sources = replace(valid.sampling, response_format=grammar), frame.sources(content)
        try:
            for param, source in sources.items():
                source.require_in_range(param)
            sampling.require_in_range(limits.vocab_size)
            await self.grammars.check(checked, sources)
        except InvalidRequest as error:
            raise in_sources(error, sources) from error
        return replace(valid, sampling=sampling)

    async def prepare(
        self, valid: ValidRequest, limits: ServingLimits, root: NamespaceRoot, on_begin: Callable[[], None]
    ) -> PreparedPrompt:
        """Tokenizes a prompt and names its blocks: in a thread, unless it is tiny. on_begin: called there."""

        def work() -> PreparedPrompt:
            on_begin()
            return prepare(valid, self.codec, limits, root, self.known, self.prefixes)

        length = len(valid.prompt)
        return work() if length <= MAX_TINY_LEN else await self.threads.run(length, work)

    async def tokenize(self, prompt: ValidPrompt, limits: ServingLimits, root: NamespaceRoot) -> pb.TokenizeResponse:
        """Returns the tokens of a text or a chat. Raises InvalidRequest or Unsupported."""
        rendered = await self.render(prompt, limits) if isinstance(prompt, Chat) else prompt
        return await self.threads.run(len(rendered), partial(self._tokens_of, rendered, root))

    def _tokens_of(self, prompt: ValidPrompt, root: NamespaceRoot) -> pb.TokenizeResponse:
        token_ids = encode(prompt, self.codec, root, self.known)
        tokens = [self.codec.token_bytes(token_id) for token_id in token_ids]
        return pb.TokenizeResponse(token_ids=token_ids, tokens=tokens)
