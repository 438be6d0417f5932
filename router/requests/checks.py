"""Checks of clients' requests: before they are tokenized, and once the prompt's tokens are known."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.requests.conversation import valid_chat
from text.chat import Chat, Rendered
from text.tokenizer_protocol import TextCodec
from wire.convert import given, sampling_from_pb
from wire.errors import ContextLengthExceeded, Lengths, ModelNotFound, require
from wire.ids import MAX_SESSION_LEN, REQUEST_ID, RequestId
from wire.kv_policy import Dropping, parse_dropping
from wire.layout import Window
from wire.load.fairness import MAX_PRIORITY
from wire.pb import inference_pb2 as pb
from wire.sampling import MAX_TOLD_PROMPT_LEN, SamplingParams
from wire.served_model import ServedModel

MAX_CHARACTER_BYTES = 4


@dataclass(frozen=True)
class ServingLimits:
    """The bounds of a request: the model's, and `num_blocks`, the smallest pool of the workers."""

    model: ServedModel
    num_blocks: int

    @property
    def max_sequence_len(self) -> int:
        """The most tokens of a choice, prompt and output."""
        return Window(self.model.layout).max_len(self.num_blocks, self.model.max_context_len)

    def require_room(self, num_tokens: int, at_least: str = "") -> None:
        """Raises ContextLengthExceeded for a prompt that leaves no room for a token."""
        length, pool = self.model.max_context_len, f"the {self.num_blocks} of the smallest pool"
        for limit, problem in (
            (length, f"leave no room in a context of {length}"),
            (self.max_sequence_len, f"need more blocks than {pool}"),
        ):
            _require_length("prompt", f"{at_least}{num_tokens} tokens {problem}", Lengths(num_tokens, 0, limit))


ValidPrompt = Chat | Rendered | str | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ValidRequest:
    """A request with every field in range. The prompt is token ids, a text, or a chat.

    session, keep_s, priority: the message's; empty, None and 0 if unset. resume: what the client has of the answer,
    from a router that was lost.
    """

    request_id: RequestId | None
    prompt: ValidPrompt
    sampling: SamplingParams
    max_tokens_given: bool
    seed_given: bool
    dropping: Dropping | None = None
    session: str = ""
    keep_s: float | None = None
    priority: int = 0
    resume: pb.Resume | None = None


def validate(message: pb.GenerateRequest, limits: ServingLimits) -> ValidRequest:
    """Checks everything that needs no tokens. Raises InvalidRequest or ModelNotFound."""
    model, sampling = limits.model, message.sampling_params
    if given(message, "model") not in (None, *model.names):
        raise ModelNotFound(f"model: no model of that name is served, but {', '.join(model.names)}")
    request_id, session, keep_s = (given(message, name) for name in ("request_id", "session", "keep_s"))
    is_id = request_id is None or REQUEST_ID.fullmatch(request_id)
    require(is_id, "request_id", "must be 1 to 64 characters of A-Z a-z 0-9 . _ -")
    valid = ValidRequest(
        request_id=None if request_id is None else RequestId(request_id),
        prompt=_prompt(message, limits),
        sampling=_sampling(sampling, model),
        max_tokens_given=sampling.HasField("max_tokens"),
        seed_given=sampling.HasField("seed"),
        dropping=_dropping(message, model),
        session=message.session,
        keep_s=keep_s,
        priority=message.priority,
        resume=given(message, "resume"),
    )
    if valid.resume is not None:
        _require_resumable(valid.resume, valid, model)
    is_fit = session is None or 1 <= len(session) <= MAX_SESSION_LEN
    require(is_fit, "session", f"must be 1 to {MAX_SESSION_LEN} characters")
    require(abs(message.priority) <= MAX_PRIORITY, "priority", f"must be at most {MAX_PRIORITY} from 0")
    require(0 <= message.keep_s < math.inf, "keep_s", "must be seconds, 0 or more")
    return valid


def _require_resumable(resume: pb.Resume, valid: ValidRequest, model: ServedModel) -> None:
    """Raises InvalidRequest for an answer so far that no answer to the request could be."""
    require(valid.seed_given, "resume", "wants the seed that the first router had")
    require(len(resume.choices) == valid.sampling.n, "resume", f"must have {valid.sampling.n} choices, as n says")
    for one in resume.choices:
        fits = len(one.token_ids) <= model.max_context_len and max(one.token_ids, default=0) < model.vocab_size
        require(fits, "resume", "has more tokens than the context, or a token that is not in the vocabulary")
        is_end = not one.HasField("ended") or one.ended.finish_reason in (
            pb.FINISH_REASON_STOP,
            pb.FINISH_REASON_LENGTH,
        )
        require(is_end, "resume", "a choice that has ended wants a reason")


def valid_text(message: pb.TokenizeRequest) -> ValidPrompt:
    """Returns the checked prompt of a Tokenize request. Raises InvalidRequest."""
    require(message.WhichOneof("prompt") is not None, "prompt", "missing: give text or messages")
    return valid_chat(message.messages) if message.HasField("messages") else message.text


