from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.events import Failed, Fetched, Finished, HeldUp, Preempted, PromptTokens, Scheduled, Started
from engine.model.batch import Batch
from engine.model.hash_model import HashModel
from engine.request import ChoiceSoFar, EngineRequest
from engine.schedule.batcher import UNLEARNED, Candidate, Gate, Pages, Plan, StepCosts
from engine.schedule.continuous_batcher import ContinuousBatcher
from kernels.backend import KVPages
from kv_store.tiers.memory_tier import MemoryTier
from prefill_worker.behaviour import PrefillBatcher
from tests.harness.engines import ROOT, drive, gained, make_core, request, serve
from tests.harness.node import Node
from wire.block_names import NameChain
from wire.errors import InvalidRequest, RequestExists
from wire.ids import AttemptId, NamespaceRoot
from wire.layout import KVLayout
from wire.load.fairness import BURST, Precedence, Standing
from wire.sampling import FinishReason, SamplingParams

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
PROMPT = tuple(range(1, 40))


@pytest.fixture
def model() -> HashModel:
    return HashModel(LAYOUT, 997)


def greedy(max_tokens: int, **settings: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **settings})


def test_tokens_are_the_oracles_and_pages_come_back(model: HashModel) -> None:
    core = make_core(model)
    run = serve(core, PROMPT, greedy(50))
    assert run.outputs[0] == model.oracle(PROMPT, 50)
    counts = core.stats().blocks
    assert (counts.owned, counts.published, counts.draining) == (0, 0, 0)
    assert counts.cached == (len(PROMPT) + 49) // 16


class Spy:
    """A plain batcher, and the standings that its last plan was made of."""

    standings: Sequence[Standing] = ()

    def plan(
        self, waiting: Sequence[Candidate], running: Sequence[Candidate], pages: Pages, costs: StepCosts = UNLEARNED
    ) -> Plan:
        self.standings = [one.standing for one in (*waiting, *running)]
        return ContinuousBatcher().plan(waiting, running, pages, costs)


def test_tenants_are_charged_for_what_is_computed_and_for_output(model: HashModel) -> None:
    """Cached tokens cost nothing, output twice as much, each over the weight of its request."""
    spy = Spy()
    core = make_core(model, batcher=spy)
    serve(core, PROMPT, greedy(1))
    heavy, light = (NamespaceRoot(bytes([number]) * 32) for number in (1, 2))
    asked = [
        replace(request(PROMPT, greedy(20)), root=ROOT),
        replace(request(PROMPT, greedy(20)), root=heavy),
        replace(request(PROMPT, greedy(20)), root=light, precedence=Precedence(2.0, priority=5)),
    ]
    for one in asked:
        core.add(one)
    num_tokens = 0
    while num_tokens < 3 * 5:
        num_tokens += len(core.step().token_ids)
    core.add(replace(request(PROMPT, greedy(2)), root=heavy))
    core.step()
    computed = {ROOT: len(PROMPT) % 16, heavy: len(PROMPT), light: len(PROMPT)}
    spent = {root: number + 2 * num_tokens / 3 for root, number in computed.items()}
    expected = {ROOT: spent[ROOT] - BURST, heavy: spent[heavy] - BURST, light: spent[light] / 2 - BURST}
    assert {one.tenant: one.spent for one in spy.standings} == expected, "each began a burst below the virtual time"
    assert [one.priority for one in spy.standings if one.tenant == light] == [5]


def test_events_come_in_order(model: HashModel) -> None:
    core = make_core(model)
    core.add(request(PROMPT, greedy(2)))
    outputs = [core.step() for _ in range(8)]
    assert [type(event) for output in outputs for event in output.events] == [Scheduled, Fetched, Started, Finished]
    assert [output.positions for output in outputs if output.token_ids] == [[0], [1]]
    assert [type(event) for event in outputs[2].before] == [Started]
    assert [type(event) for event in outputs[3].after] == [Finished]
    assert not core.has_requests


@pytest.mark.parametrize(("num_blocks", "max_running", "gate"), [(256, 1, Gate.SLOT), (5, 8, Gate.PAGES)])
def test_tells_once_what_a_request_waits_for(model: HashModel, num_blocks: int, max_running: int, gate: Gate) -> None:
    core = make_core(model, num_blocks=num_blocks, batcher=ContinuousBatcher(max_running=max_running))
    first, second = (request((number, *PROMPT), greedy(10)) for number in range(2))
    core.add(first)
    core.add(second)
    events = [event for _ in range(30) for event in core.step().events]
    assert [event for event in events if isinstance(event, HeldUp)] == [HeldUp(second.attempt_id, 0, gate)]
    assert not core.has_requests


