"""Models have the same bits on each instruction set with the order of sums of AMX, and hand over to one another."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.model.decoder import Decoder
from kernels.backend import Backend
from tests.exactness.test_one_mind import GREEDY, STORED, Crowd, Tokens, asked, make_stored, prompt
from tests.harness.checkpoints import make_checkpoint
from tests.harness.engines import make_core, prefill, request, rest_of
from tests.harness.node import Node
from tests.kernels.backends import TILES, make_backend

NUM_PROMPTS = 8
MODELS = [
    *[(arch, kept) for arch in ("llama-gqa", "gemma2") for kept in ("auto", "int8", "fp8", "int4")],
    *[(arch, "auto") for arch in ("mistral-window", "qwen3", "gpt-oss", "mixtral", *STORED)],
]
"""Checkpoints, or stored types of weights, and the KV dtype."""
ELSEWHERE = """
import json, sys
from pathlib import Path
from tests.exactness import test_mixed_fleet as fleet
from tests.kernels.backends import make_backend
tokens = fleet.run(fleet.load(Path(sys.argv[1]), make_backend(sys.argv[2])))
print(json.dumps([[token_id for token_id, _ in one] for one in tokens]))
"""
"""Prints the tokens of a checkpoint on an instruction set."""

each_other = pytest.mark.parametrize("isa", TILES[1:])


def load(folder: Path, backend: Backend, kept: str = "auto") -> Decoder:
    return Decoder.load(folder, "bfloat16", torch.device("cpu"), 16, backend, kept)


def run(model: Decoder) -> list[Tokens]:
    return Crowd(make_core(model, num_blocks=512)).run(asked(range(NUM_PROMPTS))[1])


@each_other
@pytest.mark.parametrize(("arch", "kept"), MODELS)
def test_tokens_and_log_probabilities_are_equal_and_kv_serves_both(
    isa: str, arch: str, kept: str, tmp_path: Path
) -> None:
    folder = make_stored(arch, tmp_path) if arch in STORED else make_checkpoint(arch, tmp_path)
    first, other = (load(folder, make_backend(one), kept) for one in (TILES[0], isa))
    expected = run(first)
    assert run(other) == expected
    node = Node(first.layout)
    prompts = [prompt(index) for index in range(NUM_PROMPTS)]
    handed = prefill(make_core(other, node, 512), prompts, GREEDY)
    alone = Crowd(make_core(first, num_blocks=512)).run([request(one, GREEDY) for one in prompts])
    assert Crowd(make_core(first, node, 512)).run([rest_of(one) for one in handed]) == [one[1:] for one in alone]


@each_other
def test_tokens_are_equal_where_torch_has_no_more_than_avx2(isa: str, tmp_path: Path) -> None:
    """Draws, too, which torch computes: their sums differ by 10^-15, which no draw here shows."""
    folder = make_checkpoint("llama-gqa", tmp_path)
    command = [sys.executable, "-c", ELSEWHERE, str(folder), isa]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    expected = run(load(folder, make_backend(TILES[0])))
    assert json.loads(done.stdout) == [[token_id for token_id, _ in one] for one in expected]
