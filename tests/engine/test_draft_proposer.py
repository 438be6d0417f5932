"""A draft model: its guesses are those of its own text, whatever was accepted, and its failures cost no request."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.core import EngineCore
from engine.model.batch import Batch
from engine.model.decoder import Decoder
from engine.model.hash_model import HashModel
from engine.sequence import Sequence
from engine.speculation.draft_proposer import MAX_CATCH_UP, DraftProposer
from engine.speculation.speculator import Speculator
from kernels.backend import KVPages
from tests.harness.engines import drive, make_core, request, serve
from tests.harness.model_alone import generate
from wire.layout import KVLayout
from wire.sampling import SamplingParams

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=16, dtype="float32")
MODEL = HashModel(LAYOUT, 997)
PROMPT = tuple(range(1, 40))


class Erring(HashModel):
    """Says another token at one place in three, as a draft does: the same one whenever it is asked."""

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        logits = super().forward(batch, kv)
        errs = batch.positions[batch.sample_rows] % 3 == 0
        return torch.where(errs[:, None], logits.roll(1, dims=-1), logits)


class Failing(HashModel):
    """Raises at every second run, or has no number anywhere."""

    num_runs = 0
    raises = False

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        self.num_runs += 1
        if self.raises and self.num_runs % 2:
            raise RuntimeError("no such kernel")
        logits = super().forward(batch, kv)
        return logits if self.raises else torch.full_like(logits, torch.nan)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def core_with(draft: HashModel, num_pages: int = 256, num_blocks: int = 256) -> tuple[EngineCore, DraftProposer]:
    proposer = DraftProposer(draft, num_pages)
    return make_core(MODEL, num_blocks=num_blocks, speculator=Speculator(proposer)), proposer


def sequence_of(prompt: tuple[int, ...] = PROMPT, handle: int = 0) -> Sequence:
    asked = request(prompt, greedy(900))
    return Sequence(handle, asked, asked.choices[0], MODEL)


def test_a_draft_that_is_the_model_is_always_right() -> None:
    """The model of hashes is right with the KV of its own text alone."""
    core, proposer = core_with(MODEL)
    prompts = [(number, *PROMPT[: 10 * number]) for number in range(5)]
    runs = drive(core, [request(prompt, greedy(150)) for prompt in prompts])
    assert [run.outputs[0] for run in runs] == [MODEL.oracle(prompt, 150) for prompt in prompts]
    assert core.stats().num_accepted_tokens == core.stats().num_guessed_tokens > 300
    assert proposer.pool.ledger.num_allocatable == 256


@pytest.mark.parametrize("num_wanted", [1, 2, 5])
def test_guesses_follow_whatever_was_accepted(num_wanted: int) -> None:
    """Some of the guesses and tokens of no text join: the next guesses are as of a draft that saw no other tokens."""
    draw, sequence, proposer = random.Random(num_wanted), sequence_of(), DraftProposer(MODEL, 64)
    for _ in range(60):
        guesses = [*proposer.propose({sequence: num_wanted})[sequence]]
        known = sequence.tokens(0, sequence.num_known)
        assert guesses == MODEL.oracle(known, num_wanted)
        others = [draw.randrange(997) for _ in range(draw.choice([0, 1, 1, 2]))]
        sequence.output_ids += [*guesses[: draw.randint(0, num_wanted)], *others]


def test_sequences_that_want_more_or_less_at_once() -> None:
    draw, proposer = random.Random(1), DraftProposer(MODEL, 256)
    sequences = [sequence_of((number, *PROMPT[: 7 * number]), number) for number in range(6)]
    for _ in range(40):
        wanted = {one: draw.randint(1, 7) for one in sequences if draw.random() < 0.7}
        guesses = proposer.propose(wanted)
        for one, num in wanted.items():
            assert [*guesses[one]] == MODEL.oracle(one.tokens(0, one.num_known), num)
            one.output_ids += [*guesses[one][: draw.randint(0, num)], draw.randrange(997)]


def test_a_long_prompt_takes_several_steps() -> None:
    prompt = tuple(random.Random(2).choices(range(997), k=2 * MAX_CATCH_UP + 50))
    long, short = sequence_of(prompt), sequence_of(PROMPT, 1)
    proposer = DraftProposer(MODEL, 256)
    first = [proposer.propose({short: 2, long: 2}) for _ in range(4)]
    assert [long in guesses for guesses in first] == [False, False, True, True]
    assert all([*guesses[short]] == MODEL.oracle(PROMPT, 2) for guesses in first)
    assert [*first[-1][long]] == MODEL.oracle(prompt, 2)


def test_a_draft_with_windows_computes_what_they_reach(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guesses after a long prompt, and after many tokens at once, are those of the model on all of the text."""
    model = Decoder.load(checkpoint("mistral-window"), None, torch.device("cpu"), 16)
    text = tuple(random.Random(3).choices(range(model.vocab_size), k=400))
    sequence, proposer, num_tokens = sequence_of(text[:200]), DraftProposer(model, 64), list[int]()
    proposer.pool.kv.data.fill_(torch.nan)  # of pages that are passed over
    decode_greedily = model.decode_greedily

    def counted(batch: Batch, kv: KVPages, num_runs: int) -> torch.Tensor:
        num_tokens.append(len(batch.token_ids))
        return decode_greedily(batch, kv, num_runs)

    monkeypatch.setattr(model, "decode_greedily", counted)
    for num_known in (200, 201, 400):
        sequence.output_ids = [*text[200:num_known]]
        assert [[*proposer.propose({sequence: 5})[sequence]]] == generate(model, [text[:num_known]], 5)
    assert num_tokens == [2 * 63 + 1, 1, 2 * 63 + 1]


