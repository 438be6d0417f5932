"""The search for a missing block under its tenant's other namespaces: models and layouts served with this secret.

    request     first missing block ── its key under each namespace, on a thread ──▶ kept beside its journal
    operator    these keys ── a worker of each node ──▶ tiers that have one ──▶ Cause.OTHER_NAMESPACE

These are the versions of the model that are served beside the request's, then the namespaces of earlier times.

No other tenant's root is made, so no other tenant's block is asked for.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from router.config import RouterConfig
from router.observe.journal import RequestJournal
from wire.block_names import PublicPart, digest_of, key_of_last
from wire.ids import PUBLIC, BlockKey, tenant_of
from wire.layout import KVLayout
from wire.load.limit import Limit
from wire.pb import worker_pb2
from wire.served_model import ServedNamespace
from wire.tier import Cause, Miss

MAX_WAITING = 64
"""Bound on the prompts that wait for the thread; further prompts get no other names."""
NAMING_TIMEOUT_S = 5.0
_UNKNOWN = (Cause.NEVER_SEEN, Cause.NO_LONGER_KNOWN, Cause.DIFFERS)
_SETTINGS = {
    "dtype": "model.dtype",
    "quantization": "model.kv_dtype",
    "block_size": "model.block_size",
    "window": "model.kv_policy",
    "num_sinks": "model.kv_policy",
}
"""The setting that determines each field of a KV layout."""


@dataclass(frozen=True)
class OtherName:
    """The key of a missing block in another namespace of its tenant.

    digest: the digest of that namespace's root. how: the differences between the namespace and the request's.
    """

    how: str
    key: BlockKey
    digest: bytes


class OtherNamespaces:
    """A thread that makes other names, kept as long as their requests' journals. Nothing waits for it.

    Belongs to one event loop.
    """

    def __init__(self, config: RouterConfig, served: Callable[[], Iterable[ServedNamespace]]) -> None:
        """served: lists the versions of the model that are served now."""
        self._config = config
        self._served = served
        self._thread = ThreadPoolExecutor(1, "other-namespaces")
        self._waiting = Limit(MAX_WAITING, "prompts wait for their other names")
        self._names: WeakKeyDictionary[RequestJournal, asyncio.Future[list[OtherName]]] = WeakKeyDictionary()

    def begin(
        self, journal: RequestJournal, tokens: Sequence[int], public: PublicPart | None, present: ServedNamespace
    ) -> None:
        """Begins to name a request's first missing block, unless its cause is known or MAX_WAITING prompts wait.

        present: the namespace of the request's version.
        """
        misses = journal.misses
        self._names.pop(journal, None)  # of an attempt before, with other misses
        others = [one for one in dict.fromkeys((*self._served(), *self._config.earlier)) if one != present]
        if not others or not misses or misses[0].cause not in _UNKNOWN or not self._waiting.num_free:
            return
        num_public = public.num_blocks * self._config.model.layout.block_size if public else 0
        arguments = tenant_of(journal.request_id), tokens, num_public, misses[0].first_token
        self._waiting.take()
        names = asyncio.get_running_loop().run_in_executor(self._thread, self._name, others, present, *arguments)
        names.add_done_callback(lambda _: self._waiting.release())
        self._names[journal] = names

    async def of(self, journal: RequestJournal) -> list[OtherName]:
        """Returns the names of a request's first missing block; none if the thread had no time for them."""
        names = self._names.get(journal) if journal.misses else None
        if names is None:
            return []
        await asyncio.wait([names], timeout=NAMING_TIMEOUT_S)
        return names.result() if names.done() else []

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _name(
        self,
        others: Sequence[ServedNamespace],
        present: ServedNamespace,
        tenant: str,
        tokens: Sequence[int],
        num_public: int,
        first_token: int,
    ) -> list[OtherName]:
        """Names the block with a token, in each of the other namespaces where the prompt fills it."""
        names: list[OtherName] = []
        secret = self._config.cluster.secret
        for namespace in others:
            size = namespace.layout.block_size
            index = first_token // size
            public = PublicPart(namespace.root_of(secret, PUBLIC), num_public // size)
            root = namespace.root_of(secret, tenant)
            if (end := (index + 1) * size) <= len(tokens):
                key = key_of_last(root, tokens[:end], size, public)
                digest = digest_of(public.root if index < public.num_blocks else root)
                names.append(OtherName(differences(namespace, present), key, digest))
        return names


def miss_in_other_namespace(others: Sequence[OtherName], holdings: Iterable[worker_pb2.Holding]) -> Miss | None:
    """Returns the miss for the first of `others` that a tier has; None if no tier has any.

    holdings: answers to counts of the keys of `others`.
    """
    tiers: dict[int, list[str]] = {}
    for one in holdings:
        for place in one.places:
            if place < len(others) and others[place].digest == one.namespace:
                tiers.setdefault(place, []).append(one.tier)
    if not tiers:
        return None
    place = min(tiers)
    where = " and ".join(dict.fromkeys(tiers[place]))
    return Miss(Cause.OTHER_NAMESPACE, f"{where} has it under {others[place].how}")


def differences(then: ServedNamespace, now: ServedNamespace) -> str:
    """Describes the differences between two namespaces of one tenant, by the parts of a root."""
    parts = {
        "model fingerprint": then.fingerprint_hex != now.fingerprint_hex,
        "KV layout": then.layout_hex != now.layout_hex,
    }
    changes = [f"model {then.model} then, {now.model} now"] if then.model != now.model else []
    changes += _changes(then.layout, now.layout)
    unexplained = "files of the model or kernels of this version are others"
    return f"another {' and '.join(part for part in parts if parts[part])}: {'; '.join(changes) or unexplained}"


def _changes(then: KVLayout, now: KVLayout) -> list[str]:
    values: Mapping[str, object] = vars(then)
    changed = {name: (values[name], value) for name, value in vars(now).items() if values[name] != value}
    return [
        f"{name} {_value(was)} then, {_value(value)} now ({_SETTINGS.get(name, 'the model')})"
        for name, (was, value) in changed.items()
    ]


def _value(value: object) -> str:
    return "none" if value is None else str(value)
