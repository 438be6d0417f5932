"""Counts the signatures of drawn loads that warming has not noted, and the programs that it has not captured.

A script, as Triton's interpreter cannot be left again in a process that has entered it. Kernels are noted in place of
their launch, for a target without a device; logits are drawn. Arguments: an architecture of tests.harness.checkpoints,
of tests.engine.gguf.files as gguf:KIND, or exact:ARCH for products of one order, a dtype of KV, a policy, and the
seconds of the load. Prints a JSON object.

Seconds are of a clock that steps move, by what they take an 8B model on an H200, and pauses between bursts of requests.
"""

import json
import random
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from engine.checkpoint.hub import find_folder
from engine.core import EngineCore
from engine.model.batch import Batch
from engine.model.decoder import Decoder
from engine.request import EngineRequest
from engine.schedule.continuous_batcher import ContinuousBatcher
from engine.speculation.speculator import NgramProposer, Speculator
from engine.warm.compiling import Launches, Signature
from engine.warm.warming import limits_of, make_programs, note_kernels
from kernels import checksums, row_operations
from kernels.backend import KVPages
from kernels.products import ordered
from kernels.quantized import products
from kernels.triton_backend import ExactBackend, TritonBackend
from kv_store.device_pool import COPIED_AT_ONCE, DevicePool
from tests.engine.gguf.files import make_gguf
from tests.harness.checkpoints import make_checkpoint
from tests.harness.engines import make_core, request
from tests.kernels.no_device import NoDevice
from tests.simulated_gpu import device
from tests.simulated_gpu.device import SimulatedGpu
from wire.ids import PageId
from wire.sampling import SamplingParams

BY_TORCH = SimulatedGpu.likeliest
NUM_BLOCKS, MAX_RUNNING, MAX_STEP_TOKENS = 1200, 70, 400
STEP_S, TOKEN_S = 0.005, 25e-6
PAUSE_S = 4.0
"""Between bursts of requests, on average."""
WARMED_BATCHES = (1,)
"""Pages that a store sums when it is made."""


@dataclass
class Drawn:
    """A model whose kernels are noted, and whose logits are drawn. now_s: the time on its clock."""

    model: Decoder
    launches: Launches
    num_passes: int = 0
    now_s: float = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, batch: Batch, kv: KVPages) -> torch.Tensor:
        self.num_passes += 1
        self.now_s += STEP_S + TOKEN_S * len(batch.token_ids)
        return torch.randn(self.model.forward(batch, kv).shape, device=self.model.device)


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Finds the likeliest tokens by torch, beside the kernel's launch, which is noted."""
    row_operations.likeliest(logits)
    return BY_TORCH(SimulatedGpu(), logits)


def sum_batches(pool: DevicePool, launches: Launches, sizes: Iterable[int]) -> None:
    """Sums batches of a pool's pages, as publish and fetch do, in both buffers; their kernel is noted."""
    with launches.noting():
        for size in sizes:
            for _ in range(2):
                pool.begin_checksums([PageId(page) for page in range(size)])()


def load(arch: str, kv_dtype: str, policy: str, folder: Path) -> Decoder:
    kind, _, other = arch.partition(":")
    file = make_gguf(folder, other, "llama-tied") if kind == "gguf" else make_checkpoint(other or kind, folder)
    backend = ExactBackend() if kind == "exact" else TritonBackend()
    return Decoder.load(find_folder(str(file)), "bfloat16", device.SIM, 16, backend, kv_dtype, policy)


def run(core: EngineCore, drawn: Drawn, draw: random.Random, seconds: float) -> int:
    """Steps an engine under a drawn load: bursts, single requests, prompts of any length, hits and drafts.

    Returns the number of requests.
    """
    known = [draw.randrange(drawn.vocab_size) for _ in range(1000)]
    end_s, burst_s, num_requests = drawn.now_s + seconds, drawn.now_s, 0
    while drawn.now_s < end_s:
        if drawn.now_s >= burst_s:
            asked = [draw_request(draw, known) for _ in range(draw.choice((1, 1, 2, 8, MAX_RUNNING)))]
            num_requests += len(asked)
            for one in asked:
                core.add(one)
            burst_s = drawn.now_s + draw.expovariate(1 / PAUSE_S)
        if core.has_requests:
            with drawn.launches.noting():
                core.step()
        else:
            drawn.now_s = burst_s
    return num_requests


def draw_request(draw: random.Random, known: Sequence[int]) -> EngineRequest:
    prompt = known[: draw.choice((1, 2, 15, 16, 17, 33, draw.randrange(1, 900)))]
    num_tokens, scored = draw.choice((1, 5, 30)), draw.choice((None, None, None, 1))
    settings = SamplingParams(
        temperature=draw.choice((0.0, 1.0)),
        seed=draw.randrange(99),
        n=draw.choice((1, 1, 2)),
        max_tokens=num_tokens,
        ignore_eos=True,
        prompt_logprobs=scored if len(prompt) < 100 else None,
    )
    return request(prompt, settings)


def is_dependent(signature: Signature) -> bool:
    """Tells whether a kernel is compiled for launches that overlap the kernel before them."""
    return bool(json.loads(signature.data)["options"]["launch_pdl"])


def count(arch: str, kv_dtype: str, policy: str, seconds: float) -> dict[str, Any]:
    """Returns the sizes of the warmed set and of the load's, and what of the latter is outside."""
    with tempfile.TemporaryDirectory() as name:
        model = load(arch, kv_dtype, policy, Path(name))
    warmed, drawn, draw = Launches(), Drawn(model, Launches()), random.Random(0)
    num_programs = num_late = num_requests = 0
    for speculator in (None, Speculator(NgramProposer(), 3)):
        batcher = ContinuousBatcher(MAX_STEP_TOKENS, MAX_RUNNING)
        core = make_core(drawn, None, NUM_BLOCKS, batcher, speculator)
        limits = limits_of(model, core.pool.kv, MAX_RUNNING, MAX_STEP_TOKENS)
        sum_batches(core.pool, warmed, WARMED_BATCHES)
        note_kernels(model, core.pool.kv, limits, warmed)
        with drawn.launches.noting():
            make_programs(model, core.pool.kv, limits)
        num_programs = model.num_programs
        num_requests += run(core, drawn, draw, seconds / 2)
        sum_batches(core.pool, drawn.launches, range(1, COPIED_AT_ONCE + 1))
        num_late += model.num_programs - num_programs
    seen = drawn.launches
    outside = [one.name for one in seen.signatures if one not in warmed.signatures]
    return {
        "warmed": len(warmed.signatures),
        "programs": num_programs,
        "late_programs": num_late,
        "seen": len(seen.signatures),
        "requests": num_requests,
        "passes": drawn.num_passes,
        "outside": outside,
        "independent": sorted({one.kernel for one in seen.signatures if not is_dependent(one)}),
    }


if __name__ == "__main__":
    device.load()
    device.SimulatedGpu.likeliest = staticmethod(likeliest)  # type: ignore[method-assign, assignment]
    device.SimulatedGpu.sum_pages = lambda _, *tensors: checksums.sum_pages(*tensors)  # type: ignore[method-assign]
    products.MIN_SPLIT_DEPTH = ordered.MIN_SPLIT_DEPTH = 128  # so that a depth of the small model has two splits
    driver.set_active(NoDevice(GPUTarget("cuda", 90, 32)))
    arch, kv_dtype, policy, seconds = sys.argv[1:]
    json.dump(count(arch, kv_dtype, policy, float(seconds)), sys.stdout)
