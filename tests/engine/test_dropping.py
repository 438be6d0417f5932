"""SnapKV and H2O: as a dense model with an explicit choice, and the same tokens however a sequence was run."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.choosers import Drawn, Latest
from engine.core import EngineCore
from engine.events import Failed
from engine.kv.dropping import HEAVIEST, Chooser
from engine.model.batch import CausalModel
from engine.model.decoder import Decoder
from engine.model.hash_model import HashModel
from engine.request import ChoiceSoFar, EngineRequest
from engine.schedule.continuous_batcher import ContinuousBatcher
from engine.speculation.speculator import NgramProposer, Speculator
from kernels.cpu.library import best_isa
from kv_store.device_pool import DevicePool
from kv_store.transfers import NoStore
from tests.harness.checkpoints import VOCAB_SIZE
from tests.harness.engines import drive, make_core, request
from tests.harness.node import Node
from tests.kernels.backends import make_backend
from wire.errors import InvalidRequest
from wire.kv_policy import Dropping, Rule
from wire.layout import KVLayout
from wire.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=40)
SNAPKV, H2O = Dropping(Rule.SNAPKV, 25, "%"), Dropping(Rule.H2O, 25, "%")
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, dtype="float32")
BLOCK = 16


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed * 10_000 + length)
    return tuple(torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist())


def asked(prompt_ids: Sequence[int], dropping: Dropping | None, sampling: SamplingParams = GREEDY) -> EngineRequest:
    return replace(request(prompt_ids, sampling), dropping=dropping)


def tokens(core: EngineCore, prompt_ids: Sequence[int], dropping: Dropping | None) -> list[int]:
    return drive(core, [asked(prompt_ids, dropping)])[0].outputs[0]


@pytest.fixture(scope="module")
def decoder(checkpoint: Callable[[str], Path]) -> Decoder:
    return Decoder.load(checkpoint("llama-gqa"), "float32", torch.device("cpu"), BLOCK)


class DenseOracle:
    """Transformers' model with eager attention, whose cache is cut by hand: chosen tokens by layer and KV head."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )

    @torch.inference_mode()
    def generate(self, prompt_ids: Sequence[int], dropping: Dropping, num_tokens: int) -> list[int]:
        cache: Any = transformers.DynamicCache()
        found = self.model(torch.tensor([prompt_ids]), None, None, cache, output_attentions=True)
        watched = slice(-dropping.rule.num_watched, None)
        attention = [self._grouped(layer[0])[:, :, watched].sum((1, 2)) for layer in found.attentions]
        self.keys = [layer.keys[0] for layer in cache.layers]
        self.values = [layer.values[0] for layer in cache.layers]
        num_kept = dropping.num_copied(len(prompt_ids), BLOCK) * BLOCK
        if dropping.rule is Rule.SNAPKV:
            chosen = [self._choose(layer, num_kept, num_latest=16, reach=3) for layer in attention]
        else:
            chosen = [self._choose(layer, num_kept, num_latest=num_kept // 2, reach=0) for layer in attention]
        self._keep(chosen)
        attention = [layer.gather(-1, places) for layer, places in zip(attention, chosen, strict=True)]
        output = [int(found.logits[0, -1].argmax())]
        while len(output) < num_tokens:
            position = len(prompt_ids) + len(output) - 1
            logits, seen = self._step(output[-1], position)
            output.append(int(logits.argmax()))
            if dropping.rule is Rule.H2O:
                attention = [
                    torch.nn.functional.pad(old, (0, 1)) + new for old, new in zip(attention, seen, strict=True)
                ]
                if attention[0].shape[-1] % BLOCK == 0:
                    attention = self._lose_pages(attention, num_kept // BLOCK)
        return output

    def _grouped(self, attention: torch.Tensor) -> torch.Tensor:
        """Views attention [heads, rows, keys] as [KV heads, group, rows, keys]."""
        num_kv_heads = self.model.config.num_key_value_heads
        return attention.view(num_kv_heads, len(attention) // num_kv_heads, *attention.shape[1:])

    def _choose(self, attention: torch.Tensor, num_kept: int, num_latest: int, reach: int) -> torch.Tensor:
        """Chooses places by head: the heaviest neighbour within reach counts."""
        num_prompt = attention.shape[-1]
        end = num_prompt - num_latest
        chosen = []
        for head in attention:
            pooled = [max(head[max(0, at - reach) : min(end, at + reach + 1)].tolist()) for at in range(end)]
            best = sorted(range(end), key=lambda at: (-pooled[at], at))[: num_kept - num_latest]
            chosen.append([*sorted(best), *range(end, num_prompt)])
        return torch.tensor(chosen)

    def _keep(self, chosen: Sequence[torch.Tensor]) -> None:
        for layer, places in enumerate(chosen):
            for held in (self.keys, self.values):
                held[layer] = torch.stack([head[at] for head, at in zip(held[layer], places, strict=True)])

    def _lose_pages(self, attention: list[torch.Tensor], num_pages: int) -> list[torch.Tensor]:
        while (num_full := attention[0].shape[-1] // BLOCK) > num_pages:
            weights = [
                sum(float(one[:, page * BLOCK : (page + 1) * BLOCK].sum()) for one in attention)
                for page in range(num_full)
            ]
            lightest = min(range(1, num_full - num_pages // 2), key=weights.__getitem__)
            kept = [at for at in range(attention[0].shape[-1]) if at // BLOCK != lightest]
            attention = [one[:, kept] for one in attention]
            self._keep([torch.tensor([kept] * len(one)) for one in attention])
        return attention

    def _step(self, token: int, position: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        past: Any = transformers.DynamicCache()
        for layer, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            past.update(key[None], value[None], layer)
        found = self.model(torch.tensor([[token]]), None, torch.tensor([[position]]), past, output_attentions=True)
        self.keys = [layer.keys[0] for layer in past.layers]
        self.values = [layer.values[0] for layer in past.layers]
        return found.logits[0, -1], [self._grouped(layer[0]).sum((1, 2)) for layer in found.attentions]


@pytest.mark.parametrize("dropping", [SNAPKV, H2O], ids=str)
@pytest.mark.parametrize("length", [200, 203, 320])
def test_a_dense_model_with_the_same_choice_says_the_same(
    checkpoint: Callable[[str], Path], decoder: Decoder, dropping: Dropping, length: int
) -> None:
    """Token by token; and not what it says with all of its KV."""
    expected = DenseOracle(checkpoint("llama-gqa")).generate(prompt(length), dropping, 40)
    assert tokens(make_core(decoder), prompt(length), dropping) == expected
    assert tokens(make_core(decoder), prompt(length), None) != expected


MODELS = [(best_isa(), "bfloat16", "auto"), (best_isa(), "float32", "int8"), ("torch", "float32", "fp8")]
"""Kernels, compute dtype and KV dtype."""
POLICIES = [SNAPKV, H2O, Dropping(Rule.SNAPKV, 128), Dropping(Rule.H2O, 128)]
each_rule = pytest.mark.parametrize("rule", [Rule.SNAPKV, Rule.H2O])
each_budget = pytest.mark.parametrize("budget", [(25, "%"), (128,)], ids=["25%", "128"])


@pytest.fixture(scope="module", params=["hash", *MODELS], ids=str)
def model(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> CausalModel:
    if request.param == "hash":
        return HashModel(LAYOUT, VOCAB_SIZE)
    kernels, dtype, kept = request.param
    return Decoder.load(
        checkpoint("llama-gqa"), dtype, torch.device("cpu"), BLOCK, make_backend(kernels), kv_dtype=kept
    )


@pytest.mark.pairs
@each_rule
@each_budget
def test_neither_company_nor_chunks_nor_preemption_nor_guesses_change_a_token(
    model: CausalModel, rule: Rule, budget: tuple[Any, ...]
) -> None:
    dropping = Dropping(rule, *budget)
    prompts = [prompt(length, seed) for seed, length in enumerate((310, 150, 200, 70, 40, 240, 129, 208))]
    alone = [tokens(make_core(model), one, dropping) for one in prompts]
    assert alone != [tokens(make_core(model), one, None) for one in prompts]
    small = ContinuousBatcher(max_step_tokens=23, max_running=8)
    scarce, guessing = make_core(model, None, 31, small), make_core(model, speculator=Speculator(NgramProposer()))
    for core in (make_core(model), make_core(model, batcher=small), scarce, guessing):
        runs = drive(core, [asked(one, dropping) for one in prompts])
        assert [run.outputs[0] for run in runs] == alone
    assert scarce.stats().num_preemptions > 0
    # The same prompts again: what was kept or computed before is found in part.
    assert [run.outputs[0] for run in drive(core, [asked(one, dropping) for one in prompts])] == alone


@pytest.mark.pairs
@each_rule
@each_budget
@pytest.mark.parametrize("num_emitted", [1, 7, 30])
def test_goes_on_from_emitted_tokens(model: CausalModel, rule: Rule, budget: tuple[Any, ...], num_emitted: int) -> None:
    """As after a failover: on an engine that knows nothing, and on the one that has served it."""
    dropping = Dropping(rule, *budget)
    expected = tokens(core := make_core(model), prompt(310), dropping)
    for one in (make_core(model), core):
        rest = replace(asked(prompt(310), dropping), choices=(ChoiceSoFar(0, tuple(expected[:num_emitted])),))
        assert drive(one, [rest])[0].outputs[0] == expected


@pytest.mark.pairs
@each_rule
@each_budget
def test_choices_share_what_is_kept(model: CausalModel, rule: Rule, budget: tuple[Any, ...]) -> None:
    dropping = Dropping(rule, *budget)
    sampling = replace(GREEDY, temperature=1.0, seed=5, n=3)
    core = make_core(model)
    run = drive(core, [asked(prompt(203), dropping, sampling)])[0]
    for index, output in run.outputs.items():
        alone = replace(asked(prompt(203), dropping, sampling), choices=(ChoiceSoFar(index),))
        assert drive(make_core(model), [alone])[0].outputs[index] == output
    if dropping.rule is Rule.SNAPKV:
        assert core.stats().computed_prompt_tokens == 203


@pytest.mark.parametrize("dropping", POLICIES, ids=str)
@pytest.mark.parametrize("length", [130, 203, 320])
def test_pages_follow_the_budget(decoder: Decoder, dropping: Dropping, length: int) -> None:
    core = make_core(decoder)
    core.add(asked(prompt(length), dropping, replace(GREEDY, max_tokens=100)))
    num_pages = []
    while core.has_requests:
        core.step()
        counts = core.stats().blocks
        num_pages.append(counts.owned + counts.published)
    budget = dropping.num_blocks(length, BLOCK) * BLOCK
    most = {Rule.SNAPKV: -(-(budget + 99) // BLOCK), Rule.H2O: budget // BLOCK + 1}[dropping.rule]
    assert max(num_pages[len(num_pages) // 2 :]) == most


@pytest.mark.parametrize("dropping", [SNAPKV, H2O], ids=str)
def test_the_same_text_in_full_never_reads_what_was_computed_beside_dropped_tokens(
    model: CausalModel, dropping: Dropping
) -> None:
    """A turn with drops, then its text as a prompt, on the device and from the store: token by token as if alone."""
    for is_on_device in (True, False):
        node = Node(model.layout)
        core = make_core(model, node)
        turn = (*prompt(200), *tokens(core, prompt(200), dropping), 7, 8, 9)
        run = drive(core if is_on_device else make_core(model, node), [asked(turn, None)])[0]
        assert run.outputs[0] == tokens(make_core(model), turn, None)
        assert run.fetched[0].num_found == 192


@pytest.mark.parametrize("dropping", [SNAPKV, H2O], ids=str)
@pytest.mark.parametrize("chooser", [Latest(), Drawn(3)], ids=["latest", "drawn"])
def test_controls_keep_as_much_and_say_something_else(decoder: Decoder, dropping: Dropping, chooser: Chooser) -> None:
    def core(chooser: Chooser) -> EngineCore:
        pool = DevicePool(decoder.layout, 64, decoder.device)
        return EngineCore(decoder, pool, ContinuousBatcher(), NoStore(), chooser=chooser)

    found = tokens(core(chooser), prompt(320), dropping)
    assert found != tokens(core(HEAVIEST), prompt(320), dropping)
    assert found == tokens(core(chooser), prompt(320), dropping)


def test_choices_of_tokens_and_pages() -> None:
    attention = torch.zeros(1, 1, 40)
    attention[..., 10] = 5.0
    kept = HEAVIEST.tokens(attention, 24, Rule.SNAPKV)[0, 0].tolist()
    assert kept == [0, *range(7, 14), *range(24, 40)]
    assert HEAVIEST.tokens(attention.roll(10), 24, Rule.H2O)[0, 0].tolist() == [*range(11), 20, *range(28, 40)]
    assert Latest().tokens(attention, 24, Rule.SNAPKV)[0, 0].tolist() == [*range(16, 40)]
    drawn = Drawn(1).tokens(attention, 24, Rule.SNAPKV)[0, 0].tolist()
    assert len({*drawn}) == 24
    assert drawn[8:] == [*range(24, 40)]
    weights = torch.tensor([0.0, 3.0, 1.0, 2.0, 9.0, 0.0])
    assert HEAVIEST.pages(weights, 2, 96) == [2, 3]
    assert Latest().pages(weights, 2, 96) == [0, 1]
    assert {*Drawn(1).pages(weights, 2, 96)} < {1, 2, 3}


@pytest.mark.parametrize("dropping", [SNAPKV, H2O], ids=str)
def test_a_fault_while_tokens_are_weighed_fails_that_request_alone(dropping: Dropping) -> None:
    class Scarce(HashModel):
        def weigh(self, queries: torch.Tensor, kv: Any, block_table: torch.Tensor, num_tokens: int) -> torch.Tensor:
            if num_tokens > 300:
                raise torch.OutOfMemoryError("no memory to weigh them")
            return super().weigh(queries, kv, block_table, num_tokens)

    core, failed, outputs = make_core(Scarce(LAYOUT, VOCAB_SIZE)), [], defaultdict[str, list[int]](list)
    requests = [asked(prompt(50), None), asked(prompt(200), dropping), asked(prompt(400), dropping)]
    for one in requests:
        core.add(one)
    while core.has_requests:
        output = core.step()
        failed += [event.attempt_id for event in (*output.before, *output.after) if isinstance(event, Failed)]
        for choice, token in zip(output.choices, output.token_ids, strict=True):
            outputs[choice.attempt_id].append(token)
    assert failed == [requests[2].attempt_id]
    for one in requests[:2]:
        assert outputs[one.attempt_id] == tokens(make_core(HashModel(LAYOUT, VOCAB_SIZE)), one.prompt_ids, one.dropping)
    assert core.check() == []


def test_refuses_windows_and_what_the_pool_cannot_hold_beside_the_prompt() -> None:
    with pytest.raises(InvalidRequest, match="windows"):
        make_core(HashModel(replace(LAYOUT, window=64), VOCAB_SIZE)).add(asked(prompt(200), SNAPKV))
    with pytest.raises(InvalidRequest, match="pool"):
        make_core(HashModel(LAYOUT, VOCAB_SIZE), num_blocks=16).add(asked(prompt(200), SNAPKV))
