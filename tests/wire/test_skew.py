"""Router and worker of two releases: bytes that version 4 wrote keep their meaning, and what is new is passed over."""

import pytest
from google.protobuf.message import Message

from wire.convert import tiers_to_pb
from wire.ids import PROTOCOL_VERSION
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2

SAMPLING = pb.SamplingParams(temperature=0.0, max_tokens=40, min_tokens=3, seed=7, n=2, stop=["a c"])
PROMPT = pb.TokenIds(ids=[1, 2, 300])
ATTEMPT = "r-1/2"
BEGIN = worker_pb2.Begin(
    id=ATTEMPT,
    namespace_root=b"root",
    prompt=PROMPT,
    sampling_params=SAMPLING,
    choices=[worker_pb2.UnfinishedChoice(index=1, output=pb.TokenIds(ids=[9]))],
    time_left_s=1.5,
)
INFO = worker_pb2.WorkerInfo(
    worker_id="d-0",
    role="decode",
    protocol_version=1,
    epoch="e",
    fingerprint=b"f",
    layout=b"l",
    max_context_len=4096,
    num_blocks=8,
    num_arena_blocks=9,
    vocab_size=300,
    eos_token_ids=[2],
    pid=77,
)
COUNTS = worker_pb2.BlockCounts(free=1, owned=2, published=3, cached=4, draining=5, total=15)
TIER = worker_pb2.TierStatus(
    tier="host", state="up", epoch="e", blocks=COUNTS, block_bytes=4096, counts={"leases": 2, "holds": 3}
)
STATUS = worker_pb2.WorkerStatus(
    worker_id="d-0",
    role="decode",
    pid=77,
    state="ready",
    blocks=COUNTS,
    computed_prompt_tokens=6,
    cached_prompt_tokens=7,
    generated_tokens=8,
    num_running=9,
    num_waiting=10,
    num_preemptions=11,
    tiers=[TIER],
    problems=["a"],
    engine_silent_s=1.5,
)
ERROR = worker_pb2.Error(reason="CANCELLED", message="gone", ids={"request_id": "r-1"})
TOKENS = worker_pb2.ChoiceTokens(
    index=1,
    first_position=1,
    token_ids=[10, 11],
    logprobs=[
        pb.TokenLogprobs(token_id=10, logprob=-0.5, top=[pb.TopLogprob(token_id=10, logprob=-0.5)]),
        pb.TokenLogprobs(token_id=11, logprob=-0.25),
    ],
    finish_reason=pb.FINISH_REASON_LENGTH,
    stop_token_id=11,
)
SOURCE = worker_pb2.PromptSource(cached_tokens=tiers_to_pb({"device": 16, "host": 32}), computed_tokens=3)
SPAN = pb.Span(name="decode.queue", worker="d-0", start_ms=1.0, duration_ms=2.0, counts={"tokens": 2})
WRITTEN: list[tuple[str, Message]] = [
    (
        "0a05722d312f321204726f6f741a060a040102ac0222120d00000000282830033807680272036120632a07080112030a0109"
        "31000000000000f83f",
        BEGIN,
    ),
    (
        "0a05722d312f321205722d312f321a05722d312f32220408011200220608021a0208012a070a05722d312f32320f0a05722d"
        "312f321204706172741801",
        worker_pb2.ConnectRequest(
            aborts=[ATTEMPT],
            renewals=[ATTEMPT],
            releases=[ATTEMPT],
            asks=[
                worker_pb2.Ask(number=1, info=worker_pb2.GetInfo()),
                worker_pb2.Ask(number=2, status=worker_pb2.GetStatus(check=True)),
            ],
            begins=[worker_pb2.Begin(id=ATTEMPT)],
            piece=worker_pb2.BeginPart(id=ATTEMPT, data=b"part", last=True),
        ),
    ),
    (
        "0a05722d312f321227080110011a020a0b2210080a15000000bf1a07080a15000000bf2207080b15000080be2802300b1a18"
        "0a0a0a0664657669636510100a080a04686f73741020100320072a590a310a0c6465636f64652e71756575651203642d3019"
        "000000000000f03f2100000000000000402a0a0a06746f6b656e73100212240a0943414e43454c4c45441204676f6e651a11"
        "0a0a726571756573745f69641203722d31",
        worker_pb2.Update(
            id=ATTEMPT,
            choices=[TOKENS],
            prompt=SOURCE,
            num_held_blocks=7,
            end=worker_pb2.End(spans=[SPAN], error=ERROR),
        ),
    ),
    (
        "0a070a05722d312f321209080112050a03642d30120908021a050a03642d301228080322240a0943414e43454c4c45441204"
        "676f6e651a110a0a726571756573745f69641203722d31",
        worker_pb2.ConnectResponse(
            updates=[worker_pb2.Update(id=ATTEMPT)],
            answers=[
                worker_pb2.WorkerReply(number=1, info=worker_pb2.WorkerInfo(worker_id="d-0")),
                worker_pb2.WorkerReply(number=2, status=worker_pb2.WorkerStatus(worker_id="d-0")),
                worker_pb2.WorkerReply(number=3, error=ERROR),
            ],
        ),
    ),
    ("0a03642d3012066465636f646518012201652a016632016c3880204008480950ac025a0102604d", INFO),
    (
        "0a03642d3012066465636f6465184d220572656164792a0c08011002180320042805300f3006380740084809500a580b7201"
        "6179000000000000f83f8201350a04686f7374120275701a0165220c08011002180320042805300f28802032090a05686f6c"
        "64731003320a0a066c65617365731002",
        STATUS,
    ),
]
FIELDS_OF_TOMORROW = bytes.fromhex("f8d40301fad40303616263fdd40300000000")
"""Number 15007, once each as a number, as bytes and as a float."""
BY_TYPE = [pytest.param(bytes.fromhex(text), message, id=type(message).__name__) for text, message in WRITTEN]


@pytest.mark.parametrize(("written", "message"), BY_TYPE)
def test_version_4_reads_as_it_was_meant(written: bytes, message: Message) -> None:
    """Whoever changes this speaks another language: then wire.ids.PROTOCOL_VERSION grows, and these bytes with it."""
    assert PROTOCOL_VERSION == 4
    assert type(message).FromString(written) == message
    assert message.SerializeToString(deterministic=True) == written


@pytest.mark.parametrize(("written", "message"), BY_TYPE)
def test_fields_of_a_later_release_are_passed_over(written: bytes, message: Message) -> None:
    read = type(message).FromString(written + FIELDS_OF_TOMORROW)
    assert [(field.name, value) for field, value in read.ListFields()] == [
        (field.name, value) for field, value in message.ListFields()
    ]
