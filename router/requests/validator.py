"""Checks of clients' requests, and their preparation for workers. A valid request is within every range."""

import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from router.requests.tokenizing import NO_PREFIXES, PieceCache, PublicPrefixes
from text.answer.frame import NO_FRAME, AnswerFrame, ToolUse
from text.chat import Chat, Rendered
from text.template.turns import ROLES, ChatTurn
from text.tokenizer_protocol import TextCodec
from wire.block_names import NameChain, PublicPart
from wire.convert import sampling_from_pb
from wire.errors import ContextLengthExceeded, InvalidRequest, Lengths, ModelNotFound, require
from wire.ids import MAX_SESSION_LEN, REQUEST_ID, BlockKey, NamespaceRoot, RequestId
from wire.kv_policy import Dropping, parse_kv_policy
from wire.layout import KVLayout, Window
from wire.pb import inference_pb2 as pb
from wire.rpc import MAX_TURNS
from wire.sampling import DEFAULT_MAX_TOKENS, DEFAULTS, MAX_TOLD_PROMPT_LEN, SamplingParams

SEED_BITS = 63
MAX_CHARACTER_BYTES = 4
MAX_TOOLS = 128
MAX_TOOL_DEPTH = 64
MAX_TOLD_CHARS = 64
FURTHER_FIELDS = ("tool_call_id", "name", "reasoning_content")
RENDERERS_OWN = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "documents",
        "messages",
        "return_assistant_tokens_mask",
        "tools",
    }
)
"""Names that the renderer of templates takes for itself."""


@dataclass(frozen=True)
class ServingLimits:
    """The bounds of the served model and its workers. `num_blocks` is the smallest pool that a request may meet.

    kv_policies: that a request may have; the first is that of the others. defaults, max_chat_tokens: of fields that a
    request leaves out.
    """

    model: str
    vocab_size: int
    max_context_len: int
    num_blocks: int
    layout: KVLayout
    aliases: tuple[str, ...] = ()
    kv_policies: tuple[str, ...] = ("full",)
    defaults: SamplingParams = DEFAULTS
    max_chat_tokens: int = DEFAULT_MAX_TOKENS

    @property
    def max_sequence_len(self) -> int:
        """Tokens, prompt and output, that one choice may have."""
        return Window(self.layout).max_len(self.num_blocks, self.max_context_len)


ValidPrompt = Chat | Rendered | str | tuple[int, ...]


@dataclass(frozen=True)
class ValidRequest:
    """A request whose every field is in range. The prompt is token ids, or not yet rendered or tokenized.

    session, keep_s: as in the message; empty, and None, where they are not set.
    """

    request_id: RequestId | None
    prompt: ValidPrompt
    sampling: SamplingParams
    max_tokens_given: bool
    seed_given: bool
    dropping: Dropping | None = None
    session: str = ""
    keep_s: float | None = None


