"""The rules of the simulated GPU itself."""

import ctypes
import subprocess
import sys
import time

import pytest
import torch

from kv_store.device_pool import DevicePool
from tests.simulated_gpu import device
from tests.simulated_gpu.device import SIM, SimulatedGraph, commands, counts, leave_room, races
from wire.ids import PageId
from wire.layout import KVLayout

SEEDS = range(1, 13)


def test_operators_return_before_they_have_run() -> None:
    values = torch.zeros(100, device=SIM).add_(0)
    device.synchronize()
    commands().set_delay(20_000)
    begun = time.perf_counter()
    for _ in range(40):
        values += 1
    asked = time.perf_counter()
    assert values.cpu().eq(40).all()
    assert asked - begun < time.perf_counter() - asked


def test_a_lazy_stream_runs_nothing_before_it_is_waited_for() -> None:
    commands().set_lazy(True)
    stream, event = torch.accelerator.current_stream(SIM), torch.Event(SIM)
    torch.ones(3, device=SIM)
    event.record()
    assert not stream.query()
    assert not event.query()
    event.synchronize()
    assert stream.query()


def test_new_memory_is_no_number() -> None:
    assert torch.empty(1000, device=SIM).isnan().all()


def test_the_host_cannot_read_a_device() -> None:
    values = torch.ones(3, device=SIM)
    with pytest.raises(TypeError, match="device"):
        values.numpy()
    ctypes.string_at(values.data_ptr(), 4)
    assert races() == ["the host touched memory of sim:0"]


def test_memory_runs_out_and_comes_back() -> None:
    leave_room(0, 1 << 20)
    kept = torch.zeros(1 << 19, dtype=torch.uint8, device=SIM)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory on sim:0: 1048576 bytes asked"):
        torch.zeros(1 << 20, dtype=torch.uint8, device=SIM)
    torch.zeros(1 << 20, dtype=torch.uint8, device="sim:1")
    del kept
    assert torch.zeros(1 << 19, dtype=torch.uint8, device=SIM).sum() == 0


def test_a_fault_surfaces_at_the_next_synchronization_and_stays() -> None:
    values = torch.zeros(3, device=SIM)
    values[torch.tensor([5], device=SIM)]  # queued, and not checked by the host
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"sim:0 has failed: aten::index.*index 5 is out of bounds"):
            torch.accelerator.synchronize(SIM)
    assert torch.ones(2, device="sim:1").sum() == 2
    commands().repair(0)


def test_tensors_go_from_device_to_device() -> None:
    for index in range(1, device.NUM_DEVICES):
        there = torch.arange(100, device=SIM).to(torch.device("sim", index))
        assert there.device.index == index
        assert there.sum() == 4950
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(100, device=SIM) + there


def test_pinned_memory_is_read_when_the_copy_runs() -> None:
    """The host goes on after the report, as it would on a GPU."""
    commands().set_lazy(True)
    host = torch.zeros(8).pin_memory()
    there = host.to(SIM, non_blocking=True)
    host.fill_(1)
    assert there.sum() == 8
    assert len(races()) == 1


def test_pageable_memory_is_read_at_once() -> None:
    commands().set_lazy(True)
    host = torch.zeros(8)
    there = host.to(SIM, non_blocking=True)
    host.fill_(1)
    assert there.sum() == 0


def test_graphs_record_launches_and_repeat_them() -> None:
    values = torch.ones(4, device=SIM)
    graph = SimulatedGraph(SIM)
    made: list[torch.Tensor] = []
    graph.capture(lambda: made.append(values.mul_(2) + 1))
    assert values.sum() == 4
    for _ in range(3):
        before = counts()
        graph.replay()
        assert (counts() - before).launches == 1
    assert made[0].tolist() == [9.0] * 4


def test_a_read_by_the_host_cannot_be_captured() -> None:
    values = torch.ones(4, device=SIM)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        SimulatedGraph(SIM).capture(lambda: torch.testing.assert_close(values.sum().item(), 4.0))


def test_synchronizations_are_counted_where_the_host_waits() -> None:
    stream = torch.accelerator.current_stream(SIM)
    values = torch.ones(4, device=SIM)
    before = counts()
    values += 1
    stream.synchronize()
    stream.synchronize()
    assert (counts() - before).synchronizations == 1
    assert values.sum().item() == 8
    asked = counts() - before
    assert (asked.synchronizations, asked.launches, asked.to_host) == (2, 2, 1)


def test_threads_end_with_the_process() -> None:
    program = (
        "import torch; from tests.simulated_gpu import device; device.load(); from tests.simulated_gpu.device import *;"
        "commands().set_delay(50_000); x = torch.ones(9, device='sim'); [x.mul_(2) for _ in range(20)]; print('end')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "end\n"), ended.stderr


def test_an_order_is_drawn_from_its_seed_and_repeats() -> None:
    main, sides = torch.accelerator.current_stream(SIM), [torch.Stream(SIM) for _ in range(3)]

    def computed(seed: int) -> float:
        """Changes a number on three streams that nothing orders."""
        commands().set_seed(seed)
        value = torch.ones(1, device=SIM)
        for number, side in enumerate(sides):
            side.wait_stream(main)
            with side:
                value.mul_(number + 2).add_(number)
        for side in sides:
            main.wait_stream(side)
        result = value.item()
        assert races() != []
        return result

    first = [computed(seed) for seed in SEEDS]
    assert [computed(seed) for seed in SEEDS] == first
    assert len(set(first)) > 2


def test_a_missing_fence_is_wrong_bytes_under_some_seeds() -> None:
    """And none with it, under any."""

    def read(seed: int, is_fenced: bool) -> set[int]:
        commands().set_seed(seed)
        pool, into = DevicePool(KVLayout(1, 1, 16, 16, "float32"), 2, SIM), torch.zeros(2048, dtype=torch.uint8)
        device.synchronize()
        host = into.pin_memory()
        pool.page_bytes(PageId(1)).fill_(7)
        if is_fenced:
            pool.follow(pool.fence())
        pool.read_pages(PageId(1), memoryview(host.numpy().data))
        pool.wait()
        device.synchronize()
        assert (races() == []) is is_fenced
        return set(host.tolist())

    assert all(read(seed, is_fenced=True) == {7} for seed in SEEDS)
    assert {7} < set.union(*(read(seed, is_fenced=False) for seed in SEEDS))
