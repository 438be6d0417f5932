"""Messages that are wrong, and some that only look it, to the clients' port. Each goes over a real connection."""

import math
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest

from tests.bad_input.ports import GOOD, MODEL, PROMPT, SIZES, Ports
from tests.bad_input.refusal import refusal_of, refused
from tests.harness.answer import ask
from wire.pb import cluster_pb2
from wire.pb import inference_pb2 as pb
from wire.pb.inference_pb2_grpc import InferenceStub

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCAB_SIZE = MODEL.vocab_size + 1
POOL_LEN = SIZES.num_blocks * MODEL.layout.block_size
TEN_YEARS_S = 315_360_000.0


@dataclass(frozen=True)
class Case:
    """`what` is wrong, in bytes of a GenerateRequest, and what the answer is: its status, and the parameter it names.

    `row` numbers the kind of bad input, as docs/faults.md lists them.
    """

    row: int
    what: str
    message: bytes
    param: str
    code: str = "INVALID_ARGUMENT"

    def __str__(self) -> str:
        return f"{self.row} {self.what}"


def message(**values: Any) -> bytes:
    return pb.GenerateRequest(**values).SerializeToString()


def text(prompt: str = "hi", **sampling: Any) -> bytes:
    return message(text=prompt, sampling_params=pb.SamplingParams(**sampling))


def tokens(*ids: int, **sampling: Any) -> bytes:
    return ask(ids, **sampling).SerializeToString()


def setting(row: int, name: str, *values: Any) -> list[Case]:
    """One setting with values that are out of its range."""
    return [Case(row, f"{name} {_short(value)}", text(**{name: value}), name) for value in values]


def _short(value: object) -> str:
    return repr(value) if len(repr(value)) < 24 else f"{repr(value)[:16]}..."


def spoken(role: str) -> pb.Conversation:
    return pb.Conversation(messages=[pb.Message(role=role, content="a")])


