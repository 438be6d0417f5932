"""The Triton kernels at the sizes of Llama 3 8B in bfloat16, against reading, a copy or a product, and against torch.

As many layers take turns as it needs to leave the cache, as they do in a step of a model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu_timing import Copy, Product, Read, Row, time_in_turn
from kernels import row_operations
from kernels.attention.decode import paged_decode_attention
from kernels.attention.prompts import paged_prefill_attention
from kernels.backend import Activation, Angles, AttentionVariant, Heads, KVPages
from kernels.reference import quantize
from kernels.torch_backend import TorchBackend

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, HIDDEN, MLP = 32, 8, 128, 16, 4096, 14_336
DTYPE = torch.bfloat16
VARIANT = AttentionVariant(HEAD_DIM**-0.5)
BYTES_PER_TOKEN = 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
WORKING_SET_BYTES = 1 << 29
SPARE_BYTES = 6 << 30


@dataclass(frozen=True)
class DecodeShape:
    """Sequences of one length, each decoding one token."""

    num_seqs: int
    context_len: int

    def __str__(self) -> str:
        return f"{self.num_seqs} x {self.context_len}"

    @property
    def layer_bytes(self) -> int:
        return self.num_seqs * self.context_len * BYTES_PER_TOKEN

    @property
    def num_layers(self) -> int:
        return -(-WORKING_SET_BYTES // self.layer_bytes)

    @property
    def needed_bytes(self) -> int:
        """Paged KV and its contiguous twin."""
        return 2 * self.num_layers * self.layer_bytes + SPARE_BYTES


@dataclass(frozen=True)
class PromptShape:
    """Chunks of one length behind as many tokens computed before."""

    num_seqs: int
    num_before: int
    chunk_len: int

    def __str__(self) -> str:
        return f"{self.num_seqs} x {self.num_before}+{self.chunk_len}"

    @property
    def context_len(self) -> int:
        return self.num_before + self.chunk_len

    @property
    def num_operations(self) -> int:
        """Two products, of each query head with the keys that it sees."""
        num_seen = self.chunk_len * self.num_before + self.chunk_len * (self.chunk_len + 1) // 2
        return 4 * self.num_seqs * NUM_HEADS * HEAD_DIM * num_seen


DECODE_SHAPES = [DecodeShape(num_seqs, length) for num_seqs in (1, 16, 128) for length in (1024, 8192, 32_768)]
PROMPT_SHAPES = [PromptShape(*one) for one in ((1, 0, 512), (1, 0, 2048), (4, 0, 2048), (1, 0, 8192), (1, 8192, 2048))]
ROWS = [64, 8192]


@dataclass(frozen=True)
class Times:
    """Seconds of works, and what the device did in a second of the same rounds: bytes read, bytes copied, operations.

    Copied bytes count twice.
    """

    seconds: dict[str, float]
    read: float
    copied: float
    operations: float


class Ceilings:
    """The works that others are timed beside."""

    def __init__(self) -> None:
        self._read, self._copy, self._product = Read(), Copy(), Product()

    def time(self, works: dict[str, Callable[[], object]]) -> Times:
        """Times works in turn with the ceilings."""
        seconds = time_in_turn({"read": self._read, "copy": self._copy, "product": self._product, **works})
        return Times(
            seconds,
            self._read.num_bytes / seconds["read"],
            self._copy.num_bytes / seconds["copy"],
            self._product.num_operations / seconds["product"],
        )


def measure() -> Iterator[Row]:
    """Rows as they are measured. Shapes that the device has no memory for are left out."""
    ceilings = Ceilings()
    for shape in DECODE_SHAPES:
        if shape.needed_bytes <= torch.cuda.mem_get_info()[0]:
            yield _measure_decode(shape, ceilings)
            torch.cuda.empty_cache()
    yield _measure_decode(DecodeShape(16, 8192), ceilings, torch.int8)
    yield _measure_decode(DecodeShape(16, 8192), ceilings, torch.float8_e4m3fn)
    for prompt in PROMPT_SHAPES:
        yield _measure_prompt(prompt, ceilings)
        torch.cuda.empty_cache()
    for num_rows in ROWS:
        yield from _measure_rows(num_rows, ceilings)
        torch.cuda.empty_cache()


def _measure_decode(shape: DecodeShape, ceilings: Ceilings, kept: torch.dtype | None = None) -> Row:
    query = make_random(shape.num_seqs, NUM_HEADS, HEAD_DIM)
    layers, tables = make_pool(shape.num_layers, shape.num_seqs, shape.context_len, kept)
    lens = torch.full((shape.num_seqs,), shape.context_len, dtype=torch.int32, device="cuda")
    keys, values = (
        make_random(shape.num_layers, shape.num_seqs, NUM_KV_HEADS, shape.context_len, HEAD_DIM) for _ in range(2)
    )

    def paged() -> None:
        for layer in layers:
            paged_decode_attention(query, layer, tables, lens, VARIANT)

    def contiguous() -> None:
        for key, value in zip(keys, values, strict=True):
            F.scaled_dot_product_attention(query[:, :, None], key, value, enable_gqa=True)

    times = ceilings.time({"paged": paged, "contiguous": contiguous})
    num_bytes = shape.layer_bytes if kept is None else shape.layer_bytes // 2 + shape.layer_bytes // HEAD_DIM
    name = "decode" if kept is None else f"decode {str(kept).removeprefix('torch.')[:6]}"
    scale = 1 / shape.num_layers
    own, other = times.seconds["paged"] * scale, times.seconds["contiguous"] * scale
    return Row(name, str(shape), own, num_bytes / times.read, "read", "SDPA, contiguous bf16", other)


def _measure_prompt(shape: PromptShape, ceilings: Ceilings) -> Row:
    num_layers = 4
    query = make_random(shape.num_seqs * shape.chunk_len, NUM_HEADS, HEAD_DIM)
    layers, tables = make_pool(num_layers, shape.num_seqs, shape.context_len)
    lens = torch.full((shape.num_seqs,), shape.context_len, dtype=torch.int32, device="cuda")
    starts = torch.arange(shape.num_seqs + 1, dtype=torch.int32, device="cuda") * shape.chunk_len
    keys, values = (make_random(shape.num_seqs, NUM_HEADS, shape.context_len, HEAD_DIM) for _ in range(2))
    own_query = query.view(shape.num_seqs, shape.chunk_len, NUM_HEADS, HEAD_DIM).transpose(1, 2).contiguous()
    seen = None
    if shape.num_before:
        seen = torch.ones(shape.chunk_len, shape.context_len, dtype=torch.bool, device="cuda").tril(shape.num_before)

    def paged() -> None:
        for layer in layers:
            paged_prefill_attention(query, layer, tables, lens, starts, VARIANT)

    def contiguous() -> None:
        for _ in layers:
            F.scaled_dot_product_attention(own_query, keys, values, attn_mask=seen, is_causal=seen is None)

    times = ceilings.time({"paged": paged, "contiguous": contiguous})
    own, other = times.seconds["paged"] / num_layers, times.seconds["contiguous"] / num_layers
    peer = "SDPA, contiguous" if seen is None else "SDPA, mask"
    return Row("prefill", str(shape), own, shape.num_operations / times.operations, "product", peer, other)


def _measure_rows(num_rows: int, ceilings: Ceilings) -> Iterator[Row]:
    num_heads = NUM_HEADS + 2 * NUM_KV_HEADS
    num_turns = max(1, WORKING_SET_BYTES // (num_rows * num_heads * HEAD_DIM * DTYPE.itemsize))
    num_turns = min(num_turns, 64)
    layers, _ = make_pool(1, 1, max(num_rows, BLOCK_SIZE))
    slots = torch.randperm(num_rows, device="cuda")
    heads = Heads(
        num_queries=NUM_HEADS, num_kv=NUM_KV_HEADS, size=HEAD_DIM, query_norm=None, key_norm=None, norm_eps=1e-6
    )
    angles = Angles(*torch.rand(2, num_rows, HEAD_DIM // 2, device="cuda"))
    qkv, states, gate_up = (
        make_random(num_turns, num_rows, size) for size in (num_heads * HEAD_DIM, HIDDEN, 2 * MLP // 4)
    )
    weight, of_torch = make_random(HIDDEN), TorchBackend()

    def each(work: Callable[[Tensor], object], rows: Tensor) -> Callable[[], None]:
        def run() -> None:
            for one in rows:
                work(one)

        return run

    def rotate(one: Tensor) -> Tensor:
        return row_operations.rotate_and_write(one, heads, angles, layers[0], slots)

    works: dict[str, tuple[Callable[[Tensor], object], Tensor, Callable[[Tensor], object] | None, float]] = {
        "rope, write": (rotate, qkv, None, 1.0),
        "norm": (
            lambda one: row_operations.rms_norm(one, weight, 1e-5),
            states,
            lambda one: of_torch.rms_norm(one, weight, 1e-5),
            1.0,
        ),
        "gate": (
            lambda one: row_operations.gate(one, Activation.SILU),
            gate_up,
            lambda one: of_torch.gate(one, Activation.SILU),
            0.75,
        ),
    }
    for name, (own, rows, other, share) in works.items():
        peer = {"other": each(other, rows)} if other is not None else {}
        times = ceilings.time({"own": each(own, rows), **peer})
        floor_s, other_s = 2 * share * rows[0].nbytes / times.copied, times.seconds.get("other", 0.0) / num_turns
        yield Row(
            name, f"{num_rows} rows", times.seconds["own"] / num_turns, floor_s, "copy", "torch" * len(peer), other_s
        )


def make_pool(
    num_layers: int, num_seqs: int, context_len: int, kept: torch.dtype | None = None, head_dim: int = HEAD_DIM
) -> tuple[list[KVPages], Tensor]:
    """Makes the layers of a pool of random KV, and block tables in random order."""
    blocks_each = -(-context_len // BLOCK_SIZE)
    num_pages = num_seqs * blocks_each
    shape = num_pages, num_layers, 2, NUM_KV_HEADS, BLOCK_SIZE, head_dim
    if kept is None:
        pages = KVPages(make_random(*shape))
    else:
        data = torch.empty(shape, dtype=kept, device="cuda")
        scales = torch.empty(shape[:-1], dtype=torch.bfloat16, device="cuda")
        for page in range(0, num_pages, 256):
            part = slice(page, page + 256)
            data[part], scales[part] = quantize(make_random(*data[part].shape), kept)
        pages = KVPages(data, scales)
    tables = torch.randperm(num_pages, device="cuda").int().view(num_seqs, blocks_each)
    return [pages.layer(index) for index in range(num_layers)], tables


def make_random(*shape: int) -> Tensor:
    """Makes a tensor of bfloat16 on the GPU."""
    return torch.empty(shape, dtype=DTYPE, device="cuda").normal_()
