import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import EngineCore
from engine.events import Drafted, Failed, Finished
from engine.model.batch import Batch
from engine.model.hash_model import HashModel
from engine.request import EngineRequest
from engine.schedule.continuous_batcher import ContinuousBatcher
from engine.sequence import Sequence
from engine.speculation.draft_proposer import DraftProposer
from engine.speculation.speculator import (
    MAX_PAUSE,
    MAX_ROWS,
    DraftLength,
    NgramProposer,
    NgramText,
    Payoff,
    Speculator,
)
from engine.step.work import Drafts
from kernels.backend import KVPages
from kv_store.tiers.memory_tier import MemoryTier
from tests.harness.engines import drive, gained, make_core, prefill, release, request, resume, serve
from tests.harness.node import Node
from tests.harness.oracle_proposer import OracleProposer, oracle_drafts
from wire.layout import KVLayout
from wire.sampling import FinishReason, Logprobs, SamplingParams

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
MODEL = HashModel(LAYOUT, 997)
FEW = HashModel(LAYOUT, 4, eos_token_ids=(3,))
"""So few tokens that every n-gram was there before, and is often followed by another token."""
PROMPT = tuple(range(1, 40))
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2),
    "seeded": SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, logprobs=2),
    "penalties": SamplingParams(
        temperature=0.7, seed=4, max_tokens=40, ignore_eos=True, presence_penalty=0.5, frequency_penalty=0.3
    ),
    "repetition": SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, repetition_penalty=1.5),
    "min_tokens": SamplingParams(temperature=0.7, seed=5, max_tokens=40, min_tokens=9),
    "stops": SamplingParams(temperature=1.0, seed=6, max_tokens=40, stop_token_ids=(2,), min_tokens=5),
    "four": SamplingParams(temperature=1.0, seed=7, max_tokens=40, n=4, top_p=0.9, logprobs=1),
}
Told = dict[tuple[str, int], list[tuple[int, Logprobs | None]]]


def ngram() -> Speculator:
    return Speculator(NgramProposer())


def drafted() -> Speculator:
    """The draft is the model itself: it comes true where the likeliest token is drawn."""
    return Speculator(DraftProposer(FEW, 256))


def told(core: EngineCore, requests: Seq[EngineRequest]) -> Told:
    """Runs requests to their end, and checks the books; returns each choice's tokens with their log-probabilities."""
    outputs: Told = {}
    for one in requests:
        core.add(one)
    while core.has_requests:
        output = core.step()
        for place, (choice, position, token_id) in enumerate(gained(output)):
            tokens = outputs.setdefault((choice.attempt_id, choice.index), [])
            assert position == len(tokens)
            tokens.append((token_id, output.logprobs.get(place)))
        assert not any(isinstance(event, Failed) for event in output.after)
        assert core.check() == []
    return outputs


def sixteen(length: int = 20) -> list[EngineRequest]:
    """Requests of all kinds, two each, with prompts of their own."""
    draw = random.Random(length)
    kinds = [*PARAMS.values()] * 2
    return [request([draw.randrange(4) for _ in range(length + number)], one) for number, one in enumerate(kinds)]


@pytest.mark.parametrize("kind", PARAMS)
def test_tokens_and_log_probabilities_are_as_without(kind: str) -> None:
    core = make_core(FEW, speculator=ngram())
    for number in range(6):
        asked = request([number % 3, 1, 2, 0, 1, 1, 2, 0, 3, 3, 1], PARAMS[kind])
        assert told(core, [asked]) == told(make_core(FEW), [asked])
    stats = core.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_guessed_tokens
    assert stats.num_drafts < stats.num_guessed_tokens


def test_among_sixteen_and_preempted() -> None:
    asked = sixteen()
    expected = told(make_core(FEW), asked)
    for num_blocks in (256, 20):
        core = make_core(FEW, num_blocks=num_blocks, speculator=ngram())
        assert told(core, asked) == expected
        assert core.stats().num_accepted_tokens > 0
    assert core.stats().num_preemptions > 0


@pytest.mark.parametrize("guessing", [ngram, drafted])
def test_after_a_hand_off_and_from_each_tier(guessing: Callable[[], Speculator]) -> None:
    sampling = PARAMS["four"]
    prompts = [tuple(random.Random(number).choices(range(4), k=50 + number)) for number in range(4)]
    expected = [serve(make_core(FEW), prompt, sampling).outputs for prompt in prompts]
    cold = MemoryTier(LAYOUT)
    node = Node(FEW.layout, cold=cold)
    first = make_core(FEW, node)
    held = []
    for core in (first, first, make_core(FEW, node)):  # computed, hit on the device, hit in the arena
        decode = make_core(FEW, node, speculator=guessing())
        handed = prefill(core, prompts, sampling)
        assert [run.outputs for run in resume(decode, handed)] == expected
        assert decode.stats().num_accepted_tokens > 0
        held += handed
    release(node, held)
    node.write_all_cold()
    restarted = Node(FEW.layout, cold=cold)
    handed = prefill(make_core(FEW, restarted), prompts, sampling)
    assert {*handed[0].fetched[0].found} == {"redis"}
    decode = make_core(FEW, restarted, speculator=guessing())
    assert [run.outputs for run in resume(decode, handed)] == expected
    assert decode.stats().num_accepted_tokens > 0


