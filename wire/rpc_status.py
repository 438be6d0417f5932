"""Errors as gRPC statuses, and back.

On the wire an error is its gRPC code, its message, and details in trailing metadata: google.rpc.ErrorInfo (reason, ids,
`retryable`); google.rpc.RetryInfo of an Overloaded; and the baton.v1.Timeline of a request that was let in.
"""

from collections.abc import Sequence
from typing import Any

import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from wire import errors
from wire.errors import BatonError
from wire.pb import inference_pb2 as pb

DOMAIN = "baton"
MAX_TIMELINE_BYTES = 4 << 10
"""Clients of gRPC take 8 KiB of metadata in all, in base64."""
_SPAN_HEAD_BYTES = 3


def to_status(error: BatonError) -> status_pb2.Status:
    """The google.rpc.Status of an error."""
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=DOMAIN,
        metadata={**error.ids, "retryable": str(error.status.retryable).lower()},
    )
    details = [_pack(info)]
    if isinstance(error, errors.Overloaded) and error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    if error.timeline is not None:
        details.append(_pack(bounded(error.timeline)))
    code: int = getattr(grpc.StatusCode, error.status.grpc).value[0]
    return status_pb2.Status(code=code, message=error.message, details=details)


def from_rpc_error(failure: grpc.aio.AioRpcError) -> BatonError:
    """The error a server of ours raised, or the nearest one for a failure of the call itself."""
    info, retry, timeline = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), pb.Timeline()
    for detail in details_of(failure):
        _ = detail.Unpack(info) or detail.Unpack(retry) or detail.Unpack(timeline)
    if info.domain == DOMAIN:
        ids = {name: value for name, value in info.metadata.items() if name != "retryable"}
        error = errors.rebuild(info.reason, failure.details() or "", ids)
        if isinstance(error, errors.Overloaded) and retry.HasField("retry_delay"):
            error.retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
        if timeline.spans:
            error.timeline = timeline
        return error
    return _from_code(failure.code())


def details_of(failure: grpc.aio.AioRpcError) -> Sequence[any_pb2.Any]:
    """The details of a server's status: ErrorInfo, maybe RetryInfo. None if gRPC itself failed."""
    status = rpc_status.from_call(failure)
    return () if status is None else tuple(status.details)


def bounded(timeline: pb.Timeline) -> pb.Timeline:
    """Returns a timeline of at most MAX_TIMELINE_BYTES: without its shortest spans, ends of attempts among the last."""
    kept = pb.Timeline()
    kept.CopyFrom(timeline)
    del kept.spans[:]
    spans, left = list[pb.Span](), MAX_TIMELINE_BYTES - kept.ByteSize()
    for span in sorted(timeline.spans, key=lambda span: (not span.error, -span.duration_ms)):
        left -= span.ByteSize() + _SPAN_HEAD_BYTES
        spans += [span] if left >= 0 else []
    kept.spans.extend(sorted(spans, key=lambda span: span.start_ms))
    return kept


def _from_code(code: grpc.StatusCode) -> BatonError:
    """Says in our words what gRPC itself has met with; its own, with addresses, are in the failure."""
    by_code: dict[grpc.StatusCode, BatonError] = {
        grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded("the server did not answer in time"),
        grpc.StatusCode.CANCELLED: errors.Cancelled("the call was cancelled"),
        grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded("the server refused the call, or it is too large"),
        grpc.StatusCode.UNAVAILABLE: errors.Unreachable("the server cannot be reached, or its connection broke"),
    }
    return by_code.get(code, BatonError(f"the call failed: {code.name}"))


def _pack(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
