from collections.abc import AsyncIterator

import pytest

from tests.gateway.local_gateway import LocalGateway, serving


@pytest.fixture
async def gateway() -> AsyncIterator[LocalGateway]:
    """The application before a cluster of its own, to which all come in without a key."""
    async with serving() as gateway:
        yield gateway
