"""Launches that overlap the kernel before them: which devices have them."""

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernels.products import dependent_launch
from kernels.products.dependent_launch import dependent
from tests.kernels.no_device import NoDevice

OPTIONS = {"num_warps": 4}
TARGETS = {
    GPUTarget("cuda", 80, 32): False,
    GPUTarget("cuda", 90, 32): True,
    GPUTarget("cuda", 100, 32): False,
    GPUTarget("hip", "gfx942", 64): False,
}


@pytest.mark.parametrize(("target", "is_possible"), TARGETS.items())
def test_launches_are_dependent_on_a_hopper(
    target: GPUTarget, is_possible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(driver, "_active", NoDevice(target))
    monkeypatch.setattr(dependent_launch, "is_possible", dependent_launch.is_possible.__wrapped__)
    assert ("launch_pdl" in dependent(OPTIONS)) is is_possible
    monkeypatch.setattr(dependent_launch, "IS_ON", False)
    assert dependent(OPTIONS) == OPTIONS


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted beside a GPU")
def test_interpreted_kernels_have_ordinary_launches() -> None:
    assert dependent(OPTIONS) is OPTIONS
