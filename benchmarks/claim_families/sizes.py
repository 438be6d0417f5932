"""`baton size` beside the memory that a process of the engine really takes for weights and KV.

    python benchmarks/claim_families/sizes.py FOLDER

Resident memory of a process of its own that is no file's, before and after. Requests fill every page with KV.
"""

import ctypes
import gc
import json
import os
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.claim_families.engines import BLOCK_SIZE, Asked, load, make_core, random_model, run
from benchmarks.claim_families.finding import Family, Finding, Inputs, Report
from cli.size.capacity import RequestKV
from cli.size.shape import BITS, ModelShape
from demo_model import CHECKPOINT
from engine.core import EngineCore
from engine.model.decoder import Decoder
from engine.schedule.continuous_batcher import ContinuousBatcher

HIDDEN_SIZE, NUM_LAYERS = 1024, 8
NUM_REQUESTS, REQUEST_LEN = 8, 1024
TOLERANCE = 0.02
TIMEOUT_S = 120.0


def resident_bytes() -> int:
    """Reads the anonymous memory of this process that is resident, once the heap has given back what is free in it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


def take(folder: Path) -> dict[str, int]:
    """Loads a checkpoint and fills a pool; returns the resident bytes that each step added."""
    _fill(load(CHECKPOINT, "bfloat16"), 1)  # libraries, kernels and their threads
    before = resident_bytes()
    model = load(folder, "bfloat16")
    weights = resident_bytes() - before
    _fill(model, 1)  # room for activations
    before = resident_bytes()
    kept = _fill(model, NUM_REQUESTS)
    kv = resident_bytes() - before
    del kept
    return {"weights": weights, "kv": kv}


def _fill(model: Decoder, num_requests: int) -> EngineCore:
    """Runs prompts that fill a pool; returns the engine, which keeps it."""
    core = make_core(model, ContinuousBatcher(max_step_tokens=256), num_requests * REQUEST_LEN)
    draw = random.Random(0)
    run(core, [Asked(tuple(draw.choices(range(32, 256), k=REQUEST_LEN - 1)), 1) for _ in range(num_requests)])
    return core


def measure(inputs: Inputs) -> Report:
    folder = random_model(inputs.scratch, HIDDEN_SIZE, NUM_LAYERS)
    command = [sys.executable, str(Path(__file__).resolve()), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, env=os.environ)
    found = json.loads(done.stdout.splitlines()[-1])
    shape = ModelShape.read(folder)
    kv = RequestKV(shape.kv_layout(BLOCK_SIZE), REQUEST_LEN, BITS["bfloat16"]).num_bytes * NUM_REQUESTS
    setting = (
        f"Random weights, hidden size {HIDDEN_SIZE}, {NUM_LAYERS} layers, bf16; {NUM_REQUESTS} requests of "
        f"{REQUEST_LEN} tokens, in blocks of {BLOCK_SIZE}. Measured is the memory of the engine's process that is "
        "resident and no file's."
    )
    findings = {
        "size_kv": _compare(kv, found["kv"]),
        "size_weights": _compare(shape.num_parameters * BITS["bfloat16"] // 8, found["weights"]),
    }
    return Report(setting, findings)


def _compare(expected: int, found: int) -> Finding:
    off = found / expected - 1
    return Finding(
        f"{expected / (1 << 20):.1f} MiB", f"{found / (1 << 20):.1f} MiB, {100 * off:+.2f} %", abs(off) < TOLERANCE
    )


FAMILY = Family(
    "The arithmetic itself",
    {
        "size_kv": "`baton size` tells the KV of a run within 2 %",
        "size_weights": "`baton size` tells the weights of a run within 2 %",
    },
    measure,
)

if __name__ == "__main__":
    print(json.dumps(take(Path(sys.argv[1]))))
