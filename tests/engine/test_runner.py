import pytest
import torch

from engine.decode_rows import DecodeRows
from engine.kv_cache import KVCache
from engine.model.hash_model import HashModel
from engine.request import ChoiceSoFar, EngineRequest
from engine.runner import NO_ROWS, Chunk, Runner, Work
from engine.sequence import Sequence
from kv_store.device_pool import DevicePool
from kv_store.transfers import NoStore
from tests.pair import ROOT
from wire.ids import RequestId
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
        request = EngineRequest(RequestId(str(self._num_made)), ROOT, prompt, sampling)
        sequence = Sequence(self._num_made, request, ChoiceSoFar(0, output), self.model)
        sequence.begin_run(0)
        assert self.cache.grow(sequence, sequence.num_known)
        return sequence


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_two_samples_of_a_chunk_equal_the_samples_of_two_runs(sampling: SamplingParams) -> None:
    bench = Bench()
    shorter, longer = bench.make(PROMPT, (), sampling), bench.make((*PROMPT, 3), (), sampling)
    [first, second] = [bench.runner.run(Work(NO_ROWS, [Chunk.of(one, one.num_known)])) for one in (shorter, longer)]
    both = bench.make(PROMPT, (3,), sampling)
    gains = bench.runner.run(Work(NO_ROWS, [Chunk(both, both.num_known, num_samples=2)]))
    if sampling is GREEDY:
        assert gains.token_ids.tolist() == [*first.token_ids, *second.token_ids]
    else:  # the output differs from a prompt's end in its penalties: compare with a run of each length of output
        again = bench.make(PROMPT, (3,), sampling)
        alone = bench.runner.run(Work(NO_ROWS, [Chunk.of(again, again.num_known)]))
        assert gains.token_ids.tolist() == [*first.token_ids, *alone.token_ids]
        assert gains.logprobs == {0: first.logprobs[0], 1: alone.logprobs[0]}


def test_a_chunk_within_the_known_tokens_has_no_sample() -> None:
    bench = Bench()
    gains = bench.runner.run(Work(NO_ROWS, [Chunk.of(bench.make(PROMPT, ()), 5)]))
    assert gains.token_ids.tolist() == []
    assert gains.failed == {}


def test_rows_and_chunks_run_together_as_alone() -> None:
    bench = Bench()
    expected = bench.model.oracle(PROMPT, 2)
    decoding = bench.make(PROMPT, (expected[0],))
    bench.runner.run(Work(NO_ROWS, [Chunk(decoding, len(PROMPT), 0)]))
    decoding.begin_run(len(PROMPT))
    bench.rows.put(decoding)
    chunks = [Chunk.of(bench.make((5,), ()), 1), Chunk.of(bench.make(PROMPT[3:], ()), len(PROMPT) - 3)]
    gains = bench.runner.run(Work(slice(0, 1), chunks))
    assert gains.token_ids.tolist() == [
        expected[1],
        *bench.model.oracle((5,), 1),
        *bench.model.oracle(PROMPT[3:], 1),
    ]
