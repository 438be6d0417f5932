"""Planted races: without any one of the lines that order its accesses, a program is reported, in every run."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels.accelerator import ACCELERATORS
from kv_store.device_pool import DevicePool
from kv_store.node import arena
from kv_store.node.arena import Arena
from tests.simulated_gpu.device import SIM, commands, races
from wire.ids import PageId, SlotId
from wire.layout import KVLayout

PROGRAMS = {
    "a side stream": """
values, side = torch.ones(1000, device=SIM), torch.Stream(SIM)
side.wait_stream(here())  # orders
with side:
    doubled = values * 2
here().wait_stream(side)  # orders
values += 1
""",
    "an event": """
first, second, produced = torch.Stream(SIM), torch.Stream(SIM), torch.Event(SIM)
with first:
    values = torch.ones(1000, device=SIM)
    produced.record()  # orders
second.wait_event(produced)  # orders
with second:
    values *= 2
second.synchronize()
""",
    "a pinned buffer that is filled again": """
columns, on_device = torch.zeros(1000).pin_memory(), torch.empty(1000, device=SIM)
copied = torch.Event(SIM)
for step in range(3):
    copied.synchronize()  # orders
    columns.fill_(step)
    on_device.copy_(columns, non_blocking=True)
    copied.record()  # orders
""",
    "a pinned buffer that is read": """
on_host = torch.zeros(1000).pin_memory()
on_host.copy_(torch.ones(1000, device=SIM), non_blocking=True)
here().synchronize()  # orders
on_host.sum()
""",
    "memory that is freed": """
values, side = torch.ones(1000, device=SIM), torch.Stream(SIM)
side.wait_stream(here())
with side:
    doubled = values * 2
values.record_stream(side)  # orders
del values
others = torch.zeros(1000, device=SIM)
""",
    "a block handed over from device to device": """
pools[0].page_bytes(PageId(3)).fill_(7)
pools[0].follow(pools[0].fence())  # orders
pools[0].read_pages(PageId(3), slots.slot(SlotId(1)))
pools[0].wait()  # orders
pools[1].write_pages(PageId(2), slots.slot(SlotId(1)))
pools[1].wait()  # orders
pools[1].page_bytes(PageId(2)).sum()
""",
    "a page that is taken again": """
pools[0].write_pages(PageId(3), slots.slot(SlotId(1)))
pools[0].wait()  # orders
pools[0].page_bytes(PageId(3)).fill_(1)
pools[0].follow(pools[0].fence())  # orders
pools[0].write_pages(PageId(3), slots.slot(SlotId(0)))
pools[0].wait()
""",
    "a slot that is written again": """
pools[0].write_pages(PageId(3), slots.slot(SlotId(1)))
pools[0].wait()  # orders
slots.slot(SlotId(1))[:] = bytes(LAYOUT.block_bytes)
""",
    "halves of a stream's work": """
table, side = torch.zeros(8, 100, device=SIM), torch.Stream(SIM)
rows = torch.tensor([1, 5]).pin_memory().to(SIM, non_blocking=True)
side.wait_stream(here())  # orders
with side:
    table[rows] = 1.0
table[2:4] = 2.0
here().wait_stream(side)  # orders
table[5] = 3.0
""",
}
LAYOUT = KVLayout(2, 2, 16, 16, "float32")
PLANTED = [
    pytest.param(name, place, id=f"{name} without {line.partition('  #')[0].strip()}")
    for name, program in PROGRAMS.items()
    for place, line in enumerate(program.splitlines())
    if line.endswith("# orders")
]


def here() -> torch.Stream:
    return torch.accelerator.current_stream(SIM)


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Arena:
    monkeypatch.setattr(arena, "GPU_CONTROLS", (Path("/dev/null"),))
    return Arena.anonymous(LAYOUT.block_bytes, 4)


@pytest.fixture
def run(slots: Arena) -> Callable[[str], None]:
    pools = [DevicePool(LAYOUT, 4, torch.device("sim", index)) for index in range(2)]
    for pool in pools:
        pool.follow(pool.fence())
    return lambda program: exec(program, globals() | {"pools": pools, "slots": slots, "PageId": PageId})


@pytest.mark.parametrize("is_lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_ordered_program_has_no_race(name: str, is_lazy: bool, run: Callable[[str], None]) -> None:
    commands().set_lazy(is_lazy)
    run(PROGRAMS[name])
    assert races() == []


@pytest.mark.parametrize("is_lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize(("name", "place"), PLANTED)
def test_a_line_left_out_is_a_race(name: str, place: int, is_lazy: bool, run: Callable[[str], None]) -> None:
    commands().set_lazy(is_lazy)
    lines = PROGRAMS[name].splitlines()
    run("\n".join([*lines[:place], lines[place].partition(lines[place].lstrip())[0] + "pass", *lines[place + 1 :]]))
    assert races() != []


def test_the_arena_is_pinned(slots: Arena) -> None:
    assert "sim" in ACCELERATORS
    assert torch.frombuffer(slots.slot(SlotId(1)), dtype=torch.uint8).is_pinned()