CASES = [
    Case(2, "nothing", b"", "prompt"),
    Case(2, "settings without a prompt", message(sampling_params=pb.SamplingParams()), "prompt"),
    Case(5, "text that is not UTF-8", b"\x1a\x02\xff\xfe", "message"),
    Case(5, "a model that is not UTF-8", b"\x12\x02\xff\xfe" + text(), "message"),
    Case(5, "an overlong NUL in the request id", b"\x0a\x02\xc0\x80" + text(), "message"),
    Case(5, "half a surrogate pair in a stop string", text() + b"\x32\x05\x72\x03\xed\xa0\x80", "message"),
    Case(6, "a message that is cut", text("a prompt of some length")[:-9], "message"),
    Case(6, "a length that is more than there is", b"\x1a\xff\xff\xff\x7fab", "message"),
    Case(6, "a varint without end", b"\xff" * 20, "message"),
    Case(6, "groups without end", b"\x0b" * 200, "message"),
    Case(6, "TokenIds that are cut", b"\x22\x0c\x0a\x0a\x01", "message"),
    Case(14, "unknown fields alone", b"\xfa\x3e\x03abc", "message"),
    Case(14, "token ids that are floats", b"\x22\x05\x0d\x00\x00\x80\x3f", "ids"),
    *(
        Case(31, f"model {_short(name)}", message(model=name, text="hi"), "", "NOT_FOUND")
        for name in ("other", "", "twin ", "TWIN", "twin\0")
    ),
    *(
        Case(32, f"model {_short(name)}", message(model=name, text="hi"), "", "NOT_FOUND")
        for name in ("../../etc/passwd", "/etc/passwd", "m" * 10_240)
    ),
    Case(33, "empty text", text(""), "text"),
    Case(34, "no token ids", tokens(), "token_ids"),
    Case(34, "TokenIds that say nothing", b"\x22\x00", "token_ids"),
    Case(34, "no messages", message(messages=pb.Conversation()), "messages"),
    *(
        Case(40, f"role {_short(role)}", message(messages=spoken(role)), "messages")
        for role in ("", "User", "root", "user\n", "u" * 10_240)
    ),
    Case(36, "a prompt as long as the context", tokens(*[1] * MODEL.max_context_len), "prompt"),
    Case(36, "text longer than the context", text("a" * 5000), "prompt"),
    Case(36, "prompt and max_tokens beyond what fits", tokens(*[1] * 1000, max_tokens=POOL_LEN - 999), "max_tokens"),
    Case(37, "a prompt that fills the pool", tokens(*[1] * POOL_LEN), "prompt"),
    Case(39, "a token id at the vocabulary's size", tokens(1, VOCAB_SIZE), "token_ids"),
    Case(39, "token id 2^31", tokens(1 << 31), "token_ids"),
    Case(39, "token id 2^32 - 1", tokens((1 << 32) - 1), "token_ids"),
    Case(39, "token id -1", b"\x22\x0c\x0a\x0a" + b"\xff" * 9 + b"\x01", "token_ids"),
    *setting(44, "temperature", math.nan, math.inf, -math.inf, 1e39),
    *(Case(69, f"keep_s {value}", message(text="hi", keep_s=value), "keep_s") for value in (math.nan, math.inf, -0.1)),
    *(Case(69, f"session {_short(name)}", message(text="hi", session=name), "session") for name in ("", "s" * 129)),
    *setting(45, "temperature", -0.01, 2.01),
    *setting(46, "top_p", -0.5, 1.01, math.nan, math.inf),
    *setting(46, "min_p", -0.1, 1.1, math.nan),
    *setting(47, "top_k", -2, -(2**31)),
    *setting(49, "presence_penalty", -2.01, 2.01, math.nan, math.inf),
    *setting(49, "frequency_penalty", -2.01, 2.01, math.nan, -math.inf),
    *setting(49, "repetition_penalty", 0.0, -1.0, 10.01, math.nan, math.inf),
    *setting(50, "n", 0, -1, 17, 129, 10**9),
    *setting(52, "max_tokens", 0, -1, 2**63 - 1, MODEL.max_context_len),
    *setting(53, "min_tokens", -1, 2000),
    Case(53, "min_tokens > max_tokens", text(min_tokens=11, max_tokens=10), "min_tokens"),
    *setting(54, "logprobs", -1, 21, 2**31 - 1),
    *setting(56, "logit_bias", {VOCAB_SIZE: 1.0}, {1: math.nan}, {1: math.inf}, {1: 100.1}),
    *setting(56, "logit_bias", dict.fromkeys(range(301), 1.0)),
    *setting(58, "stop", [""], ["a", ""], ["a"] * 9, ["é" * 257], ["a" * (1 << 20)], [""] * 4),
    *setting(58, "stop_token_ids", [1] * 17, [VOCAB_SIZE], [2**32 - 1]),
    *setting(60, "seed", -1, -(2**63)),
    *(
        Case(64, f"request id {_short(one)}", message(request_id=one, text="hi"), "request_id")
        for one in ("", "a" * 65, "b" * 10_240, "a\n", "a\r\nb", "a b", "\0", "\x1b[31m", "é", "../a/b", "a:b")
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_refused(ports: Ports, case: Case) -> None:
    refusal = await refused(ports.generate(case.message))
    assert (refusal.code, refusal.param) == (case.code, case.param)
    assert refusal.ids["retryable"] == "false"
    assert refusal.message.startswith(f"{case.param or 'model'}: ")
    refusal.require_discreet(case.message.decode(errors="ignore"))
    await ports.require_unharmed()


ODD = {
    "9 NUL and control characters": text("nul \0 escape \x1b bell \x07 delete \x7f \u2028 \r\n"),
    "9 noncharacters": text("\ufeff\ufffe\U0010ffff"),
    "45 temperature 1e-30": tokens(*PROMPT, max_tokens=4, temperature=1e-30),
    "45 temperature 1e-45": tokens(*PROMPT, max_tokens=4, temperature=1e-45),
    "47 top_k 2^31 - 1": tokens(*PROMPT, max_tokens=4, temperature=1.0, top_k=2**31 - 1),
    "47 top_k -1": tokens(*PROMPT, max_tokens=4, temperature=1.0, top_k=-1),
    "47 top_k 0": tokens(*PROMPT, max_tokens=4, temperature=1.0, top_k=0),
    "49 all penalties at their ends": tokens(
        *PROMPT, max_tokens=4, presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=10.0
    ),
    "52 no max_tokens": text("a"),
    "54 all logprobs there may be": tokens(*PROMPT, max_tokens=4, logprobs=20),
    "58 as many and as long stop strings as there may be": tokens(*PROMPT, max_tokens=4, stop=["é" * 256] * 8),
    "58 a stop string of NUL": tokens(*PROMPT, max_tokens=4, stop=["\0"], stop_token_ids=[299] * 16),
    "60 the largest seed": tokens(*PROMPT, max_tokens=4, temperature=1.0, seed=2**63 - 1),
    "69 the longest session, kept for years": message(text="a", session="\u00e9" * 128, keep_s=1e300),
    "69 a session that ends": message(text="a", session="\0", keep_s=0.0),
    "64 the longest request id": message(request_id="r" * 64, text="a"),
}


@pytest.mark.parametrize("what", ODD)
async def test_accepted(ports: Ports, what: str) -> None:
    [choice] = await ports.answer(ODD[what])
    assert choice.token_ids
    await ports.require_unharmed()


async def test_a_tiny_temperature_is_greedy(ports: Ports) -> None:
    [choice] = await ports.answer(tokens(*PROMPT, max_tokens=20, temperature=1e-6))
    assert choice.token_ids == MODEL.oracle(PROMPT, 20)


async def test_choices_of_a_greedy_request_are_the_same(ports: Ports) -> None:
    choices = await ports.answer(tokens(*PROMPT, max_tokens=20, n=16))
    assert [choice.token_ids for choice in choices] == [MODEL.oracle(PROMPT, 20)] * 16
    await ports.require_unharmed()


def _settings(raw: bytes) -> bytes:
    """The field `sampling_params` with these bytes."""
    return b"\x32" + bytes([len(raw)]) + raw


UNKNOWN: dict[str, tuple[bytes, str]] = {
    "a number that no field has": (b"\xfa\x3e\x03abc", "message: GenerateRequest has no field 1007; leave it out"),
    "three of them": (
        b"\xf8\x3e\x01\xf0\x3e\x01\xf8\x3e\x02\xe8\x3e\x01",
        "message: GenerateRequest has no field 1005, 1006, 1007; leave it out",
    ),
    "a group": (b"\xfb\x3e\xfc\x3e", "message: GenerateRequest has no field 1007; leave it out"),
    "adapter": (b"\x3a\x01x", "adapter: field 7 of GenerateRequest is not offered yet"),
    "an adapter of 8 KiB": (b"\x3a\x80\x40" + bytes(8 << 10), "adapter: field 7 of GenerateRequest is not offered yet"),
    "a part of a message that is no text": (
        b"\x2a\x04\x0a\x02\x4a\x00",
        "message: Message has no field 9; leave it out",
    ),
    "text as a number": (b"\x18\x01", "text: field 3 of GenerateRequest was sent with another wire type"),
    "a setting that no field has": (
        _settings(b"\xfa\x3e\x00"),
        "message: SamplingParams has no field 1007; leave it out",
    ),
    "response_format": (_settings(b"\x8a\x01\x00"), "response_format: must be 1 to 65536 bytes"),
    "temperature as a double": (
        _settings(b"\x09" + bytes(8)),
        "temperature: field 1 of SamplingParams was sent with another wire type",
    ),
    "a number in the token ids": (
        b"\x22\x06\x0a\x01\x01\xf8\x3e\x01",
        "message: TokenIds has no field 1007; leave it out",
    ),
    "a million": (b"\xfa\x3e\x00" * (1 << 20), "message: has 3145728 bytes of unknown fields; leave them out"),
}


@pytest.mark.parametrize("what", UNKNOWN)
async def test_unknown_fields_are_refused_by_number_or_name(ports: Ports, what: str) -> None:
    raw, told = UNKNOWN[what]
    refusal = await refused(ports.generate(tokens(*PROMPT, max_tokens=8) + raw))
    assert (refusal.code, refusal.message) == ("INVALID_ARGUMENT", told)
    refusal.require_discreet()
    await ports.require_unharmed()


async def test_every_method_of_ours_refuses_unknown_fields(ports: Ports) -> None:
    unknown = b"\xf8\x3e\x01"
    for port, service in (("public", pb), ("operator", cluster_pb2)):
        for name, methods in service.DESCRIPTOR.services_by_name.items():
            for method in methods.methods:
                refusal = await ports.refusal(port, f"/baton.v1.{name}/{method.name}", unknown)
                assert refusal.message == f"message: {method.input_type.name} has no field 1007; leave it out"
        check = ports.channels[port].unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)
        assert await check(unknown, timeout=20)
    await ports.require_unharmed()


async def test_of_two_prompts_the_last_is_taken(ports: Ports) -> None:
    [choice] = await ports.answer(text("not this") + tokens(*PROMPT, max_tokens=8))
    assert choice.token_ids == MODEL.oracle(PROMPT, 8)


async def test_a_deadline_in_ten_years_is_no_deadline(ports: Ports) -> None:
    [choice] = await ports.answer(tokens(*PROMPT, max_tokens=8), TEN_YEARS_S)
    assert choice.token_ids == MODEL.oracle(PROMPT, 8)
    await ports.require_unharmed()


@pytest.mark.parametrize("timeout_s", [1e-9, 0.0])
async def test_a_deadline_that_has_passed(ports: Ports, timeout_s: float) -> None:
    refusal = await refused(ports.generate(GOOD, timeout_s))
    assert refusal.code == "DEADLINE_EXCEEDED"
    await ports.require_unharmed()


@pytest.mark.parametrize("request_id", ["", "nobody's", "x" * 10_240, "../../etc/passwd", "\0\n", "é"])
async def test_only_requests_that_run_can_be_aborted(ports: Ports, request_id: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await InferenceStub(ports.channels["public"]).Abort(pb.AbortRequest(request_id=request_id), timeout=20)
    refusal = refusal_of(raised.value)
    assert (refusal.code, refusal.reason) == ("NOT_FOUND", "REQUEST_NOT_FOUND")
    refusal.require_discreet(request_id)
    await ports.require_unharmed()


async def test_an_id_that_runs_is_not_taken_twice(ports: Ports) -> None:
    ports.cluster.models["d0"].pause()
    request = message(request_id="taken", token_ids=pb.TokenIds(ids=PROMPT))
    first = ports.generate(request)
    await anext(aiter(first))
    refusal = await refused(ports.generate(request))
    assert (refusal.code, refusal.reason) == ("ALREADY_EXISTS", "REQUEST_EXISTS")
    ports.cluster.models["d0"].go_on()
    assert [response async for response in first][-1].HasField("complete")
    await ports.require_unharmed()