@pytest.mark.parametrize(("is_deferred_long", "order"), [(True, [0, 2, 1]), (False, [0, 1, 2])])
def test_a_deferred_request_is_behind_others_while_it_is(
    model: HashModel, is_deferred_long: bool, order: list[int]
) -> None:
    core, deferred = make_core(model, batcher=PrefillBatcher(max_step_tokens=8, max_running=1)), set[str]()
    requests = [request((number, *PROMPT), greedy(1)) for number in range(3)]
    requests[1] = replace(requests[1], precedence=Precedence(is_deferred=lambda: "it is" in deferred))
    for one in requests:
        core.add(one)
    events = [*core.step().events]
    deferred.add("it is")
    events += core.step().events
    if not is_deferred_long:
        deferred.clear()
    events += [event for _ in range(100) for event in core.step().events]
    ended = [event.attempt_id for event in events if isinstance(event, Finished)]
    assert ended == [requests[number].attempt_id for number in order]


def test_a_second_turn_finds_the_first(model: HashModel) -> None:
    core = make_core(model)
    first = serve(core, PROMPT, greedy(30))
    prompt = (*PROMPT, *first.outputs[0], 7, 8, 9)
    second = serve(core, prompt, greedy(10))
    assert second.outputs[0] == model.oracle(prompt, 10)
    assert second.fetched[0].found["device"] == (len(PROMPT) + 29) // 16 * 16
    assert second.fetched[0].found["device"] + second.fetched[0].computed == len(prompt)


def test_chunks_change_nothing(model: HashModel) -> None:
    prompt = tuple(range(300))
    for max_step_tokens in (7, 16, 100):
        core = make_core(model, batcher=ContinuousBatcher(max_step_tokens=max_step_tokens))
        assert serve(core, prompt, greedy(5)).outputs[0] == model.oracle(prompt, 5)


def test_more_requests_than_pages_preempt_and_all_end_right(model: HashModel) -> None:
    core = make_core(model, num_blocks=12)
    requests = [request((9, number, *PROMPT), greedy(60)) for number in range(10)]
    for run in drive(core, requests):
        assert run.outputs[0] == model.oracle(run.request.prompt_ids, 60)
    assert core.stats().num_preemptions > 0


def test_preempted_sequences_give_their_pages_to_older_ones(model: HashModel) -> None:
    core = make_core(model, num_blocks=8)
    requests = [request((number, *PROMPT), greedy(80)) for number in range(2)]
    for one in requests:
        core.add(one)
    preempted = [event for _ in range(60) for event in core.step().events if isinstance(event, Preempted)]
    assert {event.attempt_id for event in preempted} == {requests[1].attempt_id}


@pytest.mark.parametrize("num_prompt", [1000, 992, 5, 1])
def test_choices_share_one_run_of_the_prompt_and_differ(model: HashModel, num_prompt: int) -> None:
    """The others find all of it on the device: full blocks, which are shared, and a copy of the tail."""
    core, prompt = make_core(model), [token % 997 for token in range(num_prompt)]
    sampling = SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=40, ignore_eos=True)
    run = serve(core, prompt, sampling)
    assert core.stats().computed_prompt_tokens == num_prompt
    assert [run.fetched[index] for index in range(1, 4)] == [PromptTokens({"device": num_prompt})] * 3
    assert len({tuple(output) for output in run.outputs.values()}) == 4
    for index, output in run.outputs.items():
        asked = EngineRequest(
            attempt_id=AttemptId("r"),
            root=ROOT,
            prompt_ids=run.request.prompt_ids,
            sampling=sampling,
            choices=(ChoiceSoFar(index),),
        )
        assert drive(make_core(model), [asked])[0].outputs[index] == output


def test_choices_end_with_the_first_token_of_one_run(model: HashModel) -> None:
    core = make_core(model)
    core.add(request(PROMPT, greedy(1, n=4)))
    outputs = [core.step() for _ in range(4)]
    assert [token for output in outputs for token in output.token_ids] == model.oracle(PROMPT, 1) * 4
    assert sum(isinstance(event, Finished) for output in outputs for event in output.after) == 4
    assert core.check() == []
    assert not core.has_requests