def test_without_pages_it_guesses_nothing_and_goes_on_once_there_are_some() -> None:
    one, other = sequence_of(), sequence_of((7, *PROMPT), 1)
    proposer = DraftProposer(MODEL, 5)
    assert [*proposer.propose({one: 3, other: 3})] == [one]
    proposer.forget(one)
    proposer.forget(one)
    assert [*proposer.propose({other: 3})[other]] == MODEL.oracle((7, *PROMPT), 3)
    proposer.forget(other)
    assert proposer.pool.ledger.num_allocatable == 5
    assert proposer.pool.ledger.check() == []


@pytest.mark.parametrize(("num_pages", "num_blocks"), [(256, 256), (256, 14), (9, 256)])
def test_tokens_are_as_without_among_many(num_pages: int, num_blocks: int) -> None:
    """With a draft that errs, with preemption, and with pages for a few sequences only."""
    core, proposer = core_with(Erring(LAYOUT, 997), num_pages, num_blocks)
    prompts = [(number, *PROMPT[: 5 * number]) for number in range(6)]
    runs = drive(core, [request(prompt, greedy(60)) for prompt in prompts])
    assert [run.outputs[0] for run in runs] == [MODEL.oracle(prompt, 60) for prompt in prompts]
    assert 0 < core.stats().num_accepted_tokens < core.stats().num_guessed_tokens
    assert (core.stats().num_preemptions > 0) is (num_blocks < 256)
    assert proposer.pool.ledger.num_allocatable == num_pages
    assert proposer.pool.ledger.check() == []


@pytest.mark.parametrize("raises", [False, True])
def test_a_draft_that_fails_costs_no_request(raises: bool) -> None:
    draft = Failing(LAYOUT, 997)
    draft.raises = raises
    core, proposer = core_with(draft)
    assert serve(core, PROMPT, greedy(60)).outputs[0] == MODEL.oracle(PROMPT, 60)
    assert draft.num_runs > 2
    assert core.stats().num_accepted_tokens == 0
    assert proposer.pool.ledger.num_allocatable == 256


class Timed(HashModel):
    """Takes a time by a clock of its own: a step of the engine's model is 1, a run of the draft less."""

    def __init__(self, run_s: float, token_s: float, clock: list[float]) -> None:
        super().__init__(LAYOUT, 997)
        self.run_s, self.token_s, self.clock = run_s, token_s, clock
        self.spent_s, self.num_runs = 0.0, 0

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        seconds = self.run_s + self.token_s * len(batch.token_ids)
        self.clock[0] += seconds
        self.spent_s += seconds
        self.num_runs += 1
        return super().forward(batch, kv).roll(0 if self.run_s == 1 else 1, dims=-1)


@pytest.mark.parametrize("num_prompt", [10, 190, 900])
def test_a_draft_of_which_nothing_comes_true_takes_a_small_share_of_time(num_prompt: int) -> None:
    """One sequence after another: what an engine has learned it keeps. Its first guesses cannot know."""
    clock, draw = [0.0], random.Random(num_prompt)
    model, draft = Timed(1, 0, clock), Timed(0.2, 0.02, clock)
    speculator = Speculator(DraftProposer(draft, 256), clock=lambda: clock[0])
    core = make_core(model, speculator=speculator)
    prompts = [tuple(draw.choices(range(997), k=num_prompt)) for _ in range(12)]
    for prompt in prompts:
        assert serve(core, prompt, greedy(190)).outputs[0] == MODEL.oracle(prompt, 190)
    assert draft.spent_s < 0.03 * model.spent_s
    assert 4 <= draft.num_runs < 0.03 * model.num_runs
    assert core.stats().num_accepted_tokens == 0


def test_a_draft_runs_once_for_each_guess() -> None:
    """Known tokens bring the first guess: a prompt, and what has come since."""
    draft = Timed(1, 0, [0.0])
    core, _ = core_with(draft)
    serve(core, PROMPT, greedy(150))
    assert draft.num_runs == core.stats().num_guessed_tokens == core.stats().num_accepted_tokens > 100


def test_nothing_of_a_draft_is_published() -> None:
    core, proposer = core_with(MODEL)
    for _ in serve_steps(core):
        counts = proposer.pool.ledger.counts()
        assert counts.published == counts.cached == counts.draining == 0


def serve_steps(core: EngineCore) -> Iterator[None]:
    core.add(request(PROMPT, greedy(60)))
    while core.has_requests:
        core.step()
        yield
