"""Claims: allocators on traces worked out by hand, the choice of claims, and the page that results make."""

from pathlib import Path

import pytest

from benchmarks.claim_families.arithmetic import FAMILY as ARITHMETIC
from benchmarks.claim_families.batching import BATCH, StaticBatcher, largest, no_cache, static_steps
from benchmarks.claim_families.block_tables import middle_half, verdict
from benchmarks.claim_families.caching import WithoutBaton
from benchmarks.claim_families.disaggregating import compare, judge
from benchmarks.claim_families.engines import random_model
from benchmarks.claim_families.finding import Chart, Family, Finding, Inputs, Report, Stopwatch, spread
from benchmarks.claim_families.page import Kept, write_page
from benchmarks.claim_families.reservation import BLOCK_SIZE, Contiguous, Memory, Moment, Paged, Run, Usage, simulate
from benchmarks.claims import FAMILIES, choose, measure, rows_of
from benchmarks.disaggregation import Mode
from cli.bench.latency import Record
from cli.bench.schedule import TraceRow
from engine.schedule.batcher import Candidate, Pages, Phase
from tests.harness.engines import make_core, serve
from tests.harness.known_model import MODEL
from wire.sampling import SamplingParams

NOTHING = Inputs(None, Path())


def rows(*lengths: tuple[int, int]) -> list[TraceRow]:
    return [TraceRow(0.0, input_len, output_len) for input_len, output_len in lengths]


def test_a_reservation_holds_its_room_from_first_to_last() -> None:
    """Two of 50 tokens at a time. The first ends after 2 steps, and the third takes its place; then none waits."""
    memory = Contiguous(100, lambda row: 50)
    assert list(simulate(rows((10, 2), (20, 4), (30, 1), (30, 1)), memory)) == [
        Moment(num_running=2, num_tokens=30 + 22, num_allocated=100)
    ]


def test_a_gap_between_extents_is_too_small_for_a_longer_request() -> None:
    memory = Contiguous(100, lambda row: row.input_len + row.output_len)
    running: list[Run] = []
    waiting = [Run(row, row.input_len) for row in rows((30, 1), (30, 1), (30, 1), (60, 1))]
    memory.step(waiting, running)
    assert [one.start for one in running] == [0, 31, 62]
    memory.free(running[0])
    memory.free(running[2])  # 31 at the start and 38 at the end
    memory.step(waiting, running)
    assert len(waiting) == 1
    memory.free(running[1])
    memory.step(waiting, running)
    assert waiting == []


def test_pages_grow_with_the_answer_and_the_youngest_yields() -> None:
    """Three pages of 16 tokens for two requests of 15: the younger waits for a second page, then yields its first."""
    memory, running = Paged(3 * BLOCK_SIZE), list[Run]()
    waiting = [Run(row, row.input_len) for row in rows((15, 40), (15, 40))]
    seen = []
    for _ in range(20):
        for one in memory.step(waiting, running):
            one.advance()
        seen.append((tuple(len(one.pages) for one in running), len(waiting)))
    assert list(dict.fromkeys(seen)) == [((1, 1), 0), ((2, 1), 0), ((3,), 1)]
    assert [one.num_computed for one in waiting] == [0]
    assert memory.num_allocated(running) == 3 * BLOCK_SIZE


@pytest.mark.parametrize("memory", [Paged(640), Contiguous(640, lambda row: 128)], ids=["pages", "contiguous"])
def test_every_request_ends_and_memory_never_overflows(memory: Memory) -> None:
    trace = rows(*((10 + 7 * n % 60, 1 + 5 * n % 40) for n in range(60)))
    moments = list(simulate(trace, memory))
    assert all(one.num_tokens <= one.num_allocated <= 640 for one in moments)
    assert 0 < Usage.of(moments, 640).used <= Usage.of(moments, 640).allocated <= 1


def test_a_static_batch_lasts_as_long_as_its_longest_answer() -> None:
    assert static_steps([*[1] * (BATCH - 1), 9, 2, 3]) == 9 + 3
    waiting, pages = (
        [Candidate(handle=1, phase=Phase.WAITING, num_known=4, num_computed=0, num_blocks=0)],
        Pages(10, 0, 16),
    )
    assert (
        StaticBatcher(4)
        .plan(waiting, [Candidate(handle=0, phase=Phase.DECODE, num_known=5, num_computed=4, num_blocks=1)], pages)
        .admit
        == ()
    )
    assert StaticBatcher(4).plan(waiting, [], pages).admit == (1,)


