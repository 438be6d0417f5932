"""The invariants I1 to I13 over a simulated run, and the truth about every block that it may hold."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from unittest.mock import patch

import torch

from engine.events import EngineStats, Failed, Fetched, HoldOrphaned, Jumped, Preempted
from engine.model.batch import Batch
from engine.model.hash_model import HashModel
from kernels.backend import KVPages
from kv_store.eviction.order import Page
from kv_store.frame import checksum_of
from kv_store.ledger import Ledger
from kv_store.node.messages import Block
from wire.block_names import cover
from wire.ids import AttemptId, BlockKey, NamespaceRoot
from wire.kv_policy import Sinks
from wire.layout import KVLayout
from worker.loop import StepReport

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")


@cache
def model_of(window: Sinks | None, seed: int = 0) -> HashModel:
    """Makes the model of a window; one of another seed is another model, whose blocks must never be used."""
    layout = replace(LAYOUT, window=window.window, num_sinks=window.num_sinks) if window else LAYOUT
    return HashModel(layout, vocab_size=300, seed=seed)


@dataclass(frozen=True)
class Violation:
    """An invariant by its name, or "promise" for one that FAULTS makes to clients, and what breaks it."""

    invariant: str
    what: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.what}"


@dataclass(frozen=True)
class _Use:
    place: object
    pages: set[int]
    clock: Callable[[], float]
    end_s: float

    @property
    def is_over(self) -> bool:
        return self.clock() >= self.end_s


class Watch:
    """Notes violations, and which pages of a place are read or written just now, whatever its ledger says.

    A place is the ledger of a pool, or a directory.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.violations: list[Violation] = []
        self._note = note
        self._uses: dict[Hashable, _Use] = {}
        self._place: object = None

    def violated(self, invariant: str, what: str) -> None:
        violation = Violation(invariant, what)
        if violation not in self.violations:
            self.violations.append(violation)
            self._note(f"VIOLATED {violation}")

    def expect_none(self, invariant: str, where: str, problems: Sequence[str]) -> None:
        for problem in problems:
            self.violated(invariant, f"{where}: {problem}")

    @contextmanager
    def at(self, place: object) -> Iterator[None]:
        """A context in which ledgers are those of a place."""
        self._place = place
        try:
            yield
        finally:
            self._place = None

    def use(
        self, by: Hashable, place: object, pages: AbstractSet[int], clock: Callable[[], float], end_s: float
    ) -> None:
        """Notes that pages are read or written until then, or until `end`."""
        self._uses[by] = _Use(place, {*pages}, clock, end_s)

    def is_over(self, by: Hashable) -> bool:
        """Whether the time of a use has run out."""
        return by not in self._uses or self._uses[by].is_over

    def end(self, by: Hashable, pages: AbstractSet[int] | None = None) -> None:
        """Ends a use, of all pages or of these."""
        if pages is None:
            self._uses.pop(by, None)
        elif by in self._uses:
            self._uses[by].pages.difference_update(pages)

    def end_all_of(self, process: str) -> None:
        """Ends all uses by a process that is dead."""
        for by in [by for by in self._uses if isinstance(by, tuple) and by[1].startswith(f"{process}:")]:
            del self._uses[by]

    def expect_whole(self, payload: memoryview, block: Block) -> None:
        if checksum_of(payload) != block.checksum:
            self.violated("I3", f"slot {block.slot} is found, and is not what was to be written there")

    def judge(self, truth: "Truth", what: str, key: BlockKey, checksum: bytes) -> None:
        """I4 and I7: a full block has the bytes that belong under its key."""
        if (verdict := truth.judge(key, checksum)) is not None:
            self.violated(verdict[0], f"{what} {verdict[1]}")

    @contextmanager
    def on_ledgers(self) -> Iterator[None]:
        """I2: sees that no ledger gives out a page that is in use."""
        allocate = Ledger.allocate

        def checked(ledger: Ledger[Page], num_pages: int) -> list[Page]:
            pages, place = allocate(ledger, num_pages), self._place or ledger
            for by, use in self._uses.items():
                if use.place is place and not use.is_over and not use.pages.isdisjoint(pages):
                    self.violated("I2", f"a page was given out while {_name(by)} used it")
            return pages

        with patch.object(Ledger, "allocate", checked):
            yield


