"""A service of ours, started and stopped by the command line as a user would."""

import json
import subprocess
import sys
from types import TracebackType
from typing import Any

_UP_TIMEOUT_S = 300.0
_CALL_TIMEOUT_S = 60.0


class BatonService:
    """`baton up` on entry, `baton down` on exit."""

    def __init__(self, name: str, model: str | None, num_prefill: int, num_decode: int) -> None:
        self._name = f"bench-{name[:8]}"
        self._pools = ["--prefill", str(num_prefill), "--decode", str(num_decode)]
        self._model = [] if model is None else ["--model", model]
        self.address = ""

    def __enter__(self) -> "BatonService":
        try:
            self._baton("up", *self._model, *self._pools, "--grpc-port", "0", timeout_s=_UP_TIMEOUT_S)
            self.address = self.status()["address"]
        except BaseException:
            self._baton("down")
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._baton("down")

    def status(self) -> dict[str, Any]:
        """What `baton status --json` says."""
        status: dict[str, Any] = json.loads(self._baton("status", "--json"))
        return status

    def _baton(self, *arguments: str, timeout_s: float = _CALL_TIMEOUT_S) -> str:
        command = [sys.executable, "-m", "deploy.cli", *arguments, "--name", self._name]
        done = subprocess.run(command, timeout=timeout_s, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout
