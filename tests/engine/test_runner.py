import numpy as np
import pytest
import torch

from engine.model.hash_model import HashModel
from engine.pages.cache import KVCache
from engine.request import ChoiceSoFar, EngineRequest
from engine.sequence import Sequence
from engine.step.decode_rows import DecodeRows
from engine.step.runner import Runner
from engine.step.work import NO_ROWS, Drafts, Gains, PromptChunk, Work
from kv_store.device_pool import DevicePool
from kv_store.transfers import NoStore
from tests.harness.engines import ROOT
from wire.ids import AttemptId
from wire.layout import KVLayout
from wire.sampling import SamplingParams

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
PROMPT = tuple(range(1, 40))
GREEDY = SamplingParams(temperature=0.0, max_tokens=50)
SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=50, presence_penalty=1.0, min_tokens=2, logprobs=2)


class Bench:
    """A runner over a pool, and sequences to run on it."""

    def __init__(self) -> None:
        model = HashModel(LAYOUT, 997, eos_token_ids=(400,))
        pool = DevicePool(LAYOUT, 64, torch.device("cpu"))
        self.model = model
        self.cache = KVCache(pool, NoStore())
        self.rows = DecodeRows(model, 64)
        self.runner = Runner(model, pool.kv, self.cache, self.rows)
        self._num_made = 0

    def make(self, prompt: tuple[int, ...], output: tuple[int, ...], sampling: SamplingParams = GREEDY) -> Sequence:
        self._num_made += 1
        request = EngineRequest(
            attempt_id=AttemptId(str(self._num_made)), root=ROOT, prompt_ids=prompt, sampling=sampling
        )
        sequence = Sequence(self._num_made, request, ChoiceSoFar(0, output), self.model)
        sequence.begin_run(0)
        assert self.cache.allocator.grow(sequence, sequence.num_known)
        return sequence

    @torch.inference_mode()
    def run(self, work: Work) -> Gains:
        return self.runner.read(work, self.runner.launch(work))

    def decoding(self, prompt: tuple[int, ...], output: tuple[int], sampling: SamplingParams = GREEDY) -> Sequence:
        """A sequence with a row of its own."""
        sequence = self.make(prompt, output, sampling)
        self.run(Work(NO_ROWS, [PromptChunk.of(sequence, len(prompt))]))
        sequence.begin_run(len(prompt))
        self.rows.put(sequence)
        return sequence


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_samples_after_guesses_equal_the_samples_of_runs_one_by_one(sampling: SamplingParams) -> None:
    bench = Bench()
    one_by_one = bench.decoding(PROMPT, (3,), sampling)
    runs = []
    for _ in range(4):
        runs.append(bench.run(Work(slice(0, 1))))
        one_by_one.output_ids += runs[-1].token_ids.tolist()
        bench.rows.advance(runs[-1].token_ids)
    bench.rows.remove(one_by_one)
    bench.decoding(PROMPT, (3,), sampling)
    drafts = Drafts.of(bench.rows.token_ids[:1], {0: [*one_by_one.output_ids[1:4], 0]})
    gains = bench.run(Work(slice(0, 1), drafts=drafts))
    assert gains.token_ids.tolist() == one_by_one.output_ids[1:]
    assert np.array_equal(gains.num_gained, [4])
    assert gains.logprobs == {place: one for place, run in enumerate(runs) for one in run.logprobs.values()}


def test_a_chunk_within_the_known_tokens_has_no_sample() -> None:
    bench = Bench()
    gains = bench.run(Work(NO_ROWS, [PromptChunk.of(bench.make(PROMPT, ()), 5)]))
    assert gains.token_ids.tolist() == []
    assert gains.failed == {}


def test_rows_and_chunks_run_together_as_alone() -> None:
    bench = Bench()
    expected = bench.model.oracle(PROMPT, 2)
    bench.decoding(PROMPT, (expected[0],))
    chunks = [PromptChunk.of(bench.make((5,), ()), 1), PromptChunk.of(bench.make(PROMPT[3:], ()), len(PROMPT) - 3)]
    gains = bench.run(Work(slice(0, 1), chunks))
    assert gains.token_ids.tolist() == [
        expected[1],
        *bench.model.oracle((5,), 1),
        *bench.model.oracle(PROMPT[3:], 1),
    ]
