"""Memory and threads of each process, computed from settings, model and machine. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deploy.plan.byte_size import format_bytes
from deploy.plan.config import ClusterConfig
from deploy.plan.machine import Machine
from deploy.plan.model import ModelFacts
from wire.errors import ConfigError
from wire.pools import PoolSizes, Role

MAX_DEFAULT_ARENA_BYTES = 1 << 30
MAX_DEFAULT_POOL_BYTES = 512 << 20
MAX_DEFAULT_CONTEXTS = 64
"""The most full contexts that default sizes have room for: a small model then takes little memory, and starts quickly.
"""
SHARES_OF_A_GPU = 10_000
"""Ray counts parts of a GPU in units of 1/10,000."""
GPU_RESERVE_BYTES = 2 << 30
"""Memory of a GPU for a worker's activations and libraries, at most 16 MiB of sums and 64 of widened weights."""
UNUSABLE_OF_A_GPU = 50
"""The divisor for the memory that the driver keeps, or that lies between allocations: an H200 tells 140.4 GiB free, and
gives 139.8.
"""
WORKER_BYTES = 256 << 20
"""Memory of a worker's process besides weights and pages: 190 MiB as measured on a CPU, and room for activations."""
MIN_BLOCKS = 8
MORE_SHARED = "--shm-size gives a container more"


@dataclass(frozen=True)
class Sizes:
    """The sizes of each worker and of the node; `notes` are for the user."""

    num_pool_blocks: int
    num_arena_slots: int
    num_threads: int
    num_gpus: float
    notes: tuple[str, ...] = ()


