"""The choices of an engine's requests: their tokens, how far they ran, the KV that stays, their order."""

from array import array
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count

from engine.events import ChoiceId
from engine.kv.retention import BlockTable, Prefix, retention_of
from engine.model.batch import CausalModel
from engine.model.sampler import Draw
from engine.request import ChoiceSoFar, EngineRequest, HandOff
from engine.schedule.batcher import Candidate, Gate, Phase
from wire.ids import AttemptId
from wire.load.fairness import ALONE, OUTPUT_COST, FairShares
from wire.sampling import FinishReason


@dataclass(frozen=True)
class Ending:
    """The rule by which a choice ends: at one of these tokens, or once it has `max_output`.

    early_ids: tokens that are banned before min_tokens.
    """

    ids: frozenset[int]
    early_ids: tuple[int, ...]
    max_output: int

    @classmethod
    def of(cls, request: EngineRequest, model: CausalModel) -> "Ending":
        sampling, max_output = request.sampling, model.max_context_len - request.num_prompt
        ids = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else model.eos_token_ids))
        early_ids = (*sampling.stop_token_ids, *model.eos_token_ids)
        return cls(frozenset(ids), early_ids, min(sampling.max_tokens, max_output))

    def after(self, last: int) -> tuple[FinishReason, int | None]:
        """Returns the reason of an end after this token, and the token if it is a stop token."""
        return (FinishReason.STOP, last) if last in self.ids else (FinishReason.LENGTH, None)


class Sequence:
    """A choice with its known tokens, prompt plus output; the first `num_computed` have run, never the last.

    num_scored: begins as EngineRequest.num_scored, and grows. kv: the retention of its KV. chunk_end: the number of
    computed tokens beyond which no chunk goes, while later blocks of its prefix are read; else None. standing: its
    place in queues, which `SequenceTable.settle` renews. num_charged: output tokens that its tenant was charged for.
    """

    def __init__(self, handle: int, request: EngineRequest, choice: ChoiceSoFar, model: CausalModel) -> None:
        self.handle = handle
        self.request = request
        self.choice = ChoiceId(request.attempt_id, choice.index)
        self.output_ids = list(choice.output_ids)
        self.matcher = choice.matcher
        self.ending = Ending.of(request, model)
        self.kv = retention_of(request, model.layout)
        self.phase = Phase.WAITING
        self.gate: Gate | None = None
        self.has_started = False
        self.chunk_end: int | None = None
        self.num_scored = request.num_scored
        self.standing = ALONE
        self.num_charged = len(choice.output_ids)
        self._keeps_phases = model.keeps_phases
        self._num_computed = 0

    @property
    def num_known(self) -> int:
        return self.request.num_prompt + len(self.output_ids)

    @property
    def num_computed(self) -> int:
        """Tokens with KV. While the sequence decodes, all known tokens but the last."""
        return self.num_known - 1 if self.phase is Phase.DECODE else self._num_computed

    @property
    def num_stored(self) -> int:
        """Tokens whose KV is in the pages."""
        return self.num_computed - self.kv.table.num_dropped

    @property
    def wants_scores(self) -> bool:
        """Whether some of the prompt's tokens lack scores; the leader's run scores them before the first output."""
        return 0 < self.num_scored < self.request.num_prompt and not self.output_ids

    @property
    def prefix(self) -> Prefix:
        """The KV that the sequence may begin with: none of the last known token, nor of a token whose logits are
        wanted.
        """
        num_readable = self.num_scored - 1 if self.wants_scores else self.num_known - 1
        return self.kv.prefix(0 if self.request.computes_all else num_readable, self.num_known)

    def begin_run(self, num_computed: int) -> None:
        """Continues after `num_computed` tokens with KV; decodes if only the last emitted token has none.

        A hand-off never decodes: it wants one token.
        """
        self._num_computed = num_computed
        is_complete = self.output_ids and num_computed == self.num_known - 1
        decodes = is_complete and not isinstance(self.request, HandOff)
        self.phase = Phase.DECODE if decodes else Phase.PREFILL

    def advance(self, num_tokens: int) -> None:
        """Counts tokens of a chunk as computed."""
        self._num_computed += num_tokens

    def leave(self) -> None:
        """Drops the block table: a sequence that ends or waits has no KV."""
        self.kv.begin(BlockTable())
        self.chunk_end = None
        self._num_computed = 0

    def draw(self, guesses: Seq[int] = ()) -> Draw:
        """Makes the Draw of the token after the known tokens and these guesses."""
        sampling = self.request.sampling
        output_ids = [*self.output_ids, *guesses] if guesses else self.output_ids
        banned = () if len(output_ids) >= sampling.min_tokens else self.ending.early_ids
        return Draw(
            params=sampling,
            choice=self.choice.index,
            prompt_ids=self.request.prompt_ids,
            output_ids=output_ids,
            banned=banned,
            matcher=self.matcher,
        )

    @property
    def candidate(self) -> Candidate:
        """The sequence as batchers see it while it has pages; a fetching sequence has no token to run."""
        num_run = self.num_known if self.phase is Phase.FETCHING else self.num_computed
        table, spare = self.kv.table, self.kv.reserved
        num_known, num_stored = self.num_known - table.num_dropped, num_run - table.num_dropped
        return Candidate(
            handle=self.handle,
            phase=self.phase,
            num_known=num_known,
            num_computed=num_stored,
            num_blocks=len(table),
            num_behind=len(table.behind),
            num_spare=len(spare),
            chunk_end=self._next_stop(num_run),
            standing=self.standing,
        )

    def runs_decoding(self, num_tokens: int) -> bool:
        """Tells whether the next `num_tokens` known tokens run as a decoding row."""
        return num_tokens == 1 and (not self._keeps_phases or self.num_computed >= self.request.num_prompt)

    def _next_stop(self, num_run: int) -> int | None:
        """Returns `chunk_end` or, with roles that stay, the end of the prompt, and behind it of each token."""
        if not self._keeps_phases:
            return self.chunk_end
        stop = self.request.num_prompt if num_run < self.request.num_prompt else num_run + 1
        return (stop if self.chunk_end is None else min(stop, self.chunk_end)) - self.kv.table.num_dropped

    def applicant(self, leader: "Sequence") -> Candidate:
        """Returns the sequence as batchers see it while it waits; a sibling shares the prompt's full blocks.

        Reserved pages count as further tokens, which have run.
        """
        prefix, block_size = self.prefix, self.kv.window.layout.block_size
        num_shared = 0 if leader is self else min(self.request.num_prompt, prefix.num_stored) // block_size
        num_computed, num_more = num_shared * block_size, prefix.num_reserved * block_size
        num_behind = len(self.kv.window.behind(num_computed))
        num_known = self.num_known + num_more - prefix.num_dropped
        return Candidate(
            handle=self.handle,
            phase=self.phase,
            num_known=num_known,
            num_computed=num_computed + num_more,
            num_blocks=num_shared,
            num_behind=num_behind,
            standing=self.standing,
        )

    def tokens(self, start: int, num_tokens: int) -> "array[int]":
        """Slices `num_tokens` known tokens from position `start` on, as u32."""
        tokens = array("I", self.request.prompt_ids[start : start + num_tokens])
        first_output = max(0, start - self.request.num_prompt)
        tokens.extend(self.output_ids[first_output : first_output + num_tokens - len(tokens)])
        return tokens


