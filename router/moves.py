"""The moves of queued prompts to a prefill worker that computes them sooner: the choice, pure, and their record.

    a worker is READY, or has computed its last prompt ──▶ choose_moves ──▶ recall ──▶ worker ──▶ PromptReturned
                                                                            another attempt, placed anew ◀──┘

The last prompts of the longest queues move, and the prompts before them are computed no later. The worker decides,
between two steps: it keeps a prompt that it has begun, so nothing is computed twice. A prompt that has moved stays at
its new worker.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from router.workers.members import Member
from wire.ids import WorkerId
from wire.load.fairness import never

LEAST_GAIN_S, LEAST_GAIN_SHARE = 0.05, 0.1
"""The least time that a move saves, and its least share of the time until the prompt would be computed."""
MAX_MOVES = 32
"""The most prompts that are recalled for a worker at once; once it has computed these, others are."""


@dataclass(frozen=True, eq=False, kw_only=True)
class QueuedPrompt:
    """A prompt at a prefill worker. num_tokens: its tokens that no worker is thought to have.

    priority: the lower is computed first. missing: counts the tokens that another worker computes if the prompt moves
    there. recall: asks the worker to return the prompt. may_move: whether the router may recall it. is_deferred: tells
    whether it is behind others of its priority now.
    """

    member: Member
    num_tokens: int
    priority: int
    missing: Callable[[WorkerId], int]
    recall: Callable[[], None]
    may_move: bool = True
    is_deferred: Callable[[], bool] = never


def choose_moves(queues: Sequence[Sequence[QueuedPrompt]], destination: WorkerId, token_s: float) -> list[QueuedPrompt]:
    """Chooses the prompts to recall for an idle worker, in the order in which it computes them.

    queues: prompts by worker, in order of arrival. token_s: seconds of prefill a token.
    """
    movable = [
        sorted((one for one in queue if one.may_move), key=lambda one: (one.priority, one.is_deferred()))
        for queue in queues
    ]
    left = [sum(one.num_tokens for one in queue) for queue in queues]
    moves, num_moved_tokens = list[QueuedPrompt](), 0
    while len(moves) < MAX_MOVES and (candidates := [queue for queue, prompts in enumerate(movable) if prompts]):
        queue = max(candidates, key=left.__getitem__)
        prompt = movable[queue].pop()
        num_there = num_moved_tokens + prompt.missing(destination)
        if (left[queue] - num_there) * token_s >= max(LEAST_GAIN_S, LEAST_GAIN_SHARE * left[queue] * token_s):
            num_moved_tokens = num_there
            moves.append(prompt)
        left[queue] -= prompt.num_tokens
    return moves[::-1]


class PromptMoves:
    """The prompts at the prefill workers of a router, by worker in order of arrival, and the recalled prompts.

    ready: lists the workers that take prompts. full_nodes: the nodes where prompts wait for room.
    """

    def __init__(
        self, ready: Callable[[], Sequence[Member]] = tuple, full_nodes: Callable[[], Set[str]] = frozenset
    ) -> None:
        self._ready = ready
        self._full_nodes = full_nodes
        self._queues: dict[WorkerId, dict[QueuedPrompt, None]] = {}
        self._recalled: dict[QueuedPrompt, WorkerId] = {}

    @contextmanager
    def queued(self, prompt: QueuedPrompt) -> Iterator[None]:
        """Counts a prompt as its worker's within the context; others are recalled for a worker that has no more."""
        queue = self._queues.setdefault(prompt.member.id, {})
        queue[prompt] = None
        try:
            yield
        finally:
            del queue[prompt]
            self._recalled.pop(prompt, None)
            if not queue:
                del self._queues[prompt.member.id]
                # a prompt recalled for this worker may stay where it is, and is asked for anew if that still helps
                self._recalled = {one: to for one, to in self._recalled.items() if to != prompt.member.id}
                self.fill()

    def fill(self) -> None:
        """Recalls prompts for each worker that has none, and that waits for no recalled prompt."""
        if max(map(len, self._queues.values()), default=0) < 2:
            return
        busy, full, ready = {*self._queues, *self._recalled.values()}, self._full_nodes(), self._ready()
        paces_s = [one.prefill_token_s for one in ready if one.prefill_token_s is not None]
        for member in ready if paces_s else ():
            if not (member.id in busy or member.is_silent or member.info.node_id in full):
                self._recall_for(member, median(paces_s))

    def check(self) -> list[str]:
        """Lists prompts at workers; empty if no request is open."""
        return [f"{len(queue)} prompts are queued at {worker}" for worker, queue in self._queues.items()]

    def _recall_for(self, member: Member, token_s: float) -> None:
        queues = [
            [one for one in queue if one.member.version == member.version and one not in self._recalled]
            for queue in self._queues.values()
        ]
        for prompt in choose_moves(queues, member.id, token_s):
            self._recalled[prompt] = member.id
            prompt.recall()
