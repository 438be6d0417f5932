"""A worker's way to the directory of its node, with faults to order."""

from collections.abc import Callable
from typing import Any

from kv_store.node.directory_port import DirectoryPort, carry_out
from wire.errors import StoreError

Hook = Callable[[str, tuple[Any, ...]], None]
"""Hears of a call by its name and arguments, on the thread that makes it; may wait, and may raise StoreError."""


def nothing(name: str, arguments: tuple[Any, ...]) -> None:
    """The hook that does nothing."""


class DirectoryGate(DirectoryPort):
    """A port before a port. `before` and `after` are called around each call; once cut, all calls fail."""

    def __init__(self, directory: DirectoryPort) -> None:
        self.before: Hook = nothing
        self.after: Hook = nothing
        self.names: set[str] = set()
        self._directory = directory
        self._is_cut = False

    def cut(self) -> None:
        """Ends the worker's process, as its directory sees it: nothing more of it is done."""
        self._is_cut = True

    def _ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self._require_open()
        if method in ("reserve", "lease"):
            self.names.add(arguments[0])
        self.before(method, arguments)
        self._require_open()
        answer = carry_out(self._directory, method, arguments)
        self.after(method, arguments)
        return answer

    def _require_open(self) -> None:
        if self._is_cut:
            raise StoreError("the process has ended")