@dataclass(frozen=True)
class PreparedPrompt:
    """A request ready for workers. `keys` name all blocks of the prompt, a partly filled last one included.

    held_keys: the ones that a decode worker fetches. public: the part whose names are no tenant's.
    echo: the prompt's text, if it was asked for. shown: special tokens that are part of the answer's text. frame: its.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    keys: tuple[BlockKey, ...]
    held_keys: tuple[BlockKey, ...]
    echo: str = ""
    shown: Sequence[str] = ()
    public: PublicPart | None = None
    frame: AnswerFrame = NO_FRAME


def validate(message: pb.GenerateRequest, limits: ServingLimits) -> ValidRequest:
    """Everything that can be said before tokenizing. Raises InvalidRequest or ModelNotFound."""
    _require_model(message, limits)
    given = message.sampling_params
    return ValidRequest(
        request_id=_request_id(message),
        prompt=_prompt(message, limits),
        sampling=_sampling(sampling_from_pb(given, limits.defaults), given, limits),
        max_tokens_given=given.HasField("max_tokens"),
        seed_given=given.HasField("seed"),
        dropping=_dropping(message, limits),
        session=_session(message),
        keep_s=_keep_s(message),
    )


def valid_text(message: pb.TokenizeRequest) -> ValidPrompt:
    """Returns the prompt of a request for tokens. Raises InvalidRequest."""
    require(message.WhichOneof("prompt") is not None, "prompt", "missing: give text or messages")
    return valid_chat(message.messages) if message.HasField("messages") else message.text


def require_known(token_ids: Sequence[int], limits: ServingLimits) -> None:
    """Raises InvalidRequest for more token ids than the context has, and for ids that no token can have."""
    require(len(token_ids) <= limits.max_context_len, "token_ids", f"at most {limits.max_context_len}")
    known = max(token_ids, default=0) < limits.vocab_size
    require(known, "token_ids", f"must be below the vocabulary's size, {limits.vocab_size}")


def require_may_fit(prompt: ValidPrompt, codec: TextCodec, limits: ServingLimits) -> None:
    """Raises InvalidRequest for a text that is too long however it is tokenized. Takes milliseconds for megabytes."""
    text = _text_of(prompt)
    if len(text) * MAX_CHARACTER_BYTES >= limits.max_sequence_len:
        _require_room(codec.min_tokens(text, limits.max_sequence_len), limits, "at least ")


def prepare(
    valid: ValidRequest,
    codec: TextCodec,
    limits: ServingLimits,
    root: NamespaceRoot,
    known: PieceCache,
    prefixes: PublicPrefixes = NO_PREFIXES,
) -> PreparedPrompt:
    """Tokenizes, draws a seed if none was given, names the blocks. Raises InvalidRequest if it does not fit.

    May be called on any thread; takes as long as the text is.
    """
    encoded = encode(valid.prompt, codec, root, known)
    block_size = limits.layout.block_size
    if valid.dropping is not None:
        num_copied = valid.dropping.num_copied(len(encoded), block_size)
        limits = replace(limits, num_blocks=limits.num_blocks - num_copied)
    sampling = resolve(valid, encoded, limits, secrets.randbits(SEED_BITS))
    prompt_ids = tuple(encoded)
    public = prefixes.part_of(prompt_ids, block_size)
    chain = NameChain(root, block_size, public)
    chain.extend(prompt_ids)
    keys = tuple(name.key for name in chain.cover(len(prompt_ids)))
    held_keys = _held_keys(chain, limits.layout, valid.dropping)
    echo = _echo(valid, prompt_ids, codec) if sampling.echo else ""
    frame = valid.prompt.frame if isinstance(valid.prompt, Rendered) else NO_FRAME
    shown = frame.marks if sampling.skip_special_tokens else codec.special_tokens
    return PreparedPrompt(prompt_ids, sampling, keys, held_keys, echo, shown, public, frame)


def _held_keys(prompt: NameChain, layout: KVLayout, dropping: Dropping | None) -> tuple[BlockKey, ...]:
    """Lists the keys of the blocks that a decode worker fetches: kept ones, or all that the next row needs."""
    names = prompt.cover(prompt.num_tokens)
    needed = [names[place] for place in Window(layout).needed(len(names), prompt.num_tokens)]
    if dropping is not None and dropping.rule.names_kept:
        num_copied = dropping.num_copied(prompt.num_tokens, layout.block_size)
        kept = prompt.kept(dropping.terms, prompt.num_tokens, num_copied)
        needed = kept.cover(kept.num_tokens) or needed
    return tuple(name.key for name in needed)


def _echo(valid: ValidRequest, prompt_ids: Sequence[int], codec: TextCodec) -> str:
    """Returns a prompt's text as its client sent it, or as its tokens stand for it."""
    return valid.prompt if isinstance(valid.prompt, str) else codec.decode(prompt_ids)


def resolve(valid: ValidRequest, prompt_ids: Sequence[int], limits: ServingLimits, seed: int) -> SamplingParams:
    """The settings to run with, once the prompt's tokens are known; `seed` is taken if the client gave none.

    Raises InvalidRequest if prompt and output do not fit into the context or into the smallest pool.
    """
    room = _room(prompt_ids, limits)
    sampling = valid.sampling
    if not valid.max_tokens_given:
        # An answer with log-probabilities has many entries a token, which the gateway counts beforehand.
        is_chat = isinstance(valid.prompt, Rendered) and sampling.logprobs is None
        sampling = replace(sampling, max_tokens=min(limits.max_chat_tokens if is_chat else sampling.max_tokens, room))
    lengths = Lengths(len(prompt_ids), sampling.max_tokens, limits.max_sequence_len)
    _require_length(
        "max_tokens",
        f"{lengths.prompt} prompt tokens and {lengths.output} more exceed the {lengths.limit} that fit",
        lengths,
    )
    for param, is_told in (("prompt_logprobs", sampling.prompt_logprobs is not None), ("echo", sampling.echo)):
        fits = not is_told or len(prompt_ids) <= MAX_TOLD_PROMPT_LEN
        require(fits, param, f"the prompt has {len(prompt_ids)} tokens; at most {MAX_TOLD_PROMPT_LEN}")
    require(
        sampling.min_tokens <= sampling.max_tokens,
        "min_tokens",
        f"{sampling.min_tokens} is more than max_tokens, {sampling.max_tokens}",
    )
    return sampling if valid.seed_given else replace(sampling, seed=seed)