def _name(by: Hashable) -> str:
    return str(by[0]) if isinstance(by, tuple) else "a transfer"


@cache
def payloads(model: HashModel, tokens: tuple[int, ...]) -> list[bytes]:
    """Computes the full blocks of tokens, as a model writes them."""
    num_blocks = -(-len(tokens) // LAYOUT.block_size)
    kv = torch.zeros(num_blocks, *LAYOUT.shape)
    positions = torch.arange(len(tokens))
    nothing = torch.tensor([], dtype=torch.int64)
    lens, bounds = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([len(tokens)], [0, len(tokens)]))
    tables = torch.arange(num_blocks, dtype=torch.int32)[None]
    model.forward(
        Batch(
            token_ids=torch.tensor(tokens),
            positions=positions,
            slot_mapping=positions,
            block_tables=tables,
            context_lens=lens,
            cu_query_lens=bounds,
            num_decodes=0,
            sample_rows=nothing,
        ),
        KVPages(kv),
    )
    return [page.numpy().tobytes() for page in kv[: len(tokens) // LAYOUT.block_size]]


class PromptCounts:
    """I13: each token of a prompt is cached or computed once, and a jump begins behind what its sequence has."""

    def __init__(self, watch: Watch, worker: str) -> None:
        self._watch = watch
        self._worker = worker
        self._num_prompt = 0
        self._have_all_run = True
        self._ends: dict[tuple[AttemptId, int], int] = {}

    def take(self, outcome: StepReport) -> None:
        """Takes the outcome of each step."""
        self._have_all_run &= not outcome.aborted and outcome.failure is None
        for event in [*outcome.events, *outcome.output.events]:
            match event:
                case Fetched(tokens=tokens):
                    self._num_prompt += tokens.num_found + tokens.computed
                    self._ends[event.attempt_id, event.choice] = tokens.num_found
                case Jumped(span=tokens):
                    if tokens.start < self._ends[event.attempt_id, event.choice]:
                        self._watch.violated("I13", f"{self._worker}: a jump to {tokens} begins before its place")
                    self._ends[event.attempt_id, event.choice] = tokens.stop
                case Preempted() | Failed() | HoldOrphaned():
                    self._have_all_run = False

    def judge(self, stats: EngineStats) -> None:
        """Compares the tokens that the engine has counted with those of the prompts that it began, once it is idle."""
        num_counted = stats.cached_prompt_tokens + stats.computed_prompt_tokens
        if num_counted > self._num_prompt or (self._have_all_run and num_counted < self._num_prompt):
            counted = f"{stats.cached_prompt_tokens} cached and {stats.computed_prompt_tokens} computed tokens"
            self._watch.violated("I13", f"{self._worker}: {counted} of {self._num_prompt}")


class Truth:
    """The checksum of every full block that may be there, by its key; and what another namespace has for its tokens."""

    def __init__(self, window: Sinks | None) -> None:
        self._window = window
        self.foreign: dict[BlockKey, bytes] = {}
        self._checksums: dict[BlockKey, bytes] = {}
        self._foreign_checksums: set[bytes] = set()

    def learn(self, root: NamespaceRoot, tokens: tuple[int, ...]) -> list[BlockKey]:
        """Learns of a tenant's prompt and all that follows it; returns the keys of its full blocks."""
        keys = [name.key for name in cover(root, tokens, LAYOUT.block_size) if not name.is_tail]
        right, foreign = payloads(model_of(self._window), tokens), payloads(model_of(self._window, seed=1), tokens)
        self._checksums.update((key, checksum_of(memoryview(one))) for key, one in zip(keys, right, strict=True))
        self.foreign.update(zip(keys, foreign, strict=True))
        self._foreign_checksums.update(checksum_of(memoryview(one)) for one in foreign)
        return keys

    def judge(self, key: BlockKey, checksum: bytes) -> tuple[str, str] | None:
        """Names the invariant that a full block breaks, and how; None for a block that is right."""
        if checksum in self._foreign_checksums:
            return "I7", "has the bytes of another namespace"
        if key not in self._checksums:
            return "I7", "is under a key that no request has"
        return None if self._checksums[key] == checksum else ("I4", "has other bytes than the model writes")
