"""The version of the served model, and both versions while a roll replaces its weights or numbers.

    request ──▶ choose ──▶ a version: the limits, the root and the workers of all attempts at the request

Workers of different versions are never paired, and their blocks have different names: an answer is of one version.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from router.config import RouterConfig
from router.requests.attempt import Services
from router.requests.checks import ServingLimits
from router.workers.members import Member, Members, version_of
from wire.errors import ModelReplaced, RouterLeaving
from wire.ids import NamespaceRoot, WorkerId
from wire.layout import Window
from wire.pools import Role
from wire.served_model import ServedModel

MAX_KNOWN_ROOTS = 4096
"""Bound on tenants whose namespace root is cached, for each version."""


@dataclass(eq=False)
class ModelVersion:
    """A version: the model as its workers loaded it, these workers at each time, and the roots of its block names.

    num_open: the open requests of this version. services: the services of its requests, made at the first request.
    """

    model: ServedModel
    members: Members
    root_of: Callable[[str], NamespaceRoot]
    num_open: int = 0
    services: Services | None = None

    @property
    def limits(self) -> ServingLimits:
        """The bounds of the present workers; without workers the model's."""
        num_blocks = self.members.num_pool_blocks
        if num_blocks is None:
            num_blocks = Window(self.model.layout).num_needed(self.model.max_context_len)
        return ServingLimits(self.model, num_blocks)

    @property
    def num_ready(self) -> int:
        """The decode workers that take new requests."""
        return len(self.members.ready(Role.DECODE))

    @property
    def needed(self) -> list[Member]:
        """The decode workers without which its open requests cannot end: a single worker, or all, where all drain."""
        able = self.members.able(Role.DECODE)
        return able if self.num_open and (len(able) == 1 or not self.num_ready) else []


class ModelVersions:
    """The versions that workers have, the wanted one first, which all workers have in the end."""

    def __init__(self, config: RouterConfig, members: Members) -> None:
        self._config = config
        self._members = members
        self._are_told = False
        self._busy: list[ModelVersion] = []
        self._versions: tuple[ModelVersion, ...] = (self._make(config.model),)

    def __iter__(self) -> Iterator[ModelVersion]:
        return iter(self._versions)

    @property
    def wanted(self) -> ModelVersion:
        return self._versions[0]

    def of(self, worker_id: WorkerId) -> ModelVersion:
        """Returns the version of a worker."""
        return next((one for one in self if worker_id in one.members), self.wanted)

    def replace(self, models: Sequence[ServedModel]) -> None:
        """Takes the versions that workers have from now on, the wanted one first; none leaves them as they are.

        A version with open requests that has no workers now is the same one if it comes back.
        """
        self._are_told = True
        if models:
            known = {version_of(one.model): one for one in (*self._busy, *self)}
            self._versions = tuple(known.get(version_of(model)) or self._make(model) for model in models)
            self._busy = [one for one in known.values() if one.num_open]
            self._members.versions[:] = map(version_of, models)
            self._members.are_complete = False
        for version, model in zip(self, models, strict=False):
            version.model = model

    def choose(self, fingerprint: str = "") -> ModelVersion:
        """Chooses the version of a request: the wanted version, once it has as many decode workers as the pool.

        Until then, the one that has the fewest open requests for each of its decode workers. fingerprint: names the
        version of an answer that goes on; raises ModelReplaced if it is gone, RouterLeaving before any version is told.
        """
        known = [one for one in self if fingerprint in ("", one.model.version_hex)]
        if not known and not self._are_told:
            raise RouterLeaving("the router has just started, and was told no versions of the model yet")
        if not known:
            raise ModelReplaced("the model that the answer began with is served no more: ask again")
        if known[0].num_ready >= self._members.sizes.decode:
            return known[0]
        able = (one for one in known if one.num_ready)
        return min(able, key=lambda one: one.num_open / one.num_ready, default=known[0])

    def _make(self, model: ServedModel) -> ModelVersion:
        root_of = lru_cache(MAX_KNOWN_ROOTS)(replace(self._config, model=model).root_of)
        return ModelVersion(model, self._members.of(version_of(model)), root_of)
