"""A worker's way to the directory of its node, with faults to order."""

from collections.abc import Callable
from typing import Any

from kv_store.node.directory_port import DirectoryPort
from wire.errors import StoreError

Hook = Callable[[str, tuple[Any, ...]], None]
"""Told of a call by its name and arguments, on the thread that makes it; may wait, and may raise StoreError."""


def nothing(name: str, arguments: tuple[Any, ...]) -> None:
    """The hook that does nothing."""


class DirectoryGate:
    """A DirectoryPort. `before` and `after` are called around each call; once cut, all calls fail."""

    def __init__(self, directory: DirectoryPort) -> None:
        self.before: Hook = nothing
        self.after: Hook = nothing
        self.names: set[str] = set()
        self._directory = directory
        self._is_cut = False

    def cut(self) -> None:
        """The worker's process has ended: nothing that it would still do is done."""
        self._is_cut = True

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._directory, name)

        def call(*arguments: Any) -> Any:
            self._require_open()
            if name in ("reserve", "lease"):
                self.names.add(arguments[0])
            self.before(name, arguments)
            self._require_open()
            answer = method(*arguments)
            self.after(name, arguments)
            return answer

        return call

    def _require_open(self) -> None:
        if self._is_cut:
            raise StoreError("the process has ended")
