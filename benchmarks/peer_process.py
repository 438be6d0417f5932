"""An engine in a process of its own: started, asked over pipes, and ended with all processes that it has started."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

_START_TIMEOUT_S = 1200.0
_ANSWER_TIMEOUT_S = 900.0
_SETTLE_S = 0.3
"""Idle OpenMP threads spin for 0.2 s after their last work."""


class EngineFailed(Exception):
    """An engine that cannot be installed, does not start, ends, takes too long, or never decodes all its requests."""


@dataclass(frozen=True)
class Answer:
    """A generation: tokens by request, and the seconds from its start to each of them."""

    token_ids: list[list[int]]
    times_s: list[list[float]]

    @property
    def first_ids(self) -> list[int]:
        return [ids[0] for ids in self.token_ids]

    @property
    def first_s(self) -> float:
        """Seconds until the last request has its first token: the phase of prompts."""
        return max(times[0] for times in self.times_s)

    @property
    def decode_rate(self) -> float:
        """Tokens per second of the phase in which each request decodes: behind all first tokens, before any last one.

        A request's rate is taken between its own tokens of the phase; rates of requests are summed. Raises EngineFailed
        where a request has no two tokens in the phase.
        """
        end_s = min(times[-1] for times in self.times_s)
        phase = [[one for one in times if self.first_s <= one <= end_s] for times in self.times_s]
        if any(len(times) < 2 or times[0] == times[-1] for times in phase):
            raise EngineFailed("at no time did all requests decode together")
        return sum((len(times) - 1) / (times[-1] - times[0]) for times in phase)


class EngineProcess:
    """An engine that has loaded the model, or raises EngineFailed."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        try:
            loaded = self._read(_START_TIMEOUT_S)
        except BaseException:
            self.end()
            raise
        self.version, self.settings = loaded["version"], loaded["settings"]

    def ask(self, batch: int, prompt_len: int, num_tokens: int, seed: int) -> Answer:
        """Lets the engine generate greedily. Blocks until then."""
        time.sleep(_SETTLE_S)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{batch} {prompt_len} {num_tokens} {seed}\n")
            self._process.stdin.flush()
        return Answer(**self._read(_ANSWER_TIMEOUT_S))

    def end(self) -> None:
        """Kills the engine with all processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _read(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        began_s = time.monotonic()
        timer = Timer(limit_s, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            took_s = time.monotonic() - began_s
            raise EngineFailed(
                f"no answer in {limit_s:.0f} s" if took_s >= limit_s else last_line(self._log.read_text())
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def last_line(text: str) -> str:
    lines = text.split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "ended without a word")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
