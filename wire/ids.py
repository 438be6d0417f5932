"""Identifiers. Distinct types, so that one is not passed for another."""

import re
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
WorkerId = NewType("WorkerId", str)
DEFAULT_TENANT = "default"


def qualified(tenant: str, request_id: RequestId) -> RequestId:
    """Returns a request's name behind the ports: ids are unique per tenant, and no client's id has a slash."""
    return request_id if tenant == DEFAULT_TENANT else RequestId(f"{tenant}/{request_id}")


def is_qualified(name: str) -> bool:
    """Tells whether a text can be a request's name behind the ports."""
    *tenants, request_id = name.split("/", 1)
    return all(map(TENANT.fullmatch, tenants)) and REQUEST_ID.fullmatch(request_id) is not None


class AttemptId(NamedTuple):
    """A try at a request, by a number that its router uses once. Workers, engines and holds know its name."""

    request_id: RequestId
    number: int

    @property
    def name(self) -> RequestId:
        """The id under which an engine and the store know the attempt; no client's id has a slash."""
        return RequestId(f"{self.request_id}/{self.number}")


BlockKey = NewType("BlockKey", bytes)
"""32 bytes: the chained hash of all tokens up to and including a block, under a namespace root."""

NamespaceRoot = NewType("NamespaceRoot", bytes)
"""32 bytes: the root of all keys of one tenant, model, layout, adapter and policy."""

PageId = NewType("PageId", int)
"""Index of a page in a device pool, or of a slot in an arena."""

PROTOCOL_VERSION = 2
"""Of everything workers, routers and directories say to one another."""
