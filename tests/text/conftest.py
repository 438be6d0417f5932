"""Each kind of tokenizer in turn."""

import pytest

from tests.text.backends import KINDS
from text.tokenizer import Tokenizer


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(KINDS[request.param]())
