import pytest

from engine.core import EngineCore
from engine.events import HandedOff, HoldOrphaned, StepOutput
from engine.model.hash_model import HashModel
from engine.request import ChoiceSoFar, HandOff
from engine.schedule.continuous_batcher import ContinuousBatcher
from kv_store.device_pool import DevicePool
from kv_store.transfers import Done, Fetch, NoStore
from tests.harness.engines import ROOT, make_core, prefill
from tests.harness.node import Node
from wire.ids import AttemptId
from wire.layout import KVLayout
from wire.sampling import SamplingParams

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
ID = AttemptId("request")


class HeldBack(NoStore):
    """Transfers of which fetches end at once, and the rest only when they may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = False

    def poll(self) -> list[Done]:
        done = super().poll()
        if self.may_end:
            return done
        self._done = [one for one in done if not isinstance(one.transfer, Fetch)]
        return [one for one in done if isinstance(one.transfer, Fetch)]


@pytest.fixture
def model() -> HashModel:
    return HashModel(LAYOUT, 997)


def hand_off(num_prompt: int, n: int, attempt_id: AttemptId = ID) -> HandOff:
    choices = tuple(ChoiceSoFar(index) for index in range(n))
    prompt = tuple(range(len(attempt_id), len(attempt_id) + num_prompt))
    return HandOff(
        attempt_id=attempt_id,
        root=ROOT,
        prompt_ids=prompt,
        sampling=SamplingParams(temperature=0.0, max_tokens=8, n=n),
        choices=choices,
    )


def run(core: EngineCore, num_steps: int = 30) -> StepOutput:
    """All that so many steps bring."""
    whole = StepOutput()
    for _ in range(num_steps):
        output = core.step()
        whole.before += output.events
        whole.choices += output.choices
    return whole


@pytest.mark.parametrize("num_prompt", [100, 104])
def test_choices_of_a_prompt_as_large_as_the_pool_find_its_pages(model: HashModel, num_prompt: int) -> None:
    core = make_core(model, num_blocks=7)
    core.add(hand_off(num_prompt, n=4))
    output = run(core)
    assert [choice.index for choice in output.choices] == [0, 1, 2, 3]
    assert isinstance(output.events[-1], HandedOff)


def test_prompts_that_fill_the_pool_do_not_wait_for_each_others_pages(model: HashModel) -> None:
    core = make_core(model, num_blocks=14)
    for name in ("first", "other one"):
        core.add(hand_off(100, n=2, attempt_id=AttemptId(name)))
    assert sorted(event.attempt_id for event in run(core).events if isinstance(event, HandedOff)) == [
        "first",
        "other one",
    ]


def test_what_an_aborted_request_published_does_not_end_its_next_attempt(model: HashModel) -> None:
    transfers = HeldBack()
    core = EngineCore(model, DevicePool(LAYOUT, 32, model.device), ContinuousBatcher(), transfers)
    core.add(hand_off(100, n=1))
    assert run(core).choices
    core.abort(ID)
    transfers.may_end = True
    core.add(hand_off(100, n=1))
    output = run(core)
    assert [choice.attempt_id for choice in output.choices] == [ID]
    assert [event for event in output.events if isinstance(event, HandedOff)] == [HandedOff(ID, 0)]


def test_what_an_aborted_request_published_is_said_to_be_abandoned(model: HashModel) -> None:
    transfers = HeldBack()
    core = EngineCore(model, DevicePool(LAYOUT, 32, model.device), ContinuousBatcher(), transfers)
    core.add(hand_off(100, n=1))
    run(core)
    core.abort(ID)
    transfers.may_end = True
    assert run(core).events == [HoldOrphaned(ID)]


def test_a_step_that_failed_reports_nothing_later(model: HashModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    core = make_core(model)
    core.add(hand_off(100, n=1))
    core.step()
    core.step()
    with monkeypatch.context() as patch:
        patch.setattr(HashModel, "forward", fail)
        with pytest.raises(RuntimeError):
            core.step()
    core.abort(ID)
    assert not core.step().is_news
    assert core.check() == []


@pytest.mark.parametrize("num_prompt", [100, 7])
def test_a_prompt_is_handed_off_though_its_first_choice_ends_with_its_first_token(
    model: HashModel, num_prompt: int
) -> None:
    node = Node(model.layout)
    prompt = range(num_prompt)
    first = prefill(make_core(model), [prompt], SamplingParams(n=2, seed=1))[0].outputs
    assert first[0] != first[1]
    core = make_core(model, node)
    stopped = SamplingParams(n=2, seed=1, stop_token_ids=(first[0][0],))
    choices = (ChoiceSoFar(0), ChoiceSoFar(1))
    core.add(HandOff(attempt_id=ID, root=ROOT, prompt_ids=tuple(prompt), sampling=stopped, choices=choices))
    assert run(core).events[-1] == HandedOff(ID, -(-num_prompt // 16))
    assert core.check() == []