def test_blocks_that_decode_filled_with_guesses_are_right() -> None:
    """Another engine goes on from them with other tokens than a spoilt block would give."""
    node = Node(MODEL.layout)
    outputs = {PROMPT: [MODEL.oracle(PROMPT, 70)]}
    first = serve(make_core(MODEL, node, speculator=oracle_drafts(outputs, 0.3)), PROMPT, greedy(70))
    prompt = (*PROMPT, *first.outputs[0], 7)
    second = serve(make_core(MODEL, node), prompt, greedy(20))
    assert second.outputs[0] == MODEL.oracle(prompt, 20)
    assert second.fetched[0].found == {"host": (len(PROMPT) + 69) // 16 * 16}


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_in_any_mix(seed: int) -> None:
    draw = random.Random(seed)
    asked = [one for one in sixteen(draw.randint(1, 40)) if draw.random() < 0.6]
    batcher = ContinuousBatcher(max_step_tokens=draw.choice([20, 40, 200]), max_running=16)
    core = make_core(FEW, num_blocks=draw.choice([16, 30, 256]), batcher=batcher, speculator=ngram())
    assert told(core, asked) == told(make_core(FEW), asked)


@pytest.mark.parametrize("max_draft_len", [1, 3, 7, 15])
def test_a_seer_saves_runs(max_draft_len: int) -> None:
    core = make_core(MODEL, speculator=oracle_drafts({PROMPT: [MODEL.oracle(PROMPT, 200)]}, 0.0, max_draft_len))
    core.add(request(PROMPT, greedy(200)))
    num_steps = 0
    while core.has_requests:
        core.step()
        num_steps += 1
    stats = core.stats()
    assert stats.num_accepted_tokens == stats.num_guessed_tokens
    assert stats.num_drafts + stats.num_accepted_tokens <= 200
    assert num_steps < 200 / (max_draft_len + 1) + 20


def test_events_tell_of_each_draft_before_the_end() -> None:
    outputs = {PROMPT: [MODEL.oracle(PROMPT, 30)]}
    core = make_core(MODEL, speculator=oracle_drafts(outputs, 0.2))
    asked = request(PROMPT, greedy(30))
    core.add(asked)
    steps = [core.step() for _ in range(40)]
    drafted = [event for step in steps for event in step.after if isinstance(event, Drafted)]
    stats = core.stats()
    assert sum(event.num_guessed for event in drafted) == stats.num_guessed_tokens
    assert sum(event.num_accepted for event in drafted) == stats.num_accepted_tokens > 0
    assert len(drafted) == stats.num_drafts
    for step in steps:
        told_of = sum(event.num_accepted for event in step.after if isinstance(event, Drafted))
        assert len(step.token_ids) <= 1 + told_of
    assert isinstance(next(step for step in reversed(steps) if step.after).after[-1], Finished)


def test_a_draft_takes_no_page() -> None:
    core = make_core(MODEL, speculator=oracle_drafts({PROMPT: [MODEL.oracle(PROMPT, 100)]}, 0.5))
    core.add(request(PROMPT, greedy(100)))
    num_known = len(PROMPT)
    while core.has_requests:
        num_known += len(core.step().token_ids)
        counts = core.stats().blocks
        if core.has_requests and num_known > len(PROMPT):
            assert counts.owned + counts.published == -(-(num_known - 1) // 16)
    assert core.stats().num_accepted_tokens < core.stats().num_guessed_tokens


def test_a_stop_token_within_a_draft_ends_the_choice() -> None:
    expected = MODEL.oracle(PROMPT, 30)
    for place in range(1, 20):
        core = make_core(MODEL, speculator=oracle_drafts({PROMPT: [expected]}, 0.0))
        core.add(request(PROMPT, greedy(30, stop_token_ids=(expected[place],))))
        outputs = [core.step() for _ in range(40)]
        assert [token for output in outputs for token in output.token_ids] == expected[: place + 1]
        (finished,) = [event for output in outputs for event in output.after if isinstance(event, Finished)]
        assert (finished.reason, finished.stop_token_id) == (FinishReason.STOP, expected[place])
        assert core.check() == []


def test_a_full_context_is_reached_and_not_passed() -> None:
    model = HashModel(LAYOUT, 997, max_context_len=64)
    expected = model.oracle(PROMPT, 64 - len(PROMPT))
    core = make_core(model, speculator=oracle_drafts({PROMPT: [[*expected, *range(20)]]}, 0.0))
    assert serve(core, PROMPT, greedy(64 - len(PROMPT))).outputs[0] == expected


def test_no_drafts_where_a_step_is_full() -> None:
    prompts = [(number, *PROMPT) for number in range(MAX_ROWS)]
    outputs = {prompt: [MODEL.oracle(prompt, 30)] for prompt in prompts}
    core = make_core(MODEL, speculator=oracle_drafts(outputs, 0.0))
    asked = [request(prompt, greedy(30)) for prompt in prompts]
    for one in asked:
        core.add(one)
    while core.stats().generated_tokens < MAX_ROWS * 20:
        core.step()
    assert core.stats().num_drafts == 0
    for one in asked[4:]:
        core.abort(one.attempt_id)
    for _ in range(3):
        assert len(core.step().token_ids) <= MAX_ROWS
    assert core.stats().num_accepted_tokens > 4


def test_what_is_kept_of_a_sequence_goes_with_it() -> None:
    proposer = OracleProposer({}, 0.0)
    core = make_core(MODEL, num_blocks=12, speculator=Speculator(proposer))
    asked = [request((9, number, *PROMPT), greedy(60)) for number in range(4)]
    drive(core, asked)
    assert core.stats().num_preemptions > 0
    assert {one.request.attempt_id for one in proposer.forgotten} == {one.attempt_id for one in asked}
    assert len(proposer.forgotten) > len(asked), "a preempted sequence is forgotten, too"


class Fallible(HashModel):
    """Fails a run with more rows than one, or has no number for each row but the first."""

    fails = False

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        is_draft = len(batch.sample_rows) > 1
        if self.fails and is_draft:
            raise RuntimeError("no such kernel")
        logits = super().forward(batch, kv)
        if is_draft:
            logits[1:] = torch.nan
        return logits


@pytest.mark.parametrize("fails", [False, True])
def test_a_draft_that_fails_costs_no_request(fails: bool) -> None:
    model = Fallible(LAYOUT, 997)
    model.fails = fails
    expected = model.oracle(PROMPT, 30)
    core = make_core(model, speculator=oracle_drafts({PROMPT: [expected]}, 0.0))
    assert serve(core, PROMPT, greedy(30)).outputs[0] == expected
    assert (core.stats().num_drafts, core.stats().num_accepted_tokens) != (0, 0)
    assert core.stats().num_accepted_tokens == 0


def greedy(max_tokens: int, **values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **values})


@pytest.mark.parametrize(
    ("drawn", "places"),
    [
        ([1, 2, 3, 9, 6, 4, 5, 7], [0, 1, 2, 3, 4, 5, 6, 7]),
        ([1, 2, 9, 9, 6, 4, 5, 7], [0, 1, 2, 4, 5, 6, 7]),
        ([2, 2, 3, 9, 6, 4, 5, 7], [0, 4, 5, 6, 7]),
        ([1, 2, 3, 9, 6, 5, 5, 7], [0, 1, 2, 3, 4, 5]),
        ([1, -1, 3, 9, -1, 4, -1, 7], [0, 4, 5]),
    ],
    ids=["all", "gap", "first", "other", "no number"],
)
def test_guesses_are_true_up_to_the_first_that_is_not(drawn: list[int], places: list[int]) -> None:
    drafts = Drafts.of(np.array([7, 8, 9]), {0: [1, 2, 3], 2: [4, 5]})
    assert drafts.token_ids.tolist() == [7, 1, 2, 3, 8, 9, 4, 5]
    assert drafts.true_places(drawn, [(), (), ()]) == places


def test_no_guess_is_true_after_an_end() -> None:
    assert Drafts.of(np.array([7]), {0: [1, 2, 3]}).true_places([1, 2, 3, 4], [{2}]) == [0, 1]


@pytest.mark.parametrize(
    ("text", "guess"),
    [("", ""), ("abc", ""), ("abcab", "cabcab"), ("xabyabzab", "zabzab"), ("aaaa", "aaaaaa"), ("abcdebcd", "ebcdeb")],
)
def test_guesses_what_followed_the_latest_occurrence(text: str, guess: str) -> None:
    for cut in range(len(text) + 1):
        one = NgramText()
        one.extend([*text[:cut].encode()])
        one.extend([*text[cut:].encode()])
        assert bytes(one.guess(6)).decode() == guess


def test_a_long_text_takes_several_steps_and_guesses_nothing_before_its_end() -> None:
    asked = request([*range(996)] * 10, greedy(8))
    sequence = Sequence(0, asked, asked.choices[0], MODEL)
    proposer = NgramProposer()
    guesses = [proposer.propose({sequence: 3})[sequence] for _ in range(4)]
    assert guesses == [[], [], [0, 1, 2], [0, 1, 2]]


def test_pace_grows_with_success_and_pauses_after_failures() -> None:
    draft_len = DraftLength()
    draft_len.learn(2, 2)
    draft_len.learn(4, 4)
    assert draft_len.length == 8
    draft_len.learn(3, 3)
    assert draft_len.length == 8, "a draft that was cut short says nothing of longer ones"
    draft_len.learn(8, 3)
    assert draft_len.length == 4
    waits = []
    for _ in range(8):
        draft_len.learn(draft_len.length, 0)
        waits.append(next(step for step in range(100) if draft_len.is_due()))
    assert waits == [1, 2, 4, 8, 16, MAX_PAUSE, MAX_PAUSE, MAX_PAUSE]


def test_guesses_end_where_their_chance_falls_below_their_cost() -> None:
    draft_len = DraftLength()
    assert draft_len.worthwhile(0.0) > 100, "nothing is known yet"
    for _ in range(40):
        draft_len.learn(2, 1)
    assert [draft_len.worthwhile(cost) for cost in (0.6, 0.3, 0.2, 0.06, 0.0)] == [1, 1, 2, 4, 6]
    for _ in range(40):
        draft_len.learn(4, 4)
    assert draft_len.worthwhile(0.3) > 30


def test_a_guess_costs_what_a_drafted_step_takes_longer() -> None:
    payoff = Payoff()
    payoff.learn_plain(1.0)
    for _ in range(60):
        payoff.learn_drafted(1.9, 3, 2)
    assert payoff.guess_cost == pytest.approx(0.3, abs=0.01)
    payoff.learn_drafted(1000.0, 3, 2)
    assert payoff.guess_cost < 0.4, "a stall is no cost of a guess"


def judged(payoff: Payoff, plain_s: float, drafted_s: float, num_steps: int) -> list[bool]:
    """Runs steps of these times a token; tells which of them had drafts."""
    had_drafts = []
    for _ in range(num_steps):
        had_drafts.append(payoff.is_due())
        if had_drafts[-1]:
            payoff.learn_drafted(drafted_s, 1, 1)
        else:
            payoff.learn_plain(plain_s)
    return had_drafts


def test_drafts_that_gain_time_stay_but_for_a_step_in_a_while() -> None:
    assert [step for step, had in enumerate(judged(Payoff(), 2.0, 1.0, 100)) if not had] == [0, 32, 64, 96]


def test_drafts_that_lose_time_are_tried_ever_more_seldom() -> None:
    had = judged(Payoff(), 1.0, 1.1, 4000)
    assert sum(had[:100]) == 8
    assert sum(had[2000:]) < 12


def test_drafts_come_back_once_they_gain() -> None:
    payoff = Payoff()
    judged(payoff, 1.0, 2.0, 100)
    assert sum(judged(payoff, 1.0, 0.5, 300)) > 150


def test_steps_in_which_a_proposer_only_catches_up_are_paid_for() -> None:
    payoff, num_missed = Payoff(), 0
    for _ in range(10_000):
        if payoff.is_due():
            payoff.learn_missed(3.0)
            num_missed += 1
        else:
            payoff.learn_plain(1.0)
    assert 2 * num_missed < 0.03 * 10_000


def test_a_stall_among_drafts_that_gain_leaves_none_out() -> None:
    payoff = Payoff()
    judged(payoff, 1.0, 0.5, 10)
    payoff.learn_drafted(1000.0, 1, 1)
    assert sum(judged(payoff, 1.0, 0.5, 64)) == 62


def test_a_slow_first_step_does_not_make_drafts_look_fast() -> None:
    payoff = Payoff()
    judged(payoff, 50.0, 2.0, 1)
    payoff.learn_plain(1.0)
    assert sum(judged(payoff, 1.0, 2.0, 200)) == 4


def test_an_engine_leaves_out_drafts_that_lose_time() -> None:
    """Each guess takes as long as a run here, by a clock that the proposer moves on."""
    seconds = [0.0]

    class Slow(OracleProposer):
        def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int]]:
            seconds[0] += sum(wanted.values()) * per_guess_s
            return super().propose(wanted)

    def clock() -> float:
        seconds[0] += 0.5
        return seconds[0]

    numbers = []
    for per_guess_s in (0.1, 2.0):  # noqa: B007
        outputs = {PROMPT: [MODEL.oracle(PROMPT, 300)]}
        core = make_core(MODEL, speculator=Speculator(Slow(outputs, 0.0), clock=clock))
        assert serve(core, PROMPT, greedy(300)).outputs[0] == outputs[PROMPT][0]
        numbers.append(core.stats().num_accepted_tokens)
    assert numbers[0] > 2 * numbers[1]
