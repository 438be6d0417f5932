"""Engines for claims, on random weights, and requests that run through one to their end."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch

from benchmarks.claim_families.finding import Inputs
from benchmarks.disaggregation import make_model
from engine.core import EngineCore
from engine.events import Failed
from engine.model.decoder import Decoder
from engine.request import ChoiceSoFar, EngineRequest
from engine.schedule.batcher import Batcher
from kv_store.device_pool import DevicePool
from kv_store.transfers import NoStore
from wire.ids import AttemptId, NamespaceRoot
from wire.sampling import SamplingParams

BLOCK_SIZE = 16
POOL_TOKENS = 1 << 15
_ROOT = NamespaceRoot(bytes(32))
_numbers = count()


@dataclass(frozen=True)
class Asked:
    """A request: its prompt, and the length of its greedy answer."""

    prompt: tuple[int, ...]
    output_len: int


def random_model(scratch: Path, hidden_size: int, num_layers: int) -> Path:
    """Makes a checkpoint of random weights, once in a scratch folder."""
    folder = scratch / f"random-{hidden_size}-{num_layers}"
    return folder if folder.exists() else make_model(folder, hidden_size, num_layers)


@dataclass(frozen=True)
class Weights:
    """A checkpoint, and the words that name it."""

    folder: Path
    words: str


def weights(inputs: Inputs, hidden_size: int, num_layers: int) -> Weights:
    """Picks the real model where one is given, else random weights of a shape."""
    if inputs.real is not None:
        return Weights(inputs.real, "SmolLM2-135M, its file dequantized")
    folder = random_model(inputs.scratch, hidden_size, num_layers)
    return Weights(folder, f"random weights, hidden size {hidden_size}, {num_layers} layers")


def load(folder: Path, dtype: str) -> Decoder:
    """Loads a checkpoint on the CPU."""
    return Decoder.load(folder, dtype, torch.device("cpu"), BLOCK_SIZE)


def make_core(model: Decoder, batcher: Batcher, num_tokens: int) -> EngineCore:
    """Makes an engine with empty pages for so many tokens."""
    return EngineCore(model, DevicePool(model.layout, num_tokens // BLOCK_SIZE, model.device), batcher, NoStore())


def add(core: EngineCore, asked: Sequence[Asked]) -> None:
    """Queues requests."""
    for one in asked:
        sampling = SamplingParams(temperature=0.0, max_tokens=one.output_len, ignore_eos=True)
        attempt_id = AttemptId(str(next(_numbers)))
        core.add(
            EngineRequest(
                attempt_id=attempt_id, root=_ROOT, prompt_ids=one.prompt, sampling=sampling, choices=(ChoiceSoFar(0),)
            )
        )


def run(core: EngineCore, asked: Sequence[Asked]) -> int:
    """Runs requests that come all at once; returns the number of tokens generated. Raises the error of a failed one."""
    add(core, asked)
    num_tokens = 0
    while core.has_requests:
        output = core.step()
        num_tokens += len(output.token_ids)
        for event in output.events:
            if isinstance(event, Failed):
                raise event.error
    return num_tokens


def run_afresh(model: Decoder, batcher: Batcher, asked: Sequence[Asked]) -> int:
    """Runs requests through an engine that has seen none before; returns the number of tokens generated."""
    return run(make_core(model, batcher, POOL_TOKENS), asked)
