"""The page in a real Chromium: `bash tests/page.sh`."""

import asyncio
import json
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.page.browser import PROGRAM

MAX_S = 110.0
Look = Callable[..., Coroutine[Any, Any, dict[str, Any]]]


@pytest.fixture(scope="session")
def look() -> Look:
    """Looks at a page; returns what browser_program.py saw."""
    venv = Path(os.environ["BATON_PAGE_VENV"])

    async def look(
        url: str, key: str, find: str, seconds: float = 6.0, shots: str = "", is_judged: bool = True
    ) -> dict[str, Any]:
        axe = str(venv / "node_modules" / "axe-core" / "axe.min.js") if is_judged else ""
        settings = {"url": url, "key": key, "axe": axe, "shots": shots, "find": find, "seconds": seconds}
        pipe = asyncio.subprocess.PIPE
        program = await asyncio.create_subprocess_exec(
            str(venv / "bin" / "python"), str(PROGRAM), json.dumps(settings), stdout=pipe, stderr=pipe
        )
        async with asyncio.timeout(MAX_S):
            out, error = await program.communicate()
        assert program.returncode == 0, error.decode()
        seen: dict[str, Any] = json.loads(out)
        return seen

    return look
