"""Backends to measure a model's quality on: transformers, and Baton's engine in this process."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM

from engine.core import EngineCore
from engine.events import Failed, StepOutput
from engine.kv.dropping import HEAVIEST, Chooser
from engine.model.batch import Batch
from engine.model.decoder import Decoder
from engine.request import ChoiceSoFar, EngineRequest
from engine.schedule.continuous_batcher import ContinuousBatcher
from kernels.backend import KVPages
from kv_store.device_pool import DevicePool
from kv_store.transfers import NoStore
from wire.ids import AttemptId, NamespaceRoot
from wire.kv_policy import Dropping
from wire.sampling import SamplingParams

_ROOT = NamespaceRoot(bytes(32))
_numbers = count()


@dataclass(frozen=True)
class CutText:
    """A prompt, and given tokens that follow it: an engine runs them as if it had emitted them.

    So they, and tokens sampled behind them, see the kept part of the prompt's KV alone, as the rows of its prefill do
    not.
    """

    prompt_ids: tuple[int, ...]
    given_ids: tuple[int, ...]

    @classmethod
    def cut(cls, token_ids: Sequence[int], prompt_len: int) -> "CutText":
        """Cuts a text behind its first tokens, or before its last ones if prompt_len is negative."""
        return cls(tuple(token_ids[:prompt_len]), tuple(token_ids[prompt_len:]))

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt_ids, *self.given_ids]


class Backend(Protocol):
    """A loaded model."""

    def generate(self, texts: Sequence[CutText], max_tokens: int) -> list[list[int]]:
        """Continues each text greedily, up to and without the end of text."""
        ...

    def log_likelihood(self, text: CutText) -> float:
        """Sums the natural log-probabilities of given tokens but the first, which the prompt's last row brings."""
        ...


class TransformersBackend:
    """The reference."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        end = self._model.generation_config.eos_token_id
        self._end_ids = frozenset(end if isinstance(end, list) else [end])

    @torch.inference_mode()
    def generate(self, texts: Sequence[CutText], max_tokens: int) -> list[list[int]]:
        prompts = [text.token_ids for text in texts]
        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        output = self._model.generate(
            torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]),
            attention_mask=torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding]),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=min(self._end_ids),
        )
        return [until_end(row, self._end_ids) for row in output[:, width:].tolist()]

    @torch.inference_mode()
    def log_likelihood(self, text: CutText) -> float:
        logits = self._model(torch.tensor([text.token_ids])).logits[0]
        return log_likelihood(logits[len(text.prompt_ids) : -1], text.given_ids[1:])


class ScoringDecoder(Decoder):
    """A decoder that can keep the logits of all its rows, by position: `kept` while it is set."""

    kept: dict[int, torch.Tensor] | None = None

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        """Does as `Decoder.forward`."""
        if self.kept is None:
            return super().forward(batch, kv)
        num_rows = len(batch.token_ids)
        logits = super().forward(replace(batch, sample_rows=torch.arange(num_rows), num_scored=num_rows), kv)
        self.kept.update(zip(batch.positions.tolist(), logits, strict=True))
        return logits[batch.sample_rows]


class EngineBackend:
    """Baton's engine over empty pages."""

    def __init__(
        self, model: ScoringDecoder, num_blocks: int, dropping: Dropping | None = None, chooser: Chooser = HEAVIEST
    ) -> None:
        self._model = model
        self._dropping = dropping
        pool = DevicePool(model.layout, num_blocks, model.device)
        self.core = EngineCore(model, pool, ContinuousBatcher(), NoStore(), chooser=chooser)

    def generate(self, texts: Sequence[CutText], max_tokens: int) -> list[list[int]]:
        answers = {self.begin(text, max_tokens): list[int]() for text in texts}
        while self.core.has_requests:
            output = self.step()
            for choice, token_id in zip(output.choices, output.token_ids, strict=True):
                answers[choice.attempt_id].append(token_id)
        return [until_end(answer, frozenset(self._model.eos_token_ids)) for answer in answers.values()]

    def log_likelihood(self, text: CutText) -> float:
        kept: dict[int, torch.Tensor] = {}
        self._model.kept = kept
        self.generate([text], 1)
        self._model.kept = None
        first = len(text.prompt_ids)
        rows = torch.stack([kept[position] for position in range(first, first + len(text.given_ids) - 1)])
        return log_likelihood(rows.cpu(), text.given_ids[1:])

    def begin(self, text: CutText, max_tokens: int, *, ignore_eos: bool = False) -> AttemptId:
        """Queues a request for a greedy continuation."""
        max_output = len(text.given_ids) + max_tokens
        sampling = SamplingParams(temperature=0.0, max_tokens=max_output, ignore_eos=ignore_eos)
        attempt_id, choice = AttemptId(str(next(_numbers))), ChoiceSoFar(0, text.given_ids)
        request = EngineRequest(
            attempt_id=attempt_id,
            root=_ROOT,
            prompt_ids=text.prompt_ids,
            sampling=sampling,
            choices=(choice,),
            dropping=self._dropping,
        )
        self.core.add(request)
        return attempt_id

    def step(self) -> StepOutput:
        """Runs a step. Raises the error of a request that failed."""
        output = self.core.step()
        for event in output.events:
            if isinstance(event, Failed):
                raise event.error
        return output


def log_likelihood(logits: torch.Tensor, token_ids: Sequence[int]) -> float:
    """Sums the log-probabilities of the tokens that follow the rows of `logits`."""
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None]).sum().item()


def until_end(token_ids: Sequence[int], end_ids: frozenset[int]) -> list[int]:
    """Cuts tokens before the first that ends a text."""
    ends = [index for index, token in enumerate(token_ids) if token in end_ids]
    return list(token_ids[: ends[0]] if ends else token_ids)
