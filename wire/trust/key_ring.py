"""The keys of callers: each has a tenant, scopes of calls, and an allowance.

A key is `baton-ID-SECRET`: eight hex digits that name it, the first four by its tenant, and 256 random bits in hex, of
which only the SHA-256 is kept. 256 random bits cannot be guessed, so a fast hash suffices: a check costs a microsecond.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from wire.errors import ConfigError, PermissionDenied, Unauthenticated
from wire.ids import DEFAULT_TENANT, TENANT
from wire.load.fairness import MAX_WEIGHT

_KEY = re.compile(r"baton-([0-9a-f]{8})-([0-9a-f]{64})")
_HEX = re.compile(r"[0-9a-f]*")
_NO_DIGEST = "0" * 64
PLACE_DIGITS = 4
MAX_KEYS_OF_A_PLACE = 1 << 15


class Scope(Enum):
    """A kind of calls that a key opens."""

    GENERATE = "generate"
    OPERATE = "operate"
    METRICS = "metrics"


@dataclass(frozen=True)
class Allowance:
    """Bounds on the use of a key; None is no bound. arena_share: its tenant's share of each tier, 0 to 1.

    weight: the weight of its requests in fair shares, beside other tenants'; None for 1.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_open_requests: int | None = None
    arena_share: float | None = None
    weight: float | None = None

    def __post_init__(self) -> None:
        bounds = (self.requests_per_minute, self.tokens_per_minute, self.max_open_requests)
        if any(bound is not None and bound < 1 for bound in bounds):
            raise ConfigError("a limit of a key must be at least 1")
        if self.arena_share is not None and not 0 < self.arena_share <= 1:
            raise ConfigError("a share of the arena must be above 0 and at most 1")
        if self.weight is not None and not 0 < self.weight <= MAX_WEIGHT:
            raise ConfigError(f"a weight must be above 0 and at most {MAX_WEIGHT:g}")


@dataclass(frozen=True, kw_only=True)
class Key:
    """A stored key, without its secret.

    A revoked key admits no caller, but stays listed: a list without keys would admit every caller.
    """

    id: str
    digest: str
    tenant: str
    scopes: tuple[Scope, ...] = (Scope.GENERATE,)
    allowance: Allowance = field(default_factory=Allowance)
    is_revoked: bool = False

    def __post_init__(self) -> None:
        if not TENANT.fullmatch(self.tenant):
            raise ConfigError("a tenant must be 1 to 32 of a-z, 0-9 and -, beginning with a letter or digit")
        if not _HEX.fullmatch(self.id + self.digest):
            raise ConfigError("the id and the digest of a key must be hex digits")


ANYONE = Key(id="", digest="", tenant=DEFAULT_TENANT, scopes=(Scope.GENERATE, Scope.METRICS))
"""The caller of a cluster without keys."""


@dataclass(frozen=True)
class KeyList:
    """All keys of a cluster, in the form of its file."""

    keys: tuple[Key, ...] = ()

    @property
    def shares(self) -> dict[str, float]:
        """Returns each tenant's share of arenas and cold tiers: the smallest among its keys."""
        given = [(key.tenant, key.allowance.arena_share) for key in self.keys if not key.is_revoked]
        by_size = sorted(((share, tenant) for tenant, share in given if share is not None), reverse=True)
        return {tenant: share for share, tenant in by_size}


def make_key(
    tenant: str, scopes: Sequence[Scope], allowance: Allowance, taken: Collection[str] = ()
) -> tuple[Key, str]:
    """Draws a key with an id that is not taken; returns it for storage, and its caller's text. Raises ConfigError."""
    place = hashlib.sha256(tenant.encode()).hexdigest()[:PLACE_DIGITS]
    key_id, secret = place + secrets.token_hex(2), secrets.token_hex(32)
    while key_id in taken:
        key_id = place + secrets.token_hex(2) if len(taken) < MAX_KEYS_OF_A_PLACE else secrets.token_hex(4)
    return Key(
        id=key_id, digest=_digest(secret), tenant=tenant, scopes=tuple(scopes), allowance=allowance
    ), f"baton-{key_id}-{secret}"


def place_of(key: str) -> str:
    """Returns the place of a key's requests among routers, by its tenant; "" for no key. Old keys' differ."""
    matched = _KEY.fullmatch(key)
    return matched[1][:PLACE_DIGITS] if matched else ""


def page_key(token: str) -> str:
    """Derives the key of the operator's page from the cluster's token, with which it ends; it needs no made keys."""
    return f"baton-{'0' * 8}-{hmac.new(token.encode(), b'page', hashlib.sha256).hexdigest()}"


def bearer(credentials: Sequence[str]) -> str:
    """Returns the key in a call's only `authorization` field; "" unless it has a key's form."""
    scheme, _, key = credentials[0].partition(" ") if len(credentials) == 1 else ("", "", "")
    return key if scheme.lower() == "bearer" and _KEY.fullmatch(key) else ""


NO_KEYS = KeyList()
NO_CALLER = KeyList((Key(id="", digest="", tenant=DEFAULT_TENANT, scopes=(), is_revoked=True),))
"""A key list that admits no caller."""


class KeyRing:
    """The keys in force. `is_open`: no key was ever made, and every caller is admitted as the tenant `default`.

    Thread-safe.
    """

    def __init__(self, listed: KeyList = NO_KEYS) -> None:
        self.replace(listed)

    def replace(self, listed: KeyList) -> None:
        """Replaces the keys in force."""
        self._by_id = {key.id: key for key in listed.keys if not key.is_revoked}
        self.is_open = not listed.keys
        self.tenants, self.shares = {key.tenant for key in listed.keys}, listed.shares

    def admit(self, credentials: Sequence[str], scope: Scope) -> Key:
        """Returns the key of a call. Raises Unauthenticated, or PermissionDenied for a key without the scope.

        credentials: the call's `authorization` fields. The time is the same for missing, wrong and unknown keys.
        """
        if self.is_open and scope in ANYONE.scopes:
            return ANYONE
        matched = _KEY.fullmatch(bearer(credentials))
        key_id, secret = matched.groups() if matched else ("", "")
        key = self._by_id.get(key_id)
        is_right = hmac.compare_digest(_digest(secret), key.digest if key else _NO_DIGEST)
        if key is None or not is_right:
            raise Unauthenticated("a valid key is wanted, as `authorization: Bearer KEY`")
        if scope not in key.scopes:
            raise PermissionDenied(f"the key has no scope {scope.value}", scope=scope.value)
        return key


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
