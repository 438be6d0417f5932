"""The same tokens whichever way a request goes, and transformers' tokens: every architecture, length and tier."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from engine.events import PromptTokens
from engine.model.decoder import Decoder
from kv_store.tiers.files_tier import FilesTier
from kv_store.tiers.memory_tier import MemoryTier
from tests.harness.checkpoints import (
    ARCHITECTURES,
    SINKS,
    VOCAB_SIZE,
    Continuation,
    choose_prompt,
    make_checkpoint,
)
from tests.harness.engines import Run, drive, make_core, prefill, release, request, rest_of, resume, serve
from tests.harness.node import Node
from tests.kv_store.names import MAC_KEY
from wire.block_names import namespace_root
from wire.sampling import SamplingParams

NUM_TOKENS = 64
LENGTHS = (1, 15, 16, 17, 100, 700)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=11, n=4, max_tokens=24, ignore_eos=True)


@dataclass(frozen=True)
class Served:
    folder: Path
    kv_policy: str


@pytest.fixture(scope="module", params=[*((arch, "full") for arch in ARCHITECTURES), *SINKS], ids="-".join)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    arch, kv_policy = request.param
    return Served(make_checkpoint(arch, tmp_path_factory.mktemp(arch)), kv_policy)


@pytest.fixture(scope="module")
def model(served: Served) -> Decoder:
    return Decoder.load(served.folder, None, torch.device("cpu"), 16, kv_policy=served.kv_policy)


@pytest.fixture(scope="module")
def expected(served: Served) -> list[Continuation]:
    return [choose_prompt(served.folder, length, NUM_TOKENS, kv_policy=served.kv_policy) for length in LENGTHS]


def assert_exact(runs: Sequence[Run], expected: Sequence[Continuation]) -> None:
    for run, continuation in zip(runs, expected, strict=True):
        assert tuple(run.outputs[0]) == continuation.token_ids, f"prompt of {len(continuation.prompt_ids)} tokens"


def test_co_located_alone_and_among_thirty_two(model: Decoder, expected: list[Continuation]) -> None:
    for continuation in expected:
        assert_exact([serve(make_core(model), continuation.prompt_ids, GREEDY)], [continuation])
    drawn = torch.Generator().manual_seed(1)
    others = [torch.randint(VOCAB_SIZE, (length,), generator=drawn).tolist() for length in range(2, 80, 3)]
    crowd = [request(one, GREEDY) for one in [*(one.prompt_ids for one in expected), *others]]
    assert len(crowd) == 32
    assert_exact(drive(make_core(model, num_blocks=512), crowd)[: len(expected)], expected)


def test_taken_over_from_a_killed_worker(model: Decoder, expected: list[Continuation]) -> None:
    """After eleven tokens, with the prompts' blocks in the store, and with nothing left of them."""
    node = Node(model.layout)
    handed = prefill(make_core(model, node), [one.prompt_ids for one in expected], GREEDY)
    for run, continuation in zip(handed, expected, strict=True):
        run.outputs[0] = [*continuation.token_ids[:11]]
    for left in (node, None):
        decode = make_core(model, left)
        assert_exact(resume(decode, handed), expected)
        assert (decode.stats().computed_prompt_tokens == sum(LENGTHS)) is (left is None)


def test_handed_over_then_hit_in_each_tier(model: Decoder, expected: list[Continuation]) -> None:
    cold = MemoryTier(model.layout)
    node = Node(model.layout, cold=cold)
    first, decode = make_core(model, node), make_core(model, node)
    handed = prefill(first, [one.prompt_ids for one in expected], GREEDY)
    assert_exact(resume(decode, handed), expected)
    assert decode.stats().computed_prompt_tokens == 0

    again = prefill(first, [one.prompt_ids for one in expected], GREEDY)
    assert all(counted(run) == hits("device", run) for run in again)
    assert_exact(resume(make_core(model, node), again), expected)

    in_host = prefill(make_core(model, node), [one.prompt_ids for one in expected], GREEDY)
    assert all(counted(run) == hits("host", run) for run in in_host)
    assert_exact(resume(make_core(model, node), in_host), expected)

    release(node, [*handed, *again, *in_host])
    assert node.directory.records.check() == []
    node.write_all_cold()
    restarted = Node(model.layout, cold=cold)
    in_redis = prefill(make_core(model, restarted), [one.prompt_ids for one in expected], GREEDY)
    assert all(counted(run) == hits("redis", run) for run in in_redis)
    assert_exact(resume(make_core(model, restarted), in_redis), expected)


