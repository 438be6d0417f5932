"""A prefill engine and a decode engine in this process with a node's store between them: everything but the wire."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from engine.core import EngineCore
from engine.events import ChoiceId, Event, Failed, Fetched, Finished, HandedOff, PromptTokens, StepOutput
from engine.model.batch import CausalModel
from engine.request import ChoiceSoFar, EngineRequest, HandOff
from engine.schedule.batcher import Batcher
from engine.schedule.continuous_batcher import ContinuousBatcher
from engine.speculation.speculator import Speculator
from kv_store.device_pool import DevicePool
from kv_store.transfers import NoStore
from tests.harness.node import Node
from wire.ids import AttemptId, NamespaceRoot
from wire.sampling import SamplingParams

ROOT = NamespaceRoot(b"r" * 32)
_request_numbers = count()


@dataclass
class Run:
    """What became of one request on one engine."""

    request: EngineRequest
    outputs: dict[int, list[int]]
    fetched: dict[int, PromptTokens] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    is_over: bool = False

    def take(self, event: Event) -> None:
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Fetched):
            self.fetched.setdefault(event.choice, event.tokens)
        elif isinstance(event, Finished):
            self.ended.add(event.choice)
            self.is_over = len(self.ended) == len(self.request.choices)
        elif isinstance(event, HandedOff):
            self.is_over = True


def release(node: Node, runs: Sequence[Run]) -> None:
    """Ends the holds of handed-over requests, as a decode worker does once it has their blocks."""
    node.directory.release_holds([run.request.attempt_id for run in runs])


def make_core(
    model: CausalModel,
    node: Node | None = None,
    num_blocks: int = 256,
    batcher: Batcher | None = None,
    speculator: Speculator | None = None,
) -> EngineCore:
    pool = DevicePool(model.layout, num_blocks, model.device)
    transfers = node.transfers(pool) if node else NoStore()
    return EngineCore(model, pool, batcher or ContinuousBatcher(), transfers, speculator)


def gained(output: StepOutput) -> list[tuple[ChoiceId, int, int]]:
    """Choice, position and id of each token of a step."""
    return list(zip(output.choices, output.positions, output.token_ids, strict=True))


def drive(core: EngineCore, requests: Sequence[EngineRequest]) -> list[Run]:
    """Runs requests together to their end; the books are checked after every step."""
    runs = {
        request.attempt_id: Run(request, {one.index: list(one.output_ids) for one in request.choices})
        for request in requests
    }
    for request in requests:
        core.add(request)
    while core.has_requests:
        output = core.step()
        for choice, position, token_id in gained(output):
            assert position == len(runs[choice.attempt_id].outputs[choice.index])
            runs[choice.attempt_id].outputs[choice.index].append(token_id)
        for event in output.events:
            runs[event.attempt_id].take(event)
        assert core.check() == []
    core.step()
    assert core.check() == []
    assert all(run.is_over for run in runs.values())
    return list(runs.values())


def request(prompt_ids: Sequence[int], sampling: SamplingParams) -> EngineRequest:
    choices = tuple(ChoiceSoFar(index) for index in range(sampling.n))
    return EngineRequest(
        attempt_id=_next_id(), root=ROOT, prompt_ids=tuple(prompt_ids), sampling=sampling, choices=choices
    )


def serve(core: EngineCore, prompt_ids: Sequence[int], sampling: SamplingParams) -> Run:
    """One request on one engine, from prompt to end."""
    return drive(core, [request(prompt_ids, sampling)])[0]


def prefill(core: EngineCore, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Run]:
    """The prefill half of requests: one token per choice, the prompts' blocks published."""
    return drive(core, [hand_off_of(request(prompt_ids, sampling)) for prompt_ids in prompts])


def hand_off_of(asked: EngineRequest) -> HandOff:
    """The prefill half of a request."""
    return HandOff(
        attempt_id=asked.attempt_id,
        root=asked.root,
        prompt_ids=asked.prompt_ids,
        sampling=asked.sampling,
        choices=asked.choices,
    )


def resume(core: EngineCore, runs: Sequence[Run]) -> list[Run]:
    """The decode half: goes on with what runs have emitted so far."""
    return drive(core, [rest_of(run) for run in runs])


def rest_of(run: Run) -> EngineRequest:
    """What is left of a request after a run of its prefill half."""
    asked = run.request
    choices = tuple(
        ChoiceSoFar(index, tuple(output)) for index, output in run.outputs.items() if index not in run.ended
    )
    return EngineRequest(
        attempt_id=asked.attempt_id,
        root=asked.root,
        prompt_ids=asked.prompt_ids,
        sampling=asked.sampling,
        choices=choices,
    )


def _next_id() -> AttemptId:
    return AttemptId(f"request-{next(_request_numbers)}")
