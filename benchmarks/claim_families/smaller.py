"""Claims about smaller caches, a function each."""

import json
from pathlib import Path

import torch

from benchmarks.claim_families.engines import BLOCK_SIZE
from benchmarks.claim_families.finding import Family, Finding, Inputs, Report
from engine.core import EngineCore
from engine.model.hash_model import HashModel
from engine.request import EngineRequest
from engine.schedule.continuous_batcher import ContinuousBatcher
from kv_store.device_pool import DevicePool
from kv_store.transfers import NoStore
from wire.ids import AttemptId, NamespaceRoot, PageId
from wire.kv_policy import Dropping, Rule
from wire.layout import KVLayout
from wire.sampling import SamplingParams

SMALLER = {
    "int8": "int8 halves the KV cache",
    "int4": "int4 saves 75 % of it",
    "window": "a window saves 90 %",
    "h2o": "H2O saves 90 % at less than 2 % of perplexity",
    "streaming": "StreamingLLM keeps a cache of one size for a text of any length",
    "snapkv": "SnapKV needs 8.2x less memory at 16K tokens",
}
WINDOW = 256
WINDOWS_A_CONTEXT = (4, 8, 16)
SNAPKV_KEPT, SNAPKV_CONTEXT = 2048, 16_384
_QUALITY = Path(__file__).parents[1] / "results" / "quality.json"


def measure_smaller(inputs: Inputs) -> Report:
    findings = {
        "int8": _int8(),
        "int4": _int4(),
        "window": _window(),
        "h2o": _h2o(),
        "streaming": _streaming(),
        "snapkv": _snapkv(),
    }
    return Report(
        "Pools of 8 pages, 8 KV heads. Windows: pages that an engine holds for one request at the end of its context, "
        f"of a model whose layers all have windows of {WINDOW} tokens; baseline: the same model without.",
        findings,
    )


def _int8() -> Finding:
    saved = [f"{1 - _page_bytes(head_dim, 'int8') / _page_bytes(head_dim, 'none'):.1%}" for head_dim in (128, 64)]
    pages = f"{saved[0]} of the pages of a pool in bfloat16, {saved[1]} at heads of 64"
    return Finding("50 %, less a scale of 2 bytes for each head of 128: 49 %", pages, True)


def _int4() -> Finding:
    saved = 1 - _page_bytes(128, "int4") / _page_bytes(128, "none")
    return Finding(
        "75 %, less a scale for each channel of a block's keys and each token of its values: 71.5 %",
        f"{saved:.1%} of the pages of a pool in bfloat16, beside blocks under way in bfloat16",
        saved >= 0.75,
    )


def _window() -> Finding:
    contexts = {times: times * WINDOW for times in WINDOWS_A_CONTEXT}
    saved = {at: 1 - _held_blocks(_layout(WINDOW), one) / _held_blocks(_layout(), one) for at, one in contexts.items()}
    enough = [times for times, share in saved.items() if share >= 0.9]
    return Finding(
        "1 - window / context: 87.5 % with 4,096 of 32,768, 90 % from 40,960 on",
        ", ".join(f"{share:.1%} of the pages with {times} windows of context" for times, share in saved.items()),
        bool(enough),
        f"{min(enough)} windows of context" if enough else "at none of these contexts",
    )


def _h2o() -> Finding:
    """Reads the last figures of benchmarks/quality.py: a checkpoint's tokens, which take minutes."""
    rows = dict(json.loads(_QUALITY.read_text())["rows"])
    full, kept = rows["full, float32"], rows["h2o=10%"]
    saved = 1 - kept["load"]["bytes_per_token"] / full["load"]["bytes_per_token"]
    more = {kind: kept["perplexity"][kind] / full["perplexity"][kind] - 1 for kind in ("english", "facts")}
    return Finding(
        "90 % with a tenth of the tokens kept; perplexity has no arithmetic",
        "a variant: a prompt's last 64 rows weigh its tokens, and pages go where a block is full; H2O's authors weigh "
        f"by all rows, and a token goes each step. {saved:.1%} of the bytes; perplexity {more['english']:+.1%} in "
        f"English, {more['facts']:+.0%} in facts and questions, recall at 300 tokens {kept['recall']['300']:.0%} "
        "(quality.md)",
        saved >= 0.9 and max(more.values()) < 0.02,
        "of the variant, in facts: their questions come after the drop",
    )


def _streaming() -> Finding:
    contexts = [times * WINDOW for times in WINDOWS_A_CONTEXT]
    pages = [_held_blocks(_layout(WINDOW - 4, num_sinks=4), context_len) for context_len in contexts]
    return Finding(
        "sinks and window / context: nothing saved up to their sum, all that follows beyond it",
        f"{', '.join(map(str, pages))} pages at {', '.join(f'{one:,}' for one in contexts)} tokens with sinks=4+252",
        len({*pages}) == 1,
    )


def _snapkv() -> Finding:
    full = _held_blocks(_layout(), SNAPKV_CONTEXT)
    saved = full / _held_blocks(_layout(), SNAPKV_CONTEXT, Dropping(Rule.SNAPKV, SNAPKV_KEPT))
    return Finding(
        "8x with 2,048 of 16,384 tokens kept, 16x with 1,024",
        f"{saved:.1f} times fewer pages while a request decodes with snapkv={SNAPKV_KEPT}; more, not fewer, until its "
        "prompt has ended",
        saved >= 8.0,
        f"{SNAPKV_KEPT:,} of {SNAPKV_CONTEXT:,} tokens, after the prompt",
    )


def _page_bytes(head_dim: int, quantization: str) -> int:
    pool = DevicePool(KVLayout(2, 8, head_dim, BLOCK_SIZE, "bfloat16", quantization), 8, torch.device("cpu"))
    return pool.page_bytes(PageId(0)).untyped_storage().nbytes() // 8


def _layout(window: int | None = None, num_sinks: int = 0) -> KVLayout:
    return KVLayout(1, 1, 8, BLOCK_SIZE, "float32", window=window, num_sinks=num_sinks)


def _held_blocks(layout: KVLayout, context_len: int, dropping: Dropping | None = None) -> int:
    """Counts the pages that an engine holds for a request which decodes at the end of such a context."""
    model = HashModel(layout, 256, context_len)
    core = EngineCore(
        model, DevicePool(layout, 2 * context_len // BLOCK_SIZE, model.device), ContinuousBatcher(), NoStore()
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompt_ids = (1,) * (context_len - 8)
    core.add(
        EngineRequest(
            attempt_id=AttemptId("0"),
            root=NamespaceRoot(bytes(32)),
            prompt_ids=prompt_ids,
            sampling=sampling,
            dropping=dropping,
        )
    )
    held = 0
    while core.has_requests:
        counts = core.pool.ledger.counts()
        held = counts.owned + counts.published
        core.step()
    return held


SMALLER_CACHES = Family("Smaller caches", SMALLER, measure_smaller)
