"""What a lifecycle wants done."""

from dataclasses import dataclass

from engine.request import EngineRequest
from wire.errors import BatonError
from wire.ids import RequestId
from worker.update import Update


@dataclass(frozen=True)
class AddToEngine:
    request: EngineRequest


@dataclass(frozen=True)
class AbortInEngine:
    request_id: RequestId


@dataclass(frozen=True)
class ReleaseHold:
    """The prompt's blocks need not be kept for this request any longer."""

    request_id: RequestId


@dataclass(frozen=True)
class Send:
    """Tells the caller something; a caller that reads slowly gets several updates as one."""

    update: Update


@dataclass(frozen=True)
class Close:
    """The call is over, after everything sent so far. The last instruction of each life, and only there."""

    error: BatonError | None = None


Instruction = AddToEngine | AbortInEngine | ReleaseHold | Send | Close
