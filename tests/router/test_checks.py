"""Every way in which a request can be wrong, one row each; and what is allowed although it looks odd."""

import math
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from hypothesis import given
from hypothesis import strategies as st

from router.ports.interceptors import ErrorInterceptor
from router.requests.checks import ServingLimits, ValidRequest, resolve, validate
from tests.harness.served import served_model
from text.chat import Rendered
from wire.errors import BatonError, ContextLengthExceeded, InvalidRequest, Lengths, ModelNotFound
from wire.layout import KVLayout
from wire.pb import inference_pb2 as pb
from wire.pb import inference_pb2_grpc as pb_grpc
from wire.rpc import SERVER_OPTIONS, details_of
from wire.sampling import SamplingParams

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=16, dtype="float32")


def limits_of(num_blocks: int, max_context_len: int, **given: Any) -> ServingLimits:
    model = served_model(LAYOUT, name="demo", vocab_size=1000, max_context_len=max_context_len, **given)
    return ServingLimits(model, num_blocks)


LIMITS = limits_of(16, 512)
SEED = 77


def text(prompt: str = "hi", **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=prompt, sampling_params=pb.SamplingParams(**sampling))


def resumed(
    *choices: pb.ResumedChoice, seed: int | None = 1, prompt_tokens: int = 0, **settings: Any
) -> pb.GenerateRequest:
    """A request whose answer so far came from another router."""
    request = text("hi", **settings, **({} if seed is None else {"seed": seed}))
    request.resume.CopyFrom(pb.Resume(choices=choices, prompt_tokens=prompt_tokens))
    return request


def tokens(*ids: int, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling_params=pb.SamplingParams(**sampling))


def admit(message: pb.GenerateRequest, num_prompt_tokens: int = 2, limits: ServingLimits = LIMITS) -> Any:
    """Both steps, with as many prompt tokens as the tokenizer would have made."""
    valid = validate(message, limits)
    prompt = valid.prompt if isinstance(valid.prompt, tuple) else [1] * num_prompt_tokens
    return resolve(valid, prompt, limits, SEED)