def require_known(token_ids: Sequence[int], model: ServedModel) -> None:
    """Raises InvalidRequest for more token ids than the context has, and for ids beyond the vocabulary."""
    require(len(token_ids) <= model.max_context_len, "token_ids", f"at most {model.max_context_len}")
    known = max(token_ids, default=0) < model.vocab_size
    require(known, "token_ids", f"must be below the vocabulary's size, {model.vocab_size}")


def require_may_fit(prompt: ValidPrompt, codec: TextCodec, limits: ServingLimits) -> None:
    """Raises InvalidRequest for a text that is too long however it is tokenized. Takes milliseconds for megabytes."""
    text = prompt.text if isinstance(prompt, Chat) else prompt
    if isinstance(text, str) and len(text) * MAX_CHARACTER_BYTES >= limits.max_sequence_len:
        limits.require_room(codec.min_tokens(text, limits.max_sequence_len), "at least ")


def resolve(valid: ValidRequest, prompt_ids: Sequence[int], limits: ServingLimits, seed: int) -> SamplingParams:
    """Returns the settings to run with, once the prompt's tokens are known. seed: used if the client gave none.

    Raises InvalidRequest if prompt and output do not fit into the context or into the smallest pool.
    """
    sampling, max_len, num_tokens = valid.sampling, limits.max_sequence_len, len(prompt_ids)
    require(num_tokens > 0, "prompt", "has no tokens")
    limits.require_room(num_tokens)
    known = max(prompt_ids) < limits.model.vocab_size
    require(known, "prompt", "has a token that is not in the model's vocabulary")
    if not valid.max_tokens_given:
        # An answer with log-probabilities has many entries a token, which the gateway counts beforehand.
        is_chat = isinstance(valid.prompt, Rendered) and sampling.logprobs is None
        wanted = limits.model.max_chat_tokens if is_chat else sampling.max_tokens
        sampling = replace(sampling, max_tokens=min(wanted, max_len - num_tokens))
    problem = f"{num_tokens} prompt tokens and {sampling.max_tokens} more exceed the {max_len} that fit"
    _require_length("max_tokens", problem, Lengths(num_tokens, sampling.max_tokens, max_len))
    for param, is_told in (("prompt_logprobs", sampling.prompt_logprobs is not None), ("echo", sampling.echo)):
        fits = not is_told or num_tokens <= MAX_TOLD_PROMPT_LEN
        require(fits, param, f"the prompt has {num_tokens} tokens; at most {MAX_TOLD_PROMPT_LEN}")
    require(
        sampling.min_tokens <= sampling.max_tokens,
        "min_tokens",
        f"{sampling.min_tokens} is more than max_tokens, {sampling.max_tokens}",
    )
    if valid.resume is not None:
        _require_within(valid.resume, sampling, num_tokens)
    return sampling if valid.seed_given else replace(sampling, seed=seed)


def _require_within(resume: pb.Resume, sampling: SamplingParams, num_prompt_tokens: int) -> None:
    """Raises InvalidRequest for an answer so far that is longer than allowed, or that begins before its prompt."""
    lens = [len(one.token_ids) + (not one.HasField("ended")) for one in resume.choices]
    require(max(lens) <= sampling.max_tokens, "resume", f"a choice goes beyond max_tokens, {sampling.max_tokens}")
    require(resume.prompt_tokens <= num_prompt_tokens, "resume", f"the prompt has {num_prompt_tokens} tokens")
    is_prompt_whole = sampling.prompt_logprobs is None or resume.prompt_tokens == num_prompt_tokens
    has_begun = any(one.token_ids for one in resume.choices)
    require(is_prompt_whole or not has_begun, "resume", "has tokens of an answer before all scores of the prompt")


def _dropping(message: pb.GenerateRequest, model: ServedModel) -> Dropping | None:
    """Returns the policy by which a request drops KV, if any. Raises InvalidRequest unless it is allowed."""
    text = message.kv_policy if message.HasField("kv_policy") else model.kv_policies[0]
    require(text in model.kv_policies, "kv_policy", f"must be one of {', '.join(model.kv_policies)}")
    return parse_dropping(text)


def _prompt(message: pb.GenerateRequest, limits: ServingLimits) -> ValidPrompt:
    kind, token_ids = message.WhichOneof("prompt"), message.token_ids.ids
    require(kind is not None, "prompt", "missing: give text, token_ids or messages")
    if kind == "messages":
        return valid_chat(message.messages)
    require(message.text or token_ids, kind, "must not be empty")
    if kind == "text":
        return message.text
    limits.require_room(len(token_ids))
    require_known(token_ids, limits.model)
    return tuple(token_ids)


def _sampling(message: pb.SamplingParams, model: ServedModel) -> SamplingParams:
    sampling = sampling_from_pb(message, model.sampling)
    sampling.require_in_range(model.vocab_size)
    within = not message.HasField("max_tokens") or sampling.min_tokens <= sampling.max_tokens
    require(within, "min_tokens", "must not be more than max_tokens")
    return replace(sampling, top_k=min(max(sampling.top_k, 0), model.vocab_size))


def _require_length(param: str, message: str, lengths: Lengths) -> None:
    """Raises ContextLengthExceeded unless prompt and output fit; a prompt alone leaves room for one token."""
    if lengths.prompt + max(lengths.output, 1) > lengths.limit:
        raise ContextLengthExceeded(param, message, lengths)
