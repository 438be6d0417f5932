"""Claims about smaller caches, a function each; some wait for what they are about, with their arithmetic."""

import torch

from benchmarks.claim_families.engines import BLOCK_SIZE
from benchmarks.claim_families.finding import Family, Finding, Inputs, Report
from engine.core import EngineCore
from engine.model.hash_model import HashModel
from engine.request import EngineRequest
from engine.schedule.continuous_batcher import ContinuousBatcher
from kv_store.device_pool import DevicePool
from kv_store.transfers import NoStore
from wire.ids import NamespaceRoot, PageId, RequestId
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
WAITS = "waits for a policy that drops KV"


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
    codes, scales = 2 * 1024, 2 * (128 + 16)
    saved = 1 - (codes + scales) / (4 * codes)
    return Finding(f"75 %, less scales: {saved:.1%} with blocks of 16 and heads of 128", "waits for pages of four bits")


def _window() -> Finding:
    saved = {times: 1 - _held_blocks(times, WINDOW) / _held_blocks(times, None) for times in WINDOWS_A_CONTEXT}
    enough = [times for times, share in saved.items() if share >= 0.9]
    return Finding(
        "1 - window / context: 87.5 % with 4,096 of 32,768, 90 % from 40,960 on",
        ", ".join(f"{share:.1%} of the pages with {times} windows of context" for times, share in saved.items()),
        bool(enough),
        f"{min(enough)} windows of context" if enough else "at none of these contexts",
    )


def _h2o() -> Finding:
    return Finding("90 % with a tenth of the tokens kept; perplexity has no arithmetic", WAITS)


def _streaming() -> Finding:
    return Finding("sinks and window / context: nothing saved up to their sum, all that follows beyond it", WAITS)


def _snapkv() -> Finding:
    return Finding("8x with 2,048 of 16,384 tokens kept, 16x with 1,024", WAITS)


def _page_bytes(head_dim: int, quantization: str) -> int:
    pool = DevicePool(KVLayout(2, 8, head_dim, BLOCK_SIZE, "bfloat16", quantization), 8, torch.device("cpu"))
    return pool.page_bytes(PageId(0)).untyped_storage().nbytes() // 8


def _held_blocks(windows_a_context: int, window: int | None) -> int:
    """Counts the pages that an engine holds for a request which decodes at the end of such a context."""
    context_len = windows_a_context * WINDOW
    layout = KVLayout(1, 1, 8, BLOCK_SIZE, "float32", window=window)
    model = HashModel(layout, 256, context_len)
    core = EngineCore(
        model, DevicePool(layout, context_len // BLOCK_SIZE, model.device), ContinuousBatcher(), NoStore()
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    core.add(EngineRequest(RequestId("0"), NamespaceRoot(bytes(32)), (1,) * (context_len - 8), sampling))
    held = 0
    while core.has_requests:
        counts = core.pool.ledger.counts()
        held = counts.owned + counts.published
        core.step()
    return held


SMALLER_CACHES = Family("Smaller caches", SMALLER, measure_smaller)
