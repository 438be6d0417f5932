"""Claims about smaller caches; most wait for what they are about, with their arithmetic."""

import torch

from benchmarks.claim_families.finding import Family, Finding, Inputs, Report
from kv_store.device_pool import DevicePool
from wire.ids import PageId
from wire.layout import KVLayout

SMALLER = {
    "int8": "int8 halves the KV cache",
    "int4": "int4 saves 75 % of it",
    "window": "a window saves 90 %",
    "h2o": "H2O saves 90 % at less than 2 % of perplexity",
}


def measure_smaller(inputs: Inputs) -> Report:
    waits = "waits for smaller caches"
    saved = [f"{1 - _page_bytes(head_dim, 'int8') / _page_bytes(head_dim, 'none'):.1%}" for head_dim in (128, 64)]
    pages = f"{saved[0]} of the pages of a pool in bfloat16, {saved[1]} at heads of 64"
    findings = {
        "int8": Finding("50 %, less a scale of 2 bytes for each head of 128: 49 %", pages, True),
        "int4": Finding("75 %, less the scales: 74 %", waits),
        "window": Finding("1 - window / context: 87.5 % with 4,096 of 32,768, 90 % from 40,960 on", waits),
        "h2o": Finding("90 % with a tenth of the tokens kept; perplexity has no arithmetic", waits),
    }
    return Report("Pools of 8 pages, 8 KV heads.", findings)


def _page_bytes(head_dim: int, quantization: str) -> int:
    pool = DevicePool(KVLayout(2, 8, head_dim, 16, "bfloat16", quantization), 8, torch.device("cpu"))
    return pool.page_bytes(PageId(0)).untyped_storage().nbytes() // 8


SMALLER_CACHES = Family("Smaller caches", SMALLER, measure_smaller)