def test_nothing_is_kept_and_nothing_found_without_the_cache() -> None:
    prompt, sampling = tuple(range(50)), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    cores = [make_core(MODEL) for _ in range(2)]
    runs = [serve(cores[0], prompt, sampling) for _ in range(2)]
    with no_cache():
        others = [serve(cores[1], prompt, sampling) for _ in range(2)]
    assert [run.outputs for run in others] == [run.outputs for run in runs]
    assert [run.fetched[0].num_found for run in (*runs, *others)] == [0, 48, 0, 0]
    assert cores[0].pool.ledger.counts().cached > 0
    assert cores[1].pool.ledger.counts().cached == 0
    assert [core.check() for core in cores] == [[], []]


def test_without_a_cache_every_token_is_computed_again(tmp_path: Path) -> None:
    peer = WithoutBaton(str(random_model(tmp_path, 64, 1)))
    assert peer.computations(5, use_cache=False) == 1 + 2 + 3 + 4 + 5
    assert peer.computations(5, use_cache=True) == 5


def test_below_2k_disaggregation_must_not_shorten_requests_and_above_8k_it_must() -> None:
    def mode(ended_s: float) -> Mode:
        chunks = ((0.5, 1), (0.7, 1), (0.9, 1))
        return Mode([[Record(scheduled_s=0.0, sent_s=0.0, chunks=chunks, ended_s=ended_s, prompt_len=8, cached_len=0)]])

    for other_s, holds in ((1.1, (True, False)), (0.97, (True, False)), (0.9, (False, True))):
        ratios = compare({"co-located": mode(1.0), "disaggregated": mode(other_s)}, 0)
        assert list(ratios.values()) == pytest.approx([other_s, 1.0, 1.0])
        found = [judge(name, [ratios] * 3).holds for name in ("disaggregation_short", "disaggregation_long")]
        assert tuple(found) == holds
        two = judge("disaggregation_long", [ratios] * 2)
        assert (two.holds, two.decided_by) == (None, "2 of the 3 rounds that decide")
    assert judge("disaggregation_long", [ratios, ratios, dict.fromkeys(ratios, 1.1)]).holds is None


def test_the_lengths_that_decide_on_block_tables_are_named() -> None:
    assert verdict({512: [0.0, 5.0], 4096: [4.0, 12.0]}) == (None, "rounds lie on both sides of 10 % at 4096 tokens")
    assert verdict({512: [0.0, 5.0], 4096: [4.0, 9.0]}) == (False, "less at every length")
    assert verdict({512: [0.0, 5.0], 4096: [11.0, 19.0]}) == (True, "4096 tokens")
    assert verdict({512: [11.0, 12.0], 4096: [14.0, 21.0]}) == (False, "more at 4096 tokens")


def test_the_largest_batch_keeps_within_the_gap_and_the_room() -> None:
    gaps = {1: 1.0, 4: 1.5, 7: 2.0, 32: 5.0}
    assert [largest(gaps, slo, 32) for slo in (1.0, 1.5, 4.0, 8.0)] == [1, 4, 7, 32]
    assert [largest(gaps, slo, 7) for slo in (1.0, 8.0)] == [1, 7]


def test_claims_on_smaller_caches_are_measured() -> None:
    found = rows_of(measure(["smaller_caches"], None), None)
    assert (found["window"]["holds"], found["window"]["decided_by"]) == (True, "16 windows of context")
    assert found["streaming"]["measured"] == "18, 18, 18 pages at 1,024, 2,048, 4,096 tokens with sinks=4+252"
    assert {name: row["holds"] for name, row in found.items() if name in ("h2o", "snapkv", "int4")} == {
        "h2o": False,
        "snapkv": False,
        "int4": False,
    }


def test_h2o_is_judged_as_the_variant_that_it_is() -> None:
    row = rows_of(measure(["smaller_caches"], None), "h2o")["h2o"]
    assert row["measured"].startswith("a variant: ")
    assert row["decided_by"].startswith("of the variant")


def test_the_memory_of_a_draft_needs_no_measurement() -> None:
    row = rows_of(measure(["arithmetic"], None), "speculation_memory")["speculation_memory"]
    assert row["holds"] is False
    assert "x with the demo's draft" in row["arithmetic"]