class SequenceTable:
    """Sequences by request, and by handle while they wait or run; handles grow with arrival.

    So a preempted sequence keeps its place. A request's first sequence is its leader: it computes or fetches the
    prompt, and its siblings find the blocks.
    """

    def __init__(self) -> None:
        self._by_request: dict[AttemptId, list[Sequence]] = {}
        self._by_handle: dict[int, Sequence] = {}
        self._handles = count()
        self._shares = FairShares()

    def __getitem__(self, handle: int) -> Sequence:
        return self._by_handle[handle]

    @property
    def attempts(self) -> Collection[AttemptId]:
        return self._by_request.keys()

    @property
    def num_active(self) -> int:
        """Sequences that wait or run: neither ended nor handing off."""
        return len(self._by_handle)

    @property
    def waiting(self) -> list[Sequence]:
        return [sequence for sequence in self._by_handle.values() if sequence.phase is Phase.WAITING]

    @property
    def admissible(self) -> list[Candidate]:
        """Waiting leaders, and waiting siblings whose prompt is computed, with the blocks that they share."""
        pairs = ((one, self._leader(one)) for one in self.waiting)
        return [
            one.applicant(first) for one, first in pairs if one is first or first.num_computed >= one.request.num_prompt
        ]

    @property
    def running(self) -> list[Sequence]:
        """Sequences with pages: fetching ones, too."""
        return [sequence for sequence in self._by_handle.values() if sequence.phase is not Phase.WAITING]

    def add(self, request: EngineRequest, model: CausalModel) -> None:
        sequences = [Sequence(next(self._handles), request, choice, model) for choice in request.choices]
        self._by_request[request.attempt_id] = sequences
        self._by_handle |= {sequence.handle: sequence for sequence in sequences}
        self._shares.enter(request.root)
        self._shares.learn_output(request.root, request.precedence.output_cost)

    def charge_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        """Charges a sequence's tenant for computed tokens of the prompt."""
        self._shares.defer(sequence.request.root, num_tokens / sequence.request.precedence.weight)
        if sequence.num_computed >= sequence.request.num_prompt:
            self._shares.settle(sequence.request.root)

    def settle(self) -> None:
        """Charges tenants for generated tokens, and brings the standing of each sequence up to date."""
        for sequence in self._by_handle.values():
            self._charge_output(sequence)
        for sequence in self._by_handle.values():
            request = sequence.request
            sequence.standing = self._shares.standing(request.root, request.precedence, sequence.has_started)

    def siblings(self, attempt_id: AttemptId) -> Iterator[Sequence]:
        """Yields a request's sequences that have not ended; none for an unknown request."""
        return (one for one in self._by_request.get(attempt_id, ()) if one.phase is not Phase.ENDED)

    def retire(self, sequence: Sequence) -> None:
        """Forgets the handle of a sequence that has ended or hands off. A second call does nothing."""
        self._charge_output(sequence)
        self._by_handle.pop(sequence.handle, None)

    def remove(self, attempt_id: AttemptId) -> list[Sequence]:
        """Takes a request out and returns its sequences, for the caller to retire."""
        sequences = self._by_request.pop(attempt_id, [])
        if sequences:
            self._shares.settle(sequences[0].request.root)
            self._shares.leave(sequences[0].request.root)
        return sequences

    def _charge_output(self, sequence: Sequence) -> None:
        num_new, sequence.num_charged = len(sequence.output_ids) - sequence.num_charged, len(sequence.output_ids)
        if num_new:
            request = sequence.request
            self._shares.charge(request.root, OUTPUT_COST * num_new / request.precedence.weight)

    def _leader(self, sequence: Sequence) -> Sequence:
        return next(self.siblings(sequence.request.attempt_id))
