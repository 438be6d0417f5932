"""The namespaces that a secret has served, kept beside it as SECRET.served, for causes of uncached blocks."""

from dataclasses import dataclass
from pathlib import Path

from deploy.processes.atomic_file import AtomicFile
from router.config import ServedNamespace
from wire.errors import ConfigError, WireError
from wire.typed_reader import from_json, to_json

MAX_SERVED = 8


@dataclass(frozen=True)
class _Served:
    """The latest namespaces, the last one first."""

    namespaces: tuple[ServedNamespace, ...] = ()


class ServedFile:
    """The file of one secret. Without it, or in a folder that cannot be written, clusters serve all the same.

    Commands that start at once may lose each other's entry; the next start of that model brings it back.
    """

    def __init__(self, secret: Path) -> None:
        self._file = AtomicFile(secret.with_name(f"{secret.name}.served"))

    def others(self, now: ServedNamespace) -> tuple[ServedNamespace, ...]:
        """Returns the namespaces but this one, the latest first; none of a damaged file."""
        known = self._file.recall(_parse) or _Served()
        return tuple(one for one in known.namespaces if _parts(one) != _parts(now))

    def note(self, now: ServedNamespace) -> bool:
        """Puts a namespace first, and drops those beyond MAX_SERVED; returns whether the disk has taken it."""
        latest = (now, *self.others(now))[:MAX_SERVED]
        return self._file.try_write(to_json(_Served(latest)).encode())


def _parts(namespace: ServedNamespace) -> tuple[str, str]:
    return namespace.fingerprint_hex, namespace.layout_hex


def _parse(text: str) -> _Served:
    """Raises ConfigError or ValueError for a namespace that no root can be made of."""
    served = from_json(_Served, text, "served")
    try:
        _ = [(one.fingerprint, one.layout) for one in served.namespaces]
    except WireError as error:
        raise ConfigError(f"served: {error.message}") from error
    return served
