"""The life of a request as a table: what happened, and what is to be done."""

from collections.abc import Sequence
from typing import Any

import pytest

from router.requests.attempts import MAX_ATTEMPTS, MIN_PROGRESS
from router.requests.events import (
    AttemptFailed,
    BeginTrial,
    CancelCall,
    ChooseDecode,
    ChoosePrefill,
    DecodeChosen,
    DecodeEnded,
    DecodeUpdated,
    DropHold,
    EndTrial,
    Event,
    Instruction,
    KeepHold,
    NoPrefillWorker,
    PrefillAnswered,
    PrefillChosen,
    PutInQuarantine,
    SendChunk,
    SendComplete,
    SendError,
    StartDecode,
    StartPrefill,
    Stopped,
    Tokenize,
    Tokenized,
    TrialBegun,
)
from router.requests.lifecycle import RequestLifecycle
from text.byte_tokenizer import ByteTokenizer
from text.incremental import IncrementalText
from wire.convert import tiers_to_pb
from wire.errors import (
    AttemptsExhausted,
    BatonError,
    Cancelled,
    InvalidRequest,
    RequestExists,
    Unavailable,
    WireError,
    WorkerLeaving,
)
from wire.ids import WorkerId
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.sampling import SamplingParams

P0, P1, D0, D1 = (WorkerId(name) for name in ("p0", "p1", "d0", "d1"))
LOST = Unavailable("the worker is dead")
LENGTH = pb.FINISH_REASON_LENGTH
STOP = pb.FINISH_REASON_STOP


def tokens(text: str, position: int, index: int = 0, **ending: Any) -> worker_pb2.ChoiceTokens:
    return worker_pb2.ChoiceTokens(index=index, first_position=position, token_ids=list(text.encode()), **ending)


def prefilled(*choices: worker_pb2.ChoiceTokens, attempt: int = 1) -> PrefillAnswered:
    counts = tiers_to_pb({"device": 4, "redis": 2})
    return PrefillAnswered(attempt, worker_pb2.PrefillResponse(choices=choices, cached_tokens=counts))


def decoded(*choices: worker_pb2.ChoiceTokens, attempt: int = 1, has_fetched: int | None = None) -> DecodeUpdated:
    update = worker_pb2.DecodeUpdate(choices=choices)
    if has_fetched is not None:
        update.fetched.fetched_tokens.add(tier="host", tokens=has_fetched)
    return DecodeUpdated(attempt, update)


def chunk(text: str, index: int = 0) -> SendChunk:
    return SendChunk(pb.Chunk(index=index, token_ids=list(text.encode()), text=text))


def so_far(text: str, index: int = 0) -> worker_pb2.ChoiceSoFar:
    return worker_pb2.ChoiceSoFar(index=index, output=pb.TokenIds(ids=list(text.encode())))


def lifecycle(*events: Event, **sampling: Any) -> RequestLifecycle:
    """A life in which the request is tokenized, and these events have happened."""
    life = RequestLifecycle(lambda params: IncrementalText(ByteTokenizer(), params.stop, params.min_tokens))
    assert life.start() == [Tokenize()]
    assert life.handle(Tokenized(6, SamplingParams(seed=5, **sampling))) == [ChoosePrefill(1)]
    for event in events:
        life.handle(event)
    return life


def play(life: RequestLifecycle, *events: Event) -> list[Instruction]:
    return [instruction for event in events for instruction in life.handle(event)]


DECODING = (PrefillChosen(1, P0), prefilled(tokens("a", 0)), DecodeChosen(1, D0))
"""Prefill gave "a", and decode has begun."""
FINISH = [CancelCall(), DropHold()]


def error_of(instructions: Sequence[Instruction]) -> Exception:
    assert list(instructions[:-1]) == FINISH
    assert isinstance(instructions[-1], SendError)
    return instructions[-1].error


def complete_of(instructions: Sequence[Instruction]) -> pb.Complete:
    last = instructions[-1]
    assert isinstance(last, SendComplete)
    assert list(instructions[-3:-1]) == FINISH
    return last.complete


