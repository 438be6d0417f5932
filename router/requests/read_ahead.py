"""The read ahead of a prompt's blocks by a decode worker, while a prefill worker computes the rest.

    prefill ── blocks 0 to n - 1 are stored ──▶ ReadAhead ── Prefetch ──▶ decode worker: cached pages, without an owner

Nothing depends on it: the attempt begins at a decode worker as it would, which finds the blocks on its device, or not.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from router.placement import Placement, Route
from router.requests.prompt import PreparedPrompt
from router.workers.members import Member
from wire.ids import AttemptId, NamespaceRoot, WorkerId
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2

MAX_BLOCKS = 256
"""Blocks of one message, so that it is short."""


class ReadAhead:
    """The read ahead of one attempt, by a decode worker that the usual rule chooses when the first blocks are stored.

    route: the rest of the attempt's way, behind prefill. The request counts as the worker's from the choice on, until
    `running` ends.
    """

    def __init__(
        self, attempt: AttemptId, root: NamespaceRoot, prompt: PreparedPrompt, route: Route, placement: Placement
    ) -> None:
        self._attempt = attempt
        self._root = root
        self._prompt = prompt
        self._route = route
        self._placement = placement
        self._member: Member | None = None
        self._num_sent = 0
        self._work = ExitStack()

    @contextmanager
    def running(self) -> Iterator[Callable[[int], None]]:
        """Yields the function that takes the number of the prompt's first blocks that are stored."""
        with self._work:
            yield self._stored

    @property
    def sent(self) -> Mapping[WorkerId, int]:
        """The prompt's tokens whose blocks the decode worker was told to read."""
        return {self._member.id: self._num_sent * self._placement.block_size} if self._member else {}

    def _stored(self, num_blocks: int) -> None:
        """Passes newly stored blocks on."""
        if self._member is None:
            self._member = self._placement.likely_decode(self._route)
            if self._member is None:
                return
            num_choices = self._prompt.sampling.n
            self._work.enter_context(self._member.assigned(num_choices, num_choices * self._route.num_prompt_tokens))
        num_blocks = min(num_blocks, len(self._prompt.prompt_ids) // self._placement.block_size)
        while self._num_sent < num_blocks:
            stop = min(self._num_sent + MAX_BLOCKS, num_blocks)
            if not self._member.line.prefetch(self._order(self._member, self._num_sent, stop)):
                return  # the rest goes with the next ones
            self._num_sent = stop

    def _order(self, member: Member, start: int, stop: int) -> worker_pb2.Prefetch:
        size, prompt = self._placement.block_size, self._prompt
        return worker_pb2.Prefetch(
            id=self._attempt,
            namespace_root=self._root,
            tokens=pb.TokenIds(ids=prompt.prompt_ids[start * size : stop * size]),
            first_block=start,
            parent=prompt.keys[start - 1] if start else b"",
            public_root=prompt.public.root if prompt.public else b"",
            num_public_blocks=prompt.public.num_blocks if prompt.public else 0,
            block_addresses=self._placement.block_addresses(self._route, member),
        )
