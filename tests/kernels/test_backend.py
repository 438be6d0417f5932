import ctypes
import re
import subprocess
import sys

import pytest
import torch

from kernels.backend import KVPages
from kernels.cpu.backend import Attention, CpuBackend, Layer
from kernels.cpu.library import SOURCE, NoKernels, best_isa, numerics
from kernels.selection import select_backend
from kernels.torch_backend import TorchBackend
from kernels.triton_backend import TritonBackend
from tests.kernels.backends import ISAS

needs_kernels = pytest.mark.skipif(not ISAS, reason="kernels of a CPU are tested on machines without a GPU")


@pytest.fixture(autouse=True)
def unselected() -> None:
    select_backend.cache_clear()


@needs_kernels
def test_a_cpu_is_served_by_the_kernels_of_its_instruction_set() -> None:
    backend = select_backend(torch.device("cpu"))
    assert isinstance(backend, CpuBackend)
    assert backend.version.startswith(f"cpu-{numerics(best_isa())}-")


def test_a_cpu_without_a_compiler_is_served_by_torch_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    backends = [select_backend(torch.device("cpu")) for _ in range(3)]
    assert isinstance(backends[0], TorchBackend)
    assert [record.message for record in caplog.records] == [
        "serving with torch, several times slower than C++ kernels: there is no C++ compiler: install g++"
    ]


@needs_kernels
def test_versions_tell_backends_apart() -> None:
    of_cpu = [select_backend(torch.device("cpu"), f"auto{weights}").version for weights in ("", "-int8", "-int4")]
    assert len({TorchBackend.version, TritonBackend.version, *of_cpu}) == 5


@pytest.mark.parametrize(("device", "kernels"), [("cpu", "torch-int8"), ("cuda", "auto-int4")])
def test_rounded_weights_are_refused_where_no_kernel_takes_them(device: str, kernels: str) -> None:
    with pytest.raises(NoKernels, match=r"int[48] weights need"):
        select_backend(torch.device(device), kernels)


def test_a_cpu_needs_no_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch
from kernels.backend import KVPages
from kernels.selection import select_backend
select_backend(torch.device("cpu"))
try:
    select_backend(torch.device("cuda"))
except ImportError:
    print("only CUDA wants triton")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "only CUDA wants triton\n"


@needs_kernels
def test_kernels_take_over_the_threads_of_torch() -> None:
    program = """
import os, torch
from kernels.backend import KVPages
from kernels.selection import select_backend
torch.set_num_threads(5)
num_before = len(os.listdir("/proc/self/task"))
select_backend(torch.device("cpu"))
select_backend(torch.device("cpu"), "auto-int8")
print(len(os.listdir("/proc/self/task")) - num_before, torch.get_num_threads())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "4 1\n"


@needs_kernels
def test_threads_rank_no_higher_than_their_caller() -> None:
    program = """
import os, threading, time, torch
from kernels.backend import Activation, KVPages
from kernels.selection import select_backend
torch.set_num_threads(3)
before = set(os.listdir("/proc/self/task"))
backend = select_backend(torch.device("cpu"))
threads = [int(one) for one in set(os.listdir("/proc/self/task")) - before]

def call():
    os.nice(5)
    end = time.monotonic() + 30
    while {os.getpriority(os.PRIO_PROCESS, one) for one in threads} != {os.getpriority(os.PRIO_PROCESS, 0)}:
        assert time.monotonic() < end
        backend.gate(torch.zeros(4096, 64), Activation.SILU)

caller = threading.Thread(target=call)
caller.start()
caller.join()
print(len(threads), "follow")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "2 follow\n", done.stderr


@needs_kernels
def test_fewer_threads_than_asked_for_do_all_the_work() -> None:
    program = """
import resource, torch
from kernels.backend import Activation, KVPages
from kernels.selection import select_backend
select_backend(torch.device("cpu")).set_num_threads(1)
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), used + (256 << 20)))
backend = select_backend(torch.device("cpu"))
backend.set_num_threads(1024)
many, one = (backend.gate(torch.ones(rows, 64), Activation.SILU) for rows in (4096, 1))
print(torch.equal(many, one.expand(4096, 32)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n"


def test_the_pages_of_a_layer_are_views_with_their_scales() -> None:
    data, scales = torch.zeros(5, 3, 2, 1, 4, 8, dtype=torch.int8), torch.ones(5, 3, 2, 1, 4, dtype=torch.bfloat16)
    layer = KVPages(data, scales).layer(1)
    layer.data[4] = 7
    assert data[4, 1].eq(7).all()
    assert data.sum() == 7 * 64
    assert layer.scales is not None
    assert layer.scales.data_ptr() == scales[:, 1].data_ptr()
    assert KVPages(data.float()).layer(1).scales is None


@pytest.mark.parametrize(
    ("dtype", "scale"), [("int8", None), ("float8_e4m3fn", None), ("int8", "float32"), ("bfloat16", "bfloat16")]
)
def test_codes_have_scales_and_other_pages_have_none(dtype: str, scale: str | None) -> None:
    data = torch.zeros(1, 1, 2, 1, 4, 8).to(getattr(torch, dtype))
    with pytest.raises(ValueError, match="pages of"):
        KVPages(data, None if scale is None else torch.zeros(1, 1, 2, 1, 4, dtype=getattr(torch, scale)))


def test_an_unknown_compiler_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(NoKernels, match="no C\\+\\+ compiler"):
        CpuBackend("portable")


@pytest.mark.parametrize(("header", "launcher"), [("dtypes.h", Layer), ("pieces.h", Attention)])
def test_the_launcher_and_the_kernels_have_the_same_fields_in_one_order(
    header: str, launcher: type[ctypes.Structure]
) -> None:
    _, _, body = (SOURCE / header).read_text().partition(f"struct {launcher.__name__} {{\n")
    fields, _, _ = re.sub("//.*", "", body).partition("\n\n")
    assert re.findall(r"(\w+)[,;]", fields) == [field[0] for field in vars(launcher)["_fields_"]]


@needs_kernels
def test_a_library_with_more_arguments_than_the_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shorter(ctypes.Structure):
        _fields_ = vars(Attention)["_fields_"][1:]

    monkeypatch.setattr("kernels.cpu.backend.Attention", Shorter)
    with pytest.raises(RuntimeError, match="differ in the fields of Attention"):
        CpuBackend("portable")
