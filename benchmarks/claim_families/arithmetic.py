"""Claims that arithmetic settles, with the functions of `baton size`."""

from pathlib import Path

from benchmarks.claim_families.finding import Family, Finding, Inputs, Report
from cli.size.capacity import Fit, RequestKV
from cli.size.shape import BITS, ModelShape
from demo_model import CHECKPOINT, DRAFT
from deploy.plan.sizing import GPU_RESERVE_BYTES
from wire.layout import KVLayout

MIB, GIB, GB = 1 << 20, 1 << 30, 10**9
LAYOUT = KVLayout(32, 32, 128, 16, "float16")
SHARED = KVLayout(32, 8, 128, 16, "float16")
LLAMA_2_70B = KVLayout(80, 8, 128, 16, "float16")
LLAMA_2_7B_PARAMETERS, LLAMA_2_70B_PARAMETERS = 6_738_415_616, 68_976_648_192
BLOCK_SIZE = 16
NOT_MEASURED = "arithmetic only"


def kv(layout: KVLayout, num_tokens: int) -> RequestKV:
    return RequestKV(layout, num_tokens, 16)


def measure(inputs: Inputs) -> Report:
    short, long = kv(LAYOUT, 2048), kv(LAYOUT, 32768)
    chats = kv(SHARED, 4000)
    num_chats = Fit(10 * GIB + GPU_RESERVE_BYTES, 0, chats).max_requests
    of_70b = kv(LLAMA_2_70B, 4096)
    weights_70b, weights_7b = 2 * LLAMA_2_70B_PARAMETERS, 2 * LLAMA_2_7B_PARAMETERS
    findings = {
        "token_of_32_heads": _finding(
            f"{kv(LAYOUT, 1).bytes_per_token / MIB} MiB, {kv(LAYOUT, 4096).num_bytes / GIB:.0f} GiB", True
        ),
        "token_of_8_heads": _finding(
            f"{chats.bytes_per_token >> 10} KiB, {chats.bytes_per_token_per_layer >> 10} KiB a layer, "
            f"{chats.num_bytes / 1e6:.0f} MB at 4,000; {num_chats} in 10 GiB",
            True,
        ),
        "growth_of_7b": _finding(
            f"{short.num_bytes / GIB:.0f} GiB and {long.num_bytes / GIB:.0f} GiB, "
            f"{long.num_bytes / weights_7b:.1f}x the "
            f"{weights_7b / GIB:.1f} GiB of parameters; {long.num_bytes / short.num_bytes:.0f}x for 16x",
            False,
        ),
        "32_to_8_heads": _finding(f"{kv(LAYOUT, 1).num_bytes / kv(SHARED, 1).num_bytes:.0f}x", False),
        "llama_2_70b": _finding(
            f"{of_70b.num_bytes / GB:.1f} GB with its 8 KV heads, {32 * of_70b.num_bytes / GB:.0f} GB for 32; its "
            f"weights alone take {weights_70b / GB:.0f} GB",
            False,
        ),
        "blocks_of_16k": _finding("16 tokens, 2 MiB at 128 KiB a token", False),
        "exponential": _finding(
            "linear: " + ", ".join(f"{kv(SHARED, 1024 * n).num_bytes >> 20} MiB" for n in (1, 2, 4)) + " at 1K, 2K, 4K",
            False,
        ),
        "fragments_of_8_gb": _finding("it would not fit unfragmented either; 7 GB would show it", False),
        "head_sharing": _finding(
            "query heads over KV heads: 4x for the common 32 on 8; 8x from 64 on 8, 16x from 128 on 8",
            False,
            "; perplexity needs trained pairs",
        ),
        "one_head": _finding(
            f"{kv(LAYOUT, 1).bytes_per_token // kv(KVLayout(32, 1, 128, 16, 'float16'), 1).bytes_per_token}x for 32 "
            "heads",
            True,
            "; perplexity needs trained pairs",
        ),
        "speculation_memory": _draft(),
    }
    return Report(
        "By the functions of `baton size`: 2 bytes a number, 32 layers, heads of 128, unless named.", findings
    )


def _finding(arithmetic: str, holds: bool, addition: str = "") -> Finding:
    return Finding(arithmetic, f"{NOT_MEASURED}{addition}", holds)


def _draft() -> Finding:
    """Sums weights and KV of the demo model and of its draft, which has as many pages."""
    share = _num_bytes(DRAFT) / _num_bytes(CHECKPOINT)
    return _finding(
        "weights and KV of the draft beside the target's: 1.01-1.1x for 1-10 %; "
        f"{1 + share:.2f}x with the demo's draft, of {share:.0%} of the bytes of its model; n-grams take neither",
        0.5 <= share <= 1,
    )


def _num_bytes(folder: Path) -> int:
    """Counts weights in the dtype that they are computed in, and KV of as many tokens as the context has."""
    shape = ModelShape.read(folder)
    return (
        shape.weight_bytes()
        + RequestKV(shape.kv_layout(BLOCK_SIZE), shape.max_context_len, BITS[shape.dtype]).num_bytes
    )


FAMILY = Family(
    "Worked examples",
    {
        "token_of_32_heads": "32 layers x 32 heads x 128 in fp16: 0.5 MiB a token, 2 GiB at 4,096",
        "token_of_8_heads": "8 KV heads: 128 KiB a token, 4 KiB a layer, ~500 MB at 4,000, about 20 chats in 10 GB",
        "growth_of_7b": 'a 7B model at 2K takes 3.4 GB, at 32K 55 GB, "4x the parameters"; "16x for 10x longer"',
        "32_to_8_heads": '32 to 8 KV heads "saves ~8x"',
        "llama_2_70b": "Llama-2-70B: 10.7 GB a request, ~7 on an 80 GB card; a batch of 32: 342 GB",
        "blocks_of_16k": '"16K tokens per block"',
        "exponential": 'memory grows "exponentially"',
        "fragments_of_8_gb": '"a 15 GB request does not fit despite 8 GB free", as a case of fragments',
        "head_sharing": "MQA and GQA shrink KV 8-16x",
        "one_head": "MQA shrinks KV 32x",
        "speculation_memory": "speculation takes 1.5-2x the memory",
    },
    measure,
)
