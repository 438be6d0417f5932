"""The life of one request, decided purely: events in, instructions out; no clock, no I/O.

    Tokenized ──▶ choose prefill ──▶ prefill ──▶ choose decode ──▶ decode ──▶ complete
                       │ no worker                  ▲   ▲ │
                       └────────────────────────────┘   └─┘ worker lost: the next attempt, with all tokens so far

An attempt is one way through these steps. It ends when its worker is lost, and what it still says is dropped. Once any
token is out, the next attempt goes straight to a decode worker: it fetches what is published and computes the rest.
What may be the last attempt waits for its trial first, where no other such request is tried with it.
"""

from collections.abc import Callable, Iterable, Mapping

from router.observe.record import RequestSummary
from router.requests.attempts import MAX_ATTEMPTS, Attempts
from router.requests.choice_stream import ChoiceStream
from router.requests.events import (
    AttemptFailed,
    BeginTrial,
    CancelCall,
    ChooseDecode,
    ChoosePrefill,
    DecodeChosen,
    DecodeEnded,
    DecodeUpdated,
    DropHold,
    EndTrial,
    Event,
    Instruction,
    KeepHold,
    NoPrefillWorker,
    PrefillAnswered,
    PrefillChosen,
    PutInQuarantine,
    SendChunk,
    SendComplete,
    SendError,
    StartDecode,
    StartPrefill,
    Stopped,
    Tokenize,
    Tokenized,
    TrialBegun,
)
from text.incremental import IncrementalText
from wire.convert import tiers_from_pb, tiers_to_pb
from wire.errors import AttemptsExhausted, BatonError, Cancelled, RequestExists, Unavailable, WireError
from wire.ids import WorkerId
from wire.pb import inference_pb2 as pb
from wire.pb import worker_pb2
from wire.sampling import SamplingParams

_LOSSES = (Unavailable, Cancelled, WireError, RequestExists)
"""Errors that say something of the worker and nothing of the request: another attempt may do better.

RequestExists: the id was used before, and the worker has not quite left that request; a later attempt ousts it there.
"""


