"""Backends to measure a model's quality on: transformers, and Baton's engine in this process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM

from engine.engine import Engine
from engine.model.batch import Batch
from kv_store.device_pool import DevicePool
from wire.sampling import SamplingParams


class Backend(Protocol):
    """A loaded model."""

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """The greedy continuation of each prompt, up to and without the end of text."""
        ...

    def log_likelihood(self, token_ids: Sequence[int]) -> float:
        """Sum of the natural log-probabilities of all tokens but the first."""
        ...


class TransformersBackend:
    """The reference."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        end = self._model.generation_config.eos_token_id
        self._end_ids = frozenset(end if isinstance(end, list) else [end])

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        width = max(len(prompt) for prompt in prompts)
        padding = [width - len(prompt) for prompt in prompts]
        output = self._model.generate(
            torch.tensor([[0] * pad + [*prompt] for pad, prompt in zip(padding, prompts, strict=True)]),
            attention_mask=torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding]),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=min(self._end_ids),
        )
        return [_until_end(row, self._end_ids) for row in output[:, width:].tolist()]

    @torch.inference_mode()
    def log_likelihood(self, token_ids: Sequence[int]) -> float:
        return _log_likelihood(self._model(torch.tensor([token_ids])).logits[0], token_ids)


class EngineBackend:
    """Baton's engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._end_ids = frozenset(engine.core.model.eos_token_ids)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        completions = self._engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens))
        return [_until_end(completion.choices[0].token_ids, self._end_ids) for completion in completions]

    def log_likelihood(self, token_ids: Sequence[int]) -> float:
        """As one prefill that asks for every token's logits, in pages of its own."""
        model = self._engine.core.model
        num_pages = -(-len(token_ids) // model.layout.block_size)
        pool = DevicePool(model.layout, num_pages, model.device)
        pool.open(pool.ledger.allocate(num_pages))
        logits = model.forward(_prefill(token_ids, num_pages, model.device), pool.kv)
        return _log_likelihood(logits.cpu(), token_ids)


def _prefill(token_ids: Sequence[int], num_pages: int, device: torch.device) -> Batch:
    rows = torch.arange(len(token_ids), device=device)
    return Batch(
        token_ids=torch.tensor(token_ids, device=device),
        positions=rows,
        slot_mapping=rows,
        block_tables=torch.arange(num_pages, dtype=torch.int32, device=device)[None],
        context_lens=torch.tensor([len(token_ids)], dtype=torch.int32, device=device),
        cu_query_lens=torch.tensor([0, len(token_ids)], dtype=torch.int32, device=device),
        num_decodes=0,
        sample_rows=rows,
    )


def _log_likelihood(logits: torch.Tensor, token_ids: Sequence[int]) -> float:
    targets = torch.tensor(token_ids)[1:, None]
    return logits[:-1].log_softmax(-1).gather(1, targets).sum().item()


def _until_end(token_ids: Sequence[int], end_ids: frozenset[int]) -> list[int]:
    ends = [index for index, token in enumerate(token_ids) if token in end_ids]
    return list(token_ids[: ends[0]] if ends else token_ids)
