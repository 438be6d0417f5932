"""Exactness on two simulated GPUs: prefill on the first, decode on the second, the pinned arena between them.

In float32 the tokens are a CPU's; in bfloat16 they and their log-probabilities have the bits of the same devices when
each operator is waited for.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.core import EngineCore
from engine.events import Failed
from engine.model.decoder import Decoder
from engine.request import EngineRequest, HandOff
from kernels.torch_backend import TorchBackend
from kv_store.node import arena
from tests.harness.checkpoints import choose_prompt, make_checkpoint
from tests.harness.engines import make_core, request
from tests.harness.node import Node
from tests.pairs import RUNS_ALL, covering
from tests.simulated_gpu.device import commands, synchronize
from wire.kv_policy import Dropping, parse_kv_policy
from wire.sampling import Logprobs, SamplingParams

LENGTHS = (1, 16, 17, 100) if RUNS_ALL else (1, 50)
NUM_TOKENS, NUM_ROUNDS = (24, 2) if RUNS_ALL else (3, 1)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(temperature=0.9, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, presence_penalty=0.2)
ARCHITECTURES = ("llama-gqa", "mistral-window", "qwen3")
POLICIES = ("full", "sinks=4+28", "snapkv=25%", "h2o=25%")
KV_DTYPES = ("auto", "int8", "fp8", "int4")
SERVED = [
    (arch, policy, kv_dtype)
    for arch in ARCHITECTURES
    for policy in POLICIES
    for kv_dtype in KV_DTYPES
    if policy == "full" or (kv_dtype != "int4" and arch != "mistral-window")
]
"""Only the full cache is served in int4, and of a model with windows."""
PAIRS = SERVED if RUNS_ALL else [SERVED[place] for place in covering(SERVED)]
ONES = SERVED if RUNS_ALL else [SERVED[place] for place in covering(SERVED, 1)]
"""All, or few that have every pair of values, or every value."""
Served = tuple[str, str, str]
Answer = list[tuple[int, Logprobs | None]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {arch: make_checkpoint(arch, tmp_path_factory.mktemp(arch)) for arch in ARCHITECTURES}


@pytest.fixture(autouse=True)
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes arenas look for a GPU. Torch's attention waits for the device, which no graph can capture."""
    monkeypatch.setattr(arena, "GPU_CONTROLS", (Path("/dev/null"),))
    monkeypatch.setattr(Decoder, "_capture", lambda *_: None)


class Synchronous(TorchDispatchMode):
    """Waits for each operator before the next one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        synchronize()
        return result


@pytest.mark.parametrize("served", PAIRS, ids="-".join)
def test_tokens_in_float32_are_a_cpus(served: Served, folders: dict[str, Path]) -> None:
    commands().set_lazy(True)
    expected = answers(("cpu", "cpu"), "float32", served, folders)
    assert tokens(answers(("sim:0", "sim:1"), "float32", served, folders)) == tokens(expected)


@pytest.mark.parametrize("served", ONES, ids="-".join)
def test_bits_in_bfloat16_are_the_same_when_each_operator_is_waited_for(
    served: Served, folders: dict[str, Path]
) -> None:
    with Synchronous():  # type: ignore[no-untyped-call]
        expected = answers(("sim:0", "sim:1"), "bfloat16", served, folders)
    commands().set_lazy(True)
    assert answers(("sim:0", "sim:1"), "bfloat16", served, folders) == expected


def tokens(found: Sequence[Answer]) -> list[list[int]]:
    return [[token_id for token_id, _ in answer] for answer in found]


def answers(devices: Sequence[str], dtype: str, served: Served, folders: dict[str, Path]) -> list[Answer]:
    """Hands prompts over from one device to another, again with hits in a second round; returns all their answers."""
    arch, policy, kv_dtype = served
    folder = folders[arch]
    models = [Decoder.load(folder, dtype, torch.device(one), 16, TorchBackend(), kv_dtype, policy) for one in devices]
    kept = parse_kv_policy(policy)
    dropping = kept if isinstance(kept, Dropping) else None
    node = Node(models[0].layout)
    first, second = (make_core(model, node) for model in models)
    found: list[Answer] = []
    for _ in range(NUM_ROUNDS):
        asked = [
            replace(request(choose_prompt(folder, length).prompt_ids, sampling), dropping=dropping)
            for length in LENGTHS
            for sampling in (GREEDY, SEEDED)
        ]
        handed = run(first, [hand_off(one) for one in asked])
        rest = [
            replace(one, choices=(replace(one.choices[0], output_ids=(answer[0][0],)),))
            for one, answer in zip(asked, handed, strict=True)
        ]
        found += [one + other for one, other in zip(handed, run(second, rest), strict=True)]
        node.directory.release_holds([one.attempt_id for one in asked])
    return found


def hand_off(one: EngineRequest) -> HandOff:
    return HandOff(
        attempt_id=one.attempt_id,
        root=one.root,
        prompt_ids=one.prompt_ids,
        sampling=one.sampling,
        choices=one.choices,
        dropping=one.dropping,
    )


def run(core: EngineCore, asked: Sequence[EngineRequest]) -> list[Answer]:
    found: dict[str, Answer] = {one.attempt_id: [] for one in asked}
    for one in asked:
        core.add(one)
    while core.has_requests:
        output = core.step()
        assert not any(isinstance(event, Failed) for event in output.events)
        for place, (choice, token_id) in enumerate(zip(output.choices, output.token_ids, strict=True)):
            found[choice.attempt_id].append((token_id, output.logprobs.get(place)))
        assert core.check() == []
    return [*found.values()]
