"""Each wait, record and fence of the product, left out: one run of what it orders reports a race."""

import ast
import importlib
import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch

from engine.model.batch import Batch
from engine.model.decoder import Decoder
from engine.step.runner import Runner
from kernels.products.ordered import Counters
from kernels.triton_backend import TritonBackend
from kv_store.device_pool import DevicePool
from kv_store.node import arena
from kv_store.node.directory import Directory
from kv_store.node.messages import Block, Hold
from kv_store.node_store import NodeStore
from kv_store.page_store import PageStore
from kv_store.prefix.tier_list import TierList
from kv_store.tiers.memory_tier import MemoryTier
from kv_store.transfers import Fetch, InlineTransfers, ThreadTransfers, Transfer, WriteThrough
from tests.docs.sizes import product_packages
from tests.harness.checkpoints import choose_prompt, make_checkpoint
from tests.harness.engines import drive, make_core, request
from tests.harness.node import Node
from tests.kv_store.names import LAYOUT, names_of
from tests.simulated_gpu.device import NUM_DEVICES, SIM, commands, races
from tests.simulated_gpu.triton_kernels import triton_kernels
from wire.ids import PageId, SlotId
from wire.layout import KVLayout
from wire.sampling import SamplingParams

ROOT = Path(__file__).parents[2]
ORDERING = ("synchronize", "wait", "wait_event", "wait_stream", "record", "follow", "record_stream")
OF_DEVICES = ("torch.Stream", "torch.Event", "torch.accelerator", "DevicePool", "NodeStore", "BlockStore")
NUM_BLOCKS, NUM_SLOTS, WAIT_S = 4, 16, 60.0
PAGES = [PageId(page) for page in range(NUM_BLOCKS)]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
Carry = Callable[[NodeStore, Transfer], None]


class TouchedArena(Directory):
    """A directory of a node whose other processes read and write slots as soon as they may: here, after each call."""

    node: Node

    def commit(self, writer: str, blocks: Sequence[Block], hold: Hold | None) -> int:
        committed = super().commit(writer, blocks, hold)
        self._touch_all()
        return committed

    def abandon(self, writer: str) -> int:
        abandoned = super().abandon(writer)
        self._touch_all()
        return abandoned

    def release(self, lease_id: int) -> bool:
        released = super().release(lease_id)
        self._touch_all()
        return released

    def _touch_all(self) -> None:
        """Writes the bytes that the slots have."""
        for number in range(NUM_SLOTS):
            slot = self.node.arena.slot(SlotId(number))
            slot[0] = slot[0]


def carry_inline(store: NodeStore, transfer: Transfer) -> None:
    with suppress(torch.OutOfMemoryError):
        InlineTransfers(store).begin(transfer)


def carry_in_a_thread(store: NodeStore, transfer: Transfer) -> None:
    ended = threading.Event()
    transfers = ThreadTransfers(store, ended.set)
    transfers.start()
    transfers.begin(transfer)
    assert ended.wait(WAIT_S)
    transfers.close()