class RequestLifecycle:
    """`new_text` makes the incremental text of one choice from the request's settings."""

    def __init__(self, new_text: Callable[[SamplingParams], IncrementalText]) -> None:
        self.ended = False
        self._new_text = new_text
        self._attempts = Attempts()
        self._is_on_trial = False
        self._num_prompt_tokens = 0
        self._seed = 0
        self._choices: list[ChoiceStream] = []
        self._cached: Mapping[str, int] | None = None
        self._prefill_worker: WorkerId | None = None
        self._decode_worker: WorkerId | None = None
        self._todo: list[Instruction] = []

    @property
    def summary(self) -> RequestSummary:
        return RequestSummary(
            self._num_prompt_tokens,
            self._num_tokens,
            self._cached,
            self._prefill_worker,
            self._decode_worker,
            self._attempts.num_begun,
        )

    def start(self) -> list[Instruction]:
        """What a new request begins with."""
        return [Tokenize()]

    def handle(self, event: Event) -> list[Instruction]:
        """What is to be done now, in order. What former attempts say, and anything after the end, asks for nothing."""
        if self.ended or getattr(event, "attempt", self._attempts.number) != self._attempts.number:
            return []
        self._todo = []
        self._take(event)
        return self._todo

    def _take(self, event: Event) -> None:
        match event:
            case Tokenized(num_prompt_tokens, sampling):
                self._open(num_prompt_tokens, sampling)
            case TrialBegun():
                self._todo.append(self._first_step())
            case PrefillChosen(attempt, worker):
                self._prefill_worker = worker
                self._todo.append(StartPrefill(attempt, worker))
            case NoPrefillWorker(attempt):
                self._prefill_worker = None
                self._todo.append(ChooseDecode(attempt))
            case PrefillAnswered(_, response):
                self._prefilled(response)
            case DecodeChosen(attempt, worker):
                self._decode_worker = worker
                unfinished = tuple(choice.so_far for choice in self._choices if choice.finish is None)
                self._todo.append(StartDecode(attempt, worker, unfinished))
            case DecodeUpdated(_, update):
                self._decoded(update)
            case DecodeEnded():
                self._attempt_over(WireError("a worker closed its stream before every choice had ended"))
            case AttemptFailed(_, error):
                self._attempt_over(error)
            case Stopped(error):
                self._end(SendError(error))

    def _open(self, num_prompt_tokens: int, sampling: SamplingParams) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._seed = sampling.seed
        self._choices = [ChoiceStream(index, self._new_text(sampling)) for index in range(sampling.n)]
        self._todo.append(ChoosePrefill(self._attempts.number))

    def _prefilled(self, response: worker_pb2.PrefillResponse) -> None:
        self._cached = tiers_from_pb(response.cached_tokens)
        if not self._accept(response.choices):
            self._attempt_over(WireError("a worker skipped tokens"))
        elif self._all_ended:
            self._complete()
        else:
            self._todo += [KeepHold(), ChooseDecode(self._attempts.number)]

    def _decoded(self, update: worker_pb2.DecodeUpdate) -> None:
        if update.HasField("fetched"):
            self._cached = tiers_from_pb(update.fetched.fetched_tokens) if self._cached is None else self._cached
            self._todo.append(DropHold())
        if not self._accept(update.choices):
            self._attempt_over(WireError("a worker skipped tokens"))
        elif self._all_ended and self._worker_goes_on:
            self._complete()

    def _accept(self, gained: Iterable[worker_pb2.ChoiceTokens]) -> bool:
        """Takes tokens in order; False at the first that leave a gap or belong to no choice."""
        for tokens in gained:
            choice = self._choices[tokens.index] if tokens.index < len(self._choices) else None
            if choice is None or not choice.continues(tokens):
                return False
            chunk = choice.accept(tokens)
            if chunk is not None:
                self._todo.append(SendChunk(chunk))
        if self._is_on_trial and not self._attempts.is_in_vain(self._num_tokens):
            self._end_trial()
        return True

    @property
    def _num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self._choices)

    @property
    def _all_ended(self) -> bool:
        return bool(self._choices) and all(choice.finish is not None for choice in self._choices)

    @property
    def _worker_goes_on(self) -> bool:
        """A stop string ends a choice here only; one that its worker ended too is followed by the end of the stream."""
        return any(choice.finish is not None and choice.finish.HasField("stop_string") for choice in self._choices)

    def _attempt_over(self, error: BatonError) -> None:
        if self._all_ended:
            self._complete()
        elif not isinstance(error, _LOSSES):
            self._end(SendError(error))
        else:
            self._attempts.begin_next(error, self._num_tokens)
            self._try_again()

    def _try_again(self) -> None:
        if self._attempts.are_exhausted:
            self._todo.append(PutInQuarantine())
            self._end(SendError(AttemptsExhausted(f"{MAX_ATTEMPTS} workers were lost while they served this request")))
        elif self._attempts.is_last:
            # Who waits for a trial must not keep the arena from the one that is on trial.
            self._is_on_trial = True
            self._todo += [CancelCall(), DropHold(), BeginTrial(self._attempts.number)]
        else:
            self._todo += [CancelCall(), self._first_step()]

    def _first_step(self) -> ChoosePrefill | ChooseDecode:
        return (ChooseDecode if self._num_tokens else ChoosePrefill)(self._attempts.number)

    def _end_trial(self) -> None:
        self._is_on_trial = False
        self._todo.append(EndTrial())

    def _complete(self) -> None:
        usage = pb.Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_tokens,
            cached_tokens=tiers_to_pb(self._cached or {}),
        )
        finishes = [choice.finish for choice in self._choices if choice.finish is not None]
        complete = pb.Complete(choices=finishes, usage=usage, seed=self._seed)
        self._end(SendComplete(complete, self._prefill_worker, self._decode_worker))

    def _end(self, last: SendComplete | SendError) -> None:
        self.ended = True
        if self._is_on_trial:
            self._end_trial()
        self._todo += [CancelCall(), DropHold(), last]
