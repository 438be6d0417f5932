"""The sequences of all requests of an engine, in order of arrival."""

from collections.abc import Collection, Iterator
from itertools import count

from engine.model.batch import Model
from engine.request import EngineRequest
from engine.schedule.batcher import Candidate, Phase
from engine.sequence import Sequence
from wire.ids import AttemptId


class SequenceTable:
    """Sequences by request, and by handle while they wait or run; handles grow with arrival.

    So a preempted sequence keeps its place.
    The first of a request's sequences is its leader: it computes or fetches the prompt, and its siblings find it.
    """

    def __init__(self) -> None:
        self._by_request: dict[AttemptId, list[Sequence]] = {}
        self._by_handle: dict[int, Sequence] = {}
        self._handles = count()

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
        """Waiting leaders, and waiting followers that would find their prompt, with the blocks that they share."""
        pairs = ((one, self._leader(one)) for one in self.waiting)
        return [one.applicant(first) for one, first in pairs if one is first or first.num_computed >= one.num_prompt]

    @property
    def running(self) -> list[Sequence]:
        """Sequences with pages: fetching ones, too."""
        return [sequence for sequence in self._by_handle.values() if sequence.phase is not Phase.WAITING]

    def add(self, request: EngineRequest, model: Model) -> None:
        sequences = [Sequence(next(self._handles), request, choice, model) for choice in request.choices]
        self._by_request[request.attempt_id] = sequences
        self._by_handle |= {sequence.handle: sequence for sequence in sequences}

    def siblings(self, attempt_id: AttemptId) -> Iterator[Sequence]:
        """Yields a request's sequences that have not ended; none for an unknown request."""
        return (one for one in self._by_request.get(attempt_id, ()) if one.phase is not Phase.ENDED)

    def retire(self, sequence: Sequence) -> None:
        """Forgets the handle of a sequence that neither waits nor runs any more. A second call does nothing."""
        self._by_handle.pop(sequence.handle, None)

    def remove(self, attempt_id: AttemptId) -> list[Sequence]:
        """Takes a request out and returns its sequences, for the caller to retire."""
        return self._by_request.pop(attempt_id, [])

    def _leader(self, sequence: Sequence) -> Sequence:
        return next(self.siblings(sequence.request.attempt_id))
