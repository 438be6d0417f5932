"""Baton for programs: a client of a running cluster, and the engine in this process.

>>> with Client("127.0.0.1:50051") as client:
...     print(client.generate("Once upon a time", temperature=0).text)

`AsyncClient` is the same for asyncio. Every failure of a call is a `BatonError`. `Engine` loads torch at its first use.
"""

from typing import TYPE_CHECKING

from baton.async_client import AsyncClient, AsyncStream
from baton.client import Client, Stream
from baton.request import SamplingOptions
from baton.results import Choice, Chunk, Completion, Model, Span, Timeline, Usage
from wire.errors import (
    AttemptsExhausted,
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RequestExists,
    RequestNotFound,
    Unavailable,
)
from wire.sampling import FinishReason, Logprobs, SamplingParams

if TYPE_CHECKING:
    from engine.engine import Engine

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "AttemptsExhausted",
    "BatonError",
    "Cancelled",
    "Choice",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Engine",
    "FinishReason",
    "InvalidRequest",
    "Logprobs",
    "Model",
    "ModelNotFound",
    "Overloaded",
    "RequestExists",
    "RequestNotFound",
    "SamplingOptions",
    "SamplingParams",
    "Span",
    "Stream",
    "Timeline",
    "Unavailable",
    "Usage",
]


def __getattr__(name: str) -> object:
    """Imports the engine at its first use, because a client needs no torch."""
    if name != "Engine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from engine.engine import Engine

    return Engine
