"""A worker that says what a test says, when the test says it."""

from typing import Any

from tests.harness.fake_worker import FakeLine, FakeWorker
from wire.convert import error_to_pb, tiers_to_pb
from wire.errors import BatonError
from wire.ids import AttemptId, WorkerId, request_of
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.pools import Role


class ScriptedWorker(FakeWorker):
    """Answers questions while `answers` is set, and of attempts says nothing by itself.

    `begins`, `aborts` and `releases` tell tests what it was asked; `open_calls` counts attempts that have no end yet.
    """

    def __init__(self, worker_id: WorkerId, role: Role, num_arena_blocks: int = 1000) -> None:
        super().__init__(worker_id, role, num_arena_blocks)
        self.answers = True
        self.begins: list[worker_pb2.Begin] = []
        self.aborts: list[AttemptId] = []
        self.releases: list[AttemptId] = []
        self._lines: dict[AttemptId, ScriptedLine] = {}
        self._open: set[AttemptId] = set()

    def connect(self) -> "ScriptedLine":
        self.line = ScriptedLine(self)
        return self.line

    def begun(self, begin: worker_pb2.Begin, line: "ScriptedLine") -> None:
        """Notes an attempt that a router has begun on a line."""
        self.begins.append(begin)
        self._lines[AttemptId(begin.id)] = line
        self._open.add(AttemptId(begin.id))
        self.open_calls = len(self._open)

    def ended(self, attempt: AttemptId) -> None:
        """Notes the end of an attempt."""
        self._open.discard(attempt)
        self.open_calls = len(self._open)

    def lost(self, line: "ScriptedLine") -> None:
        """Notes the end of a line, and so of all that was begun on it."""
        for attempt in [attempt for attempt in self._open if self._lines[attempt] is line]:
            self.ended(attempt)

    def say(
        self,
        *choices: worker_pb2.ChoiceTokens,
        request_id: str = "",
        number: int = 0,
        prompt: dict[str, int] | None = None,
        ends: bool = False,
        error: BatonError | None = None,
    ) -> None:
        """Sends an update of the latest attempt, or of the attempt with this number among its request's here.

        prompt: tokens by tier. error: the attempt ends with it.
        """
        begun = self.begins_of(request_id or request_of(AttemptId(self.begins[-1].id)))[number - 1]
        attempt = AttemptId(begun.id)
        update = worker_pb2.Update(id=begun.id, choices=choices)
        if prompt is not None:
            update.prompt.cached_tokens.extend(tiers_to_pb(prompt))
        if ends or error is not None:
            update.end.SetInParent()
            self.ended(attempt)
        if error is not None:
            update.end.error.CopyFrom(error_to_pb(error))
        self._lines[attempt].say(update)

    def has_open(self, attempt: AttemptId) -> bool:
        """Whether an attempt has no end yet."""
        return attempt in self._open

    def begins_of(self, request_id: str) -> list[worker_pb2.Begin]:
        return [begin for begin in self.begins if request_of(AttemptId(begin.id)) == request_id]


class ScriptedLine(FakeLine):
    """A WorkerEnd that leaves attempts to the test."""

    def __init__(self, worker: ScriptedWorker) -> None:
        super().__init__(worker)
        self._script = worker

    def take(self, request: worker_pb2.ConnectRequest) -> None:
        self._script.aborts.extend(map(AttemptId, request.aborts))
        for attempt in map(AttemptId, request.aborts):
            self._script.ended(attempt)
        self._script.releases.extend(map(AttemptId, request.releases))
        if not self._script.answers:
            request.ClearField("asks")
        super().take(request)

    def begin(self, begin: worker_pb2.Begin) -> None:
        self._script.begun(begin, self)

    def close(self) -> None:
        super().close()
        self._script.lost(self)


def tokens(text: str, position: int, index: int = 0, **ending: Any) -> worker_pb2.ChoiceTokens:
    """One token a byte; `position` is the first one's among the choice's output."""
    return worker_pb2.ChoiceTokens(index=index, first_position=position, token_ids=list(text.encode()), **ending)


def chunk(gained: str, index: int = 0, **values: Any) -> pb.Chunk:
    """The chunk that a client gets of `tokens(gained, ...)`; its text is the same unless another is given."""
    return pb.Chunk(index=index, token_ids=list(gained.encode()), **{"text": gained, **values})


def so_far(text: str, index: int = 0) -> worker_pb2.UnfinishedChoice:
    """The choice that a worker goes on with after this text."""
    return worker_pb2.UnfinishedChoice(index=index, output=pb.TokenIds(ids=list(text.encode())))
