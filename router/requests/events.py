"""What happens to a request (events, past participles), and what is then to be done for it (instructions, imperatives).

Events that a worker or a choice of workers causes carry the number of the attempt they belong to.
"""

from dataclasses import dataclass

from wire.errors import BatonError
from wire.ids import WorkerId
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.sampling import SamplingParams


@dataclass(frozen=True)
class Tokenized:
    """The prompt is known in tokens, and the settings are complete."""

    num_prompt_tokens: int
    sampling: SamplingParams


@dataclass(frozen=True)
class TrialBegun:
    """It is the request's turn to be tried alone."""

    attempt: int


@dataclass(frozen=True)
class PrefillChosen:
    attempt: int
    worker: WorkerId


@dataclass(frozen=True)
class NoPrefillWorker:
    """The pool of prefill workers is empty: a decode worker prefills."""

    attempt: int


@dataclass(frozen=True)
class PrefillAnswered:
    attempt: int
    response: worker_pb2.PrefillResponse


@dataclass(frozen=True)
class DecodeChosen:
    attempt: int
    worker: WorkerId


@dataclass(frozen=True)
class DecodeUpdated:
    attempt: int
    update: worker_pb2.DecodeUpdate


@dataclass(frozen=True)
class DecodeEnded:
    """The worker closed the stream without an error."""

    attempt: int


@dataclass(frozen=True)
class AttemptFailed:
    """The call of this attempt, or the wait for a worker, ended with an error."""

    attempt: int
    error: BatonError


@dataclass(frozen=True)
class Stopped:
    """The request is over whatever its workers do: client gone or slow, aborted, out of time, prompt refused, a bug."""

    error: BatonError


Event = (
    Tokenized
    | TrialBegun
    | PrefillChosen
    | NoPrefillWorker
    | PrefillAnswered
    | DecodeChosen
    | DecodeUpdated
    | DecodeEnded
    | AttemptFailed
    | Stopped
)


@dataclass(frozen=True)
class Tokenize:
    pass


@dataclass(frozen=True)
class BeginTrial:
    """The attempt may be the last: it waits until no other such attempt is under way."""

    attempt: int


@dataclass(frozen=True)
class EndTrial:
    """The attempt leads somewhere, or is over."""


@dataclass(frozen=True)
class PutInQuarantine:
    """The prompt is not to be tried again for a while."""


@dataclass(frozen=True)
class ChoosePrefill:
    attempt: int


@dataclass(frozen=True)
class StartPrefill:
    attempt: int
    worker: WorkerId


@dataclass(frozen=True)
class ChooseDecode:
    attempt: int


@dataclass(frozen=True)
class StartDecode:
    """`choices` are the unfinished ones, each with what the client has of it."""

    attempt: int
    worker: WorkerId
    choices: tuple[worker_pb2.ChoiceSoFar, ...]


@dataclass(frozen=True)
class CancelCall:
    """Ends whatever is under way for the request: a wait or a call."""


@dataclass(frozen=True)
class KeepHold:
    """The prompt's blocks are in the arena under a hold; renew it until it is released."""


@dataclass(frozen=True)
class DropHold:
    pass


@dataclass(frozen=True)
class SendChunk:
    chunk: pb.Chunk


@dataclass(frozen=True)
class SendComplete:
    """The last message but for its timeline, of which it has the workers that served."""

    complete: pb.Complete
    prefill_worker: WorkerId | None
    decode_worker: WorkerId | None


@dataclass(frozen=True)
class SendError:
    error: BatonError


Instruction = (
    Tokenize
    | BeginTrial
    | EndTrial
    | PutInQuarantine
    | ChoosePrefill
    | StartPrefill
    | ChooseDecode
    | StartDecode
    | CancelCall
    | KeepHold
    | DropHold
    | SendChunk
    | SendComplete
    | SendError
)