def hand_over_blocks(carry: Carry, layout: KVLayout = LAYOUT) -> None:
    """Takes blocks from one device to another by the arena and a cold tier, and fails once amid copies."""
    cold, directory = MemoryTier(layout), TouchedArena(NUM_SLOTS, high_water=0.0, block_bytes=layout.block_bytes)
    directory.node = node = Node(layout, NUM_SLOTS, cold, directory)
    source, target = (DevicePool(layout, NUM_BLOCKS, torch.device("sim", index)) for index in range(2))
    stores = [NodeStore(layout, node.arena, directory, [cold], pool) for pool in (source, target)]
    names = names_of(NUM_BLOCKS * LAYOUT.block_size)[:NUM_BLOCKS]

    def fill(pool: DevicePool, value: int) -> None:
        for page in PAGES:
            pool.page_bytes(page).fill_(value)

    fill(source, 7)
    carry(stores[0], WriteThrough(names, PAGES))
    fill(source, 8)
    node.write_all_cold()
    directory.delete([name.key for name in names[:2]])
    fill(target, 9)
    carry(stores[1], Fetch(names, PAGES))
    fill(target, 9)
    directory.delete([name.key for name in names[:2]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "write_pages", failing_after(3, target.write_pages))
        carry(stores[1], Fetch(names, PAGES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "read_pages", failing_after(1, source.read_pages))
        carry(stores[0], WriteThrough(names_of(NUM_BLOCKS * LAYOUT.block_size, first=9)[:NUM_BLOCKS], PAGES))


def keep_in_tiers(_: Path) -> None:
    """Writes pages to a tier of an engine's own store, changes them, and reads them again."""
    pool = DevicePool(LAYOUT, NUM_BLOCKS, SIM)
    transfers = InlineTransfers(PageStore(TierList([MemoryTier(LAYOUT)]), pool))
    names = names_of(NUM_BLOCKS * LAYOUT.block_size)[:NUM_BLOCKS]
    for transfer in (WriteThrough(names, PAGES), Fetch(names, PAGES)):
        for page in PAGES:
            pool.page_bytes(page).fill_(7)
        transfers.begin(transfer)


def failing_after(num_calls: int, function: Callable[..., object]) -> Callable[..., None]:
    """Makes a function that fails once it has done its work, from that call on."""
    calls: list[object] = []

    def failing(*args: object) -> None:
        calls.append(function(*args))
        if len(calls) >= num_calls:
            raise torch.OutOfMemoryError("out of memory in a copy")

    return failing


def decode(folder: Path) -> None:
    """Decodes with captured programs, then runs one three times without a read between."""
    model = Decoder.load(folder, "float32", SIM, 16, TritonBackend())
    core = make_core(model)
    drive(core, [request(choose_prompt(folder, length).prompt_ids, GREEDY) for length in (1, 2)])
    row, table = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32)
    lens, starts = torch.ones(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    for _ in range(3):
        model.forward(
            Batch(
                token_ids=row,
                positions=row,
                slot_mapping=row,
                block_tables=table,
                context_lens=lens,
                cu_query_lens=starts,
                num_decodes=1,
                sample_rows=row,
            ),
            core.pool.kv,
        )


def fail_steps(folder: Path) -> None:
    """Aborts one of two requests whose step, without a graph, fails once its columns are on the way.

    The step ahead fails first, which fails no request.
    """
    model = Decoder.load(folder, "float32", SIM, 16, TritonBackend())
    core = make_core(model)
    requests = [request(choose_prompt(folder, length).prompt_ids, GREEDY) for length in (1, 2)]
    for one in requests:
        core.add(one)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "_program_for", lambda *_: None)
        while core.stats().generated_tokens < 2 * len(requests):  # both decode
            core.step()
        patch.setattr(model, "forward", failing_after(1, model.forward))
        patch.setattr(Runner, "_is_sound", lambda _: False)  # as where no page is left for a probe
        core.step()
        with suppress(torch.OutOfMemoryError):
            core.step()
    core.abort(requests[0].attempt_id)


def count_on_a_second_stream(_: Path) -> None:
    """Counts tiles of products on a stream beside the one that has made the counters."""
    counters, side = Counters(), torch.Stream(SIM)
    counters.here(SIM)
    with side:
        counters.here(SIM).add_(1)
    side.synchronize()


NO_WORDS = KVLayout(1, 1, 1, 1, "bfloat16")
"""A layout whose payloads are no whole words, so that the host takes their checksums."""
OF_BLOCKS = [
    lambda _: hand_over_blocks(carry_inline),
    lambda _: hand_over_blocks(carry_in_a_thread),
    lambda _: hand_over_blocks(carry_in_a_thread, NO_WORDS),
]
PROGRAMS: dict[str, list[Callable[[Path], None]]] = {
    "engine/model/programs.py": [decode],
    "engine/model/sampler.py": [decode],
    "engine/step/runner.py": [fail_steps],
    "kernels/products/ordered.py": [count_on_a_second_stream],
    "kv_store/device_pool.py": OF_BLOCKS,
    "kv_store/node_store.py": OF_BLOCKS,
    "kv_store/page_store.py": [keep_in_tiers],
    "kv_store/transfers.py": OF_BLOCKS,
}
"""What runs the statements of each file that order accesses of a device."""
OF_FAILURES = ("engine/warm/warming.py",)
"""Files whose waits order no access: they raise a device's failure at the step that caused it (test_warming.py)."""


def ordering_statements(source: str) -> list[ast.Expr]:
    """Lists the statements that are one call of a wait, record or fence."""
    return [
        one
        for one in ast.walk(ast.parse(source))
        if isinstance(one, ast.Expr)
        and isinstance(one.value, ast.Call)
        and isinstance(one.value.func, ast.Attribute)
        and one.value.func.attr in ORDERING
    ]


PLANTED = [
    pytest.param(file, one.lineno, id=f"{file}:{one.lineno} {ast.unparse(one)}")
    for file in PROGRAMS
    for one in ordering_statements((ROOT / file).read_text())
]


def leave_out(file: str, line: int, patch: pytest.MonkeyPatch) -> None:
    """Gives the function around a statement the code that its module has without it."""
    tree = ast.parse((ROOT / file).read_text())
    for node in ast.walk(tree):
        for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(body, list):
                body[:] = [ast.Pass(lineno=line, col_offset=0) if is_at(one, line) else one for one in body]
    around = [
        code
        for code in codes_of(compile(ast.fix_missing_locations(tree), file, "exec"))
        if code.co_name != "<module>" and any(at == line for _, _, at in code.co_lines())
    ]
    assert around, "no function has this line"
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    for code in around:
        function: Any = reduce(getattr, code.co_qualname.split("."), module)
        function = inspect.unwrap(function)
        patch.setattr(function, "__code__", code)


def is_at(statement: ast.stmt, line: int) -> bool:
    return isinstance(statement, ast.Expr) and statement.lineno == line


def codes_of(code: CodeType) -> list[CodeType]:
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return [code, *(found for one in inner for found in codes_of(one))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-gqa", tmp_path_factory.mktemp("llama-gqa"), num_hidden_layers=1)


@pytest.fixture(autouse=True)
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes arenas look for a GPU."""
    monkeypatch.setattr(arena, "GPU_CONTROLS", (Path("/dev/null"),))


def run(file: str, folder: Path) -> None:
    with triton_kernels():  # whose launches wait for nothing, as those of torch's attention do
        for program in PROGRAMS[file]:
            program(folder)


@pytest.mark.parametrize("file", {(*programs,): file for file, programs in PROGRAMS.items()}.values())
def test_whole_programs_have_no_race(file: str, folder: Path) -> None:
    run(file, folder)
    assert races() == []


@pytest.mark.parametrize(("file", "line"), PLANTED)
def test_a_statement_left_out_is_reported(file: str, line: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(file, line, monkeypatch)
    with suppress(RuntimeError):  # of a device that has met a number that was not there yet
        run(file, folder)
    for device in range(NUM_DEVICES):  # programs of two devices leave either with such a fault
        commands().repair(device)
    assert races() != []


def test_every_file_that_orders_a_device_is_planted() -> None:
    product = [path for package in product_packages() for path in (ROOT / package).rglob("*.py")]
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in product}
    found = {
        name
        for name, source in sources.items()
        if any(one in source for one in OF_DEVICES) and ordering_statements(source)
    }
    assert found == {*PROGRAMS, *OF_FAILURES}