INVALID: dict[str, tuple[Callable[[], pb.GenerateRequest], str]] = {
    # nothing to complete
    "no prompt": (pb.GenerateRequest, "prompt"),
    "empty text": (lambda: text(""), "text"),
    # precedence
    "a priority far below 0": (lambda: pb.GenerateRequest(text="a", priority=-(1 << 31) - 1), "priority"),
    "a priority far above 0": (lambda: pb.GenerateRequest(text="a", priority=1 << 62), "priority"),
    "empty token list": (lambda: tokens(), "token_ids"),
    "empty TokenIds": (lambda: pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids"),
    # token ids
    "token id at the vocabulary's size": (lambda: tokens(1, 1000), "token_ids"),
    "token id 2^31": (lambda: tokens(2**31), "token_ids"),
    "token id 2^32 - 1": (lambda: tokens(2**32 - 1, 1), "token_ids"),
    # lengths
    "prompt as long as the context": (lambda: tokens(*[1] * 512), "prompt"),
    "prompt that fills the pool": (lambda: tokens(*[1] * 256), "prompt"),
    "prompt + max_tokens beyond the pool": (lambda: tokens(*[1] * 200, max_tokens=57), "max_tokens"),
    "max_tokens 0": (lambda: text(max_tokens=0), "max_tokens"),
    "max_tokens -1": (lambda: text(max_tokens=-1), "max_tokens"),
    "max_tokens 2^63 - 1": (lambda: text(max_tokens=2**63 - 1), "max_tokens"),
    "max_tokens at the context": (lambda: text(max_tokens=512), "max_tokens"),
    "min_tokens -1": (lambda: text(min_tokens=-1), "min_tokens"),
    "min_tokens > max_tokens": (lambda: text(min_tokens=11, max_tokens=10), "min_tokens"),
    "min_tokens > default max_tokens": (lambda: text(min_tokens=257), "min_tokens"),
    "kv_policy that is not allowed": (lambda: pb.GenerateRequest(text="hi", kv_policy="h2o=25%"), "kv_policy"),
    # the distribution
    "temperature NaN": (lambda: text(temperature=math.nan), "temperature"),
    "temperature +Inf": (lambda: text(temperature=math.inf), "temperature"),
    "temperature -Inf": (lambda: text(temperature=-math.inf), "temperature"),
    "temperature 1e39, infinite as a float": (lambda: text(temperature=1e39), "temperature"),
    "temperature below 0": (lambda: text(temperature=-0.01), "temperature"),
    "temperature above 2": (lambda: text(temperature=2.01), "temperature"),
    "top_p below 0": (lambda: text(top_p=-0.5), "top_p"),
    "top_p above 1": (lambda: text(top_p=1.01), "top_p"),
    "top_p NaN": (lambda: text(top_p=math.nan), "top_p"),
    "top_k -2": (lambda: text(top_k=-2), "top_k"),
    "top_k -2^31": (lambda: text(top_k=-(2**31)), "top_k"),
    "min_p below 0": (lambda: text(min_p=-0.1), "min_p"),
    "min_p above 1": (lambda: text(min_p=1.1), "min_p"),
    "min_p NaN": (lambda: text(min_p=math.nan), "min_p"),
    # penalties
    **{
        f"{name} {value}": (partial(text, "hi", **{name: value}), name)
        for name in ("presence_penalty", "frequency_penalty")
        for value in (-2.01, 2.01, math.nan, math.inf, -math.inf)
    },
    **{
        f"repetition_penalty {value}": (partial(text, repetition_penalty=value), "repetition_penalty")
        for value in (0, -1, 10.01, math.nan, math.inf)
    },
    # counts
    "n 0": (lambda: text(n=0), "n"),
    "n -1": (lambda: text(n=-1), "n"),
    "n 17": (lambda: text(n=17), "n"),
    "n 10^9": (lambda: text(n=10**9), "n"),
    "logprobs -1": (lambda: text(logprobs=-1), "logprobs"),
    "logprobs 21": (lambda: text(logprobs=21), "logprobs"),
    "prompt_logprobs -1": (lambda: text(prompt_logprobs=-1), "prompt_logprobs"),
    "prompt_logprobs 21": (lambda: text(prompt_logprobs=21), "prompt_logprobs"),
    "seed -1": (lambda: text(seed=-1), "seed"),
    "seed -2^63": (lambda: text(seed=-(2**63)), "seed"),
    # stops
    "stop of nothing": (lambda: text(stop=[""]), "stop"),
    "stop of nothing among others": (lambda: text(stop=["a", ""]), "stop"),
    "nine stops": (lambda: text(stop=["a"] * 9), "stop"),
    "stop of 257 characters": (lambda: text(stop=["é" * 257]), "stop"),
    "stop of 1 MB": (lambda: text(stop=["a" * (1 << 20)]), "stop"),
    "seventeen stop tokens": (lambda: text(stop_token_ids=[1] * 17), "stop_token_ids"),
    "stop token beyond the vocabulary": (lambda: text(stop_token_ids=[1000]), "stop_token_ids"),
    # messages
    "a chat of 4,097 messages": (
        lambda: pb.GenerateRequest(messages=pb.Conversation(messages=[pb.Message(role="user")] * 4097)),
        "messages",
    ),
    # an answer so far, from another router
    "resume without a seed": (lambda: resumed(pb.ResumedChoice(), seed=None), "resume"),
    "resume of too few choices": (lambda: resumed(pb.ResumedChoice(), n=2), "resume"),
    "resume of too many choices": (lambda: resumed(pb.ResumedChoice(), pb.ResumedChoice()), "resume"),
    "resume beyond the vocabulary": (lambda: resumed(pb.ResumedChoice(token_ids=[1000])), "resume"),
    "resume beyond the context": (lambda: resumed(pb.ResumedChoice(token_ids=[1] * 513)), "resume"),
    "resume of a choice that ended for no reason": (lambda: resumed(pb.ResumedChoice(ended=pb.Choice())), "resume"),
    "resume beyond max_tokens": (lambda: resumed(pb.ResumedChoice(token_ids=[1] * 5), max_tokens=4), "resume"),
    "resume of max_tokens without an end": (
        lambda: resumed(pb.ResumedChoice(token_ids=[1] * 4), max_tokens=4),
        "resume",
    ),
    "resume of more of the prompt than there is": (lambda: resumed(pb.ResumedChoice(), prompt_tokens=3), "resume"),
    "resume of an answer before its prompt's scores": (
        lambda: resumed(pb.ResumedChoice(token_ids=[1]), prompt_tokens=1, prompt_logprobs=0),
        "resume",
    ),
    # request ids
    **{
        f"request id {value[:8]!r}": (partial(pb.GenerateRequest, request_id=value, text="hi"), "request_id")
        for value in ("", "a" * 65, "b" * 10_240, "a\n", "a\r\nb", "a b", "\0", "\x1b[31m", "é", "../a/b", "a:b")
    },
}


NEED_TOKENS = {
    "prompt + max_tokens beyond the pool",
    "max_tokens 2^63 - 1",
    "max_tokens at the context",
    "min_tokens > default max_tokens",
    "resume beyond max_tokens",
    "resume of max_tokens without an end",
    "resume of more of the prompt than there is",
    "resume of an answer before its prompt's scores",
}


@pytest.mark.parametrize("row", INVALID)
def test_refused(row: str) -> None:
    """All without tokenizing, which is the expensive part, but for lengths that are told beside the prompt's."""
    make, param = INVALID[row]
    check = admit if row in NEED_TOKENS else lambda message: validate(message, LIMITS)
    with pytest.raises(InvalidRequest) as caught:
        check(make())
    assert caught.value.message.startswith(f"{param}: ")
    assert caught.value.ids["param"] == param
    assert caught.value.status.grpc == "INVALID_ARGUMENT"


@pytest.mark.parametrize("sampling", [{"prompt_logprobs": 0}, {"echo": True}])
def test_a_prompt_that_is_told_is_bounded(sampling: dict[str, Any]) -> None:
    large = limits_of(1 << 14, 1 << 17)
    assert admit(text(**sampling), 1 << 15, large).seed == SEED
    with pytest.raises(InvalidRequest, match=next(iter(sampling))):
        admit(text(**sampling), (1 << 15) + 1, large)


@pytest.mark.parametrize("name", ["other", "", "demo ", "DEMO", "../../etc/passwd", "m" * 10_240, "demo\0"])
def test_unknown_model(name: str) -> None:
    limits = limits_of(16, 512, aliases=("other name",))
    with pytest.raises(ModelNotFound, match=r"^model: .*, but demo, other name$") as caught:
        validate(pb.GenerateRequest(model=name, text="hi"), limits)
    assert caught.value.status.grpc == "NOT_FOUND"


FIELDS = {
    "request_id": st.text(max_size=200),
    "model": st.text(max_size=200),
    "text": st.text(max_size=200),
}


@given(st.fixed_dictionaries({}, optional=FIELDS), st.lists(st.text(min_size=65, max_size=400), max_size=6))
def test_a_message_never_repeats_what_was_sent(fields: dict[str, Any], stops: list[str]) -> None:
    answer = refusal(pb.GenerateRequest(**fields, sampling_params=pb.SamplingParams(stop=stops)))
    sent = [value for value in (*fields.values(), *stops) if len(value) > 64]
    assert not any(value[:65] in answer for value in sent)
    assert len(answer) < 160


def refusal(message: pb.GenerateRequest) -> str:
    try:
        validate(message, LIMITS)
    except BatonError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    "message",
    [
        text("nul \0, escape \x1b, line\r\n, bell \x07"),
        text(" "),
        text(n=4, temperature=0.0),
        text(temperature=1e-30),
        text(temperature=2.0, top_p=1.0, min_p=1.0),
        text(top_k=2**31 - 1),
        text(max_tokens=254),
        text(min_tokens=5, max_tokens=5),
        text(logprobs=0),
        text(logprobs=20, n=16),
        text(seed=0),
        text(seed=2**63 - 1),
        text(stop=["é" * 256] * 4),
        text(stop=["\0"], stop_token_ids=[999] * 16),
        text(presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=10.0),
        tokens(*[0] * 255),
        tokens(999),
        pb.GenerateRequest(text="hi", model="demo", request_id="A-z_0.9"),
        pb.GenerateRequest(text="hi", request_id="r" * 64),
    ],
    ids=lambda message: str(message)[:40],
)
def test_accepted(message: pb.GenerateRequest) -> None:
    assert admit(message).max_tokens >= 1