def test_a_request_from_beginning_to_end() -> None:
    life = lifecycle()
    assert play(life, PrefillChosen(1, P0)) == [StartPrefill(1, P0)]
    assert play(life, prefilled(tokens("a", 0))) == [chunk("a"), KeepHold(), ChooseDecode(1)]
    assert play(life, DecodeChosen(1, D0)) == [StartDecode(1, D0, (so_far("a"),))]
    assert play(life, decoded(has_fetched=6)) == [DropHold()]
    assert play(life, decoded(tokens("bc", 1))) == [chunk("bc")]
    assert play(life, decoded(tokens("d", 3, finish_reason=LENGTH))) == [chunk("d")]
    assert play(life, DecodeEnded(1)) == [
        *FINISH,
        SendComplete(
            pb.Complete(
                choices=[pb.Choice(index=0, finish_reason=LENGTH)],
                usage=pb.Usage(
                    prompt_tokens=6, completion_tokens=4, cached_tokens=tiers_to_pb({"device": 4, "redis": 2})
                ),
                seed=5,
            ),
            P0,
            D0,
        ),
    ]
    assert life.ended


def test_the_end_at_the_first_token() -> None:
    life = lifecycle(PrefillChosen(1, P0))
    instructions = play(life, prefilled(tokens("a", 0, finish_reason=STOP, stop_token_id=97)))
    assert complete_of(instructions).choices[0].stop_token_id == 97
    assert not any(isinstance(one, ChooseDecode) for one in instructions)


def test_without_prefill_workers() -> None:
    life = lifecycle()
    assert play(life, NoPrefillWorker(1)) == [ChooseDecode(1)]
    assert play(life, DecodeChosen(1, D0)) == [StartDecode(1, D0, (so_far(""),))]
    instructions = play(life, decoded(tokens("ab", 0, finish_reason=LENGTH), has_fetched=3), DecodeEnded(1))
    assert complete_of(instructions).usage.cached_tokens == tiers_to_pb({"host": 3})
    assert isinstance(instructions[-1], SendComplete)
    assert instructions[-1].prefill_worker is None


def test_usage_is_what_prefill_saw_whatever_decode_fetches() -> None:
    life = lifecycle(*DECODING, decoded(has_fetched=6))
    instructions = play(life, decoded(tokens("b", 1, finish_reason=LENGTH)), DecodeEnded(1))
    assert complete_of(instructions).usage.cached_tokens == tiers_to_pb({"device": 4, "redis": 2})


@pytest.mark.parametrize(
    "error", [LOST, Cancelled("the server stops"), WireError("nonsense"), RequestExists("not quite gone")]
)
def test_a_lost_prefill_worker_is_followed_by_another(error: BatonError) -> None:
    life = lifecycle(PrefillChosen(1, P0))
    assert play(life, AttemptFailed(1, error)) == [CancelCall(), ChoosePrefill(2)]
    assert play(life, PrefillChosen(2, P1)) == [StartPrefill(2, P1)]
    assert play(life, prefilled(tokens("a", 0), attempt=2))[0] == chunk("a")


def test_a_lost_decode_worker_is_followed_by_another_with_all_tokens_so_far() -> None:
    life = lifecycle(*DECODING, decoded(tokens("bc", 1)))
    assert play(life, AttemptFailed(1, LOST)) == [CancelCall(), ChooseDecode(2)]
    assert play(life, DecodeChosen(2, D1)) == [StartDecode(2, D1, (so_far("abc"),))]
    assert play(life, decoded(tokens("d", 3), attempt=2)) == [chunk("d")]


def test_a_decode_worker_lost_before_any_token_leads_back_to_prefill() -> None:
    life = lifecycle(NoPrefillWorker(1), DecodeChosen(1, D0))
    assert play(life, AttemptFailed(1, LOST)) == [CancelCall(), ChoosePrefill(2)]


@pytest.mark.parametrize(
    "late",
    [
        PrefillChosen(1, P0),
        NoPrefillWorker(1),
        prefilled(tokens("z", 0)),
        DecodeChosen(1, D0),
        decoded(tokens("z", 1)),
        decoded(tokens("z", 1, finish_reason=LENGTH)),
        DecodeEnded(1),
        AttemptFailed(1, LOST),
        AttemptFailed(1, InvalidRequest("prompt", "is poison")),
    ],
)
def test_what_a_former_attempt_says_is_dropped(late: Event) -> None:
    life = lifecycle(*DECODING, AttemptFailed(1, LOST), DecodeChosen(2, D1))
    assert play(life, late) == []
    assert play(life, decoded(tokens("b", 1), attempt=2)) == [chunk("b")]


@pytest.mark.parametrize("after_end", [*DECODING, decoded(tokens("z", 1)), DecodeEnded(1), Stopped(LOST)])
def test_nothing_happens_after_the_end(after_end: Event) -> None:
    life = lifecycle(*DECODING, Stopped(Cancelled("enough")))
    assert play(life, after_end) == []


