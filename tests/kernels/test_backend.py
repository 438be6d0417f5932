import subprocess
import sys

import pytest
import torch

from kernels import kv_write, paged_decode, reference
from kernels.backend import select_backend


def test_a_cpu_is_served_by_the_reference() -> None:
    backend = select_backend(torch.device("cpu"))
    assert backend.name == "reference"
    assert backend.write_kv is reference.write_kv
    assert backend.paged_decode_attention is reference.paged_decode_attention
    assert backend.paged_prefill_attention is reference.paged_prefill_attention


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_gpu_is_served_by_triton(name: str) -> None:
    backend = select_backend(torch.device(name))
    assert backend.name == "triton"
    assert backend.write_kv is kv_write.write_kv
    assert backend.paged_decode_attention is paged_decode.paged_decode_attention


def test_versions_tell_backends_apart() -> None:
    assert select_backend(torch.device("cpu")).version != select_backend(torch.device("cuda")).version


def test_a_cpu_needs_no_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch
from kernels.backend import select_backend
select_backend(torch.device("cpu"))
try:
    select_backend(torch.device("cuda"))
except ImportError:
    print("only CUDA wants triton")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "only CUDA wants triton\n"