def test_choices_that_find_no_page_wait_with_their_first_token(model: HashModel) -> None:
    core = make_core(model, num_blocks=4)
    run = serve(core, PROMPT, SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=20, ignore_eos=True))
    assert all(len(output) == 20 for output in run.outputs.values())
    alone = serve(
        make_core(model), PROMPT, SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=20, ignore_eos=True)
    )
    assert run.outputs == alone.outputs


def test_goes_on_from_emitted_tokens(model: HashModel) -> None:
    emitted = model.oracle(PROMPT, 20)
    asked = EngineRequest(
        attempt_id=AttemptId("r"),
        root=ROOT,
        prompt_ids=PROMPT,
        sampling=greedy(40),
        choices=(ChoiceSoFar(0, tuple(emitted)),),
    )
    assert drive(make_core(model), [asked])[0].outputs[0] == model.oracle(PROMPT, 40)


def test_abort_frees_everything_at_every_step(model: HashModel) -> None:
    for num_steps in range(12):
        core = make_core(model, batcher=ContinuousBatcher(max_step_tokens=16))
        asked = request(PROMPT, greedy(50, n=2))
        core.add(asked)
        for _ in range(num_steps):
            core.step()
        core.abort(asked.attempt_id)
        assert not core.step().is_news
        assert core.check() == []
        assert not core.has_requests


def test_ending_a_choice_at_every_step_leaves_its_siblings_alone(model: HashModel) -> None:
    sampling = replace(greedy(20, n=3), temperature=1.0)
    whole = serve(make_core(model), PROMPT, sampling)
    for num_steps in range(24):
        core = make_core(model, batcher=ContinuousBatcher(max_step_tokens=16))
        asked = request(PROMPT, sampling)
        core.add(asked)
        outputs: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for step in range(60):
            if step == num_steps:
                core.end(asked.attempt_id, 0)
                assert not core.end(asked.attempt_id, 0)
                num_left = len(outputs[0])
            for choice, _, token_id in gained(core.step()):
                outputs[choice.index].append(token_id)
        assert len(outputs[0]) == num_left
        assert [outputs[1], outputs[2]] == [whole.outputs[1], whole.outputs[2]]
        assert core.check() == []
        assert not core.has_requests


def test_aborting_one_leaves_the_others_alone(model: HashModel) -> None:
    core = make_core(model)
    doomed, kept = request(PROMPT, greedy(50)), request((5, *PROMPT), greedy(20))
    core.add(doomed)
    core.add(kept)
    for _ in range(5):
        core.step()
    core.abort(doomed.attempt_id)
    core.abort(doomed.attempt_id)
    events = [event for _ in range(30) for event in core.step().events]
    assert {event.attempt_id for event in events} == {kept.attempt_id}
    assert isinstance(events[-1], Finished)


@pytest.mark.parametrize("max_tokens", [2000, 100])
def test_refuses_what_can_never_fit(model: HashModel, max_tokens: int) -> None:
    core = make_core(model, num_blocks=8)
    with pytest.raises(InvalidRequest, match="max_tokens"):
        core.add(request(PROMPT, greedy(max_tokens)))
    assert not core.has_requests


@pytest.mark.parametrize(
    ("prompt", "max_tokens"),
    [((), 5), ((5, 997), 5), ((5, -1), 5), (PROMPT, 0)],
    ids=["empty", "wide", "negative", "none"],
)
def test_refuses_what_no_step_could_run(model: HashModel, prompt: tuple[int, ...], max_tokens: int) -> None:
    core = make_core(model)
    with pytest.raises(InvalidRequest):
        core.add(request(prompt, greedy(max_tokens)))
    assert not core.has_requests


def test_runs_what_just_fits(model: HashModel) -> None:
    core = make_core(model, num_blocks=8)
    num = 8 * 16 - len(PROMPT)
    assert serve(core, PROMPT, greedy(num)).outputs[0] == model.oracle(PROMPT, num)


def test_refuses_a_second_request_of_one_id(model: HashModel) -> None:
    core = make_core(model)
    asked = request(PROMPT, greedy(5))
    core.add(asked)
    with pytest.raises(RequestExists):
        core.add(asked)