def _room(prompt_ids: Sequence[int], limits: ServingLimits) -> int:
    """Counts the output tokens that fit after the prompt, at least one."""
    num_tokens = len(prompt_ids)
    require(num_tokens > 0, "prompt", "has no tokens")
    _require_room(num_tokens, limits)
    require(max(prompt_ids) < limits.vocab_size, "prompt", "has a token that is not in the model's vocabulary")
    return limits.max_sequence_len - num_tokens


def _require_room(num_tokens: int, limits: ServingLimits, at_least: str = "") -> None:
    _require_length(
        "prompt",
        f"{at_least}{num_tokens} tokens leave no room in a context of {limits.max_context_len}",
        Lengths(num_tokens, 0, limits.max_context_len),
    )
    _require_length(
        "prompt",
        f"{at_least}{num_tokens} tokens need more blocks than the {limits.num_blocks} of the smallest pool",
        Lengths(num_tokens, 0, limits.max_sequence_len),
    )


def _require_model(message: pb.GenerateRequest, limits: ServingLimits) -> None:
    if message.HasField("model") and message.model not in (limits.model, *limits.aliases):
        served = ", ".join((limits.model, *limits.aliases))
        raise ModelNotFound(f"model: no model of that name is served, but {served}")


def _dropping(message: pb.GenerateRequest, limits: ServingLimits) -> Dropping | None:
    """Returns the policy by which a request drops KV, if it is one that is allowed."""
    text = message.kv_policy if message.HasField("kv_policy") else limits.kv_policies[0]
    require(text in limits.kv_policies, "kv_policy", f"must be one of {', '.join(limits.kv_policies)}")
    policy = parse_kv_policy(text)
    return policy if isinstance(policy, Dropping) else None


def _session(message: pb.GenerateRequest) -> str:
    is_fit = not message.HasField("session") or 1 <= len(message.session) <= MAX_SESSION_LEN
    require(is_fit, "session", f"must be 1 to {MAX_SESSION_LEN} characters")
    return message.session


def _keep_s(message: pb.GenerateRequest) -> float | None:
    require(0 <= message.keep_s < math.inf, "keep_s", "must be seconds, 0 or more")
    return message.keep_s if message.HasField("keep_s") else None


def _request_id(message: pb.GenerateRequest) -> RequestId | None:
    if not message.HasField("request_id"):
        return None
    valid = REQUEST_ID.fullmatch(message.request_id) is not None
    require(valid, "request_id", "must be 1 to 64 characters of A-Z a-z 0-9 . _ -")
    return RequestId(message.request_id)


def _text_of(prompt: ValidPrompt) -> str:
    """Returns the text that a client sent in its prompt."""
    if isinstance(prompt, Chat):
        return prompt.text
    return prompt if isinstance(prompt, str) else ""


def encode(prompt: ValidPrompt, codec: TextCodec, root: NamespaceRoot, known: PieceCache) -> Sequence[int]:
    """Returns the token ids of a prompt; a chat must be rendered. Takes as long as the text is that is not known."""
    assert not isinstance(prompt, Chat), "not rendered yet"
    if isinstance(prompt, Rendered):
        return known.encode(root, prompt.pieces(codec), codec)
    return codec.encode(prompt) if isinstance(prompt, str) else prompt


def _prompt(message: pb.GenerateRequest, limits: ServingLimits) -> ValidPrompt:
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt", "missing: give text, token_ids or messages")
    if kind == "messages":
        return valid_chat(message.messages)
    if kind == "text":
        text = message.text
        require(text != "", "text", "must not be empty")
        return text
    return _token_ids(message.token_ids.ids, limits)


