from collections.abc import AsyncIterator

import pytest_asyncio

from tests.bad_input.ports import Ports, serving


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ports() -> AsyncIterator[Ports]:
    """One cluster for all cases of a module, which must leave it as it was."""
    async with serving() as ports:
        yield ports