@pytest.mark.parametrize(
    ("update", "sent"),
    [
        (decoded(tokens("a", 0)), []),
        (decoded(tokens("abc", 0)), [chunk("bc")]),
        (decoded(tokens("bc", 1), tokens("bcd", 1)), [chunk("bc"), chunk("d")]),
        (decoded(tokens("b", 1), tokens("c", 2)), [chunk("b"), chunk("c")]),
        (decoded(tokens("", 1)), []),
    ],
)
def test_tokens_that_are_known_are_not_sent_again(update: DecodeUpdated, sent: list[Instruction]) -> None:
    assert play(lifecycle(*DECODING), update) == sent


@pytest.mark.parametrize(
    ("update", "sent"),
    [
        (decoded(tokens("c", 2)), []),
        (decoded(tokens("b", 1), tokens("d", 3)), [chunk("b")]),
        (decoded(tokens("b", 1, index=7)), []),
    ],
)
def test_tokens_that_do_not_follow_end_the_attempt(update: DecodeUpdated, sent: list[Instruction]) -> None:
    assert play(lifecycle(*DECODING), update) == [*sent, CancelCall(), ChooseDecode(2)]


def test_a_prefill_that_skips_the_first_token_is_done_again() -> None:
    life = lifecycle(PrefillChosen(1, P0))
    assert play(life, prefilled(tokens("b", 1))) == [CancelCall(), ChoosePrefill(2)]


def test_a_stream_that_ends_too_early_is_a_lost_worker() -> None:
    assert play(lifecycle(*DECODING), DecodeEnded(1)) == [CancelCall(), ChooseDecode(2)]


def test_a_worker_lost_after_the_last_token_is_not_missed() -> None:
    life = lifecycle(*DECODING, decoded(tokens("b", 1, finish_reason=LENGTH)))
    assert complete_of(play(life, AttemptFailed(1, LOST))).usage.completion_tokens == 2


def test_attempts_come_to_an_end() -> None:
    """The last of them waits until no other request is on trial; then the prompt is not tried again."""
    life = lifecycle(*DECODING)
    assert play(life, AttemptFailed(1, LOST)) == [CancelCall(), ChooseDecode(2)]
    assert play(life, AttemptFailed(2, LOST)) == [CancelCall(), DropHold(), BeginTrial(3)]
    assert play(life, TrialBegun(3)) == [ChooseDecode(3)]
    quarantine, end_of_trial, *end = play(life, AttemptFailed(MAX_ATTEMPTS, LOST))
    assert (quarantine, end_of_trial) == (PutInQuarantine(), EndTrial())
    assert isinstance(error_of(end), AttemptsExhausted)


def test_attempts_that_lead_somewhere_do_not_count() -> None:
    life = lifecycle(*DECODING)
    for attempt in range(1, 20):
        gained = tokens("x" * MIN_PROGRESS, 1 + (attempt - 1) * MIN_PROGRESS)
        assert play(life, decoded(gained, attempt=attempt), AttemptFailed(attempt, LOST))[1:] == [
            CancelCall(),
            ChooseDecode(attempt + 1),
        ]


def test_a_trial_ends_as_soon_as_it_leads_somewhere() -> None:
    life = lifecycle(*DECODING, AttemptFailed(1, LOST), AttemptFailed(2, LOST), TrialBegun(3))
    assert play(life, decoded(tokens("x" * (MIN_PROGRESS - 1), 1), attempt=3))[1:] == []
    assert play(life, decoded(tokens("x", MIN_PROGRESS), attempt=3))[1:] == [EndTrial()]
    assert play(life, AttemptFailed(3, LOST)) == [CancelCall(), ChooseDecode(4)]


def test_a_worker_that_gives_the_request_back_is_not_lost() -> None:
    life = lifecycle(*DECODING)
    for attempt in range(1, 20):
        given_back = AttemptFailed(attempt, WorkerLeaving("it drains"))
        assert play(life, given_back) == [CancelCall(), ChooseDecode(attempt + 1)]


def test_a_trial_before_any_token_leads_back_to_prefill() -> None:
    life = lifecycle(PrefillChosen(1, P0), AttemptFailed(1, LOST), AttemptFailed(2, LOST))
    assert play(life, TrialBegun(3)) == [ChoosePrefill(3)]
    assert error_of(play(life, Stopped(LOST))[1:]) is LOST


def test_an_error_of_the_request_ends_it() -> None:
    error = InvalidRequest("prompt", "is poison")
    assert error_of(play(lifecycle(*DECODING), AttemptFailed(1, error))) is error


