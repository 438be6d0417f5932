"""What becomes of tokens: which of them are new, their text, and how each choice ends."""

from typing import Any

import pytest

from router.requests.answer import MAX_PART_TOKENS, ChoiceStreams, PromptAnswer
from tests.harness.scripted_worker import chunk, so_far, tokens
from text.byte_tokenizer import ByteTokenizer
from wire.errors import WireError
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.sampling import SamplingParams

LENGTH = pb.FINISH_REASON_LENGTH
STOP = pb.FINISH_REASON_STOP


def answer(*so_far: worker_pb2.ChoiceTokens, **sampling: Any) -> ChoiceStreams:
    """An answer that has these tokens."""
    made = ChoiceStreams(SamplingParams(**sampling), ByteTokenizer())
    accept(made, *so_far)
    return made


def accept(answer: ChoiceStreams, *gained: worker_pb2.ChoiceTokens) -> list[pb.Chunk]:
    return list(answer.accept(gained))


def test_tokens_come_with_their_text_until_the_last() -> None:
    one = answer()
    assert (one.has_ended, one.num_tokens, one.unfinished) == (False, 0, [so_far("")])
    assert accept(one, tokens("a", 0)) == [chunk("a")]
    assert accept(one, tokens("bc", 1)) == [chunk("bc")]
    assert one.unfinished == [so_far("abc")]
    assert accept(one, tokens("d", 3, finish_reason=LENGTH)) == [chunk("d", ended=pb.Choice(finish_reason=LENGTH))]
    assert (one.has_ended, one.worker_goes_on, one.num_tokens, one.unfinished) == (True, False, 4, [])
    assert one.finishes == [pb.Choice(finish_reason=LENGTH)]


def test_a_stop_token_has_no_text_and_is_named() -> None:
    one = answer()
    end = pb.Choice(finish_reason=STOP, stop_token_id=97)
    assert accept(one, tokens("a", 0, finish_reason=STOP, stop_token_id=97)) == [pb.Chunk(token_ids=[97], ended=end)]
    assert one.finishes == [end]
    assert not one.worker_goes_on


@pytest.mark.parametrize(
    ("gained", "sent"),
    [
        ([tokens("a", 0)], []),
        ([tokens("abc", 0)], [chunk("bc")]),
        ([tokens("bc", 1), tokens("bcd", 1)], [chunk("bc"), chunk("d")]),
        ([tokens("b", 1), tokens("c", 2)], [chunk("b"), chunk("c")]),
        ([tokens("", 1)], []),
        ([tokens("", 0)], []),
    ],
)
def test_tokens_that_are_known_are_not_sent_again(gained: list[worker_pb2.ChoiceTokens], sent: list[pb.Chunk]) -> None:
    one = answer(tokens("a", 0))
    assert accept(one, *gained) == sent
    assert one.num_tokens == 1 + sum(len(part.token_ids) for part in sent)


@pytest.mark.parametrize(
    ("gained", "sent"),
    [
        ([tokens("c", 2)], []),
        ([tokens("b", 1), tokens("d", 3)], [chunk("b")]),
        ([tokens("b", 1, index=7)], []),
        ([tokens("b", 1), tokens("b", 0, index=1)], [chunk("b")]),
    ],
)
def test_tokens_that_do_not_follow_are_an_error_after_any_that_do(
    gained: list[worker_pb2.ChoiceTokens], sent: list[pb.Chunk]
) -> None:
    one = answer(tokens("a", 0))
    taken: list[pb.Chunk] = []
    with pytest.raises(WireError):
        taken.extend(one.accept(gained))
    assert taken == sent
    assert one.unfinished == [so_far("a" + "".join(part.text for part in sent))]
    assert one.num_tokens == 1 + len(sent)


def test_a_stop_string_across_tokens_ends_the_choice_here() -> None:
    one = answer(tokens("a", 0), stop=("xyz",))
    assert accept(one, tokens("bx", 1)) == [chunk("bx", text="b")]
    end = pb.Choice(finish_reason=STOP, stop_string="xyz")
    assert accept(one, tokens("yzef", 3)) == [chunk("yz", text="", ended=end)]
    assert one.worker_goes_on
    assert one.finishes == [end]
    assert one.num_tokens == 5


def test_a_stop_string_goes_on_where_another_worker_does() -> None:
    one = answer(tokens("a", 0), tokens("bx", 1), stop=("xyz",))
    assert one.unfinished == [so_far("abx")]
    assert accept(one, tokens("abx", 0)) == []
    accept(one, tokens("yz", 3))
    assert one.finishes[0].stop_string == "xyz"


def test_a_character_goes_on_where_another_worker_does() -> None:
    euro, one = "€".encode(), answer(tokens("a", 0))
    first = worker_pb2.ChoiceTokens(first_position=1, token_ids=euro[:2])
    assert accept(one, first) == [pb.Chunk(token_ids=euro[:2])]
    rest = worker_pb2.ChoiceTokens(first_position=3, token_ids=euro[2:])
    assert accept(one, rest) == [pb.Chunk(token_ids=euro[2:], text="€")]


def test_text_held_back_comes_with_the_end() -> None:
    one = answer(tokens("a", 0), tokens("x", 1), stop=("xyz",))
    ended = worker_pb2.ChoiceTokens(first_position=2, finish_reason=LENGTH)
    assert accept(one, ended) == [pb.Chunk(text="x", ended=pb.Choice(finish_reason=LENGTH))]
    assert one.finishes == [pb.Choice(finish_reason=LENGTH)]


