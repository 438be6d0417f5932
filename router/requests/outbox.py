"""The outbox: messages that are ready for a client and not yet taken by its stream."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from router.observe.journal import RequestJournal
from wire.errors import BatonError, Overloaded
from wire.ids import RequestId
from wire.load.limit import Limit
from wire.pb import inference_pb2 as pb


class Outbox:
    """A bounded queue for one reader, ended by one last message or one error.

    A slow reader gets fewer and larger messages: a chunk joins its choice's waiting chunk. begun: ends once a worker
    has the prompt, with the prompt's length; with 0 if the end comes first. adapted: from then on the changes of the
    messages, as in Rendered. max_tokens: bounds the waiting tokens; a message without tokens counts as one.
    writing_since: the loop's time when the reader last took a message, which it may still be writing; None while it
    waits. It shows messages that gRPC took and the client did not read.
    """

    def __init__(self, max_tokens: int) -> None:
        self.writing_since: float | None = None
        what = "tokens wait for a client that reads more slowly than they come"
        self._tokens = Limit(max_tokens, what, "router.max_buffered_tokens", None)
        self._events: deque[pb.GenerateResponse] = deque()
        self._chunks: dict[int, pb.GenerateResponse] = {}
        self._error: Exception | None = None
        self._closed = False
        self._reader: asyncio.Future[None] | None = None
        self.adapted: Sequence[str] = ()
        self.begun: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def begin(self, num_prompt_tokens: int) -> None:
        """Ends the wait for `begun`; the first call counts."""
        if not self.begun.done():
            self.begun.set_result(num_prompt_tokens)

    def put(self, event: pb.GenerateResponse) -> None:
        """Adds an event. Raises Overloaded if the waiting tokens reach the limit: the reader is too slow."""
        self._tokens.require()
        waiting = self._chunks.get(event.chunk.index) if event.HasField("chunk") else None
        if waiting is None:
            self._append(event)
        else:
            self._tokens.release(_weight(waiting))
            _join(waiting.chunk, event.chunk)
            self._tokens.exceed(_weight(waiting))

    def complete(self, last: pb.GenerateResponse) -> None:
        """Adds the last message, which always has room."""
        self._append(last)
        self._close()

    def fail(self, error: Exception) -> None:
        """Ends with this error, after the waiting messages."""
        self._error = error
        self._close()

    def _append(self, event: pb.GenerateResponse) -> None:
        self._events.append(event)
        self._tokens.exceed(_weight(event))  # of one event, or of the last
        if event.HasField("chunk"):
            self._chunks[event.chunk.index] = event
        self._wake()

    def _take(self) -> pb.GenerateResponse:
        event = self._events.popleft()
        self._tokens.release(_weight(event))
        if event.HasField("chunk"):
            del self._chunks[event.chunk.index]
        return event

    def _close(self) -> None:
        self._closed = True
        self.begin(0)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def __aiter__(self) -> "Outbox":
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        loop = asyncio.get_running_loop()
        self.writing_since = None
        while not self._events and not self._closed:
            self._reader = loop.create_future()
            await self._reader
        self.writing_since = loop.time()
        if self._events:
            return self._take()
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration


class ReplyWriter:
    """The writer of an answer's messages to the client.

    on_gain: notes a choice's gained tokens, and the time. on_first_token: called before the first chunk is sent. stop:
    ends the request with an error.
    """

    def __init__(
        self,
        request_id: RequestId,
        outbox: Outbox,
        journal: RequestJournal,
        on_gain: Callable[[int, int, float], None],
        on_first_token: Callable[[], None],
        stop: Callable[[BatonError], None],
        fingerprint: str = "",
    ) -> None:
        """fingerprint: the answering model's, which the first message tells."""
        self._fingerprint = fingerprint
        self._journal = journal
        self._on_gain = on_gain
        self._request_id = request_id
        self._outbox = outbox
        self._on_first_token = on_first_token
        self._stop = stop
        self._loop = asyncio.get_running_loop()

    def adapt(self, words: Sequence[str]) -> None:
        """Keeps the changes of the client's messages, which `begin` sends."""
        self._outbox.adapted = words

    def begin(self, num_prompt_tokens: int) -> None:
        """Tells the client that a worker has its prompt."""
        self._outbox.begin(num_prompt_tokens)

    def send(self, chunk: pb.Chunk) -> None:
        if self._journal.ttft_s is None:
            self._on_first_token()
        self._on_gain(chunk.index, len(chunk.token_ids), self._loop.time())
        self._put(pb.GenerateResponse(request_id=self._request_id, chunk=chunk))

    def send_prompt(self, part: pb.PromptPart) -> None:
        self._put(pb.GenerateResponse(request_id=self._request_id, prompt=part))

    def _put(self, response: pb.GenerateResponse) -> None:
        response.fingerprint, self._fingerprint = self._fingerprint, ""
        try:
            self._outbox.put(response)
        except Overloaded as refusal:
            self._stop(refusal)


def _weight(event: pb.GenerateResponse) -> int:
    return max(1, len(event.chunk.token_ids))


def _join(chunk: pb.Chunk, later: pb.Chunk) -> None:
    """Appends a choice's next chunk, in place."""
    chunk.token_ids.extend(later.token_ids)
    chunk.text += later.text
    chunk.logprobs.extend(later.logprobs)
    if later.HasField("ended"):
        chunk.ended.CopyFrom(later.ended)