def test_what_is_not_set_has_its_documented_default() -> None:
    sampling = admit(pb.GenerateRequest(text="hi"), limits=LIMITS)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.n, sampling.logprobs) == (254, 0, 1, None)
    assert (sampling.seed, sampling.ignore_eos, sampling.stop, sampling.stop_token_ids) == (SEED, False, (), ())
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0, 0, 1)


def test_zero_is_not_the_same_as_not_set() -> None:
    assert admit(text(temperature=0)).is_greedy
    assert admit(text(seed=0)).seed == 0
    assert not admit(text()).is_greedy
    assert admit(text(temperature=1e-6)).is_greedy


def test_top_k_is_clamped_to_the_vocabulary_and_minus_one_is_off() -> None:
    assert admit(text(top_k=5)).top_k == 5
    assert admit(text(top_k=5000)).top_k == 1000
    assert admit(text(top_k=-1)).top_k == admit(text(top_k=0)).top_k == 0


def test_fields_that_are_left_out_have_the_models_own_defaults() -> None:
    advised = SamplingParams(temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1)
    limits = limits_of(16, 512, sampling=advised)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    assert all(getattr(admit(text(), limits=limits), name) == getattr(advised, name) for name in names)
    own = admit(text(temperature=0, top_p=1, top_k=0, repetition_penalty=1), limits=limits)
    assert (own.temperature, own.top_p, own.top_k, own.repetition_penalty, own.min_p) == (0, 1, 0, 1, 0.05)


