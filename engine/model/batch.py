"""The tensors of one step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kernels.backend import KVPages
from wire.layout import KVLayout

_DTYPES = {
    "token_ids": torch.int64,
    "positions": torch.int64,
    "slot_mapping": torch.int64,
    "block_tables": torch.int32,
    "context_lens": torch.int32,
    "cu_query_lens": torch.int32,
    "sample_rows": torch.int64,
}


@dataclass(frozen=True)
class Watched:
    """Rows of a batch whose queries the model writes into `queries` [num_layers, rows, ...]."""

    rows: slice
    queries: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens of several sequences, sequence by sequence; decoding sequences, of one token each, come first.

    T tokens, S sequences, N the blocks of the longest; in host memory until a model takes them. Raises ValueError for a
    wrong dtype: a kernel gets the address alone and would read wrong numbers.
    """

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slot_mapping: torch.Tensor  # int64 [T]: page * block_size + offset
    block_tables: torch.Tensor  # int32 [S, N], rows padded with 0
    context_lens: torch.Tensor  # int32 [S]: tokens with KV once this step has run
    cu_query_lens: torch.Tensor  # int32 [S + 1]: where each sequence's tokens start
    num_decodes: int
    sample_rows: torch.Tensor  # int64 [R]: rows of T whose logits are wanted
    num_scored: int = 0  # of these, rows of prompts that are scored
    watched: Sequence[Watched] = ()

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            tensor: torch.Tensor = getattr(self, name)
            if tensor.dtype is not dtype:
                raise ValueError(f"{name} has {tensor.dtype}, not {dtype}")

    def to(self, device: torch.device) -> "Batch":
        """Copies the tensors to a device, pinned ones without waiting."""
        if device.type == "cpu":
            return self
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in _DTYPES})

    @property
    def samples_all(self) -> bool:
        """Whether all logits are wanted: each row is a decoding row or a guess."""
        return not self.num_scored and len(self.token_ids) == len(self.sample_rows)

    @property
    def last_rows(self) -> torch.Tensor:
        """The last row of each sequence, int64 [S]."""
        return self.cu_query_lens[1:].long() - 1

    def after(self, token_ids: torch.Tensor, block_size: int) -> "Batch":
        """Makes the batch of the next tokens, int64 [S], one for each sequence; its pages have room for them."""
        positions = self.positions[self.last_rows] + 1
        pages = self.block_tables.gather(1, positions[:, None] // block_size)[:, 0].long()
        slots = pages * block_size + positions % block_size
        starts = torch.arange(len(token_ids) + 1, dtype=torch.int32, device=token_ids.device)
        lens, num = self.context_lens + 1, len(token_ids)
        return Batch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            block_tables=self.block_tables,
            context_lens=lens,
            cu_query_lens=starts,
            num_decodes=num,
            sample_rows=starts[:-1].long(),
        )


class CausalModel(Protocol):
    """A model as an engine runs it. Twins: `Decoder` and `HashModel`."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context_len(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def keeps_phases(self) -> bool:
        """Whether attention sums in another order in chunks than in decoding rows, and no other row matters.

        Then prompts run in chunks and output as decoding rows whenever they run, so that KV is the same each time.
        """

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        """Writes the KV of the batch's tokens into `kv` [layout.shape]; returns float32 logits [R, V]."""

    def new_queries(self, num_rows: int) -> torch.Tensor:
        """Makes a buffer for the queries of `num_rows` rows, [num_layers, num_rows, ...]."""

    def weigh(self, queries: torch.Tensor, kv: KVPages, block_table: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Sums the attention of a sequence's last rows, given their queries, that falls on each of its tokens.

        block_table: the sequence's pages, int32. num_tokens: tokens with KV in them. Returns float32 [num_layers,
        num_kv_heads, num_tokens]; no bit depends on how the rows were batched.
        """


class DraftModel(CausalModel, Protocol):
    """A model as a draft proposer runs it."""

    def decode_greedily(self, batch: Batch, kv: KVPages, num_runs: int) -> torch.Tensor:
        """Runs a batch, then num_runs - 1 times the likeliest next tokens; returns these, int64 [num_runs, S].

        Samples each sequence's last row, or all rows. The pages have room for all drawn tokens but the last.
        """


def decode_greedily(model: CausalModel, batch: Batch, kv: KVPages, num_runs: int) -> torch.Tensor:
    """Implements `DraftModel.decode_greedily`, with a forward pass for each run."""
    drawn: list[torch.Tensor] = []
    for _ in range(num_runs):
        batch = batch.after(drawn[-1], model.layout.block_size) if drawn else batch
        logits = model.forward(batch, kv)
        drawn.append(argmax(logits[batch.last_rows] if batch.samples_all else logits))
    return torch.stack(drawn)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Finds the place of the greatest value of each row [R, V], int64 [R]; numpy is ten times as fast on a CPU."""
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.is_cpu else logits.argmax(-1)