@pytest.mark.parametrize(
    "before", [(), DECODING[:1], DECODING[:2], DECODING, (*DECODING, AttemptFailed(1, LOST))], ids=range(5)
)
def test_a_stop_ends_it_in_any_state(before: tuple[Event, ...]) -> None:
    error = Cancelled("the client went away")
    assert error_of(play(lifecycle(*before), Stopped(error))) is error


def test_a_stop_while_tokenizing() -> None:
    life = RequestLifecycle(lambda _: IncrementalText(ByteTokenizer()))
    life.start()
    assert isinstance(error_of(life.handle(Stopped(LOST))), Unavailable)
    assert life.handle(Tokenized(6, SamplingParams())) == []


def test_a_stop_string_across_tokens_ends_the_call() -> None:
    life = lifecycle(*DECODING, stop=("xyz",))
    assert play(life, decoded(tokens("bx", 1))) == [SendChunk(pb.Chunk(token_ids=list(b"bx"), text="b"))]
    instructions = play(life, decoded(tokens("yzef", 3)))
    assert instructions[0] == SendChunk(pb.Chunk(token_ids=list(b"yz")))
    complete = complete_of(instructions)
    assert complete.choices[0] == pb.Choice(finish_reason=STOP, stop_string="xyz")
    assert complete.usage.completion_tokens == 5


def test_a_stop_string_across_workers() -> None:
    life = lifecycle(*DECODING, decoded(tokens("bx", 1)), AttemptFailed(1, LOST), stop=("xyz",))
    assert play(life, DecodeChosen(2, D1)) == [StartDecode(2, D1, (so_far("abx"),))]
    assert complete_of(play(life, decoded(tokens("yz", 3), attempt=2))).choices[0].stop_string == "xyz"


def test_a_character_across_workers() -> None:
    euro = "€".encode()
    life = lifecycle(*DECODING)
    first = worker_pb2.ChoiceTokens(first_position=1, token_ids=euro[:2])
    assert play(life, decoded(first)) == [SendChunk(pb.Chunk(token_ids=euro[:2]))]
    play(life, AttemptFailed(1, LOST), DecodeChosen(2, D1))
    rest = worker_pb2.ChoiceTokens(first_position=3, token_ids=euro[2:])
    assert play(life, decoded(rest, attempt=2)) == [SendChunk(pb.Chunk(token_ids=euro[2:], text="€"))]


def test_text_held_back_comes_with_the_end() -> None:
    life = lifecycle(*DECODING, decoded(tokens("x", 1)), stop=("xyz",))
    ended = worker_pb2.ChoiceTokens(first_position=2, finish_reason=LENGTH)
    assert play(life, decoded(ended)) == [SendChunk(pb.Chunk(text="x"))]


def test_choices_end_one_by_one() -> None:
    life = lifecycle(PrefillChosen(1, P0), n=2)
    play(life, prefilled(tokens("a", 0), tokens("b", 0, index=1, finish_reason=STOP, stop_token_id=98)))
    assert play(life, DecodeChosen(1, D0)) == [StartDecode(1, D0, (so_far("a"),))]
    play(life, decoded(tokens("c", 1, finish_reason=LENGTH)))
    complete = complete_of(play(life, DecodeEnded(1)))
    assert [choice.finish_reason for choice in complete.choices] == [LENGTH, STOP]
    assert complete.usage.completion_tokens == 3


def test_a_choice_ended_by_a_stop_string_waits_for_the_others_and_is_heard_no_more() -> None:
    life = lifecycle(PrefillChosen(1, P0), n=2, stop=("x",))
    play(life, prefilled(tokens("a", 0), tokens("x", 0, index=1)), DecodeChosen(1, D0))
    assert play(life, decoded(tokens("b", 1), tokens("y", 1, index=1))) == [chunk("b")]
    complete = complete_of(play(life, decoded(tokens("x", 2))))
    assert [choice.stop_string for choice in complete.choices] == ["x", "x"]
    assert complete.usage.completion_tokens == 4


def test_logprobs_go_with_their_tokens() -> None:
    logprobs = [pb.TokenLogprobs(token_id=token, logprob=-token) for token in b"abc"]
    gained = worker_pb2.ChoiceTokens(first_position=0, token_ids=b"abc", logprobs=logprobs)
    sent = play(lifecycle(*DECODING), decoded(gained))
    assert sent == [SendChunk(pb.Chunk(token_ids=b"bc", text="bc", logprobs=logprobs[1:]))]
