"""The step ahead: a decoding step is launched before the last one is read, and no token changes."""

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from engine.core import EngineCore
from engine.events import Failed
from engine.grammar.grammars import Grammars
from engine.model.decoder import Decoder
from engine.request import EngineRequest
from engine.schedule.continuous_batcher import ContinuousBatcher
from engine.speculation.speculator import MAX_ROWS
from engine.step.runner import Runner
from tests.harness.checkpoints import choose_prompt, make_checkpoint
from tests.harness.engines import ROOT, drive, gained, make_core, request, serve
from tests.pairs import RUNS_ALL
from tests.simulated_gpu.device import SIM, commands
from text.byte_tokenizer import NUM_BYTES, ByteTokenizer
from wire.block_names import NameChain
from wire.ids import AttemptId
from wire.sampling import FormatKind, ResponseFormat, SamplingParams

LENGTHS = (1, 14, 17, 40)
NUM_TOKENS = 40
CPU = torch.device("cpu")


@dataclass
class Aheads:
    """Passes that were launched ahead, and steps that ran one."""

    launched: int = 0
    taken: int = 0


@pytest.fixture
def aheads(monkeypatch: pytest.MonkeyPatch) -> Aheads:
    """Counts the passes of all engines."""
    found, launch_ahead, launch = Aheads(), Runner.launch_ahead, Runner.launch

    def counting_ahead(runner: Runner, *args: Any) -> None:
        launch_ahead(runner, *args)
        found.launched += runner.has_launched_ahead

    def counting(runner: Runner, work: Any) -> Any:
        found.taken += runner.has_launched_ahead
        return launch(runner, work)

    monkeypatch.setattr(Runner, "launch_ahead", counting_ahead)
    monkeypatch.setattr(Runner, "launch", counting)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-gqa", tmp_path_factory.mktemp("llama-gqa"))


