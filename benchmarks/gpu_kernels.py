"""The Triton kernels at the sizes of Llama 3 8B in bfloat16: bytes per second against a copy and against torch.

As many layers take turns as it needs to leave the cache, as they do in a step of a model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_timing import Copy, Row, time_in_turn
from kernels import kv_write, paged_decode
from kernels.backend import AttentionVariant, KVPages

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
DTYPE = torch.bfloat16
BYTES_PER_TOKEN = 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
WORKING_SET_BYTES = 1 << 29
SPARE_BYTES = 4 << 30


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


DECODE_SHAPES = [DecodeShape(num_seqs, length) for num_seqs in (1, 16, 128) for length in (1024, 8192, 32_768)]
WRITE_LENS = [128, 8192]


def measure() -> Iterator[Row]:
    """Rows as they are measured. Shapes that the device has no memory for are left out."""
    copy = Copy()
    for shape in DECODE_SHAPES:
        if shape.needed_bytes <= torch.cuda.mem_get_info()[0]:
            yield _measure_decode(shape, copy)
            torch.cuda.empty_cache()
    for num_tokens in WRITE_LENS:
        yield _measure_write(num_tokens, copy)


def _measure_decode(shape: DecodeShape, copy: Copy) -> Row:
    query = _random(shape.num_seqs, NUM_HEADS, HEAD_DIM)
    works: dict[str, Callable[[], None]] = {
        "copy": copy,
        "triton": _paged_layers(shape, query),
        "torch": _contiguous_layers(shape, query),
    }
    seconds = time_in_turn(works)
    return Row(
        name="decode",
        shape=str(shape),
        num_bytes=shape.layer_bytes,
        seconds=seconds["triton"] / shape.num_layers,
        copy_gb_s=copy.num_bytes / seconds["copy"] / 1e9,
        peer="SDPA on contiguous KV",
        peer_seconds=seconds["torch"] / shape.num_layers,
    )


def _paged_layers(shape: DecodeShape, query: Tensor) -> Callable[[], None]:
    blocks_each = shape.context_len // BLOCK_SIZE
    num_pages = shape.num_seqs * blocks_each
    pool = _random(num_pages, shape.num_layers, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    block_tables = torch.randperm(num_pages, device="cuda").int().view(shape.num_seqs, blocks_each)
    context_lens = torch.full((shape.num_seqs,), shape.context_len, dtype=torch.int32, device="cuda")
    layers, variant = [KVPages(layer) for layer in pool.unbind(1)], AttentionVariant(HEAD_DIM**-0.5)

    def run() -> None:
        for layer in layers:
            paged_decode.paged_decode_attention(query, layer, block_tables, context_lens, variant)

    return run


def _contiguous_layers(shape: DecodeShape, query: Tensor) -> Callable[[], None]:
    keys, values = (
        _random(shape.num_layers, shape.num_seqs, NUM_KV_HEADS, shape.context_len, HEAD_DIM) for _ in range(2)
    )

    def run() -> None:
        for key, value in zip(keys, values, strict=True):
            scaled_dot_product_attention(query[:, :, None], key, value, enable_gqa=True)

    return run


def _measure_write(num_tokens: int, copy: Copy) -> Row:
    num_layers = -(-WORKING_SET_BYTES // (num_tokens * BYTES_PER_TOKEN))
    num_pages = num_tokens // BLOCK_SIZE
    layers = _random(num_pages, num_layers, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM).unbind(1)
    keys, values = _random(2, num_layers, num_tokens, NUM_KV_HEADS, HEAD_DIM)
    slots = torch.randperm(num_tokens, device="cuda")
    pages, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE

    def write() -> None:
        for layer, key, value in zip(layers, keys, values, strict=True):
            kv_write.write_kv(key, value, layer, slots)

    def assign() -> None:
        for layer, key, value in zip(layers, keys, values, strict=True):
            layer[pages, 0, :, offsets] = key
            layer[pages, 1, :, offsets] = value

    seconds = time_in_turn({"copy": copy, "triton": write, "torch": assign})
    return Row(
        name="write",
        shape=f"{num_tokens} tokens",
        num_bytes=2 * num_tokens * BYTES_PER_TOKEN,
        seconds=seconds["triton"] / num_layers,
        copy_gb_s=copy.num_bytes / seconds["copy"] / 1e9,
        peer="indexed assignment",
        peer_seconds=seconds["torch"] / num_layers,
    )


def _random(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=DTYPE, device="cuda").normal_()
