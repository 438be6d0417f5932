"""Packed weights that the workers of a node share: memory, decode speed, and the time of a second start.

    OMP_NUM_THREADS=1 python benchmarks/weights_once.py --model smollm2

Each worker is a process that loads the model as workers do and takes a step. Memory of weights: what anonymous memory
grew by while they loaded, and the process's part of the mapped file (PSS). Decode speed: private and mapped weights in
one process, in turns. A start counts from where weights are wanted to the end of the first step, in a process that has
served the demo model, so without imports, and without the digest of the model's own files, which `up` has computed. The
shortest of several starts counts, so that a neighbour's work on a shared machine costs little.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks.result_file import write_result
from demo_model import CHECKPOINT as DEMO_MODEL
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.fingerprint import DigestCache
from engine.checkpoint.hub import find_folder
from engine.checkpoint.pulled import MODELS
from engine.model.decoder import Decoder, compute_dtype
from engine.model.weight_cache import WeightCache
from engine.model.weights import LoadWeights, load_private
from kernels.selection import select_backend
from kernels.user_cache import user_cache
from tests.harness.model_alone import PagedRun, generate
from tests.kernels.backends import lend_kernels

CPU = torch.device("cpu")
MAX_BYTES = 1 << 36
NUM_STARTS = 3
NUM_TURNS = 9
NUM_TOKENS = 24
BATCHES = (1, 8)


def load(folder: Path, load_weights: LoadWeights) -> Decoder:
    return Decoder.load(folder, None, CPU, 16, load_weights=load_weights)


def work(folder: Path, is_mapped: bool, num_threads: int, line: Connection) -> None:
    """Sends the seconds of a start and, when it is asked, the memory of its weights; then ends."""
    torch.set_num_threads(num_threads)
    generate(load(DEMO_MODEL, load_private), [[1, 2, 3]], 1, 23)  # what every process takes once, whatever its model
    before = anonymous_bytes()
    began_s = time.perf_counter()
    model = load(folder, WeightCache(MAX_BYTES).load if is_mapped else load_private)
    generate(model, [[1, 2, 3]], 1, 23)
    line.send(time.perf_counter() - began_s)
    while line.recv() == "memory":
        line.send(anonymous_bytes() - before + mapped_bytes())


def anonymous_bytes() -> int:
    return _sum_kib(Path("/proc/self/smaps_rollup").read_text().splitlines(), "Pss_Anon:")


def mapped_bytes() -> int:
    """Sums this process's part of the weight files that it maps."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_ours = line.endswith(".weights")
        elif is_ours:
            total += _sum_kib([line], "Pss:")
    return total


def _sum_kib(lines: list[str], name: str) -> int:
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


class Worker:
    """A process that has loaded the model."""

    def __init__(self, folder: Path, is_mapped: bool, num_threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(folder, is_mapped, num_threads, theirs))
        self._process.start()
        theirs.close()
        self.start_s: float = self._line.recv()

    def memory_bytes(self) -> int:
        self._line.send("memory")
        received: int = self._line.recv()
        return received

    def end(self) -> None:
        self._line.send("end")
        self._process.join()


def memory_of(folder: Path, is_mapped: bool, num_workers: int, num_threads: int) -> int:
    workers = [Worker(folder, is_mapped, num_threads) for _ in range(num_workers)]
    total = sum(worker.memory_bytes() for worker in workers)
    for worker in workers:
        worker.end()
    return total


def start_of(folder: Path, is_mapped: bool, num_threads: int) -> float:
    worker = Worker(folder, is_mapped, num_threads)
    worker.end()
    return worker.start_s


def weight_files() -> list[Path]:
    return list((user_cache() / "weights").glob("*.weights"))


def forget_files() -> None:
    for file in weight_files():
        file.unlink()


def leave_memory() -> None:
    """Lets the system drop the file's pages, as after a reboot."""
    for file in weight_files():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def starts_of(folder: Path, is_mapped: bool, num_threads: int, prepare: Callable[[], None]) -> list[float]:
    found = []
    for _ in range(NUM_STARTS):
        prepare()
        found.append(start_of(folder, is_mapped, num_threads))
    return found


def decode_s(model: Decoder, num_requests: int) -> float:
    """Returns the seconds of decoding steps alone."""
    run = PagedRun(model, [[1 + index, 7, 9] for index in range(num_requests)], NUM_TOKENS + 2)
    run.prefill(23)
    run.decode(2)  # the step is recorded
    began_s = time.perf_counter()
    run.decode(NUM_TOKENS + 2)
    return time.perf_counter() - began_s


def decode_ratios(folder: Path, num_requests: int) -> list[float]:
    """Returns the speed of mapped over private weights, a turn each; each goes first in every other turn."""
    models = [load(folder, load_private), load(folder, WeightCache(MAX_BYTES).load)]
    ratios = []
    for turn in range(NUM_TURNS):
        seconds = [0.0, 0.0]
        for at in (turn % 2, 1 - turn % 2):
            seconds[at] = decode_s(models[at], num_requests)
        ratios.append(seconds[0] / seconds[1])
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", default="weights_once")
    args = parser.parse_args()
    source = MODELS[args.model].pull(lambda *_: None) if args.model in MODELS else Path(args.model)
    with tempfile.TemporaryDirectory() as cache:
        lend_kernels(Path(cache))
        os.environ["XDG_CACHE_HOME"] = cache
        torch.set_num_threads(args.threads)
        backend, folder = select_backend(CPU), find_folder(str(source.resolve()))
        checkpoint = Checkpoint(folder)
        dtype = str(compute_dtype(None, checkpoint.config, backend)).removeprefix("torch.")
        checkpoint.fingerprint(dtype, backend.version, DigestCache.of_user())
        common = folder, True, args.threads
        private = starts_of(folder, False, args.threads, lambda: None)
        first = starts_of(*common, forget_files)
        second = starts_of(*common, lambda: None)
        cold = starts_of(*common, leave_memory)
        memory = {(kept, num): memory_of(folder, kept, num, args.threads) for kept in (True, False) for num in (1, 3)}
        ratios = {num: decode_ratios(folder, num) for num in BATCHES}
        [file] = weight_files()
        file_bytes = file.stat().st_size
    figures = {
        "instruction set": backend.name,
        "compute dtype": dtype,
        "bytes of packed weights, MiB": f"{file_bytes / 2**20:.1f}",
        "memory of weights, 3 workers over 1 (PSS)": f"{memory[True, 3] / memory[True, 1]:.3f}",
        "the same, private weights": f"{memory[False, 3] / memory[False, 1]:.2f}",
        "memory of weights, 1 worker, mapped, MiB": f"{memory[True, 1] / 2**20:.1f}",
        "memory of weights, 3 workers, mapped, MiB": f"{memory[True, 3] / 2**20:.1f}",
        "memory of weights, 3 workers, private, MiB": f"{memory[False, 3] / 2**20:.1f}",
        **{f"decode, mapped / private weights, {num} requests": f"{median(ratios[num]):.3f}" for num in BATCHES},
        "start with private weights, s": f"{min(private):.3f}",
        "first start, s": f"{min(first):.3f}",
        "second start, s": f"{min(second):.3f}",
        "second start, the file not in memory, s": f"{min(cold):.3f}",
        "second start / first": f"{min(second) / min(first):.3f}",
        "first start / start with private weights": f"{min(first) / min(private):.3f}",
    }
    details = {"private": private, "first": first, "second": second, "cold": cold, "ratios": ratios}
    write_result(args.out, figures, details)
    return 0


if __name__ == "__main__":
    sys.exit(main())
