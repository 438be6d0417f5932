"""Log-probabilities of prompts: transformers' own, and the same bits alone, in chunks, in company and taken over."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import engine.core
from engine.core import EngineCore
from engine.events import Fetched, Preempted, Scored
from engine.model.decoder import Decoder
from engine.request import EngineRequest, HandOff
from engine.schedule.continuous_batcher import ContinuousBatcher
from kernels.cpu.library import best_isa
from tests.harness.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.harness.engines import make_core, request
from tests.harness.node import Node
from tests.kernels.backends import make_backend
from wire.ids import AttemptId
from wire.sampling import Logprobs, SamplingParams

SAMPLING = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=3)
LENGTHS = (1, 2, 16, 17, 64, 150)


@pytest.fixture(scope="module", params=["llama-gqa", "mistral-window", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=[best_isa(), "torch"])
def model(request: pytest.FixtureRequest, folder: Path) -> Decoder:
    return Decoder.load(folder, "float32", torch.device("cpu"), 16, make_backend(request.param))


def prompt(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist())


def scored(length: int, num_scored: int = 1) -> EngineRequest:
    return replace(request(prompt(length), SAMPLING), num_scored=num_scored)


def handed_off(length: int) -> HandOff:
    one = scored(length)
    return HandOff(
        attempt_id=one.attempt_id,
        root=one.root,
        prompt_ids=one.prompt_ids,
        sampling=one.sampling,
        choices=one.choices,
        num_scored=1,
    )


class Scores(dict[AttemptId, list[Logprobs]]):
    """The scores of requests that run together on an engine, and what became of them."""

    def __init__(self, core: EngineCore, requests: Sequence[EngineRequest]) -> None:
        super().__init__({one.attempt_id: [] for one in requests})
        starts = {one.attempt_id: one.num_scored for one in requests}
        self.num_found = self.num_preempted = self.num_parts = 0
        for one in requests:
            core.add(one)
        while core.has_requests:
            for event in core.step().events:
                if isinstance(event, Scored):
                    assert event.first_position == starts[event.attempt_id] + len(self[event.attempt_id])
                    self[event.attempt_id] += event.logprobs
                    self.num_parts += 1
                elif isinstance(event, Fetched):
                    self.num_found += event.tokens.num_found
                self.num_preempted += isinstance(event, Preempted)
            assert core.check() == []

    @property
    def lists(self) -> list[list[Logprobs]]:
        return [*self.values()]


@pytest.fixture(scope="module")
def alone(model: Decoder) -> list[list[Logprobs]]:
    return [Scores(make_core(model), [scored(length)]).lists[0] for length in LENGTHS]


def test_as_transformers_has_them(model: Decoder, folder: Path, alone: list[list[Logprobs]]) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for length, found in zip(LENGTHS, alone, strict=True):
        assert len(found) == length - 1
        if length == 1:
            continue
        with torch.inference_mode():
            expected = torch.log_softmax(oracle(torch.tensor([prompt(length)])).logits[0], dim=-1)
        for position, one in enumerate(found, 1):
            row = expected[position - 1]
            assert one.chosen == pytest.approx(float(row[prompt(length)[position]]), abs=2e-4)
            values = row.topk(3).values.tolist()
            assert [value for _, value in one.top] == pytest.approx(values, abs=2e-4)
            assert [float(row[token_id]) for token_id, _ in one.top] == pytest.approx(values, abs=2e-4)


@pytest.mark.parametrize("chunk_len", [8, 40, 512])
def test_in_a_batch_in_chunks(model: Decoder, alone: list[list[Logprobs]], chunk_len: int) -> None:
    batcher = ContinuousBatcher(max_step_tokens=chunk_len + 12, max_running=12)
    others = [request(prompt(length + 3), replace(SAMPLING, max_tokens=30)) for length in LENGTHS]
    requests = [scored(length) for length in LENGTHS]
    found = Scores(make_core(model, batcher=batcher), [*others, *requests])
    assert [found[one.attempt_id] for one in requests] == alone
    assert all(found[one.attempt_id] == [] for one in others)


def test_a_step_scores_a_bounded_number(
    model: Decoder, alone: list[list[Logprobs]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.core, "MAX_SCORED_TOKENS", 50)
    found = Scores(make_core(model), [scored(length) for length in LENGTHS])
    assert found.lists == alone
    assert found.num_parts > len(LENGTHS)


def test_preempted(model: Decoder, alone: list[list[Logprobs]]) -> None:
    older = request(prompt(16), replace(SAMPLING, max_tokens=150))
    batcher = ContinuousBatcher(max_step_tokens=3, max_running=2)
    num_blocks = 12 if model.layout.window is None else 8
    found = Scores(make_core(model, num_blocks=num_blocks, batcher=batcher), [older, scored(150)])
    assert found.lists == [[], alone[-1]]
    assert found.num_preempted


def test_blocks_of_the_prompt_are_not_read_but_published(model: Decoder, alone: list[list[Logprobs]]) -> None:
    """Behind scores that are known already the prompt is read again, up to the token before the next one."""
    node = Node(model.layout)
    found = Scores(make_core(model, node), [handed_off(length) for length in LENGTHS])
    assert (found.lists, found.num_found) == (alone, 0)
    core = make_core(model, node)
    again = Scores(core, [scored(length) for length in LENGTHS])
    assert (again.lists, again.num_found) == (alone, 0)
    rest = Scores(make_core(model, node), [scored(150, num_scored=100)])
    assert (rest.lists, rest.num_found) == ([alone[-1][99:]], 96)
    plain = Scores(core, [request(prompt(150), SAMPLING)])
    assert plain.num_found == 144


def test_choices_share_the_scores_of_their_prompt(model: Decoder, alone: list[list[Logprobs]]) -> None:
    one = replace(request(prompt(64), replace(SAMPLING, n=3)), num_scored=1)
    assert Scores(make_core(model, Node(model.layout)), [one]).lists == [alone[4]]
