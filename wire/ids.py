"""Identifiers, as distinct types that cannot be confused."""

import re
import secrets
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import NewType, Self

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_SESSION_LEN = 128
TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_ATTEMPT_ID = re.compile(rf"({TENANT.pattern}/)?{REQUEST_ID.pattern}/[1-9][0-9]{{0,18}}")
INCARNATION_BITS, NUMBER_BITS = 31, 32
MAX_COUNT = (1 << NUMBER_BITS) - 1
"""The last number of an attempt, without its router's incarnation; the first is 1."""
SEED_BITS = 63
"""Random bits of a drawn seed."""
DEFAULT_TENANT = "default"
PUBLIC = "*"
"""The tenant in the root of public block names; no real tenant may have this name."""

RequestId = NewType("RequestId", str)
"""A client's id of a request, of the form REQUEST_ID: unique among the open requests of one tenant."""

QualifiedId = NewType("QualifiedId", str)
"""A request's id in the router, unique over all tenants: `tenant/id`, or the id alone for the default tenant."""

AttemptId = NewType("AttemptId", str)
"""A try at a request, `QualifiedId/number`: the id on lines, in engines and in stores, unique among all routers."""

WorkerId = NewType("WorkerId", str)


def qualified(tenant: str, request_id: RequestId) -> QualifiedId:
    return QualifiedId(request_id if tenant == DEFAULT_TENANT else f"{tenant}/{request_id}")


def tenant_of(request: QualifiedId) -> str:
    return request.rpartition("/")[0] or DEFAULT_TENANT


def attempt_id(request: QualifiedId, number: int) -> AttemptId:
    return AttemptId(f"{request}/{number}")


def request_of(attempt: AttemptId) -> QualifiedId:
    return QualifiedId(attempt.rpartition("/")[0])


def number_of(attempt: AttemptId) -> int:
    return int(attempt.rpartition("/")[2])


def attempt_numbers() -> Iterator[int]:
    """Yields the numbers of one router: an incarnation, drawn now, above NUMBER_BITS bits that count from 1."""
    incarnation = secrets.randbits(INCARNATION_BITS) << NUMBER_BITS
    return (incarnation + number % MAX_COUNT + 1 for number in count())


def incarnation_of(attempt: AttemptId) -> int:
    """Returns the incarnation of the router that made an attempt."""
    return number_of(attempt) >> NUMBER_BITS


def is_attempt_id(text: str) -> bool:
    """Returns whether a text has the form of an attempt's id."""
    return _ATTEMPT_ID.fullmatch(text) is not None


BlockKey = NewType("BlockKey", bytes)
"""32 bytes: the chained hash of all tokens up to and including a block, under a namespace root."""

NamespaceRoot = NewType("NamespaceRoot", bytes)
"""32 bytes: the root of all keys of one tenant, model, layout, adapter and policy."""

PageId = NewType("PageId", int)
"""Index of a page in a worker's device pool."""

SlotId = NewType("SlotId", int)
"""Index of a slot in a node's arena."""

PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION = 4, 4
"""The newest and the oldest version of all messages between workers, routers and directories that this release speaks.

A worker of version 3 refuses the ids of attempts, which have an incarnation since version 4.
"""


def agreed_version(oldest: int, newest: int) -> int | None:
    """Returns the newest version that this release and a peer both speak; None without a common version.

    oldest, newest: the versions that the peer speaks.
    """
    agreed = min(newest, PROTOCOL_VERSION)
    return agreed if agreed >= max(oldest, OLDEST_PROTOCOL_VERSION) else None


def release() -> str:
    """Returns the installed release of this code, or the source tree's if nothing is installed."""
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return str(tomllib.loads(PROJECT.read_text())["project"]["version"])


TRACEPARENT = "traceparent"
"""The trace that a call belongs to, W3C's header: the same text as header of HTTP and as metadata of gRPC."""
_TRACE = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-[ -~]{0,64})?")
_SAMPLED = 1


@dataclass(frozen=True)
class TraceContext:
    """A trace, its span that sent the call, and whether the sender samples the trace."""

    trace_id: bytes
    span_id: bytes
    is_sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{int(self.is_sampled):02x}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Reads a header. Returns None for one that is malformed, as for none: W3C has a trace begin anew then."""
        found = _TRACE.fullmatch(text)
        if found is None or (found[1] == "00" and found[5]):
            return None
        return cls(bytes.fromhex(found[2]), bytes.fromhex(found[3]), bool(int(found[4], 16) & _SAMPLED))