def test_a_claim_that_has_left_its_family_is_kept_no_longer() -> None:
    kept = Kept("", "", "", "", {"one_head": {"said": "a"}, "gone": {"said": "b"}}, None)
    assert list(kept.only(ARITHMETIC).rows) == ["one_head"]


def test_rounds_begin_with_each_way_in_turn() -> None:
    order: list[str] = []
    watch = Stopwatch().take_turns({name: lambda name=name: order.append(name) for name in "ab"}, 2)  # type: ignore[misc]
    assert order == ["a", "b", "b", "a"]
    assert len(watch.ratios("a", "b")) == 2


def test_a_spread_is_the_median_between_least_and_greatest() -> None:
    assert spread([3.0, 1.0, 2.0]) == "2x (1 .. 3)"
    assert spread([7.25]) == "7.25x"
    assert spread(middle_half([9.0, 1.0, 4.0, 3.0]), " %", ".0f") == "4 % (3 .. 4)"


def test_names_choose_claims_and_families() -> None:
    assert choose("cache_speed", has_trace=False) == choose("caching", has_trace=False) == ["caching"]
    assert set(choose(None, has_trace=True)) - set(choose(None, has_trace=False)) == {"reservation", "batching"}
    with pytest.raises(SystemExit, match="no claim and no family is named nothing"):
        choose("nothing", has_trace=True)
    with pytest.raises(SystemExit, match="needs a published trace"):
        choose("utilization", has_trace=False)


def test_every_claim_has_a_name_of_its_own() -> None:
    names = [claim for family in FAMILIES.values() for claim in family.claims]
    assert len(names) == len(set(names)) >= 30


def test_worked_examples_and_smaller_caches_need_no_machine() -> None:
    found = rows_of(measure(["arithmetic", "smaller_caches"], None), None)
    assert found["llama_2_70b"]["arithmetic"] == (
        "1.3 GB with its 8 KV heads, 43 GB for 32; its weights alone take 138 GB"
    )
    assert found["growth_of_7b"]["arithmetic"] == "1 GiB and 16 GiB, 1.3x the 12.6 GiB of parameters; 16x for 16x"
    assert [found[name]["holds"] for name in ("token_of_32_heads", "32_to_8_heads", "h2o")] == [True, False, False]
    assert found["int8"]["measured"].startswith("49.2% of the pages")
    assert found["int4"]["measured"].startswith("71.5% of the pages")
    assert set(found["int8"]) == {"said", "arithmetic", "measured", "holds", "decided_by"}
    assert rows_of(measure(["smaller_caches"], None), "int4").keys() == {"int4"}
    assert set(ARITHMETIC.measure(NOTHING).findings) == set(ARITHMETIC.claims)


def test_the_page_has_each_claim_and_the_chart_of_its_family(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = Chart("Speed", "batch", "x", {"a": [(1, 1.0), (2, 3.0)], "b": [(1, 2.0)]})
    bars = Chart("Memory", "", "%", {"a": [("pages", 3.0), ("none", 4.0)]})
    findings = {"lines": Finding("2x", "1.9x (1.8 .. 2)", True, "at 32"), "bars": Finding("2x", "1.9x", None)}
    families = {
        name: Family(name.title(), {f"{name}_claim": "twice as fast"}, lambda inputs: Report("", {}))
        for name in ("lines", "bars")
    }
    kept = {
        name: Kept.of(
            family,
            Report("A setting.", {f"{name}_claim": findings[name]}, chart),
            "a machine",
            "2026-01-01",
            "commit 1234abcd",
        )
        for (name, family), chart in zip(families.items(), (lines, bars), strict=True)
    }
    page = tmp_path / "claims.md"
    write_page(page, families, kept)
    text = page.read_text()
    assert "| `lines_claim` | twice as fast | 2x | 1.9x (1.8 .. 2) | yes: at 32 |" in text
    assert "Of 2 claims 1 holds, 0 do not, and 1 waits." in text
    assert "A setting. Machine: a machine, 2026-01-01, commit 1234abcd." in text
    assert "![Speed](claims/lines.svg)" in text
    assert "and to be made again: Lines, Bars." in text
    first = (tmp_path / "claims" / "bars.svg").read_bytes()
    write_page(page, families, kept)
    assert (tmp_path / "claims" / "bars.svg").read_bytes() == first
