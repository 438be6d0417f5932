"""The engine on a GPU with random weights, against what its bytes and products take at the device's own rates.

    python3 benchmarks/gpu_engine.py

Decoding reads all weights and each sequence's KV once a step; a prompt multiplies each weight with each of its tokens.
Prompts run as graphs, beside the same prompts kernel by kernel. Alone it also captures all graphs of both models, as a
worker does, and tells their time and memory.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.gpu_kernels import Ceilings
from benchmarks.gpu_model import SIZES, Sizes
from benchmarks.gpu_timing import Row
from engine.checkpoint.config import ModelConfig
from engine.core import EngineCore
from engine.events import Failed
from engine.model.decoder import Decoder
from engine.model.feed_forward import DenseLayer, Linear
from engine.model.programs import MIN_CHUNK_TOKENS, ProgramSize, padded
from engine.model.weights import DecoderWeights, LayerWeights
from engine.request import ChoiceSoFar, EngineRequest
from engine.schedule.continuous_batcher import ContinuousBatcher
from engine.warm.warming import compile_kernels, limits_of, make_programs
from kernels.backend import Activation, Backend, Heads, Weight
from kernels.triton_backend import TritonBackend
from kv_store.device_pool import DevicePool
from kv_store.transfers import NoStore
from wire.ids import AttemptId, NamespaceRoot
from wire.sampling import SamplingParams

ROOT = NamespaceRoot(bytes(32))
DEVICE = torch.device("cuda")
NUM_STEPS = 40
NUM_WARM_UPS = 8
NUM_PROMPTS = 5
MAX_STEP_TOKENS, MAX_RUNNING = 8192, 128


SMALL, LARGE = SIZES["135M"], SIZES["8B"]
LOADS = [(SMALL, 1, 512), (SMALL, 32, 512), (LARGE, 1, 1024), (LARGE, 16, 1024), (LARGE, 64, 2048)]
PROMPTS = [(SMALL, 128), (SMALL, 1100), (SMALL, 2048), (LARGE, 128), (LARGE, 512), (LARGE, 2048), (LARGE, 8192)]
"""By default 8B has graphs of up to 512 prompt tokens; here all have one."""


def make_decoder(shape: Sizes, backend: Backend | None = None) -> Decoder:
    """Makes a decoder of a shape with random weights."""
    backend = backend or TritonBackend()

    def weight(columns: int, depth: int, pack: Callable[[torch.Tensor], Weight] = backend.pack) -> Linear:
        numbers = torch.empty(columns, depth, dtype=torch.bfloat16, device=DEVICE).normal_(std=depth**-0.5)
        return Linear(pack(numbers))

    def norm() -> torch.Tensor:
        return torch.ones(shape.hidden, dtype=torch.bfloat16, device=DEVICE)

    heads = Heads(
        num_queries=shape.num_heads,
        num_kv=shape.num_kv_heads,
        size=shape.head_dim,
        query_norm=None,
        key_norm=None,
        norm_eps=1e-5,
    )
    queries = shape.num_heads * shape.head_dim
    layers = tuple(
        LayerWeights(
            attention_norm=norm(),
            qkv=weight(queries + 2 * shape.num_kv_heads * shape.head_dim, shape.hidden),
            heads=heads,
            attention_output=weight(shape.hidden, queries),
            mlp_norm=norm(),
            feed_forward=DenseLayer(
                gate_up=weight(2 * shape.mlp, shape.hidden, backend.pack_gated),
                down=weight(shape.hidden, shape.mlp),
                activation=Activation.SILU,
            ),
        )
        for _ in range(shape.num_layers)
    )
    table, head = weight(shape.vocab, shape.hidden).weight, weight(shape.vocab, shape.hidden).weight
    weights = DecoderWeights(table, layers, norm(), head)
    config = ModelConfig.parse(shape.config | {"eos_token_id": None})
    return Decoder(config, weights, config.kv_layout("bfloat16", 16), backend)


class Load:
    """An engine that serves requests of random prompts, a step at a time."""

    def __init__(self, model: Decoder, num_tokens: int) -> None:
        pool = DevicePool(model.layout, num_tokens // model.layout.block_size, DEVICE)
        batcher = ContinuousBatcher(max_step_tokens=MAX_STEP_TOKENS, max_running=MAX_RUNNING)
        self.core = EngineCore(model, pool, batcher, NoStore())
        self.kv = pool.kv
        self._num = 0

    def add(self, prompt_len: int, num_tokens: int) -> AttemptId:
        self._num += 1
        prompt = torch.randint(1000, (prompt_len,)).tolist()
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        name = AttemptId(f"{self._num}")
        self.core.add(
            EngineRequest(
                attempt_id=name, root=ROOT, prompt_ids=tuple(prompt), sampling=sampling, choices=(ChoiceSoFar(0),)
            )
        )
        return name

    def step(self) -> tuple[float, int]:
        """Returns the seconds of a step and the tokens that came of it."""
        start = time.perf_counter()
        output = self.core.step()
        failed = [one for one in output.events if isinstance(one, Failed)]
        if failed:
            raise failed[0].error
        return time.perf_counter() - start, len(output.token_ids)


def measure() -> Iterator[Row]:
    """Rows of decode steps and of prompts, wall time of the whole engine, Python included."""
    ceilings = Ceilings()
    times = ceilings.time({})
    for shape in (SMALL, LARGE):
        model = make_decoder(shape)
        compile_all(model)
        for _, num_seqs, context_len in (one for one in LOADS if one[0] is shape):
            yield _measure_decode(model, shape, num_seqs, context_len, times.read)
        for _, prompt_len in (one for one in PROMPTS if one[0] is shape):
            yield _measure_prompt(model, shape, prompt_len, times.operations)
        del model
        torch.cuda.empty_cache()


def compile_all(model: Decoder) -> None:
    """Compiles the kernels of all steps side by side, where no earlier run has."""
    kv = Load(model, 16_384).kv
    compile_kernels(model, TritonBackend(), kv, limits_of(model, kv, MAX_RUNNING, MAX_STEP_TOKENS))


def capture_all(shape: Sizes) -> str:
    """Captures the graphs that a worker has; returns their number, time and memory."""
    model = make_decoder(shape)
    kv = Load(model, 16_384).kv
    torch.cuda.synchronize()
    free_bytes, began_s = torch.cuda.mem_get_info()[0], time.perf_counter()
    without = make_programs(model, kv, limits_of(model, kv, MAX_RUNNING, 2048))
    took_s, taken_bytes = time.perf_counter() - began_s, free_bytes - torch.cuda.mem_get_info()[0]
    return f"{shape.name}: {model.num_programs} graphs, {took_s:.2f} s, {taken_bytes >> 20} MiB; without: {without}"


def _measure_decode(model: Decoder, shape: Sizes, num_seqs: int, context_len: int, bytes_s: float) -> Row:
    load = Load(model, num_seqs * (context_len + 256))
    for _ in range(num_seqs):
        load.add(context_len, NUM_WARM_UPS + NUM_STEPS + 20)
    num_running = 0
    while num_running < num_seqs:
        num_running = load.step()[1]
    seconds = [load.step()[0] for _ in range(NUM_WARM_UPS + NUM_STEPS)][NUM_WARM_UPS:]
    num_bytes = 2 * shape.num_weights + num_seqs * context_len * shape.kv_bytes
    name = f"step {shape.name}"
    return Row(name, f"{num_seqs} x {context_len}", median(seconds), num_bytes / bytes_s, "read")


def _measure_prompt(model: Decoder, shape: Sizes, prompt_len: int, operations_s: float) -> Row:
    """Kernel by kernel first: the graph is made in between."""
    load = Load(model, 2 * prompt_len + 512)
    launched_s = _time_prompts(load, prompt_len)
    prepare_prompt(model, load, prompt_len)
    num_operations = 2 * (shape.num_weights - shape.hidden * shape.vocab) * prompt_len
    return Row(
        f"prompt {shape.name}",
        f"{prompt_len}",
        _time_prompts(load, prompt_len),
        num_operations / operations_s,
        "product",
        "kernel by kernel",
        launched_s,
    )


def prepare_prompt(model: Decoder, load: Load, prompt_len: int) -> None:
    """Makes the graph of a prompt that is one chunk."""
    width = -(-(prompt_len + 1) // model.layout.block_size)
    if not model.prepare(ProgramSize(0, width, padded(prompt_len, MIN_CHUNK_TOKENS)), load.kv):
        raise RuntimeError("no memory for a graph")


def run_prompt(load: Load, prompt_len: int) -> float:
    """Returns the seconds of a prompt of one token."""
    load.add(prompt_len, 1)
    seconds = 0.0
    while load.core.has_requests:
        seconds += load.step()[0]
    return seconds


def _time_prompts(load: Load, prompt_len: int) -> float:
    """Times prompts, one after the other."""
    return median(run_prompt(load, prompt_len) for _ in range(NUM_PROMPTS))


if __name__ == "__main__":
    for row in measure():
        print(row.name, row.shape, f"{row.seconds * 1e6:.1f} us", f"{row.of_ceiling:.2f} of {row.ceiling}", end=" ")
        print(f"{row.over_peer:.2f} x {row.peer}" if row.peer else "", flush=True)
    for one in (SMALL, LARGE):
        print(capture_all(one), flush=True)
        torch.cuda.empty_cache()
