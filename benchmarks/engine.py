"""The engine's own cost: Python per token beside earlier code, and a step's time by operation.

    python benchmarks/engine.py --profile --before ../earlier
    python benchmarks/engine.py --checkpoint /path/to/a/checkpoint
    python benchmarks/engine.py --kv-dtype int8 --requests 16 --context 4096

--profile: microseconds per decoded token, and per token of a prompt, of a model that costs next to nothing, its own
time subtracted; with `--before` also of the engine in another folder of this repository, in turns. Else: where a step
of a real model spends its time, and the bytes a second of weights and KV over what as many threads read from memory in
the same run; with `--kv-dtype` tokens a second with KV of that dtype and in bfloat16, in turns.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The engine of another folder is timed in a process of its own, which this names.
sys.path.insert(0, os.environ.get("BATON_ENGINE", str(ROOT)))

import torch

from engine.core import EngineCore
from engine.model.batch import Batch, CausalModel
from engine.request import ChoiceSoFar, EngineRequest
from engine.schedule.continuous_batcher import ContinuousBatcher
from kv_store.device_pool import DevicePool
from kv_store.transfers import NoStore
from wire.ids import AttemptId, NamespaceRoot
from wire.layout import KV_DTYPES, KVLayout
from wire.sampling import SamplingParams

SHAPES = ((1, 64), (32, 64), (128, 64), (512, 64), (32, 32_000))
"""Sequences, and the length of their prompts."""
PROMPT_LENS = (128, 2048)
"""Tokens of prompts that run alone, each in one chunk."""
NUM_PROMPTS = 40
BLOCK_SIZE = 16
NUM_STEPS = 96
"""Six blocks of each sequence: the cost of a block counts as often as it arises."""
_VOCAB_SIZE = 64
_ROUND_TIMEOUT_S = 300.0
READ_BYTES = 1 << 30
REST_S = 0.05
"""OpenMP's threads spin for milliseconds after their work."""


class FreeModel:
    """A CausalModel without weights, which adds up its own time. Every token is as likely as in the step before."""

    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=BLOCK_SIZE, dtype="float32")
    device = torch.device("cpu")
    vocab_size = _VOCAB_SIZE
    max_context_len = 1 << 16
    eos_token_ids: tuple[int, ...] = ()
    keeps_phases = False

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._logits = torch.randn(max(num for num, _ in SHAPES), _VOCAB_SIZE)

    def forward(self, batch: Batch, kv: object) -> torch.Tensor:
        began_s = time.perf_counter()
        logits = self._logits[: len(batch.sample_rows)]
        self.spent_s += time.perf_counter() - began_s
        return logits

    def new_queries(self, num_rows: int) -> torch.Tensor:
        return torch.empty(1, num_rows, 0)

    def weigh(self, queries: object, kv: object, block_table: object, num_tokens: int) -> torch.Tensor:
        return torch.ones(1, 1, num_tokens)


