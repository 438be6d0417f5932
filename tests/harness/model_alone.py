"""Drives a model over paged KV without an engine: pages, batches and greedy choice, nothing else."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.model.batch import Batch, CausalModel
from kernels.backend import KVPages
from kv_store.device_pool import view_pages


@dataclass
class Row:
    """A sequence: its known tokens, its pages, and how many of its tokens have KV."""

    tokens: list[int]
    pages: list[int]
    num_computed: int = 0
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class PagedRun:
    """Prompts that are run together. Pages are dealt out in random order and hold NaN until they are written."""

    def __init__(self, model: CausalModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        self.model = model
        block_size = model.layout.block_size
        sizes = [-(-(len(prompt) + num_tokens) // block_size) for prompt in prompts]
        pages = random.Random(0).sample(range(sum(sizes)), sum(sizes))
        # Bytes of ones are NaN in every dtype but int8, whose scales they make NaN.
        memory = torch.full((len(pages), model.layout.payload_bytes), 255, dtype=torch.uint8)
        view = view_pages(memory, model.layout)
        self.kv, self.scales = view.data, view.scales
        self.rows = [
            Row(list(prompt), [pages.pop() for _ in range(size)]) for prompt, size in zip(prompts, sizes, strict=True)
        ]

    def prefill(self, chunk_len: int) -> None:
        """Steps until every prompt is computed and has its first token; those that have it decode meanwhile."""
        while any(row.num_computed < row.num_prompt for row in self.rows):
            self.step(chunk_len)

    def decode(self, num_tokens: int) -> list[list[int]]:
        """Steps until every row has so many output tokens; returns them."""
        while any(len(row.output) < num_tokens for row in self.rows):
            self.step(1)
        return [row.output[:num_tokens] for row in self.rows]

    def step(self, chunk_len: int) -> torch.Tensor:
        """Runs at most `chunk_len` tokens of each row and appends the likeliest token to those that have KV for all.

        Returns the logits.
        """
        rows = sorted(
            (row for row in self.rows if self._room(row)),
            key=lambda row: len(row.tokens) - row.num_computed > 1,
        )
        chunks = [(row, min(chunk_len, len(row.tokens) - row.num_computed)) for row in rows]
        logits = self.model.forward(self.batch(chunks), KVPages(self.kv, self.scales)).clone()
        best = logits.argmax(-1).tolist()
        for row, length in chunks:
            row.num_computed += length
            if row.num_computed == len(row.tokens):
                row.tokens.append(best.pop(0))
        return logits

    def _room(self, row: Row) -> bool:
        return len(row.tokens) <= len(row.pages) * self.model.layout.block_size

    def batch(self, chunks: list[tuple[Row, int]]) -> Batch:
        """The next tokens of each row, so many; rows with one token first."""
        block_size = self.model.layout.block_size
        runs = [(row, range(row.num_computed, row.num_computed + length)) for row, length in chunks]
        ends = torch.tensor([length for _, length in chunks]).cumsum(0)
        slots = [row.pages[p // block_size] * block_size + p % block_size for row, run in runs for p in run]
        width = max(len(row.pages) for row, _ in chunks)
        tables = [row.pages + [0] * (width - len(row.pages)) for row, _ in chunks]
        return Batch(
            token_ids=torch.tensor([row.tokens[p] for row, run in runs for p in run]),
            positions=torch.tensor([p for _, run in runs for p in run]),
            slot_mapping=torch.tensor(slots),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            context_lens=torch.tensor([run.stop for _, run in runs], dtype=torch.int32),
            cu_query_lens=torch.tensor([0, *ends.tolist()], dtype=torch.int32),
            num_decodes=sum(length == 1 for _, length in chunks),
            sample_rows=torch.tensor(
                [end - 1 for end, (row, run) in zip(ends.tolist(), runs, strict=True) if run.stop == len(row.tokens)],
                dtype=torch.int64,
            ),
        )


def generate(
    model: CausalModel, prompts: Sequence[Sequence[int]], num_tokens: int, chunk_len: int = 10_000
) -> list[list[int]]:
    """The greedy output of each prompt, all in one batch."""
    run = PagedRun(model, prompts, num_tokens)
    run.prefill(chunk_len)
    return run.decode(num_tokens)


def logits_of(model: CausalModel, prompts: Sequence[Sequence[int]], num_tokens: int, chunk_len: int) -> torch.Tensor:
    """The logits of all steps: chunks of prompts, and greedy tokens."""
    run, seen = PagedRun(model, prompts, num_tokens), list[torch.Tensor]()
    while any(len(row.output) < num_tokens for row in run.rows):
        seen.append(run.step(chunk_len))
    return torch.cat(seen)