def test_stops_at_a_stop_token_and_says_which(model: HashModel) -> None:
    expected = model.oracle(PROMPT, 30)
    stop = expected[10]
    core = make_core(model)
    core.add(request(PROMPT, greedy(30, stop_token_ids=(stop,))))
    outputs = [core.step() for _ in range(40)]
    assert [token for output in outputs for token in output.token_ids] == expected[: expected.index(stop) + 1]
    (finished,) = [event for output in outputs for event in output.after if isinstance(event, Finished)]
    assert (finished.reason, finished.stop_token_id) == (FinishReason.STOP, stop)


def test_min_tokens_keeps_stop_tokens_away(model: HashModel) -> None:
    stop = model.oracle(PROMPT, 1)[0]
    run = serve(make_core(model), PROMPT, greedy(10, stop_token_ids=(stop,), min_tokens=4))
    assert stop not in run.outputs[0][:4]
    assert len(run.outputs[0]) >= 4


class Poisoned(HashModel):
    """Its logits are no numbers for one sequence of a batch, or it fails for all."""

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        logits = super().forward(batch, kv)
        firsts = batch.token_ids[batch.cu_query_lens[:-1].long()]
        logits[firsts[: len(logits)] == 13] = torch.nan
        return logits


def test_logits_that_are_no_numbers_end_their_request_only() -> None:
    core = make_core(Poisoned(LAYOUT, 997))
    bad, good = request((13, *PROMPT), greedy(5)), request(PROMPT, greedy(5))
    core.add(bad)
    core.add(good)
    events = [event for _ in range(20) for event in core.step().events]
    assert [event.attempt_id for event in events if isinstance(event, Failed)] == [bad.attempt_id]
    assert [event.attempt_id for event in events if isinstance(event, Finished)] == [good.attempt_id]
    assert core.stats().blocks.cached == (len(PROMPT) + 4) // 16, "blocks of the failed request must not be found"
    assert core.check() == []


class Fallible(HashModel):
    """Fails at a token, and for the next so many runs."""

    num_failures = 0

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        self.num_failures -= 1
        if self.num_failures >= 0 or 13 in batch.token_ids:
            raise RuntimeError("no such kernel")
        return super().forward(batch, kv)


def test_a_request_that_cannot_be_run_fails_alone() -> None:
    model = Fallible(LAYOUT, 997)
    core = make_core(model)
    good, bad = request(range(10), greedy(5)), request((13, *range(20)), greedy(5))
    core.add(good)
    core.add(bad)
    outputs = [core.step() for _ in range(20)]
    failed = [event for output in outputs for event in output.after if isinstance(event, Failed)]
    assert [event.attempt_id for event in failed] == [bad.attempt_id]
    assert [token for output in outputs for token in output.token_ids] == model.oracle(range(10), 5)
    assert core.check() == []


def test_a_request_that_cannot_be_run_fails_even_alone() -> None:
    core = make_core(Fallible(LAYOUT, 997))
    core.add(request((13, 1, 2), greedy(5)))
    events = [event for _ in range(4) for event in core.step().events]
    assert isinstance(events[-1], Failed)
    assert "incident" in events[-1].error.message
    assert "kernel" not in events[-1].error.message
    assert core.check() == []


def test_a_run_that_fails_for_all_together_is_done_for_each() -> None:
    model = Fallible(LAYOUT, 997)
    core = make_core(model)
    asked = [request(range(number, number + 20), greedy(6)) for number in (20, 21, 22)]
    model.num_failures = 1
    for run, one in zip(drive(core, asked), asked, strict=True):
        assert run.outputs[0] == model.oracle(one.prompt_ids, 6)


@pytest.mark.parametrize("num_blocks", [64, 2])
def test_a_model_that_does_not_run_at_all_is_no_requests_fault(num_blocks: int) -> None:
    """Or may not be: with all pages in use there is none to try it with."""
    model = Fallible(LAYOUT, 997)
    core = make_core(model, num_blocks=num_blocks)
    asked = request(range(20), greedy(6))
    core.add(asked)
    core.step()
    core.step()
    model.num_failures = 100
    with pytest.raises(RuntimeError, match="no such kernel"):
        core.step()
    core.abort(asked.attempt_id)
    assert core.check() == []


