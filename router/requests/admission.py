"""Which requests may come in: bounds on how many are open, and on how many wait for their first token. Pure."""

from router.config import AdmissionBounds
from wire.errors import Overloaded, RequestExists, reached
from wire.ids import QualifiedId


class Admission:
    """Open requests by id."""

    def __init__(self, bounds: AdmissionBounds) -> None:
        self._bounds = bounds
        self._queued_bytes: dict[QualifiedId, int] = {}
        self._num_queued_bytes = 0
        self._running: set[QualifiedId] = set()

    @property
    def retry_after_s(self) -> float:
        return self._bounds.retry_after_s

    @property
    def num_queued(self) -> int:
        return len(self._queued_bytes)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def require_room(self) -> None:
        """Raises Overloaded if no request may come in, however small it is."""
        num_open = self.num_queued + self.num_running + 1
        self._require(num_open, self._bounds.max_open_requests, "requests are open", "router.max_open_requests")
        max_queued = self._bounds.max_queued_requests
        self._require(self.num_queued + 1, max_queued, "requests are queued", "router.max_queued_requests")

    def admit(self, request_id: QualifiedId, num_bytes: int) -> None:
        """Raises RequestExists if the id is taken, Overloaded if a bound is reached."""
        if request_id in self._queued_bytes or request_id in self._running:
            raise RequestExists("a request of that id is running", request_id=request_id)
        self.require_room()
        num_queued, max_queued = self._num_queued_bytes + num_bytes, self._bounds.max_queued_bytes
        self._require(num_queued, max_queued, "bytes of requests may be queued", "router.max_queued_bytes")
        self._queued_bytes[request_id] = num_bytes
        self._num_queued_bytes += num_bytes

    def started(self, request_id: QualifiedId) -> None:
        """The request has its first token."""
        if request_id in self._queued_bytes:
            self._num_queued_bytes -= self._queued_bytes.pop(request_id)
            self._running.add(request_id)

    def leave(self, request_id: QualifiedId) -> None:
        """The request is over."""
        self._num_queued_bytes -= self._queued_bytes.pop(request_id, 0)
        self._running.discard(request_id)

    def check(self) -> list[str]:
        """Returns violated invariants: the bytes counted are the bytes of queued requests."""
        num_bytes = sum(self._queued_bytes.values())
        if num_bytes == self._num_queued_bytes:
            return []
        return [f"{self._num_queued_bytes} bytes are counted as queued, {num_bytes} are"]

    def _require(self, number: int, limit: int, what: str, setting: str) -> None:
        if number > limit:
            raise Overloaded(reached(limit, what, setting), self._bounds.retry_after_s)
