"""Every error that crosses a process, and its one mapping to gRPC and HTTP.

BatonError                INTERNAL             500
├── InvalidRequest        INVALID_ARGUMENT     400   names the parameter
│   └── ContextLengthExceeded                        prompt and output do not fit into the context
├── Unsupported           UNIMPLEMENTED        400
├── ModelNotFound         NOT_FOUND            404
├── RequestNotFound       NOT_FOUND            404
├── WorkerNotFound        NOT_FOUND            404
├── RequestExists         ALREADY_EXISTS       409
├── Overloaded            RESOURCE_EXHAUSTED   429   may carry a delay after which to retry
├── Unauthenticated       UNAUTHENTICATED      401
├── PermissionDenied      PERMISSION_DENIED    403   a key without the scope
├── PairRefused           FAILED_PRECONDITION  400   workers that do not fit together
├── Unavailable           UNAVAILABLE          503
│   ├── WorkerLeaving                                of its own accord; others serve what it gives back
│   │   └── PromptReturned                           from a queue, for another worker computes it sooner
│   ├── RouterLeaving                                likewise; another router goes on with its streams
│   ├── ModelReplaced                                a roll replaced the model amid the answer, whose workers died
│   └── Unreachable                                  no server of ours has said it
├── DeadlineExceeded      DEADLINE_EXCEEDED    504
├── Cancelled             CANCELLED            499
├── AttemptsExhausted     ABORTED              409   the request outlived as many workers as it may
├── Overtaken             ABORTED              409   a later order of the operator is in force
├── NonFiniteLogits       INTERNAL             500   NaN or infinity from the model; cached KV may be why
├── WireError             INTERNAL             500   a message or frame of ours that cannot be what it claims
│   └── ForgedFrame                                  a frame that no process with the secret has made
├── StoreError            INTERNAL             500   a tier failed; callers count a miss
└── ConfigError           FAILED_PRECONDITION  400   refused at start, exit code 78
    └── ModelError                                   a model folder that is not one
"""

import logging
import secrets
from dataclasses import asdict, dataclass, fields
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Status:
    """An error seen from outside: gRPC code name, HTTP status, and whether the same request may succeed later."""

    grpc: str
    http: int
    retryable: bool


class BatonError(Exception):
    """The root. `message` is fit for clients: no paths, no exception text of libraries, at most 64 chars of input."""

    status = Status("INTERNAL", 500, False)
    exit_code = 1
    timeline: Any = None
    """Timeline of the request that the error ended, a message or baton's `Timeline`; None if it was not let in."""

    def __init__(self, message: str, **ids: str) -> None:
        super().__init__(message)
        self.message = message
        self.ids = ids

    def __reduce__(self) -> tuple[object, ...]:
        """Makes an error picklable for Ray, whatever arguments its class takes."""
        return _revive, (type(self), self.message, vars(self))

    @property
    def reason(self) -> str:
        """Stable, upper-case name for ErrorInfo, e.g. INVALID_REQUEST."""
        name = type(self).__name__
        return "".join("_" + c if c.isupper() and i else c for i, c in enumerate(name)).upper()


def _revive(cls: type[BatonError], message: str, values: dict[str, object]) -> BatonError:
    error = cls.__new__(cls, message)
    error.__dict__.update(values)
    return error


class InvalidRequest(BatonError):
    """A parameter of the request is wrong."""

    status = Status("INVALID_ARGUMENT", 400, False)
    exit_code = 2

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}", param=param)


def require(valid: object, param: str, message: str) -> None:
    """Raises InvalidRequest, for the field `param`, unless it is valid."""
    if not valid:
        raise InvalidRequest(param, message)


def require_setting(holds: object, name: str, what: str) -> None:
    """Raises ConfigError, for the setting `name` that must be `what`, unless that holds."""
    if not holds:
        raise ConfigError(f"{name} must be {what}")


@dataclass(frozen=True)
class Lengths:
    """Tokens that do not fit. prompt: a lower bound. output: as asked for, 0 if the prompt alone is too long."""

    prompt: int
    output: int
    limit: int


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output do not fit into the model's context, or into the smallest pool."""

    def __init__(self, param: str, message: str, lengths: Lengths) -> None:
        super().__init__(param, message)
        self.ids |= {f"{name}_tokens": str(number) for name, number in asdict(lengths).items()}

    @property
    def lengths(self) -> Lengths | None:
        """The lengths, which travel as ids; None from a process that sends no such ids."""
        told = [self.ids.get(f"{one.name}_tokens") for one in fields(Lengths)]
        return Lengths(*map(int, filter(None, told))) if all(told) else None