class PrefilledModel:
    """A CausalModel in whose pages all prompts have some KV already: only decoding rows cost time."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Batch, kv: Any) -> torch.Tensor:
        if batch.num_decodes < len(batch.token_ids):
            return torch.zeros(len(batch.sample_rows), self._model.vocab_size)
        logits: torch.Tensor = self._model.forward(batch, kv)
        return logits


class TimedBackend:
    """A Backend that adds up the seconds of each operation of another one, called one by one: it records none."""

    def __init__(self, backend: Any) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._backend = backend

    def record(self) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._backend, name)
        return self._timed(name, operation) if callable(operation) else operation

    def _timed(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began_s = time.perf_counter()
            result = operation(*arguments, **named)
            self.seconds[name] += time.perf_counter() - began_s
            return result

        return timed


def decoding_core(model: CausalModel, num_sequences: int, prompt_len: int, num_tokens: int) -> EngineCore:
    """Makes an engine with so many sequences that have their first token, and `num_tokens` to come."""
    num_blocks = num_sequences * (-(-(prompt_len + num_tokens) // BLOCK_SIZE) + 1)
    batcher = ContinuousBatcher(max_step_tokens=4096 + num_sequences, max_running=num_sequences)
    core = EngineCore(model, DevicePool(model.layout, num_blocks, model.device), batcher, NoStore())
    for number in range(num_sequences):
        core.add(_request(model, number, prompt_len, num_tokens))
    while core.stats().generated_tokens < num_sequences:
        core.step()
    while core.stats().num_waiting or core.stats().computed_prompt_tokens < num_sequences * prompt_len:
        core.step()
    return core


def _request(model: CausalModel, number: int, prompt_len: int, num_tokens: int) -> EngineRequest:
    """Makes a request that shares no block with one of another number."""
    return EngineRequest(
        attempt_id=AttemptId(str(number)),
        root=NamespaceRoot(number.to_bytes(32, "big")),
        prompt_ids=tuple((number * 7 + place * place) % model.vocab_size for place in range(prompt_len)),
        sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
        choices=(ChoiceSoFar(0),),
    )


def prompt_us(prompt_len: int) -> float:
    """Measures microseconds per token of a prompt from arrival to its first token; the least of some prompts.

    The model's time is left out. The pool has room for two prompts, so that each evicts an earlier one's blocks.
    """
    model, batcher, took_s = FreeModel(), ContinuousBatcher(max_step_tokens=prompt_len), []
    pool = DevicePool(model.layout, 2 * (prompt_len // BLOCK_SIZE + 1), model.device)
    core = EngineCore(model, pool, batcher, NoStore())
    for number in range(NUM_PROMPTS):
        request, model.spent_s = _request(model, number, prompt_len, 1), 0.0
        began_s = time.perf_counter()
        core.add(request)
        while core.has_requests:
            core.step()
        took_s.append(time.perf_counter() - began_s - model.spent_s)
    return min(took_s) / prompt_len * 1e6


def python_us(num_sequences: int, prompt_len: int) -> float:
    """Measures the engine's microseconds per decoded token, the model's left out; the least of three times."""
    return min(_python_us(num_sequences, prompt_len) for _ in range(3 if prompt_len < 1000 else 1))


def _python_us(num_sequences: int, prompt_len: int) -> float:
    model = FreeModel()
    core = decoding_core(model, num_sequences, prompt_len, 4 * NUM_STEPS)
    for _ in range(BLOCK_SIZE):
        core.step()
    before, model.spent_s = core.stats().generated_tokens, 0.0
    began_s = time.perf_counter()
    for _ in range(NUM_STEPS):
        core.step()
    spent_s = time.perf_counter() - began_s - model.spent_s
    return spent_s / (core.stats().generated_tokens - before) * 1e6


def profile(before: Path | None, num_rounds: int) -> dict[str, dict[str, float]]:
    """Returns, for each shape, the medians of `now` and, with another folder, of `before` and their ratio."""
    folders = {"now": ROOT} if before is None else {"before": before, "now": ROOT}
    rounds = [{name: _profile_in(folder) for name, folder in folders.items()} for _ in range(num_rounds)]
    return {shape: summarize([{name: one[shape] for name, one in row.items()} for row in rounds]) for shape in _names()}


def summarize(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Takes medians over rounds, and the median of the ratio within a round."""
    medians = {name: median(one[name] for one in rounds) for name in rounds[0]}
    if "before" in medians:
        medians["ratio"] = median(one["before"] / one["now"] for one in rounds)
    return medians