def test_found_in_files_by_a_cluster_that_starts_anew(
    model: Decoder, expected: list[Continuation], tmp_path: Path
) -> None:
    """As after a stop and a start on one folder, with one secret."""
    for is_again in (False, True):
        cold = FilesTier(str(tmp_path), model.layout, MAC_KEY, timeout_s=30.0, max_bytes=1 << 30)
        node = Node(model.layout, cold=cold)
        handed = prefill(make_core(model, node), [one.prompt_ids for one in expected], GREEDY)
        if is_again:
            assert all(counted(run) == hits("files", run) for run in handed)
            assert_exact(resume(make_core(model, node), handed), expected)
        release(node, handed)
        node.write_all_cold()
        cold.close()


def counted(run: Run) -> PromptTokens:
    """The tokens of a run's prompt by tier; causes of uncached blocks have tests of their own."""
    return replace(run.fetched[0], misses=())


def hits(tier: str, run: Run) -> PromptTokens:
    """All full blocks that end before the prompt's last token, from one tier, and the rest computed."""
    num_prompt = len(run.request.prompt_ids)
    num_cached = (num_prompt - 1) // 16 * 16
    return PromptTokens({tier: num_cached} if num_cached else {}, num_prompt - num_cached)


def test_preempted_again_and_again(model: Decoder, expected: list[Continuation]) -> None:
    for node in (None, Node(model.layout)):
        core = make_core(model, node, num_blocks=60 if model.layout.window is None else 12)
        asked = [request(one.prompt_ids, GREEDY) for one in expected * 2]
        assert_exact(drive(core, asked), expected * 2)
        assert core.stats().num_preemptions > 0


def test_four_seeded_samples_every_way(model: Decoder, expected: list[Continuation]) -> None:
    prompt = expected[LENGTHS.index(100)].prompt_ids
    alone = serve(make_core(model), prompt, SAMPLED).outputs
    assert len({tuple(output) for output in alone.values()}) == 4
    cold = MemoryTier(model.layout)
    node = Node(model.layout, cold=cold)
    first = make_core(model, node)
    held = []
    for core in (first, first, make_core(model, node)):  # computed, hit on the device, hit in the arena
        decode = make_core(model, node)
        handed = prefill(core, [prompt], SAMPLED)
        assert resume(decode, handed)[0].outputs == alone
        assert decode.stats().computed_prompt_tokens == 0
        held += handed
    release(node, held)
    node.write_all_cold()
    restarted = Node(model.layout, cold=cold)
    handed = prefill(make_core(model, restarted), [prompt], SAMPLED)
    assert counted(handed[0]) == hits("redis", handed[0])
    assert resume(make_core(model, restarted), handed)[0].outputs == alone
    crowded = make_core(model, num_blocks=30)
    others = [request(one.prompt_ids, GREEDY) for one in expected if len(one.prompt_ids) < 700]
    assert drive(crowded, [*others, request(prompt, SAMPLED)])[-1].outputs == alone


def test_kv_under_sinks_is_none_of_the_full_cache(tmp_path: Path) -> None:
    """A turn under sinks, then the same text in full, and again under sinks: on one folder, with one secret."""
    folder, files = make_checkpoint("llama-gqa", tmp_path / "model"), str(tmp_path / "files")
    found = []
    for kv_policy in ("sinks=4+60", "full", "sinks=4+60"):
        expected = choose_prompt(folder, 100, NUM_TOKENS, kv_policy=kv_policy)
        model = Decoder.load(folder, None, torch.device("cpu"), 16, kv_policy=kv_policy)
        root = namespace_root(MAC_KEY, "tenant", b"model", model.layout.encode(), "", "")
        with closing(FilesTier(files, model.layout, MAC_KEY, timeout_s=30.0, max_bytes=1 << 30)) as cold:
            node = Node(model.layout, cold=cold)
            [run] = drive(make_core(model, node), [replace(request(expected.prompt_ids, GREEDY), root=root)])
            node.write_all_cold()
        assert_exact([run], [expected])
        found.append(run.fetched[0].num_found)
    assert found == [0, 0, 96]


@pytest.mark.pairs(1)
@pytest.mark.parametrize("spoil", ["zero", "stale"])
def test_a_spoilt_block_shows(model: Decoder, expected: list[Continuation], spoil: str) -> None:
    """What makes the tests above mean something: with zeros or another block in one block's place the output changes.

    Two blocks that only trade places would change nothing: keys carry their positions.
    """
    continuation = expected[LENGTHS.index(100)]
    node = Node(model.layout)
    handed = prefill(make_core(model, node), [continuation.prompt_ids], GREEDY)
    decode = make_core(model, node)
    decode.add(rest_of(handed[0]))
    decode.step()  # fetches
    kv = decode.pool.kv.data
    *_, second, first, _tail = [page for page in range(len(kv)) if kv[page].any()]
    kv[first] = kv[second] if spoil == "stale" else 0.0
    spoilt = [token for _ in range(NUM_TOKENS) for token in decode.step().token_ids]
    assert spoilt != list(continuation.token_ids[1:])
