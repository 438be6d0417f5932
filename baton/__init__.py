"""Baton for programs: clients of a running cluster, and the engine in this process.

>>> with Client("127.0.0.1:50051") as client:
...     print(client.generate("Once upon a time", temperature=0).text)

Each failure of a call is a BatonError of the tree in `errors`. `Engine` loads torch at its first use.
"""

from typing import TYPE_CHECKING

from baton.client import AsyncClient, Client
from baton.results import Chunk, Completion
from wire import errors
from wire.errors import BatonError
from wire.sampling import SamplingParams

if TYPE_CHECKING:
    from engine.engine import Engine

__all__ = ["AsyncClient", "BatonError", "Chunk", "Client", "Completion", "Engine", "SamplingParams", "errors"]


def __getattr__(name: str) -> object:
    """Imports the engine at its first use, because a client needs no torch."""
    if name != "Engine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from engine.engine import Engine

    return Engine
