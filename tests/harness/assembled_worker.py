"""A worker in this process, assembled as a real one, on a model and tiers that a test has."""

from collections.abc import Callable
from dataclasses import replace

from decode_worker.behaviour import decode_behaviour
from engine.model.batch import CausalModel, DraftModel
from kernels.backend import KVPages
from prefill_worker.behaviour import prefill_behaviour
from tests.harness.served import served_model
from text.byte_tokenizer import ByteTokenizer
from wire.pools import Role
from worker.assembly import THREADS, Assembly, Threads, Tiers, assemble_on
from worker.config import (
    MAX_SILENCE_S,
    BatchSettings,
    CheckpointSettings,
    ServerSettings,
    SpeculationSettings,
    StoreSettings,
    WorkerConfig,
)
from worker.job import Behaviour
from worker.service import COLD, Warm

FINGERPRINT = b"f" * 32
TOKEN = "the cluster's token"
UNTIMED = replace(THREADS, stopwatch=lambda: 0.0)
"""All steps take no time: whether there are guesses does not depend on the machine."""
_BEHAVIOURS = {Role.PREFILL: prefill_behaviour, Role.DECODE: decode_behaviour}


def behaviour_of(role: Role, batch: BatchSettings | None = None, block_size: int = 16) -> Behaviour:
    return _BEHAVIOURS[role](batch or BatchSettings(), block_size)


def local_worker(
    model: CausalModel,
    tiers: Tiers,
    worker_id: str,
    role: Role,
    num_blocks: int,
    batch: BatchSettings | None = None,
    max_silence_s: float = MAX_SILENCE_S,
    on_broken: Callable[[], None] = lambda: None,
    threads: Threads = UNTIMED,
    node_id: str = "",
    proposer: str = "off",
    draft: DraftModel | None = None,
    definition: Callable[[], str] = lambda: ByteTokenizer().definition,
    warm_up: Callable[[KVPages, KVPages | None], Warm] = lambda kv, draft_kv: COLD,
    fingerprint: bytes | None = None,
) -> Assembly:
    """Its service is not started. Folder and socket in its configuration are nowhere; a node is its own address."""
    served = served_model(model.layout, folder="nowhere", fingerprint_hex=(fingerprint or FINGERPRINT).hex())
    config = WorkerConfig(
        worker_id=worker_id,
        role=role,
        model=CheckpointSettings(served),
        num_blocks=num_blocks,
        store=StoreSettings("nowhere", "00" * 32, node_id=node_id, block_address=node_id),
        server=ServerSettings(TOKEN),
        batch=batch or BatchSettings(),
        speculation=SpeculationSettings(proposer),
        max_silence_s=max_silence_s,
    )
    behaviour = behaviour_of(role, config.batch, config.block_size)
    return assemble_on(model, tiers, config, behaviour, on_broken, threads, draft, definition, warm_up)