def valid_chat(conversation: pb.Conversation) -> Chat:
    """Reads the messages of a chat. Raises InvalidRequest."""
    require(len(conversation.messages) > 0, "messages", "must not be empty")
    require(len(conversation.messages) <= MAX_TURNS, "messages", f"at most {MAX_TURNS}")
    for one in conversation.messages:
        require(one.role in ROLES, "messages", f"a role must be one of {', '.join(ROLES)}")
    continues, budget = conversation.continue_final_message, conversation.thinking_token_budget
    is_assistants = conversation.messages[-1].role == "assistant"
    require(not continues or is_assistants, "continue_final_message", "the last message must be an assistant's")
    has_budget = conversation.HasField("thinking_token_budget")
    require(not has_budget or budget > 0, "thinking_token_budget", "must be at least 1")
    return Chat(
        tuple(map(_message, conversation.messages)),
        _tool_use(conversation),
        _variables(conversation.chat_template_kwargs),
        continues,
        budget if has_budget else None,
    )


def _tool_use(conversation: pb.Conversation) -> ToolUse:
    """Reads tools and the choice among them. `strict` is not for the template."""
    require(len(conversation.tools) <= MAX_TOOLS, "tools", f"at most {MAX_TOOLS}")
    tools = tuple(_function(one, f"tools[{place}]") for place, one in enumerate(conversation.tools))
    functions, choice = {one["function"]["name"]: one["function"] for one in tools}, conversation.tool_choice
    require(len(functions) == len(tools), "tools", "must have names of their own")
    strict = frozenset(name for name, function in functions.items() if function.pop("strict", False) is True)
    required = choice.required or bool(choice.name)
    require(bool(tools) or not required, "tool_choice", "wants tools")
    require(choice.name in functions or not choice.name, "tool_choice", "must name one of the tools")
    parallel = choice.parallel or not choice.HasField("parallel")
    use = ToolUse(tools, strict, required, choice.name, parallel)
    for name in functions if required else strict:
        schema = functions[name].get("parameters") or {}
        is_object = isinstance(schema, dict) and schema.get("type", "object") == "object"
        require(is_object, use.field(name), "must be of type object")
    return use


def _variables(text: str) -> dict[str, Any]:
    """Reads what a template takes besides the conversation."""
    param = "chat_template_kwargs"
    try:
        read = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(param, "must be JSON") from error
    require(isinstance(read, dict) and _is_shallow(read, MAX_TOOL_DEPTH), param, "must be an object, not too deep")
    for name in read:
        is_free = name not in RENDERERS_OWN and not name.endswith("_token") and name.isidentifier()
        require(is_free, param, f"{name[:MAX_TOLD_CHARS]} is no variable that a client may set")
    return dict(read)


def _message(message: pb.Message) -> ChatTurn:
    calls = tuple(_function(one, "messages") for one in message.tool_calls)
    require(not calls or message.role == "assistant", "messages", "only an assistant has tool_calls")
    arguments = all(isinstance(one["function"].get("arguments"), dict) for one in calls)
    require(arguments, "messages", "the arguments of a call must be an object")
    more = {name: getattr(message, name) for name in FURTHER_FIELDS if message.HasField(name)}
    return ChatTurn(message.role, message.content, calls, more)


def _function(text: str, param: str) -> dict[str, Any]:
    """Reads a tool, or a call of one."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(param, "a tool, or a call of one, must be JSON") from error
    function = read.get("function") if isinstance(read, dict) else None
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    require(_is_shallow(read, MAX_TOOL_DEPTH), param, f"may be nested at most {MAX_TOOL_DEPTH} deep")
    require(named, param, "a tool, or a call of one, must be an object that names a function")
    known: dict[str, Any] = read
    return known


def _is_shallow(value: object, depth: int) -> bool:
    within = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_shallow(one, depth - 1) for one in within)


def _token_ids(ids: Sequence[int], limits: ServingLimits) -> tuple[int, ...]:
    require(len(ids) > 0, "token_ids", "must not be empty")
    _require_room(len(ids), limits)
    require_known(ids, limits)
    return tuple(ids)


def _sampling(sampling: SamplingParams, given: pb.SamplingParams, limits: ServingLimits) -> SamplingParams:
    sampling.require_in_range(limits.vocab_size)
    within = not given.HasField("max_tokens") or sampling.min_tokens <= sampling.max_tokens
    require(within, "min_tokens", "must not be more than max_tokens")
    return replace(sampling, top_k=min(max(sampling.top_k, 0), limits.vocab_size))


def _require_length(param: str, message: str, lengths: Lengths) -> None:
    """Raises ContextLengthExceeded unless prompt and output fit; a prompt alone leaves room for one token."""
    if lengths.prompt + max(lengths.output, 1) > lengths.limit:
        raise ContextLengthExceeded(param, message, lengths)