class Unsupported(BatonError):
    """A known feature that is not offered."""

    status = Status("UNIMPLEMENTED", 400, False)


class ModelNotFound(BatonError):
    """No model of that name is served."""

    status = Status("NOT_FOUND", 404, False)


class RequestNotFound(BatonError):
    """No such request, or not the caller's."""

    status = Status("NOT_FOUND", 404, False)


class WorkerNotFound(BatonError):
    """No worker of that id."""

    status = Status("NOT_FOUND", 404, False)


class RequestExists(BatonError):
    """A request of that id is running."""

    status = Status("ALREADY_EXISTS", 409, False)


FIXED = "fixed"
"""In place of a setting: the limit has none."""


def reached(limit: int, what: str, setting: str = FIXED) -> str:
    """Writes that a limit is reached, as in "2,048 requests are open, the limit (router.max_open_requests)"."""
    return f"{limit:,} {what}, the limit ({setting})"


class Overloaded(BatonError):
    """A bound is reached; retry after `retry_after_s`."""

    status = Status("RESOURCE_EXHAUSTED", 429, True)

    def __init__(self, message: str, retry_after_s: float | None = None, **ids: str) -> None:
        super().__init__(message, **ids)
        self.retry_after_s = retry_after_s


class Unauthenticated(BatonError):
    """The call lacks a valid key, or the cluster's token."""

    status = Status("UNAUTHENTICATED", 401, False)


class PermissionDenied(BatonError):
    """The key is valid, and does not open this."""

    status = Status("PERMISSION_DENIED", 403, False)


class PairRefused(BatonError):
    """Two workers differ in fingerprint, layout or protocol version."""

    status = Status("FAILED_PRECONDITION", 400, False)


class Unavailable(BatonError):
    """No process is there to serve it now."""

    status = Status("UNAVAILABLE", 503, True)


class WorkerLeaving(Unavailable):
    """The worker gives a request back, which another worker serves.

    It drains or goes away, or its router recalled the prompt (PromptReturned).
    """


class PromptReturned(WorkerLeaving):
    """The worker stays, and has returned a prompt that it had not begun: its router had recalled it."""


class RouterLeaving(Unavailable):
    """The router stops, or has just started, and has nothing against the request: another router goes on with it."""


class ModelReplaced(Unavailable):
    """The last worker with the model of an answer is gone, amid a roll to another: no other can go on with it."""


class Unreachable(Unavailable):
    """The server that was called does not answer, or the connection to it broke."""


class DeadlineExceeded(BatonError):
    """The request's deadline has passed."""

    status = Status("DEADLINE_EXCEEDED", 504, True)


class Cancelled(BatonError):
    """The client, or Abort, ended the request."""

    status = Status("CANCELLED", 499, False)


class AttemptsExhausted(BatonError):
    """The request was tried on as many workers as it may be."""

    status = Status("ABORTED", 409, False)


class Overtaken(BatonError):
    """A later order set another size of the same pool."""

    status = Status("ABORTED", 409, False)


class NonFiniteLogits(BatonError):
    """The model's output is not a number, or infinite."""


class WireError(BatonError):
    """Bytes that are not the message they claim to be."""


class ForgedFrame(WireError):
    """A frame whose checksum is right and whose MAC is wrong."""


class StoreError(BatonError):
    """A tier of the store failed or timed out."""


class ConfigError(BatonError):
    """A setting is wrong; nothing was started."""

    status = Status("FAILED_PRECONDITION", 400, False)
    exit_code = 78


class ModelError(ConfigError):
    """A model folder that cannot be served, and why."""


_BY_REASON = {
    cls.__new__(cls).reason: cls
    for cls in tuple(globals().values())
    if isinstance(cls, type) and issubclass(cls, BatonError)
}


def rebuild(reason: str, message: str, ids: dict[str, str]) -> BatonError:
    """Makes an error from another process's reason, message and ids. An unknown reason makes a BatonError."""
    cls = _BY_REASON.get(reason, BatonError)
    error = cls.__new__(cls, message)
    BatonError.__init__(error, message, **ids)
    if isinstance(error, Overloaded):
        error.retry_after_s = None
    return error


def report(error: BaseException, **values: object) -> BatonError:
    """Logs a bug of ours with its values; returns the error for a client, with a number to search the log by."""
    number = secrets.token_hex(8)
    log.error("incident", exc_info=error, extra={"incident": number, **values})
    return BatonError(f"internal error, incident {number}", incident=number)


def known(error: Exception, **values: object) -> BatonError:
    """Returns an error of the tree as it is; reports a bug."""
    return error if isinstance(error, BatonError) else report(error, **values)