def test_blocks_that_led_to_no_number_are_found_nowhere() -> None:
    """Neither on the device nor in the tiers of the store, to which they went before it showed."""
    cold = MemoryTier(LAYOUT)
    node = Node(LAYOUT, cold=cold)
    core = make_core(Poisoned(LAYOUT, 997), node, batcher=ContinuousBatcher(max_step_tokens=16, max_running=4))
    bad = request((*range(100, 148), 13), greedy(5))
    core.add(bad)
    events = [event for _ in range(3) for event in core.step().events]
    node.write_all_cold()
    assert len(cold.frames) > 0
    events += [event for _ in range(8) for event in core.step().events]
    assert isinstance(events[-1], Failed)
    assert len(cold.frames) == 0
    assert node.directory.records.status().counts.free == node.directory.records.status().counts.total
    assert core.stats().blocks.free == core.stats().blocks.total


def test_unused_slots_are_few_at_steady_load(model: HashModel) -> None:
    """Of the slots in pages that sequences hold, at most 4 % are empty, for requests of 300 tokens and more."""
    core = make_core(model, num_blocks=1200)
    prompts = [(number, *range(300 + 7 * number)) for number in range(32)]
    for number, prompt in enumerate(prompts):
        core.add(request(prompt, greedy(200 + number)))
    num_known = sum(map(len, prompts))
    shares = []
    for _ in range(150):
        num_known += len(core.step().token_ids)
        blocks = core.stats().blocks
        num_filled = num_known - len(prompts)  # once all decode: the last known token of each has no KV
        shares.append(1 - num_filled / (max(1, blocks.owned + blocks.published) * LAYOUT.block_size))
    assert core.stats().num_running == len(prompts)
    assert 0 <= min(shares[20:]) <= max(shares[20:]) <= 0.04


class Counting(ContinuousBatcher):
    """Counts its plans."""

    num_plans = 0

    def plan(
        self,
        waiting: Sequence[Candidate],
        running: Sequence[Candidate],
        pages: Pages,
        costs: StepCosts = UNLEARNED,
    ) -> Plan:
        Counting.num_plans += 1
        return super().plan(waiting, running, pages, costs)


def test_steps_of_decoding_alone_have_no_plan(model: HashModel) -> None:
    core = make_core(model, batcher=Counting())
    asked = [request((number, *PROMPT), greedy(60)) for number in range(8)]
    for one in asked:
        core.add(one)
    while core.stats().num_waiting or core.stats().generated_tokens < 2 * len(asked):
        core.step()
    num_plans = Counting.num_plans
    for _ in range(40):
        assert len(core.step().token_ids) == len(asked)
        assert core.check() == []
    assert Counting.num_plans == num_plans
    core.add(request(PROMPT, greedy(2)))
    core.step()
    assert Counting.num_plans == num_plans + 1


def test_a_block_is_named_when_it_is_full(model: HashModel, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(model)
    core.add(request(PROMPT, greedy(70)))
    while core.stats().generated_tokens < 2:
        core.step()
    extended: list[int] = []
    extend = NameChain.extend

    def watched(chain: NameChain, tokens: Sequence[int]) -> None:
        extended.append(len(tokens))
        extend(chain, tokens)

    monkeypatch.setattr(NameChain, "extend", watched)
    for _ in range(7):
        core.step()
    assert extended == []
    core.step()
    assert extended == [9], "of the second block, 7 tokens of the prompt were there"


@pytest.mark.parametrize("num_blocks", [12, 256])
def test_each_way_to_sample_is_the_same_among_others(model: HashModel, num_blocks: int) -> None:
    """Plain rows beside ones that want log-probabilities, penalties, stop tokens, a least length, or chance."""
    ways = [
        greedy(40),
        greedy(40, logprobs=3),
        greedy(40, presence_penalty=1.5),
        greedy(40, stop_token_ids=(model.oracle((2, *PROMPT), 9)[8],), min_tokens=4),
        greedy(40, temperature=0.9, seed=4),
        greedy(40, temperature=0.9, seed=4, top_p=0.8, logprobs=0),
    ]
    asked = [request((number % 3, *PROMPT), way) for number, way in enumerate(ways * 2)]
    together = drive(make_core(model, num_blocks=num_blocks), asked)
    for run, one in zip(together, asked, strict=True):
        assert run.outputs == serve(make_core(model), one.prompt_ids, one.sampling).outputs
