"""What each request makes a directory do, and the answer."""

from collections.abc import Callable
from typing import Any

from kv_store.node.directory import Directory
from wire.codec import MessageCodec
from wire.directory import (
    MESSAGES,
    Abandon,
    Check,
    Commit,
    Count,
    Flags,
    GetExisting,
    GetInfo,
    GetStatus,
    MarkCold,
    Problems,
    ReleaseHolds,
    ReleaseLease,
    RenewHolds,
    Reserve,
    TakeLease,
    WithdrawBlocks,
)
from wire.errors import WireError

CODEC = MessageCodec(MESSAGES)

_CALLS: dict[type, Callable[[Directory, Any, Callable[[str], str]], object]] = {
    GetInfo: lambda directory, _, who: directory.info(),
    GetExisting: lambda directory, asked, who: Flags(directory.exists(asked.keys)),
    Reserve: lambda directory, asked, who: directory.reserve(who(asked.writer), asked.names, asked.hold),
    Commit: lambda directory, asked, who: Count(directory.commit(who(asked.writer), asked.blocks, asked.hold)),
    Abandon: lambda directory, asked, who: Count(directory.abandon(who(asked.writer))),
    TakeLease: lambda directory, asked, who: directory.lease(who(asked.reader), asked.keys, asked.ttl_s),
    ReleaseLease: lambda directory, asked, who: Flags([directory.release(asked.lease_id)]),
    WithdrawBlocks: lambda directory, asked, who: Count(directory.withdraw(asked.blocks)),
    RenewHolds: lambda directory, asked, who: Count(directory.renew(asked.request_ids, asked.ttl_s)),
    ReleaseHolds: lambda directory, asked, who: Count(directory.release_holds(asked.request_ids)),
    MarkCold: lambda directory, asked, who: Count(directory.mark_cold(asked.keys)),
    GetStatus: lambda directory, _, who: directory.status(),
    Check: lambda directory, _, who: Problems(directory.check()),
}


def answer(directory: Directory, request: object, who: Callable[[str], str]) -> object:
    """The answer to a request. `who` turns the name a process gives a writer into one that is only that process's.

    WireError if it is no request.
    """
    call = _CALLS.get(type(request))
    if call is None:
        raise WireError(f"{type(request).__name__} is no request")
    return call(directory, request, who)
