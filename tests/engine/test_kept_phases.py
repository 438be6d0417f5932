"""A model whose attention sums in another order in chunks: prompts always run in chunks, output as decoding rows."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from engine.model.batch import Batch
from engine.model.hash_model import HashModel
from engine.schedule.continuous_batcher import ContinuousBatcher
from engine.speculation.speculator import NgramProposer, Speculator
from engine.step.decode_rows import DecodeRows
from kernels.backend import KVPages
from tests.harness.engines import drive, make_core, request, rest_of
from wire.layout import KVLayout
from wire.sampling import SamplingParams

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
PROMPTS = [tuple(range(number, number + 33)) for number in range(1, 7)]
"""Of one length, so that a position tells whether a row is of a prompt; a chunk of 16 or 32 leaves one token."""
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


class PhasedModel(HashModel):
    """Notes the positions of decoding rows and of chunks."""

    keeps_phases = True

    def __init__(self) -> None:
        super().__init__(LAYOUT, 997)
        self.decoding: list[int] = []
        self.in_chunks: list[int] = []

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        positions = batch.positions.tolist()
        self.decoding += positions[: batch.num_decodes]
        self.in_chunks += positions[batch.num_decodes :]
        return super().forward(batch, kv)

    def check(self) -> None:
        assert self.decoding
        assert min(self.decoding) >= len(PROMPTS[0]) > max(self.in_chunks, default=0)


@pytest.mark.parametrize("max_step_tokens", [8, 16, 33, 2048])
@pytest.mark.parametrize("num_emitted", [0, 1, 2, 17, 39])
def test_rows_run_in_the_phase_in_which_they_first_ran(max_step_tokens: int, num_emitted: int) -> None:
    """Requests come with output of another engine; prompts of one token more than a chunk, too."""
    model, batcher = PhasedModel(), ContinuousBatcher(max_step_tokens, 6)
    runs = drive(make_core(model, batcher=batcher), [request(prompt, GREEDY) for prompt in PROMPTS])
    cut = [replace(one, outputs={0: one.outputs[0][:num_emitted]}, ended=set()) for one in runs]
    resumed = drive(make_core(model, batcher=batcher), [rest_of(one) for one in cut])
    assert [one.outputs[0] for one in resumed] == [model.oracle(prompt, 40) for prompt in PROMPTS]
    model.check()


def test_preempted_sequences_run_again_in_their_phases() -> None:
    model = PhasedModel()
    core = make_core(model, num_blocks=14, batcher=ContinuousBatcher(max_running=6))
    runs = drive(core, [request(prompt, GREEDY) for prompt in PROMPTS])
    assert core.stats().num_preemptions > 0
    assert [one.outputs[0] for one in runs] == [model.oracle(prompt, 40) for prompt in PROMPTS]
    model.check()


def test_forced_text_is_not_guessed() -> None:
    """Guesses run in a chunk. A proposer guesses nevertheless: with it no tokens are promised."""
    for model, may_draft in ((PhasedModel(), False), (HashModel(LAYOUT, 997), True)):
        rows = DecodeRows(model, 8)
        rows.sequences = [Mock(matcher=object())]
        assert Speculator().may_draft(rows, 1, 1) is may_draft
        assert Speculator(NgramProposer()).may_draft(rows, 1, 1)
