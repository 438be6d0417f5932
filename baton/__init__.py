"""Baton for programs: clients of a running cluster, and the engine and the store of KV in this process.

>>> with Client("127.0.0.1:50051") as client:
...     print(client.generate("Once upon a time", temperature=0).text)

Each failure of a call is a BatonError of the tree in `errors`. `Engine` and `PrefixStore` load torch at
their first use.
"""

from typing import TYPE_CHECKING

from baton.client import AsyncClient, Client
from baton.results import Chunk, Completion
from wire import errors
from wire import tier as tiers
from wire.errors import BatonError
from wire.layout import KVLayout
from wire.sampling import SamplingParams

if TYPE_CHECKING:
    from engine.engine import Engine
    from kv_store.prefix_store import PrefixStore

__all__ = [
    "AsyncClient",
    "BatonError",
    "Chunk",
    "Client",
    "Completion",
    "Engine",
    "KVLayout",
    "PrefixStore",
    "SamplingParams",
    "errors",
    "tiers",
]


def __getattr__(name: str) -> object:
    """Imports engine and store at their first use, because a client needs no torch."""
    if name == "Engine":
        from engine.engine import Engine

        return Engine
    if name == "PrefixStore":
        from kv_store.prefix_store import PrefixStore

        return PrefixStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