def test_the_prompt_is_handed_on_untouched() -> None:
    prompt = "nul \0 and ünïcode 😀\r\n"
    assert validate(text(prompt), LIMITS).prompt == prompt
    assert validate(tokens(3, 1, 4), LIMITS).prompt == (3, 1, 4)
    assert validate(text(), LIMITS).request_id is None


class TestLengths:
    """Context 512 and a pool of 16 blocks of 16: 256 tokens fit."""

    def test_default_is_256_or_what_fits(self) -> None:
        assert admit(text(), num_prompt_tokens=10).max_tokens == 246
        roomy = limits_of(1000, 2048)
        assert admit(text(), num_prompt_tokens=10, limits=roomy).max_tokens == 256
        assert admit(text(), num_prompt_tokens=2047, limits=roomy).max_tokens == 1

    def test_a_chat_may_fill_the_context_up_to_a_bound_unless_it_tells_log_probabilities(self) -> None:
        roomy = limits_of(1000, 2048, max_chat_tokens=1500)
        chat = replace(validate(text(), roomy), prompt=Rendered("hello", "|"))
        lens = {100: 1500, 1000: 1048, 2047: 1}
        assert {prompt: resolve(chat, (1,) * prompt, roomy, SEED).max_tokens for prompt in lens} == lens
        told = replace(chat, sampling=replace(chat.sampling, logprobs=2))
        assert resolve(told, (1,) * 100, roomy, SEED).max_tokens == 256
        given = replace(chat, sampling=replace(chat.sampling, max_tokens=7), max_tokens_given=True)
        assert resolve(given, (1,) * 100, roomy, SEED).max_tokens == 7

    def test_a_given_one_is_never_clamped(self) -> None:
        assert admit(text(max_tokens=246), num_prompt_tokens=10).max_tokens == 246
        with pytest.raises(ContextLengthExceeded, match=r"^max_tokens: 10 prompt tokens and 247 more exceed") as raised:
            admit(text(max_tokens=247), num_prompt_tokens=10)
        assert raised.value.lengths == Lengths(10, 247, 256)

    def test_context_binds_where_the_pool_is_larger(self) -> None:
        small = limits_of(16, 32)
        assert admit(text(max_tokens=22), num_prompt_tokens=10, limits=small).max_tokens == 22
        with pytest.raises(InvalidRequest, match="max_tokens"):
            admit(text(max_tokens=23), num_prompt_tokens=10, limits=small)
        with pytest.raises(ContextLengthExceeded, match="leave no room in a context of 32") as raised:
            admit(text(), num_prompt_tokens=32, limits=small)
        assert raised.value.lengths == Lengths(32, 0, 32)

    def test_a_prompt_larger_than_the_pool(self) -> None:
        with pytest.raises(ContextLengthExceeded, match="need more blocks than the 16 of the smallest") as raised:
            admit(text(), num_prompt_tokens=256)
        assert raised.value.lengths == Lengths(256, 0, 256)

    def test_text_without_a_token(self) -> None:
        with pytest.raises(InvalidRequest, match="prompt: has no tokens"):
            admit(text(" "), num_prompt_tokens=0)

    def test_text_with_a_token_that_the_model_has_no_row_for(self) -> None:
        valid = validate(text("<pad>"), LIMITS)
        with pytest.raises(InvalidRequest, match="not in the model's vocabulary"):
            resolve(valid, [1, 1000], LIMITS, SEED)

    def test_min_tokens_beyond_what_fits(self) -> None:
        with pytest.raises(InvalidRequest, match="min_tokens"):
            admit(text(min_tokens=7), num_prompt_tokens=250)