def test_an_end_that_comes_twice_counts_once() -> None:
    one = answer(n=2)
    ending = tokens("a", 0, finish_reason=LENGTH)
    accept(one, ending, ending, tokens("", 1, finish_reason=LENGTH))
    assert not one.has_ended
    assert [choice.index for choice in one.unfinished] == [1]


def test_choices_end_one_by_one() -> None:
    one = answer(n=2)
    accept(one, tokens("a", 0), tokens("b", 0, index=1, finish_reason=STOP, stop_token_id=98))
    assert one.unfinished == [so_far("a")]
    accept(one, tokens("c", 1, finish_reason=LENGTH))
    assert [choice.finish_reason for choice in one.finishes] == [LENGTH, STOP]
    assert one.num_tokens == 3


def test_a_choice_ended_by_a_stop_string_waits_for_the_others_and_takes_no_more() -> None:
    one = answer(tokens("a", 0), tokens("x", 0, index=1), n=2, stop=("x",))
    assert (one.has_ended, one.unfinished) == (False, [so_far("a")])
    assert accept(one, tokens("b", 1), tokens("y", 1, index=1)) == [chunk("b")]
    accept(one, tokens("x", 2))
    assert (one.has_ended, one.worker_goes_on) == (True, True)
    assert [choice.stop_string for choice in one.finishes] == ["x", "x"]
    assert one.num_tokens == 4


def test_a_choice_ended_by_a_stop_string_may_go_on_at_its_worker() -> None:
    one = answer(tokens("ab", 0), tokens("x", 0, index=1), n=2, stop=("x",))
    for position in range(1, 4):
        assert accept(one, tokens("y", position, index=1)) == []
    assert accept(one, tokens("c", 2)) == [chunk("c")]


def test_logprobs_go_with_their_tokens() -> None:
    logprobs = [pb.TokenLogprobs(token_id=token, logprob=-token) for token in b"abc"]
    gained = worker_pb2.ChoiceTokens(first_position=0, token_ids=b"abc", logprobs=logprobs)
    named = [pb.TokenLogprobs(token_id=token, logprob=-token, token=bytes([token])) for token in b"bc"]
    assert accept(answer(tokens("a", 0)), gained) == [chunk("bc", logprobs=named)]


def test_a_stop_token_may_have_text() -> None:
    one = answer(include_stop_str_in_output=True)
    end = pb.Choice(finish_reason=STOP, stop_token_id=98)
    assert accept(one, tokens("ab", 0, finish_reason=STOP, stop_token_id=98)) == [chunk("ab", ended=end)]
    assert one.finishes == [end]


def scores(first_position: int, *logprobs: float) -> worker_pb2.PromptScores:
    return worker_pb2.PromptScores(
        first_position=first_position, logprobs=[pb.TokenLogprobs(logprob=one) for one in logprobs]
    )


def prompt_answer(prompt: str, **sampling: Any) -> PromptAnswer:
    params = SamplingParams(**sampling)
    return PromptAnswer(tuple(prompt.encode()), params, ByteTokenizer(), "echo" if params.echo else "")


def told(gained: str, *logprobs: float, **values: Any) -> pb.PromptPart:
    """A part of these tokens, with logprobs if there are any."""
    part = pb.PromptPart(
        tokens=[pb.TokenLogprobs(token_id=one, token=bytes([one])) for one in gained.encode()], **values
    )
    for token, logprob in zip(part.tokens, logprobs, strict=False):
        token.logprob = logprob
    return part


def test_a_prompt_is_echoed_in_parts() -> None:
    one = prompt_answer("a" * MAX_PART_TOKENS + "bc", echo=True)
    assert list(one.first_parts()) == [told("a" * MAX_PART_TOKENS, text="echo"), told("bc")]
    assert one.num_scored == 0


def test_nothing_is_told_of_a_prompt_unasked() -> None:
    one = prompt_answer("abc")
    assert (list(one.first_parts()), one.num_scored) == ([], 0)
    with pytest.raises(WireError):
        one.accept(scores(0, -1.0))


def test_scores_of_a_prompt_are_told_once_whichever_worker_sends_them() -> None:
    one = prompt_answer("abcde", prompt_logprobs=0)
    assert (list(one.first_parts()), one.num_scored) == ([told("a")], 1)
    assert one.accept(scores(1, -1.0, -2.0)) == told("bc", -1.0, -2.0)
    assert one.num_scored == 3
    assert one.accept(scores(1, -1.0)) is None
    assert one.accept(scores(2, -2.0, -3.0)) == told("d", -3.0)
    assert one.accept(scores(4, 0.0)) == told("e", 0.0)
    assert one.num_scored == 0


@pytest.mark.parametrize("wrong", [scores(2, -1.0), scores(1, -1.0, -2.0, -3.0)])
def test_scores_that_do_not_follow_are_an_error(wrong: worker_pb2.PromptScores) -> None:
    one = prompt_answer("abc", prompt_logprobs=0)
    assert len(list(one.first_parts())) == 1
    with pytest.raises(WireError):
        one.accept(wrong)
    assert one.num_scored == 1


def test_a_prompt_of_one_token_has_no_scores() -> None:
    one = prompt_answer("a", prompt_logprobs=2, echo=True)
    assert (list(one.first_parts()), one.num_scored) == ([told("a", text="echo")], 0)
