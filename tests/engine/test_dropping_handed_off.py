"""SnapKV and H2O between a prefill and a decode engine: which blocks go over, their names, and what replaces them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.events import HandedOff
from engine.model.hash_model import HashModel
from engine.request import ChoiceSoFar, EngineRequest, HandOff
from kv_store.tiers.memory_tier import MemoryTier
from kv_store.transfers import InlineTransfers, Transfer, WriteThrough
from tests.harness.engines import ROOT, Run, drive, make_core, release, request
from tests.harness.node import Node
from wire.block_names import NameChain
from wire.ids import BlockKey
from wire.kv_policy import Dropping, Rule
from wire.layout import KVLayout
from wire.sampling import SamplingParams

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, dtype="float32")
MODEL = HashModel(LAYOUT, 997)
PROMPT = tuple(range(1, 404))
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=60)
SNAPKV, H2O = Dropping(Rule.SNAPKV, 25, "%"), Dropping(Rule.H2O, 25, "%")
NUM_KEPT, NUM_FULL = 7, 25
"""Blocks of the prompt that SnapKV keeps, and that are full."""


def asked(dropping: Dropping | None, sampling: SamplingParams = GREEDY) -> EngineRequest:
    return replace(request(PROMPT, sampling), dropping=dropping)


def handed_off(node: Node, dropping: Dropping | None, sampling: SamplingParams = GREEDY) -> Run:
    one = asked(dropping, sampling)
    first = HandOff(
        attempt_id=one.attempt_id,
        root=ROOT,
        prompt_ids=PROMPT,
        sampling=sampling,
        choices=one.choices,
        dropping=dropping,
    )
    return drive(make_core(MODEL, node), [first])[0]


def rest_of(run: Run) -> EngineRequest:
    choices = tuple(ChoiceSoFar(index, tuple(output)) for index, output in run.outputs.items())
    one = run.request
    return EngineRequest(
        attempt_id=one.attempt_id,
        root=ROOT,
        prompt_ids=PROMPT,
        sampling=one.sampling,
        choices=choices,
        dropping=one.dropping,
    )


def alone(dropping: Dropping | None, sampling: SamplingParams = GREEDY) -> dict[int, list[int]]:
    return drive(make_core(MODEL), [asked(dropping, sampling)])[0].outputs


def names_kept() -> list[BlockKey]:
    chain = NameChain(ROOT, 16)
    chain.extend(PROMPT)
    return [name.key for name in chain.kept(SNAPKV.terms, len(PROMPT), NUM_KEPT).full(NUM_KEPT * 16)]


def names_plain() -> list[BlockKey]:
    chain = NameChain(ROOT, 16)
    chain.extend(PROMPT)
    return [name.key for name in chain.full(len(PROMPT))]


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("dropping", [SNAPKV, H2O], ids=str)
def test_a_hand_off_is_as_one_engine(dropping: Dropping, num_choices: int) -> None:
    sampling = replace(GREEDY, temperature=1.0, seed=5, n=num_choices)
    node = Node(MODEL.layout)
    run = handed_off(node, dropping, sampling)
    core = make_core(MODEL, node)
    [resumed] = drive(core, [rest_of(run)])
    assert resumed.outputs == alone(dropping, sampling)
    if dropping is SNAPKV:
        assert resumed.fetched[0].found == {"host": len(PROMPT)}
        assert core.stats().computed_prompt_tokens == 0
    else:
        assert resumed.fetched[0].num_found == (len(PROMPT) - 64) // 16 * 16
    assert resumed.outputs != alone(None, sampling)


def test_what_is_kept_goes_first_and_is_held_the_rest_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[int, bool]] = []
    begin = InlineTransfers.begin

    def note(transfers: InlineTransfers, transfer: Transfer) -> None:
        if isinstance(transfer, WriteThrough):
            begun.append((len(transfer.names), transfer.hold is not None))
        begin(transfers, transfer)

    monkeypatch.setattr(InlineTransfers, "begin", note)
    node = Node(MODEL.layout)
    handed_off(node, SNAPKV)
    assert begun == [(NUM_KEPT, True), (NUM_FULL, False)]
    assert all(node.directory.records.exists([*names_kept(), *names_plain()]))


def lose(node: Node, lost: Sequence[BlockKey]) -> None:
    assert node.directory.delete(lost) == len(lost)


@pytest.mark.parametrize("num_emitted", [1, 2, 17, 40])
@pytest.mark.parametrize("is_lost", [[0], [6], [*range(7)], []], ids=str)
@pytest.mark.parametrize("has_prompt", [True, False])
def test_what_is_lost_is_chosen_again(num_emitted: int, is_lost: list[int], has_prompt: bool) -> None:
    """Kept blocks, or the prompt's as well: the tokens stay those of one engine, wherever the choice had come to."""
    node, expected = Node(MODEL.layout), alone(SNAPKV)[0]
    run = handed_off(node, SNAPKV)
    release(node, [run])
    lose(node, [names_kept()[place] for place in is_lost])
    if not has_prompt:
        lose(node, names_plain())
    run.outputs[0] = expected[:num_emitted]
    core = make_core(MODEL, node)
    [resumed] = drive(core, [rest_of(run)])
    assert resumed.outputs[0] == expected
    found = 384 if has_prompt else 0
    assert resumed.fetched[0].num_found == (found if is_lost else len(PROMPT))
    assert all(node.directory.records.exists(names_kept()))


