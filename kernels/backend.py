"""The kernels of a device, as one object that the model is given: Torch everywhere, Triton on a GPU, C++ on a CPU."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from kernels.quantized.matrix import Quantized
from kernels.routing import Gating, Routing

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Quantized dtypes with one code an item, with their largest code; int4 has two codes in a uint8."""


TRITON, TRITON_EXACT = "triton", "triton-exact"
"""Names of the backends of GPUs; the second one's rows know no batch."""
ANY_DEVICE = "any"
"""The end of a backend's version that names no architecture of a GPU."""


@dataclass(frozen=True)
class Weight:
    """A matrix [columns, depth] in the layout of one backend; no other backend can read `data`.

    dtype: the dtype of the rows that it multiplies, and of data, unless that is uint8: codes with their scales.
    """

    data: Tensor
    columns: int
    depth: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Interleaved(Weight):
    """A plain matrix whose rows are a gate, its up, the next gate and so on."""


@dataclass(frozen=True)
class Experts:
    """The matrices of a layer's experts, of one shape and dtype, as `Backend.experts` makes them.

    table: for kernels that find a matrix themselves, int64 [experts, 2], address and whether it is packed codes.
    """

    weights: tuple[Weight, ...]
    table: Tensor

    @property
    def columns(self) -> int:
        return self.weights[0].columns


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The heads of a row of queries, keys and values, and the norms of query and key heads: both or neither."""

    num_queries: int
    num_kv: int
    size: int
    query_norm: Tensor | None
    key_norm: Tensor | None
    norm_eps: float


@dataclass(frozen=True)
class Angles:
    """Cosines and sines of a rotary embedding, float32 [positions, head size / 2]. Raises ValueError for others.

    A model with several rotary embeddings has their columns side by side. turns: the angles by which a row's query is
    rotated back before it meets sinks outside its window.
    """

    cosines: Tensor
    sines: Tensor
    turns: "Angles | None" = None

    def __post_init__(self) -> None:
        if self.cosines.dtype is not torch.float32 or self.sines.dtype is not torch.float32:
            raise ValueError(f"angles of {self.cosines.dtype} and {self.sines.dtype}, not float32")

    def at(self, positions: Tensor) -> "Angles":
        """Picks the angles of positions int64 [T]."""
        return Angles(self.cosines[positions], self.sines[positions])

    def columns(self, first: int, half: int) -> "Angles":
        """Views `half` columns from the first one on."""
        if self.cosines.shape[-1] == half:
            return self
        return Angles(self.cosines[:, first : first + half], self.sines[:, first : first + half])


@dataclass(frozen=True)
class Int4:
    """The parts of KV in int4 besides codes and the scales of values, for all layers of a model or for one.

    key_scales: a scale for each channel, bfloat16 [num_pages, num_layers, num_kv_heads, head_dim]. open: blocks that
    are not full, in the compute dtype, [num_open, num_layers, 2, num_kv_heads, block_size, head_dim]. page_to_open:
    int32 [num_pages], the place in `open` of a page's open block.
    """

    key_scales: Tensor
    open: Tensor
    page_to_open: Tensor

    def layer(self, index: int) -> "Int4":
        """Views the parts of one layer."""
        return Int4(self.key_scales[:, index], self.open[:, index], self.page_to_open)


@dataclass(frozen=True)
class KVPages:
    """KV in pages, for all layers of a model or for one.

    data: [num_pages, num_layers, 2, num_kv_heads, block_size, head_dim], for one layer without num_layers; each head's
    block is contiguous. Its dtype is the compute dtype, or that of codes: int8, float8_e4m3fn, or uint8 with two int4
    codes an item, from a head's first and second half. scales: bfloat16, shaped like data without head_dim, with data's
    strides in bytes; for int4 values alone have them, and the 2 is missing. int4: None for other dtypes. Raises
    ValueError for unknown dtypes.
    """

    data: Tensor
    scales: Tensor | None = None
    int4: Int4 | None = None

    def __post_init__(self) -> None:
        scale = None if self.scales is None else self.scales.dtype
        is_int4 = self.data.dtype is torch.uint8
        if scale is not (torch.bfloat16 if is_int4 or self.data.dtype in LARGEST_CODE else None):
            raise ValueError(f"pages of {self.data.dtype} with scales of {scale}")
        if is_int4 is (self.int4 is None):
            raise ValueError(f"pages of {self.data.dtype} with the parts of int4: {not is_int4}")

    def layer(self, index: int) -> "KVPages":
        """Views the pages of one layer."""
        scales = None if self.scales is None else self.scales[:, index]
        return KVPages(self.data[:, index], scales, self.int4 and self.int4.layer(index))


@dataclass(frozen=True)
class Tables:
    """The block tables of a batch, and the rows of its sequences; the first `num_decodes` have one row each.

    block_tables: int32 [S, N], pages; context_lens: int32 [S], the batch's own tokens included; cu_query_lens: int32 [S
    + 1], the first row of each sequence. turns: `Angles.turns`, for variants with num_sinks.
    """

    block_tables: Tensor
    context_lens: Tensor
    cu_query_lens: Tensor
    num_decodes: int
    turns: Angles | None = None


@dataclass(frozen=True)
class Scores:
    """Changes of scores between scaling and softmax.

    soft_cap: a score becomes soft_cap * tanh(score / soft_cap), as in Gemma 2 (arXiv 2408.00118). sinks: float32
    [num_queries], a learned score of each query head that joins its softmax without a value, as in gpt-oss (arXiv
    2508.10925).
    """

    soft_cap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class AttentionVariant:
    """The attention of one layer: the keys that a row sees, and the changes of scores before the softmax.

    scale: a factor of query times key. window: tokens that a row sees, itself included; None for all. num_sinks: first
    tokens that a row sees besides its window (StreamingLLM, arXiv 2309.17453).
    """

    scale: float
    window: int | None = None
    num_sinks: int = 0
    scores: Scores = field(default_factory=Scores)


class Activation(Enum):
    """The activation of a gate: SiLU, or GELU approximated by tanh (arXiv 1606.08415).

    CLAMPED_SWISH is gpt-oss's (arXiv 2508.10925): of a gate of 7 at most, gate * sigmoid(1.702 gate); the second half
    is clamped to 7 either way, and 1 is added.
    """

    SILU = 0
    GELU_TANH = 1
    CLAMPED_SWISH = 2


class Program(Protocol):
    """Recorded operations."""

    def run(self, num_rows: int, num_sequences: int, num_decodes: int, num_samples: int = 0) -> None:
        """Runs all operations, on the first rows and sequences of the tensors that they were recorded with.

        num_samples: the rows of operations recorded after `sample`.
        """


class Backend(Protocol):
    """The operations of a decoder. Rows are tokens; no operation's result for a row depends on other rows.

    Results go to `out`, which may be `residual`, or else to a new tensor, and are returned.

    `version` is part of the model fingerprint: it changes whenever the numbers may, so that no worker reads KV of other
    kernels. Exception: the last bits of TRITON's products with plain weights depend on the other rows.
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def record(self) -> "Recorder | None":
        """Begins a recording: returns a backend whose operations require `out`; None if it has no recordings."""

    def pack(self, weight: Tensor) -> Weight:
        """Copies a matrix [columns, depth] into the backend's own layout; on the device `meta` only its size."""

    def pack_exactly(self, weight: Tensor) -> Weight:
        """Copies a matrix as `pack` does, and rounds it to no fewer bits, whatever the backend's width of weights."""

    def pack_gated(self, gate_up: Tensor) -> Weight:
        """Copies a matrix of gates, then ups, [2 * columns, depth], for `gated_linear` alone."""

    def pack_codes(self, parts: Sequence[Quantized], dtype: torch.dtype) -> Weight:
        """Copies matrices of one depth, joined along the columns; a product has the bits of `dequantize` in a dtype."""

    def embed(self, token_ids: Tensor, table: Weight, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
        """Returns the rows `token_ids` int64 [T] of a table, times `scale`, [T, depth]."""

    def rms_norm(
        self, states: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Normalizes rows [T, columns], in float32, and scales them by `weight` [columns]. Source: arXiv 1910.07467.

        A weight in float32 beside states in another dtype scales them before they are rounded. Adds `residual`. Rows
        of `states` and `out`, which may be one tensor, may be parts of longer rows.
        """

    def linear(
        self,
        states: Tensor,
        weight: Weight,
        bias: Tensor | None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Multiplies rows [T, depth], adds `bias` [columns] and then `residual` [T, columns]; returns [T, columns].

        out: may be `residual`, which is then added to in place.
        """

    def logits(self, states: Tensor, weight: Weight, cap: float | None = None, out: Tensor | None = None) -> Tensor:
        """Multiplies rows [T, depth]; returns float32 [T, columns], each cap * tanh(logit / cap) with a cap."""

    def rotate_and_write(
        self, qkv: Tensor, heads: Heads, angles: Angles, pages: KVPages, slot_mapping: Tensor
    ) -> Tensor:
        """Normalizes and rotates queries and keys, and writes keys and values into one layer of KV, in place.

        For pages of codes it quantizes, as `kernels.reference.quantize` does; for int4 block by block, as
        `kernels.reference.close_blocks` does.

        qkv: [T, (num_queries + 2 * num_kv) * size], may be modified; angles: T rows; pages: one layer; slot_mapping:
        see `kernels.reference.write_kv`. Returns queries [T, num_queries, size], perhaps a view.
        """

    def attend(
        self,
        query: Tensor,
        pages: KVPages,
        tables: Tables,
        variant: AttentionVariant,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attends with rows [T, num_queries, size] over one layer, as `kernels.reference` does; keeps the shape."""

    def gate(self, gate_up: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
        """Returns activation(first half) * second half of rows [T, 2 * columns], or [T, num_chosen, 2 * columns]."""

    def gated_linear(
        self,
        states: Tensor,
        weight: Weight,
        bias: Tensor | None,
        activation: Activation,
        product: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Multiplies rows [T, depth] and gates them as `gate` does, which may round activations but SiLU otherwise.

        weight: a matrix that `pack_gated` or `pack_codes` has packed. bias: numbers of gates, then of ups. product:
        [T, 2 * columns], a buffer that a backend may use. Returns [T, columns].
        """

    def experts(self, weights: Sequence[Weight]) -> Experts:
        """Lists a layer's matrices, one for each expert; copies none. Raises ValueError for unlike ones."""

    def route(self, logits: Tensor, num_chosen: int, shares: Gating, out: Routing | None = None) -> Routing:
        """Chooses the experts of rows, as `kernels.routing.route` does."""

    def expert_linear(
        self, states: Tensor, experts: Experts, routing: Routing, bias: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """Multiplies each row by the matrices of its chosen experts, and adds their rows of `bias` [experts, columns].

        states: [T, depth], a row for all its experts, or [T, num_chosen, depth], a row for each of them; returns
        [T, num_chosen, columns] in the order of `routing`, each row as `linear` computes it.
        """

    def combine(
        self, rows: Tensor, routing: Routing, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Adds up the rows of each token's experts, as `kernels.routing.combine` does; `out` may be `residual`."""


class StepTensors(Protocol):
    """The tensors of a step, with the fields of engine.model.batch."""

    @property
    def token_ids(self) -> Tensor: ...

    @property
    def positions(self) -> Tensor: ...

    @property
    def slot_mapping(self) -> Tensor: ...

    @property
    def block_tables(self) -> Tensor: ...

    @property
    def context_lens(self) -> Tensor: ...

    @property
    def cu_query_lens(self) -> Tensor: ...


class Recorder(Backend, Protocol):
    """A backend that records its operations and runs none; `pick`, `sample` and `advance` are its own."""

    def pick(self, table: Tensor, ids: Tensor, out: Tensor) -> None:
        """Copies the rows `ids` int64 [T] of a table, float32 [rows, columns], to `out` [T, columns]."""

    def sample(self, states: Tensor, rows: Tensor, out: Tensor) -> None:
        """Copies sampled rows int64 [R] of states [T, columns] to `out` [R, columns].

        Operations recorded later run on these R rows alone.
        """

    def advance(self, logits: Tensor, block_size: int, batch: StepTensors) -> None:
        """Turns a batch, in place, into that of the likeliest next tokens. logits: a row for each row of the batch."""

    def finish(self) -> Program:
        """Makes a program of the recorded operations."""


def on_any_device(version: str) -> str:
    """Returns a GPU backend's version as a machine without a device names it."""
    return f"{version.rpartition('-')[0]}-{ANY_DEVICE}"
