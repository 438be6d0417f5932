"""What a client is told when a call fails."""

from collections.abc import AsyncIterable
from dataclasses import dataclass

import grpc.aio
import pytest
from google.rpc import error_details_pb2

from wire.pb import inference_pb2 as pb
from wire.rpc import details_of

MAX_ECHO_CHARS = 64
FORBIDDEN = ("Traceback", "Error", "Exception", ".py", "/", "\n")


@dataclass(frozen=True)
class Refusal:
    """The name of the status, its message, and what its details say; those of gRPC itself say nothing."""

    code: str
    message: str
    reason: str
    ids: dict[str, str]
    retry_after_s: float | None = None

    @property
    def param(self) -> str:
        return self.ids.get("param", "")

    def require_discreet(self, *sent: str) -> None:
        """Nothing of our insides, and little of what was sent."""
        assert not [word for word in FORBIDDEN if word in self.message]
        assert not [text for text in sent if len(text) > MAX_ECHO_CHARS and text[: MAX_ECHO_CHARS + 1] in self.message]
        assert len(self.message) < 160


def refusal_of(failure: grpc.aio.AioRpcError) -> Refusal:
    info, retry, timeline = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), pb.Timeline()
    assert all(any(map(detail.Unpack, (info, retry, timeline))) for detail in details_of(failure))
    retry_after_s = retry.retry_delay.ToTimedelta().total_seconds() if retry.HasField("retry_delay") else None
    return Refusal(failure.code().name, failure.details() or "", info.reason, dict(info.metadata), retry_after_s)


async def refused(call: AsyncIterable[object]) -> Refusal:
    """How a stream ends that must not end well."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in call:
            pass
    return refusal_of(raised.value)
