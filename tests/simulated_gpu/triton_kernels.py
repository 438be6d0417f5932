"""Triton's kernels on the simulated GPU: interpreted on a stream's thread, on the device's own memory.

Triton's interpreter would copy whole storages to the host at each launch, and back after it: a page that a stream
writes meanwhile would be lost. Its products of bfloat16 are put right by tests/kernels/interpreter.py.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import checksums
from kernels.row_operations import likeliest
from tests.kernels.interpreter import bfloat16_as_on_a_gpu
from tests.simulated_gpu.device import NAME, SimulatedGpu, commands

_LAUNCH = ctypes.CFUNCTYPE(None)
_one_at_a_time = threading.Lock()
"""Of interpreted kernels: the interpreter has one grid, and rewrites Triton's module while it runs."""
_launches: list[Any] = []
"""Calls that C++ may make yet: those of graphs at any time."""


class Accesses:
    """The addresses that a kernel under way has read and written, with the bytes of an item."""

    def __init__(self) -> None:
        self.addresses: dict[tuple[int, bool], list[np.ndarray]] = {}

    def add(self, pointers: TensorHandle, mask: TensorHandle, is_write: bool) -> None:
        item_bytes = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        touched = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))
        chosen = touched[np.broadcast_to(mask.data, touched.shape)].ravel()
        if len(chosen):  # an address that is not the device's fails the kernel before the process would
            commands().touch(torch.tensor([int(chosen.min()), int(chosen.max())]), item_bytes, is_write)
        self.addresses.setdefault((item_bytes, is_write), []).append(chosen)

    def note(self) -> None:
        """Tells the device, for the task under way."""
        for (item_bytes, is_write), pieces in sorted(self.addresses.items(), key=lambda one: one[0][1]):
            unique = np.unique(np.concatenate(pieces)).astype(np.int64)
            commands().touch(torch.from_numpy(unique), item_bytes, is_write)
        self.addresses.clear()


@contextmanager
def triton_kernels() -> Iterator[None]:
    """Makes launches of interpreted kernels with tensors of a simulated GPU tasks of its current stream."""
    accesses, own_call = Accesses(), GridExecutor.__call__
    own_load, own_store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def load(builder: InterpreterBuilder, pointers: TensorHandle, mask: TensorHandle, *others: object) -> TensorHandle:
        accesses.add(pointers, mask, is_write=False)
        return own_load(builder, pointers, mask, *others)

    def store(
        builder: InterpreterBuilder, pointers: TensorHandle, value: TensorHandle, mask: TensorHandle, policy: object
    ) -> object:
        accesses.add(pointers, mask, is_write=True)
        return own_store(builder, pointers, value, mask, policy)

    def call(executor: GridExecutor, *args: object, **kwargs: object) -> Any:
        given = [one.base if isinstance(one, TensorDescriptor) else one for one in (*args, *kwargs.values())]
        devices = {one.device for one in given if isinstance(one, Tensor)}
        if {one.type for one in devices} == {"cpu"}:
            return own_call(executor, *args, **kwargs)
        here = torch.device(NAME, torch.accelerator.current_device_index())
        assert devices == {here}, f"a kernel launched on {here} with tensors of {devices}"  # as Triton's own launch
        own_args = [_accessible(one) for one in args]
        own_kwargs = {name: _accessible(one) for name, one in kwargs.items()}

        def run() -> None:
            own_call(executor, *own_args, **own_kwargs)
            accesses.note()

        return _enqueue(here, run, executor.fn.__name__)

    with bfloat16_as_on_a_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", load)
        patch.setattr(InterpreterBuilder, "create_masked_store", store)
        patch.setattr(GridExecutor, "__call__", call)
        patch.setattr(SimulatedGpu, "sum_pages", lambda _, *tensors: checksums.sum_pages(*tensors))
        patch.setattr(GridExecutor, "_init_args_hst", lambda _, args, kwargs: (list(args), kwargs))
        patch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
        patch.setattr(SimulatedGpu, "likeliest", staticmethod(likeliest))
        yield


def _accessible(value: object) -> object:
    if isinstance(value, TensorDescriptor):
        return replace(value, base=commands().accessible(value.base))
    return commands().accessible(value) if isinstance(value, Tensor) else value


def _enqueue(device: torch.device, run: Callable[[], None], name: str) -> None:
    def launch() -> None:
        try:
            with _one_at_a_time, torch.inference_mode():
                run()
        except Exception as failure:  # of whatever kind a kernel may raise: it is the device's fault
            commands().fail(device.index, f"{name}: {failure}")

    _launches.append(_LAUNCH(launch))
    commands().enqueue(device.index, ctypes.cast(_launches[-1], ctypes.c_void_p).value, name)
