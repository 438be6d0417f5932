"""Router and worker of two releases: bytes that version 2 wrote keep their meaning, and what is new is passed over."""

import pytest
from google.protobuf.message import Message

from wire.convert import tiers_to_pb
from wire.ids import PROTOCOL_VERSION
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2

SAMPLING = pb.SamplingParams(temperature=0.0, max_tokens=40, min_tokens=3, seed=7, n=2, stop=["a c"])
PROMPT = pb.TokenIds(ids=[1, 2, 300])
FETCHED = worker_pb2.Fetched(fetched_tokens=tiers_to_pb({"device": 16, "host": 32}), computed_tokens=3)
WRITTEN: list[tuple[str, Message]] = [
    (
        "0a03722d3110021a04726f6f7422060a040102ac022a120d0000000028283003380768027203612063",
        worker_pb2.PrefillRequest(
            request_id="r-1", attempt=2, namespace_root=b"root", prompt=PROMPT, sampling_params=SAMPLING
        ),
    ),
    (
        "0802120508011a010920032801",
        worker_pb2.PrefillResponse(
            attempt=2,
            choices=[worker_pb2.ChoiceTokens(index=1, token_ids=[9])],
            computed_tokens=3,
            num_held_blocks=1,
        ),
    ),
    (
        "0a03722d3110021a04726f6f7422060a040102ac022a120d00000000282830033807680272036120633207080112030a0109",
        worker_pb2.DecodeRequest(
            request_id="r-1",
            attempt=2,
            namespace_root=b"root",
            prompt=PROMPT,
            sampling_params=SAMPLING,
            choices=[worker_pb2.ChoiceSoFar(index=1, output=pb.TokenIds(ids=[9]))],
        ),
    ),
    (
        "0802120c080110011a020a0b2802300b1a1810031a0a0a0664657669636510101a080a04686f73741020",
        worker_pb2.DecodeUpdate(
            attempt=2,
            choices=[
                worker_pb2.ChoiceTokens(
                    index=1,
                    first_position=1,
                    token_ids=[10, 11],
                    finish_reason=pb.FINISH_REASON_LENGTH,
                    stop_token_id=11,
                )
            ],
            fetched=FETCHED,
        ),
    ),
    (
        "0a03642d3012066465636f646518012201652a016632016c3880204008480950ac025a0102604d",
        worker_pb2.WorkerInfo(
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
        ),
    ),
]
FIELDS_OF_TOMORROW = bytes.fromhex("f8d40301fad40303616263fdd40300000000")
"""Number 15007, once each as a number, as bytes and as a float."""
BY_TYPE = [pytest.param(bytes.fromhex(text), message, id=type(message).__name__) for text, message in WRITTEN]


@pytest.mark.parametrize(("written", "message"), BY_TYPE)
def test_version_2_reads_as_it_was_meant(written: bytes, message: Message) -> None:
    """Whoever changes this speaks another language: then wire.ids.PROTOCOL_VERSION grows, and these bytes with it."""
    assert PROTOCOL_VERSION == 2
    assert type(message).FromString(written) == message
    assert message.SerializeToString(deterministic=True) == written


@pytest.mark.parametrize(("written", "message"), BY_TYPE)
def test_fields_of_a_later_release_are_passed_over(written: bytes, message: Message) -> None:
    read = type(message).FromString(written + FIELDS_OF_TOMORROW)
    assert [(field.name, value) for field, value in read.ListFields()] == [
        (field.name, value) for field, value in message.ListFields()
    ]