def size(config: ClusterConfig, model: ModelFacts, machine: Machine, num_workers: int) -> Sizes:
    """Divides a machine among workers and arena. Raises ConfigError, with the way out, if they do not fit."""
    num_gpus = (1.0 if machine.gpus else 0.0) if config.worker.num_gpus is None else config.worker.num_gpus
    _require_gpus(num_gpus * num_workers, machine)
    layout, open_bytes = model.served.layout, _open_bytes(config, model)
    pool_bytes = config.worker.pool_bytes or (
        _default_gpu_pool_bytes(config, num_gpus, model, machine)
        if num_gpus
        else _default_pool_bytes(num_workers, model, machine, open_bytes)
    )
    arena_bytes = _arena_bytes(config, model, machine)
    worker_bytes = WORKER_BYTES + (0 if num_gpus else model.worker_bytes(pool_bytes))
    advice = "; start fewer, or set worker.pool_bytes and arena.size_bytes"
    _require_memory(num_workers, "workers", worker_bytes, machine.memory_bytes - arena_bytes - model.node_bytes, advice)
    sizes = Sizes(
        num_pool_blocks=_num_blocks(pool_bytes, layout.payload_bytes, "worker.pool_bytes", open_bytes),
        num_arena_slots=arena_bytes // layout.block_bytes,
        num_threads=config.worker.num_threads or max(1, machine.num_cores // num_workers),
        num_gpus=num_gpus,
    )
    return replace(sizes, notes=(*_notes(sizes, model), *_shared_memory_note(config, model, machine)))


def require_room(
    before: PoolSizes, after: PoolSizes, used_bytes: Sequence[int], num_gpus: float, machine: Machine
) -> None:
    """Raises ConfigError if growing pools would not fit, with the number of workers that would.

    num_gpus: GPUs of all workers together. used_bytes: private memory of each process; the largest stands for a new
    worker. Workers that were requested but have not started count like ready workers.
    """
    num_before, num_after = before.prefill + before.decode, after.prefill + after.decode
    _require_gpus(num_gpus, machine)
    worker_bytes = max([WORKER_BYTES, *used_bytes])
    free_bytes = machine.memory_bytes + sum(used_bytes) - num_before * worker_bytes
    _require_memory(num_after - num_before, "more workers", worker_bytes, free_bytes, "")


def without_arena(config: ClusterConfig, model: ModelFacts, machine: Machine) -> Machine:
    """Returns a machine less the memory of an arena sized for it; its free /dev/shm stays as it was.

    Raises ConfigError without room for the arena.
    """
    return replace(machine, memory_bytes=machine.memory_bytes - _arena_bytes(config, model, machine))


def num_more(config: ClusterConfig, model: ModelFacts, machine: Machine) -> int:
    """Counts the further workers for which a machine has memory now; a default `worker.pool_bytes` shrinks with it.

    config: has the role's settings. Ray counts GPUs.
    """
    worker = config.worker
    pool_bytes = worker.pool_bytes or _default_pool_bytes(1, model, machine, _open_bytes(config, model))
    worker_bytes = WORKER_BYTES + (0 if worker.num_gpus else model.worker_bytes(pool_bytes))
    return max(0, machine.memory_bytes - model.node_bytes) // worker_bytes


def share_gpu(config: ClusterConfig, machine: Machine) -> ClusterConfig:
    """Divides the only GPU of a machine among the workers, unless the settings say what each gets of it."""
    num_workers = config.pools.prefill + config.pools.decode
    if len(machine.gpus) != 1 or any(config.worker.of(role).num_gpus is not None for role in Role):
        return config
    return replace(config, worker=replace(config.worker, num_gpus=SHARES_OF_A_GPU // num_workers / SHARES_OF_A_GPU))


def _open_bytes(config: ClusterConfig, model: ModelFacts) -> int:
    """Sums the bytes of a worker's open blocks, which its pool has besides its pages."""
    layout = model.served.layout
    num_open = config.batch.num_open(layout.block_size) if layout.has_open_blocks else 0
    return num_open * replace(layout, quantization="none").payload_bytes


def _default_gpu_pool_bytes(config: ClusterConfig, num_gpus: float, model: ModelFacts, machine: Machine) -> int:
    """Returns the rest of a GPU's share after weights, graphs and activations."""
    # torch takes a second to import, which other commands need not wait for.
    from engine.model.programs import graph_bytes, program_sizes

    served = model.served
    block_bytes, max_blocks = served.layout.block_bytes, served.layout.num_blocks(served.max_context_len)
    chunk_tokens = min(config.batch.max_step_tokens, model.captured_tokens)
    programs = program_sizes(config.batch.max_running, max_blocks, chunk_tokens)
    graphs = graph_bytes(programs, served.vocab_size, model.row_bytes)
    share_bytes = int(min(machine.gpus) * num_gpus)
    share_bytes -= share_bytes // UNUSABLE_OF_A_GPU
    free_bytes = share_bytes - model.worker_bytes(0) - graphs - GPU_RESERVE_BYTES
    return max(0, free_bytes) // (block_bytes + model.draft.block_bytes) * block_bytes


def _default_pool_bytes(num_workers: int, model: ModelFacts, machine: Machine, open_bytes: int) -> int:
    """Returns a small share of memory, for laptops."""
    share = machine.memory_bytes // (8 * num_workers)
    return min(MAX_DEFAULT_POOL_BYTES, share, MAX_DEFAULT_CONTEXTS * model.context_bytes + open_bytes)


def _arena_bytes(config: ClusterConfig, model: ModelFacts, machine: Machine) -> int:
    """Returns the size of an arena. Raises ConfigError if /dev/shm has no room for it, or for too few blocks."""
    arena_bytes = config.arena.size_bytes or _default_arena_bytes(model, machine)
    if arena_bytes > machine.shared_bytes:
        problem = f"the arena takes {format_bytes(arena_bytes)}, but only {format_bytes(machine.shared_bytes)}"
        raise ConfigError(f"{problem} of /dev/shm are free: set arena.size_bytes; {MORE_SHARED}")
    _num_blocks(arena_bytes, model.served.layout.block_bytes, "arena.size_bytes", advice=f"; {MORE_SHARED}")
    return arena_bytes


def _default_arena_bytes(model: ModelFacts, machine: Machine) -> int:
    """Returns a quarter of memory, or less: as many contexts are enough, and on a CPU as many bytes, for laptops."""
    share = min(machine.shared_bytes, machine.memory_bytes) // 4
    bounds = [share, MAX_DEFAULT_CONTEXTS * model.context_bytes]
    return min(bounds if model.device != "cpu" else [*bounds, MAX_DEFAULT_ARENA_BYTES])


def _num_blocks(num_bytes: int, block_bytes: int, setting: str, open_bytes: int = 0, advice: str = "") -> int:
    num_blocks = (num_bytes - open_bytes) // block_bytes
    if num_blocks < MIN_BLOCKS:
        least = format_bytes(MIN_BLOCKS * block_bytes + open_bytes)
        raise ConfigError(
            f"{setting}: {format_bytes(max(0, num_bytes))} is too little, it takes at least {least}{advice}"
        )
    return num_blocks


def _require_gpus(num_gpus: float, machine: Machine) -> None:
    if num_gpus > len(machine.gpus):
        problem = f"the workers take {num_gpus:g} GPUs, but there are {len(machine.gpus)}"
        raise ConfigError(f"{problem}: start fewer workers, or give each a share, --gpus 0.5 (worker.num_gpus)")


def _require_memory(num: int, workers: str, worker_bytes: int, free_bytes: int, advice: str) -> None:
    most = max(0, free_bytes // worker_bytes)
    if num > most:
        problem = f"{num} {workers} take {format_bytes(worker_bytes)} of memory each"
        left = format_bytes(max(0, free_bytes))
        raise ConfigError(f"{problem}, and {left} are left for them: at most {most} fit{advice}")


def _notes(sizes: Sizes, model: ModelFacts) -> tuple[str, ...]:
    rooms = (
        ("worker.pool_bytes", sizes.num_pool_blocks, "longer requests are refused"),
        ("arena.size_bytes", sizes.num_arena_slots, "of longer prompts a part is computed twice"),
    )
    return tuple(
        f"{setting} has room for {num_blocks * model.served.layout.block_size} tokens, "
        f"less than the model's context of {model.served.max_context_len}: {consequence}"
        for setting, num_blocks, consequence in rooms
        if num_blocks * model.served.layout.block_bytes < model.context_bytes
    )


def _shared_memory_note(config: ClusterConfig, model: ModelFacts, machine: Machine) -> tuple[str, ...]:
    """Returns a note if /dev/shm, as in a container, makes the default arena smaller than memory would."""
    arena_bytes = _default_arena_bytes(model, machine)
    roomy = replace(machine, shared_bytes=machine.memory_bytes)
    if config.arena.size_bytes or arena_bytes == _default_arena_bytes(model, roomy):
        return ()
    return (f"the arena takes {format_bytes(arena_bytes)}, a quarter of what /dev/shm has free; {MORE_SHARED}",)
