"""The preparation of a request's prompt: token ids and names of blocks."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from router.requests.checks import ServingLimits, ValidPrompt, ValidRequest, resolve
from router.requests.tokenizing import NO_PREFIXES, PieceCache, PublicPrefixes, TokenizerThreads
from text.answer.frame import NO_FRAME, AnswerFrame
from text.chat import Chat, NoRenderer, Rendered, Renderer
from text.grammar import GrammarProcesses, in_sources
from text.tokenizer_protocol import TextCodec
from wire.block_names import NameChain, PublicPart
from wire.errors import InvalidRequest
from wire.ids import SEED_BITS, BlockKey, NamespaceRoot
from wire.kv_policy import Dropping
from wire.layout import KVLayout, Window
from wire.pb import inference_pb2 as pb
from wire.sampling import SamplingParams

MAX_ADDED_CHARS_PER_TOKEN = 4
"""Characters that a chat template may add to a conversation for each token of the context."""
MAX_TINY_LEN = 256
"""Most characters or tokens of a prompt that is prepared on the event loop: a thread would take longer to begin."""


@dataclass(frozen=True, kw_only=True)
class PreparedPrompt:
    """A request ready for workers. keys: all blocks of the prompt, the tail included.

    held_keys: keys that a decode worker fetches. public: the part whose names are no tenant's. echo: the prompt's text,
    if it was asked for. shown: special tokens that are part of the answer's text. frame: the answer's.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    keys: tuple[BlockKey, ...]
    held_keys: tuple[BlockKey, ...]
    echo: str = ""
    shown: Sequence[str] = ()
    public: PublicPart | None = None
    frame: AnswerFrame = NO_FRAME

    @cached_property
    def ids_to_send(self) -> pb.TokenIds:
        """The prompt as all orders have it: made once, for it takes a quarter of a millisecond for 8,000 tokens."""
        return pb.TokenIds(ids=self.prompt_ids)


