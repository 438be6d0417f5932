"""SmolLM2 as `baton pull` fetches it, against llama.cpp's tokenizer and transformers on the dequantized weights.

bash tests/real_model.sh fetches both, and runs these.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.hub import find_folder
from engine.checkpoint.pulled import MODELS
from engine.engine import Engine
from tests.engine.gguf.files import load_oracle
from tests.engine.gguf.lines import drawn_lines
from wire.sampling import SamplingParams

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
NUM_PROMPTS, PROMPT_LEN, NUM_TOKENS = 64, 200, 32
TIE = 1e-3
THEIR_TOKENS = """
import json, sys, llama_cpp
model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
json.dump([model.tokenize(line.encode(), add_bos=False, special=False) for line in json.load(sys.stdin)], sys.stdout)
"""


def require_tokens_of_transformers(path: Path, folder: Path, text: str, num_prompts: int, prompt_len: int) -> None:
    """Compares greedy tokens in float32 after pieces of a text; they may part where two logits are TIE apart."""
    model = load_oracle(path, folder)
    engine = Engine.load(str(folder), dtype="float32", num_blocks=num_prompts * (prompt_len // 16 + 4))
    ids = engine.tokenizer.encode(text)
    prompts = [ids[start : start + prompt_len] for start in range(0, num_prompts * prompt_len, prompt_len)]
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    answers = [one.choices[0].token_ids for one in engine.generate(prompts, sampling)]
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2, dim=-1)
        differing = [at for at, token in enumerate(answer) if best.indices[at, 0] != token]
        if differing:
            values = best.values[differing[0]]
            assert values[0] - values[1] < TIE, f"differs after {differing[0]} tokens, not at a tie"


@pytest.fixture(scope="module")
def path() -> Path:
    return MODELS["smollm2"].pull(lambda *_: None)


@pytest.fixture(scope="module")
def folder(path: Path) -> Path:
    return find_folder(str(path))


def test_tokens_of_2000_lines_equal_llamacpp_on_the_same_file(path: Path, folder: Path) -> None:
    python = os.environ.get("BATON_LLAMACPP_PYTHON")
    if python is None:
        pytest.skip("BATON_LLAMACPP_PYTHON names no Python with llama-cpp-python")
    lines = drawn_lines(2000, seed=7)
    command = [python, "-c", THEIR_TOKENS, str(path)]
    done = subprocess.run(command, input=json.dumps(lines), capture_output=True, text=True, check=True)
    tokenizer = Checkpoint(folder).load_tokenizer()
    theirs = json.loads(done.stdout)
    differing = [line for line, ids in zip(lines, theirs, strict=True) if tokenizer.encode(line) != ids]
    assert differing == []


def test_greedy_tokens_equal_transformers_in_float32_or_differ_at_a_tie(path: Path, folder: Path) -> None:
    text = "\n".join(drawn_lines(400, seed=3)) + Path(__file__).read_text()
    require_tokens_of_transformers(path, folder, text, NUM_PROMPTS, PROMPT_LEN)


def test_a_question_gets_an_answer(folder: Path) -> None:
    engine = Engine.load(str(folder), num_blocks=64)
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    (completion,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=40))
    assert "Paris" in completion.choices[0].text