@pytest.fixture(autouse=True, params=[False, True] if RUNS_ALL else [True], ids=lambda is_lazy: f"lazy={is_lazy}")
def schedule(request: pytest.FixtureRequest, devices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's attention waits for the device, which no graph can capture."""
    commands().set_lazy(request.param)
    monkeypatch.setattr(Decoder, "_capture", lambda *_: None)


@pytest.fixture(scope="module")
def model(folder: Path, devices: None) -> Decoder:
    return Decoder.load(folder, "float32", SIM, 16)


@dataclass
class Traffic:
    """Requests that come and go between an engine's steps, as drawn; the tokens of each."""

    core: EngineCore
    draw: random.Random
    outputs: dict[AttemptId, list[int]] = field(default_factory=dict)
    failed: list[AttemptId] = field(default_factory=list)

    def run(self, asked: Sequence[EngineRequest]) -> None:
        late = [*asked]
        while late or self.core.has_requests:
            if late and (not self.core.has_requests or self.draw.random() < 0.2):
                self.outputs[late[-1].attempt_id] = []
                self.core.add(late.pop())
            self.step()
            if self.core.has_requests and self.draw.random() < 0.02:
                self.core.abort(self.draw.choice(sorted(self.core.attempts)))
                assert self.core.check() == []

    def step(self) -> None:
        output = self.core.step()
        for choice, _, token_id in gained(output):
            self.outputs[choice.attempt_id].append(token_id)
        self.failed += [one.attempt_id for one in output.events if isinstance(one, Failed)]
        assert self.core.check() == []


def expected(folder: Path, asked: EngineRequest) -> list[int]:
    """Transformers' tokens, up to a stop token."""
    tokens = choose_prompt(folder, asked.num_prompt, NUM_TOKENS).token_ids[: asked.sampling.max_tokens]
    stops = [place for place, one in enumerate(tokens) if one in asked.sampling.stop_token_ids]
    return [*tokens[: stops[0] + 1 if stops else None]]


def drawn_requests(folder: Path, draw: random.Random) -> Iterator[EngineRequest]:
    """Requests that end by their length, or by a token that they will draw."""
    for length in LENGTHS * 3:
        known = choose_prompt(folder, length, NUM_TOKENS)
        stops = (known.token_ids[draw.randrange(NUM_TOKENS)],) if draw.random() < 0.5 else ()
        settings = SamplingParams(
            temperature=0, max_tokens=draw.randrange(1, NUM_TOKENS), stop_token_ids=stops, ignore_eos=True
        )
        yield request(known.prompt_ids, settings)


@pytest.mark.parametrize(("num_blocks", "least_taken"), [(10, 1), (64, 11)])
@pytest.mark.parametrize("seed", range(20 if RUNS_ALL else 1))
def test_ends_arrivals_and_aborts_change_no_token(
    folder: Path, model: Decoder, aheads: Aheads, seed: int, num_blocks: int, least_taken: int
) -> None:
    """With pages for all, and for few: then sequences are preempted, or no page is left for the step ahead."""
    draw = random.Random(seed)
    batcher = ContinuousBatcher(max_step_tokens=32, max_running=8)
    traffic, asked = Traffic(make_core(model, None, num_blocks, batcher), draw), [*drawn_requests(folder, draw)]
    traffic.run(asked)
    whole = 0
    for one in asked:
        output, tokens = traffic.outputs[one.attempt_id], expected(folder, one)
        assert output == tokens[: len(output)]
        whole += output == tokens
    assert whole >= len(asked) // 2
    assert aheads.launched >= aheads.taken >= least_taken


def test_a_pass_that_fails_to_launch_changes_no_token(
    folder: Path, model: Decoder, aheads: Aheads, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, num_calls = model.forward, [0]

    def failing(*args: Any) -> torch.Tensor:
        logits = forward(*args)
        num_calls[0] += 1
        if num_calls[0] % 3 == 0 and num_calls[0] > 4:
            raise torch.OutOfMemoryError("out of memory, once it was launched")
        return logits

    monkeypatch.setattr(model, "forward", failing)
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    asked = [request(choose_prompt(folder, length, NUM_TOKENS).prompt_ids, sampling) for length in LENGTHS[:2]]
    runs = drive(make_core(model), asked)
    assert [run.outputs[0] for run in runs] == [expected(folder, one) for one in asked]
    assert aheads.launched > 3


def test_steps_that_raise_take_no_page_twice(
    folder: Path, model: Decoder, aheads: Aheads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that was taken for a step ahead is the row's when the step is done again: its blocks are found by name."""
    core, known = make_core(model), choose_prompt(folder, 14, NUM_TOKENS)
    traffic = Traffic(core, random.Random(0))
    asked = request(known.prompt_ids, SamplingParams(temperature=0, max_tokens=NUM_TOKENS - 4, ignore_eos=True))
    traffic.outputs[asked.attempt_id] = []
    core.add(asked)
    while core.has_requests:
        with monkeypatch.context() as patch, suppress(BrokenDevice):
            patch.setattr(Runner, "_gains", broken)
            patch.setattr(Runner, "_is_sound", lambda _: False)
            core.step()
        assert core.check() == []
        traffic.step()
    assert traffic.outputs[asked.attempt_id] == expected(folder, asked)
    assert aheads.launched > NUM_TOKENS
    longer = request([*known.prompt_ids, *known.token_ids[:-4]], replace(asked.sampling, max_tokens=4))
    [run] = drive(core, [longer])
    assert run.fetched[0].found == {"device": 48}
    assert run.outputs[0] == [*known.token_ids[-4:]]


class BrokenDevice(RuntimeError):
    """A fault of a device that is not there."""


def broken(*_: Any) -> NoReturn:
    raise BrokenDevice("no token can be read")


def test_pages_are_free_before_a_prompt_comes(model: Decoder) -> None:
    """The engine evicts while the device computes, and keeps a page of each 64 free."""
    core, draw = make_core(model, num_blocks=128), random.Random(0)
    while core.pool.ledger.num_evicted < 20:
        serve(core, draw.choices(range(NUM_BYTES), k=64), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert core.pool.ledger.counts().free >= 2


def test_a_row_that_is_no_number_fails_alone(folder: Path, model: Decoder, aheads: Aheads) -> None:
    """The token of its fault is no row of the embedding, and the device has run it by then."""
    core = make_core(model)
    traffic = Traffic(core, random.Random(0))
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    asked = [request(choose_prompt(folder, length, NUM_TOKENS).prompt_ids, sampling) for length in (40, 17)]
    for one in asked:
        traffic.outputs[one.attempt_id] = []
        core.add(one)
    while len(traffic.outputs[asked[1].attempt_id]) < 4:
        traffic.step()
    spoilt, whole = asked
    chain = NameChain(ROOT, 16)
    chain.extend(spoilt.prompt_ids[:16])
    page = core.pool.ledger.find(chain.full(16)[0].key)
    assert page is not None
    core.pool.page_bytes(page).fill_(255)  # no number, in float32
    while core.has_requests:
        traffic.step()
    assert traffic.failed == [spoilt.attempt_id]
    assert traffic.outputs[whole.attempt_id] == expected(folder, whole)
    assert aheads.taken > 3


def test_rows_with_grammars_are_launched_ahead_where_a_step_has_no_room_for_guesses(
    tmp_path: Path, aheads: Aheads
) -> None:
    """Their masks are computed once the host has their tokens; with few rows forced tokens are guessed instead."""
    folder = make_checkpoint("llama-gqa", tmp_path, vocab_size=300)
    form = ResponseFormat(FormatKind.REGEX, "(red|green|blue),[a-d]{20}")
    formed = SamplingParams(temperature=1, seed=3, max_tokens=12, response_format=form)
    free = SamplingParams(temperature=1, seed=4, max_tokens=12, ignore_eos=True, presence_penalty=0.5, logprobs=1)
    grammars = Grammars(lambda: ByteTokenizer().definition, 300, (NUM_BYTES,))

    def answers(device: torch.device, num_free: int) -> list[list[int]]:
        asked = [request([one + 1, 2, 3], formed if one < 2 else free) for one in range(num_free + 2)]
        core = make_core(Decoder.load(folder, "float32", device, 16))
        return [run.outputs[0] for run in drive(core, [grammars.prepare(one) for one in asked])]

    assert answers(SIM, 2) == answers(CPU, 2)
    assert aheads.launched < 6  # of free rows, once the others have ended
    assert answers(SIM, MAX_ROWS) == answers(CPU, MAX_ROWS)
    assert aheads.launched >= 8


def test_a_cpu_launches_nothing_ahead(folder: Path, aheads: Aheads) -> None:
    core = make_core(Decoder.load(folder, "float32", CPU, 16))
    drive(core, [request([1, 2], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))])
    assert aheads.launched == 0