class TestOverTheWire:
    """Bytes that no client library of ours would send."""

    @pytest.fixture
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=SERVER_OPTIONS)
        pb_grpc.add_InferenceServicer_to_server(Echo(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
        await server.stop(None)

    @pytest.mark.parametrize(
        ("data", "param"),
        [
            (b"\x1a\x02\xff\xfe", "message"),  # text that is not UTF-8
            (b"\x0a\x02\xc0\x80", "message"),  # request_id, an overlong NUL
            (b"\x1a\x09ab", "message"),  # truncated
            (b"\xff" * 20, "message"),
            (b"", "prompt"),
            (b"\x22\x0c\x0a\x0a" + b"\xff" * 9 + b"\x01", "token_ids"),  # id -1 as a varint
            (b"\x1a\x01a\x32\x03\x18\xfe\xff", "message"),  # truncated top_k
            (b"\x1a\x01a\x32\x05\x68\x80\x80\x80\x40", "n"),
        ],
    )
    async def test_refused_by_parameter(self, channel: grpc.aio.Channel, data: bytes, param: str) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await send(channel, data)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith(f"{param}: ")
        assert "Error" not in (caught.value.details() or "")

    async def test_error_names_the_parameter_in_its_details(self, channel: grpc.aio.Channel) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await send(channel, text(n=0).SerializeToString())
        info = error_details_pb2.ErrorInfo()
        (detail,) = details_of(caught.value)
        assert detail.Unpack(info)
        assert (info.reason, dict(info.metadata)) == ("INVALID_REQUEST", {"param": "n", "retryable": "false"})

    async def test_control_characters_come_through(self, channel: grpc.aio.Channel) -> None:
        prompt = "nul \0 bell \x07 delete \x7f \u2028"
        assert (await send(channel, text(prompt).SerializeToString())).chunk.text == prompt

    def test_bad_utf8_does_not_parse(self) -> None:
        with pytest.raises(DecodeError):
            pb.GenerateRequest.FromString(b"\x1a\x02\xff\xfe")


class Echo(pb_grpc.InferenceServicer):
    """Answers a valid request with its prompt."""

    async def Generate(  # noqa: N802 - named by the proto
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        valid: ValidRequest = validate(request, LIMITS)
        yield pb.GenerateResponse(chunk=pb.Chunk(text=str(valid.prompt)))


async def send(channel: grpc.aio.Channel, data: bytes) -> pb.GenerateResponse:
    call = channel.unary_stream(
        "/baton.v1.Inference/Generate",
        request_serializer=bytes,
        response_deserializer=pb.GenerateResponse.FromString,
    )(data, timeout=10)
    return await anext(aiter(call))
