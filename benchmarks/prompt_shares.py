"""The processor time of a long prompt by operation: the engine's model alone, one thread, chunk by chunk.

    OMP_NUM_THREADS=1 python benchmarks/prompt_shares.py --model smollm2 --write
    OMP_NUM_THREADS=1 python benchmarks/prompt_shares.py --model smollm2 --cpu-kernels avx2

--cpu-kernels is the name of a library in kernels/cpu/library.py, or auto.

Processor time of a thread is what other work of the machine changes least. An operation's rate counts products of
weights as 2 operations a weight and row, attention as 4 a query head, its size and each token that a row sees.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.result_file import write_result
from engine.checkpoint.hub import find_folder
from engine.model.batch import Batch
from engine.model.decoder import Decoder
from kernels.cpu.library import ISA_TO_FEATURES
from kernels.selection import select_backend
from kv_store.device_pool import DevicePool

BLOCK_SIZE = 16
SHOWN = 0.002
"""The least share of an operation that has a row."""


class CountedBackend:
    """A Backend that adds up processor time and arithmetic of each operation of another one, called one by one."""

    def __init__(self, backend: Any) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.operations: dict[str, float] = defaultdict(float)
        self._backend = backend

    def record(self) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._backend, name)
        return self._counted(name, operation) if callable(operation) else operation

    def _counted(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            began_s = time.process_time()
            result = operation(*arguments, **named)
            self.seconds[name] += time.process_time() - began_s
            self.operations[name] += num_operations(name, arguments)
            return result

        return counted


PRODUCTS = ("linear", "gated_linear")


def num_operations(name: str, arguments: tuple[Any, ...]) -> float:
    """Counts multiplications and additions of products of weights, and of the attention of one chunk."""
    if name in PRODUCTS:
        states, weight = arguments[:2]
        return float(2 * len(states) * weight.columns * weight.depth)
    if name == "attend":
        query, _, tables = arguments[:3]
        num_rows, num_heads, size = query.shape
        end = int(tables.context_lens[0])
        return float(4 * num_heads * size * sum(range(end - num_rows + 1, end + 1)))
    return 0.0


def chunk_of(prompt: torch.Tensor, start: int, end: int) -> Batch:
    """Makes the batch of a prompt's tokens from `start` to `end`, in the first pages."""
    positions = torch.arange(start, end)
    return Batch(
        token_ids=prompt[start:end],
        positions=positions,
        slot_mapping=positions,
        block_tables=torch.arange(-(-end // BLOCK_SIZE), dtype=torch.int32)[None],
        context_lens=torch.tensor([end], dtype=torch.int32),
        cu_query_lens=torch.tensor([0, end - start], dtype=torch.int32),
        num_decodes=0,
        sample_rows=torch.tensor([end - start - 1]),
    )


def measure(folder: Path, isa: str, num_tokens: int, chunk_tokens: int) -> dict[str, str]:
    """Runs a prompt once; returns the rows of its table."""
    torch.set_num_threads(1)
    backend = CountedBackend(select_backend(torch.device("cpu"), isa))
    model = Decoder.load(folder, None, torch.device("cpu"), BLOCK_SIZE, backend)
    pool = DevicePool(model.layout, -(-num_tokens // BLOCK_SIZE), model.device)
    prompt = torch.randint(model.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(0))
    backend.seconds.clear()  # of packing the weights
    rows, began_s = {}, time.process_time()
    for start in range(0, num_tokens, chunk_tokens):
        end, before, chunk_s = min(num_tokens, start + chunk_tokens), dict(backend.seconds), time.process_time()
        model.forward(chunk_of(prompt, start, end), pool.kv)
        taken = {name: backend.seconds[name] - before.get(name, 0.0) for name in (*PRODUCTS, "attend")}
        whole_s = time.process_time() - chunk_s
        rows[f"tokens {start} to {end}"] = f"{whole_s:.2f} s: " + ", ".join(f"{n} {s:.2f}" for n, s in taken.items())
    whole_s = time.process_time() - began_s
    for name, seconds in sorted(backend.seconds.items(), key=lambda one: -one[1]):
        if seconds >= SHOWN * whole_s:
            rate = f", {backend.operations[name] / seconds / 1e9:.0f} GFLOP/s" if backend.operations[name] else ""
            rows[name] = f"{seconds:.2f} s, {seconds / whole_s:.1%}{rate}"
    rest_s = whole_s - sum(backend.seconds.values())
    rows["outside operations"] = f"{rest_s:.2f} s, {rest_s / whole_s:.1%}"
    return {"kernels": backend.version, **rows, "in all": f"{whole_s:.2f} s of processor time"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a folder, a GGUF file, or a name of `baton pull`")
    parser.add_argument("--cpu-kernels", choices=("auto", *ISA_TO_FEATURES), default="auto")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--chunk", type=int, default=2000)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/prompt_shares.md")
    options = parser.parse_args()
    rows = measure(find_folder(options.model), options.cpu_kernels, options.tokens, options.chunk)
    if options.write:
        write_result("prompt_shares", rows, rows)
    else:
        print("\n".join(f"{name}: {text}" for name, text in rows.items()))


if __name__ == "__main__":
    main()