def _profile_in(folder: Path) -> dict[str, float]:
    env = os.environ | {"BATON_ENGINE": str(folder), "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--once"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_ROUND_TIMEOUT_S, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _names() -> list[str]:
    return [f"{num} x {length}" for num, length in SHAPES] + [f"prompt of {length}" for length in PROMPT_LENS]


def operations(folder: Path, num_sequences: int, context_len: int, num_threads: int) -> dict[str, float]:
    """Measures a decoding step of a checkpoint: milliseconds of each operation, and bytes a second over the ceiling."""
    from engine.model.decoder import Decoder
    from kernels.selection import select_backend

    torch.set_num_threads(num_threads)
    backend = TimedBackend(select_backend(torch.device("cpu")))
    model = Decoder.load(folder, None, torch.device("cpu"), BLOCK_SIZE, backend)
    core = decoding_core(model, num_sequences, context_len, 4 * NUM_STEPS)
    core.step()
    read, samples = Reader(num_threads), defaultdict[str, list[float]](list)
    for _ in range(BLOCK_SIZE):
        samples["read"].append(read.once())
        backend.seconds.clear()
        with _stopwatch(backend.seconds, "step"):
            core.step()
        for name, seconds in backend.seconds.items():
            samples[name].append(seconds)
    milliseconds = {name: median(each) * 1e3 for name, each in samples.items()}
    ceiling_gb_s = READ_BYTES / milliseconds.pop("read") / 1e6
    weights = sum(weight.data.nbytes for layer in model.weights.layers for weight in _matrices(layer))
    layout = model.layout
    token_bytes = layout.payload_bytes // layout.block_size
    kv = num_sequences * (context_len + BLOCK_SIZE // 2) * token_bytes
    multiplying = milliseconds["linear"] + milliseconds.get("gated_linear", 0.0)
    rest = milliseconds["step"] - sum(value for name, value in milliseconds.items() if name != "step")
    return {
        **{f"{name}_ms": value for name, value in sorted(milliseconds.items(), key=lambda one: -one[1])},
        "outside_operations_ms": rest,
        "read_gb_s": ceiling_gb_s,
        "weights_of_read": weights / multiplying / 1e6 / ceiling_gb_s,
        "attention_of_read": kv / milliseconds["attend"] / 1e6 / ceiling_gb_s,
    }


def kv_speed(folder: Path, kv_dtype: str, num_sequences: int, context_len: int, num_threads: int) -> dict[str, float]:
    """Measures tokens a second of decoding with KV in bfloat16 and in another dtype, in turns; ratio of medians."""
    from engine.model.decoder import Decoder

    torch.set_num_threads(num_threads)
    cores, samples = {}, defaultdict[str, list[float]](list)
    for name in ("auto", kv_dtype):
        model: Any = PrefilledModel(Decoder.load(folder, "bfloat16", torch.device("cpu"), BLOCK_SIZE, kv_dtype=name))
        cores[name] = decoding_core(model, num_sequences, context_len, 4 * NUM_STEPS)
        cores[name].step()
    for _ in range(BLOCK_SIZE):
        for name, core in cores.items():
            with _stopwatch(spent := defaultdict[str, float](float), name):
                core.step()
            samples[name].append(spent[name])
    speeds = {name: num_sequences / median(each) for name, each in samples.items()}
    sizes = {name: core.pool.layout.payload_bytes for name, core in cores.items()}
    return {
        "bfloat16_tokens_s": speeds["auto"],
        f"{kv_dtype}_tokens_s": speeds[kv_dtype],
        "speed_ratio": speeds[kv_dtype] / speeds["auto"],
        "blocks_ratio": sizes["auto"] / sizes[kv_dtype],
    }


def _matrices(layer: Any) -> list[Any]:
    return [layer.qkv.weight, layer.attention_output.weight, *layer.feed_forward.matrices]


class Reader:
    """Reads a gigabyte of memory with as many threads."""

    def __init__(self, num_threads: int) -> None:
        self._values = torch.ones(READ_BYTES // 4)
        self._num_threads = num_threads

    def once(self) -> float:
        """Returns the seconds of one reading; afterwards torch has one thread, and the others have come to rest."""
        torch.set_num_threads(self._num_threads)
        began_s = time.perf_counter()
        self._values.amax()
        seconds = time.perf_counter() - began_s
        torch.set_num_threads(1)
        time.sleep(REST_S)
        return seconds


@contextmanager
def _stopwatch(seconds: dict[str, float], name: str) -> Iterator[None]:
    began_s = time.perf_counter()
    yield
    seconds[name] += time.perf_counter() - began_s


def main() -> None:
    options = _parse(sys.argv[1:])
    if options.once:
        figures = [python_us(*shape) for shape in SHAPES] + [prompt_us(length) for length in PROMPT_LENS]
        print(json.dumps(dict(zip(_names(), figures, strict=True))))
    elif options.profile:
        _report(options, profile(options.before, options.rounds), "us_per_token")
    else:
        from benchmarks.peers import default_folder, make_model

        folder = options.checkpoint or make_model(default_folder())
        case = options.requests, options.context, options.threads
        if options.kv_dtype is None:
            _report(options, {"step": operations(folder, *case)}, "of_a_step")
        else:
            _report(options, {"decoding": kv_speed(folder, options.kv_dtype, *case)}, f"kv_{options.kv_dtype}")


def _report(options: argparse.Namespace, figures: dict[str, dict[str, float]], what: str) -> None:
    from benchmarks.result_file import write_result

    flat = {f"{shape} {name}": value for shape, values in figures.items() for name, value in values.items()}
    write_result(f"{options.out}_{what}", flat, {})


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true", help="Python per token instead of a model's operations")
    parser.add_argument("--before", type=Path, help="a folder with earlier code, to profile in turns")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpoint", type=Path, help="a folder; SmolLM-135M's shape with random weights")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--context", type=int, default=512, help="tokens of each request's prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv-dtype", choices=KV_DTYPES[1:], help="decode with such KV, beside bfloat16")
    parser.add_argument("--out", default="engine", help="prefix of the results in benchmarks/results")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