@dataclass(frozen=True, kw_only=True)
class PromptPreparer:
    """The preparer of all requests' prompts: renders chats, checks grammars, tokenizes and names blocks."""

    codec: TextCodec
    renderer: Renderer = field(default_factory=NoRenderer)
    prefixes: PublicPrefixes = NO_PREFIXES
    threads: TokenizerThreads = field(default_factory=TokenizerThreads)
    known: PieceCache = field(default_factory=PieceCache)
    grammars: GrammarProcesses = field(default_factory=GrammarProcesses)

    async def close(self) -> None:
        """Ends the threads and processes; running work ends by itself."""
        self.threads.close()
        await self.renderer.close()
        await self.grammars.close()

    async def render(self, prompt: Chat, limits: ServingLimits) -> Rendered:
        """Renders a chat. Raises InvalidRequest or Unsupported."""
        max_added_chars = MAX_ADDED_CHARS_PER_TOKEN * limits.model.max_context_len
        return await prompt.render(self.renderer, self.codec.special_tokens, max_added_chars)

    async def check_grammar(self, valid: ValidRequest, limits: ServingLimits) -> ValidRequest:
        """Checks an answer's grammar, and makes it the response format. Raises InvalidRequest or Unsupported."""
        frame = valid.prompt.frame if isinstance(valid.prompt, Rendered) else NO_FRAME
        content = valid.sampling.response_format
        grammar, checked = frame.grammar(content, self.codec), frame.grammar(content)
        if grammar is None or checked is None:
            return valid
        sampling, sources = replace(valid.sampling, response_format=grammar), frame.sources(content)
        try:
            for param, source in sources.items():
                source.require_in_range(param)
            sampling.require_in_range(limits.model.vocab_size)
            await self.grammars.check(checked, sources)
        except InvalidRequest as error:
            raise in_sources(error, sources) from error
        return replace(valid, sampling=sampling)

    async def prepare(
        self, valid: ValidRequest, limits: ServingLimits, root: NamespaceRoot, on_begin: Callable[[], None]
    ) -> PreparedPrompt:
        """Tokenizes a prompt and names its blocks, in a thread unless it is tiny. on_begin: called at the start."""

        def work() -> PreparedPrompt:
            on_begin()
            return self._prepare(valid, limits, root)

        length = len(valid.prompt)
        return work() if length <= MAX_TINY_LEN else await self.threads.run(length, work)

    async def tokenize(self, prompt: ValidPrompt, limits: ServingLimits, root: NamespaceRoot) -> pb.TokenizeResponse:
        """Returns the tokens of a text or a chat. Raises InvalidRequest or Unsupported."""
        rendered = await self.render(prompt, limits) if isinstance(prompt, Chat) else prompt
        return await self.threads.run(len(rendered), partial(self._tokens_of, rendered, root))

    def _prepare(self, valid: ValidRequest, limits: ServingLimits, root: NamespaceRoot) -> PreparedPrompt:
        """Tokenizes, draws a missing seed, names the blocks. Raises InvalidRequest if the prompt does not fit.

        Thread-safe; takes time in proportion to the text.
        """
        prompt, dropping, layout = valid.prompt, valid.dropping, limits.model.layout
        prompt_ids = tuple(encode(prompt, self.codec, root, self.known))
        if dropping is not None:
            num_copied = dropping.num_copied(len(prompt_ids), layout.block_size)
            limits = replace(limits, num_blocks=limits.num_blocks - num_copied)
        sampling = resolve(valid, prompt_ids, limits, secrets.randbits(SEED_BITS))
        public = self.prefixes.part_of(prompt_ids, layout.block_size)
        chain = NameChain(root, layout.block_size, public)
        chain.extend(prompt_ids)
        keys = tuple(name.key for name in chain.cover(len(prompt_ids)))
        text = prompt if isinstance(prompt, str) else self.codec.decode(prompt_ids) if sampling.echo else ""
        frame = prompt.frame if isinstance(prompt, Rendered) else NO_FRAME
        return PreparedPrompt(
            prompt_ids=prompt_ids,
            sampling=sampling,
            keys=keys,
            held_keys=_held_keys(chain, layout, dropping),
            echo=text if sampling.echo else "",
            shown=frame.marks if sampling.skip_special_tokens else self.codec.special_tokens,
            public=public,
            frame=frame,
        )

    def _tokens_of(self, prompt: ValidPrompt, root: NamespaceRoot) -> pb.TokenizeResponse:
        token_ids = encode(prompt, self.codec, root, self.known)
        tokens = [self.codec.token_bytes(token_id) for token_id in token_ids]
        return pb.TokenizeResponse(token_ids=token_ids, tokens=tokens)


def _held_keys(prompt: NameChain, layout: KVLayout, dropping: Dropping | None) -> tuple[BlockKey, ...]:
    """Lists the keys of the blocks that a decode worker fetches: kept blocks, or all that the next row needs."""
    names = prompt.cover(prompt.num_tokens)
    needed = [names[place] for place in Window(layout).needed(len(names), prompt.num_tokens)]
    if dropping is not None and dropping.rule.names_kept:
        num_copied = dropping.num_copied(prompt.num_tokens, layout.block_size)
        kept = prompt.kept(dropping.terms, prompt.num_tokens, num_copied)
        needed = kept.cover(kept.num_tokens) or needed
    return tuple(name.key for name in needed)


def encode(prompt: ValidPrompt, codec: TextCodec, root: NamespaceRoot, known: PieceCache) -> Sequence[int]:
    """Returns the token ids of a prompt or a rendered chat. Takes time in proportion to the text that is not cached."""
    assert not isinstance(prompt, Chat), "not rendered yet"
    if isinstance(prompt, Rendered):
        return known.encode(root, prompt.pieces(codec), codec)
    return codec.encode(prompt) if isinstance(prompt, str) else prompt