def test_the_next_attempt_finds_what_was_filled_behind_kept_blocks() -> None:
    """After a worker is lost, its successor finds the blocks of the tokens that it had emitted."""
    node = Node(MODEL.layout)
    run = handed_off(node, SNAPKV)
    [first] = drive(make_core(MODEL, node), [rest_of(run)])
    chain = NameChain(ROOT, 16)
    chain.extend(PROMPT)
    kept = chain.kept(SNAPKV.terms, len(PROMPT), NUM_KEPT)
    kept.extend(first.outputs[0][:48])
    names = kept.full(NUM_KEPT * 16 + 48)
    assert len(names) == NUM_KEPT + 3
    assert all(node.directory.records.exists([name.key for name in names]))
    whole, first.outputs[0] = first.outputs[0], first.outputs[0][:50]
    core = make_core(MODEL, node)
    assert drive(core, [rest_of(first)])[0].outputs[0] == whole
    assert core.pool.ledger.find(names[-1].key) is not None


def test_kept_blocks_come_from_a_cold_tier() -> None:
    cold = MemoryTier(LAYOUT)
    node = Node(MODEL.layout, cold=cold)
    run = handed_off(node, SNAPKV)
    release(node, [run])
    node.write_all_cold()
    [resumed] = drive(make_core(MODEL, Node(MODEL.layout, cold=cold)), [rest_of(run)])
    assert resumed.outputs == alone(SNAPKV)
    assert resumed.fetched[0].num_found == len(PROMPT)


def test_policies_share_no_kept_block_but_the_prompts() -> None:
    node = Node(MODEL.layout)
    drive(make_core(MODEL, node), [asked(SNAPKV)])
    other = Dropping(Rule.SNAPKV, 50, "%")
    [run] = drive(make_core(MODEL, node), [asked(other)])
    assert run.outputs == alone(other)
    assert run.fetched[0].num_found == (len(PROMPT) - 16) // 16 * 16


def test_a_prompt_that_ends_at_its_first_token_leaves_its_blocks() -> None:
    node = Node(MODEL.layout)
    handed_off(node, SNAPKV, replace(GREEDY, max_tokens=1))
    assert all(node.directory.records.exists(names_plain()))


def test_an_aborted_prompt_leaves_no_page_behind() -> None:
    for num_steps in range(1, 8):
        core = make_core(MODEL, Node(MODEL.layout))
        one = asked(SNAPKV)
        core.add(HandOff(attempt_id=one.attempt_id, root=ROOT, prompt_ids=PROMPT, sampling=GREEDY, dropping=SNAPKV))
        events = [event for _ in range(num_steps) for event in core.step().events]
        core.abort(one.attempt_id)
        core.step()
        assert core.check() == []
        assert not core.has_requests
    assert any(isinstance(event, HandedOff) for event in events)
