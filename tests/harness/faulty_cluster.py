"""A whole cluster in this process whose workers die, stall and lose their store, and are replaced."""

import asyncio
from collections.abc import Callable, Sequence

from engine.model.batch import CausalModel
from kv_store.node.messages import Block, Hold
from kv_store.node_store import HOLD_TTL_S
from router.workers.line import Transport
from tests.harness.answer import ChoiceAnswer, Reader
from tests.harness.assembled_worker import behaviour_of
from tests.harness.cold_gate import ColdGate
from tests.harness.directory_gate import DirectoryGate
from tests.harness.fake_clock import FakeClock
from tests.harness.faulty_model import FaultyModel
from tests.harness.faulty_transport import Faults, FaultyTransport
from tests.harness.fragments import FragmentTokenizer
from tests.harness.idle import visit_idle
from tests.harness.local_cluster import LocalCluster, Parts, Sizes
from tests.harness.mortal_transport import MortalTransport
from wire.block_names import BlockName, cover
from wire.ids import DEFAULT_TENANT, AttemptId, NamespaceRoot
from wire.pb import inference_pb2 as pb
from wire.pools import Role
from worker.assembly import Tiers


class FaultyCluster(LocalCluster):
    """Workers that die lose all they had, and their writes are void; `clock` is the directory's.

    replace_dead: a new worker of the same role takes the place of each that dies, as the controller sees to.
    broken_ones_linger: the processes of workers that are of no use any more do not end.
    """

    def __init__(self, model: CausalModel, sizes: Sizes) -> None:
        self.clock = FakeClock()
        super().__init__(FaultyModel(model), sizes, FragmentTokenizer(), self.clock)
        self._plain_model = model
        self.models: dict[str, FaultyModel] = {}
        self.gates: dict[str, DirectoryGate] = {}
        self.colds: dict[str, ColdGate] = {}
        self.mortals: dict[str, MortalTransport] = {}
        self.replace_dead = False
        self.broken_ones_linger = False
        self.dead: list[str] = []
        self.someone_died = asyncio.Event()
        self.listed: list[str] = []
        self._poison: int | None = None
        self._applying = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._burials: set[asyncio.Task[None]] = set()

    async def enlist(self, *names: str, draining: str = "") -> None:
        self.listed = list(names)
        await self._apply(draining)

    async def add(self, role: Role) -> str:
        """One more worker; returns its name."""
        name = self._new_name(role)
        self.listed.append(name)
        await self._apply()
        return name

    def open(self, request: pb.GenerateRequest, time_left_s: float | None = 60.0) -> Reader:
        return Reader(self.router.dispatcher.open(request, time_left_s).outbox)

    async def answer(self, request: pb.GenerateRequest) -> list[ChoiceAnswer]:
        return await self.open(request).read_all()

    async def drain(self, name: str, grace_s: float = 20.0) -> int:
        """As the controller drains: the worker leaves once it has finished, the grace is over, or it dies."""
        await self._apply(draining=name)
        num_given_back = await self.workers[name].service.attempts.drain(grace_s)
        if name in self.listed:
            self.listed.remove(name)
        await self._apply()
        await self.workers[name].service.close()
        await asyncio.to_thread(self.workers[name].close)
        return num_given_back

    async def change_role(self, name: str, role: Role, grace_s: float) -> int:
        """As the controller has a worker change its role."""
        await self._apply(draining=name)
        num_given_back = await self.workers[name].service.serve_as(behaviour_of(role, self._sizes.batch), grace_s)
        self.changed_roles[name] = role
        await self._apply()
        return num_given_back

    def crash(self, name: str) -> None:
        """The worker's process ends now. May be called from any thread."""
        self.gates[name].cut()
        self._loop.call_soon_threadsafe(self.mortals[name].kill)

    def disconnect(self, name: str) -> None:
        """The router loses a worker that lives on, and is not replaced."""
        self.listed.remove(name)
        FaultyTransport.kill(self.mortals[name])

    def poison(self, token: int) -> None:
        """From now on every worker dies at the step in which it meets this token."""
        self._poison = token
        for name in self.models:
            self._be_poisoned(name)

    def hold_all_slots(self) -> None:
        """Fills the arena with other bytes, held for a request that nobody knows."""
        root = NamespaceRoot(b"nobody's" * 4)
        names = cover(
            root, range(self.arena.num_slots * self._plain_model.layout.block_size), self._plain_model.layout.block_size
        )
        hold = Hold(AttemptId("nobody's"), HOLD_TTL_S)
        slots = self.directory.reserve("nobody", names, hold).slots
        given = [(slot, name) for slot, name in zip(slots, names, strict=True) if slot is not None]
        for slot, _ in given:
            self.arena.slot(slot)[:] = b"x" * self.arena.block_bytes
        blocks = [Block(slot, name, b"") for slot, name in given]
        self.directory.commit("nobody", blocks, hold)

    @property
    def payload_bytes(self) -> int:
        """Of a block."""
        return self._plain_model.layout.payload_bytes

    def names_of(self, prompt: Sequence[int]) -> list[BlockName]:
        """Of the blocks of a prompt, as the router and the workers name them."""
        return cover(self.router.dispatcher.root_of(DEFAULT_TENANT), prompt, self._plain_model.layout.block_size)

    def blocks(self) -> list[Block]:
        """What is found in the arena."""
        return self.directory.state.blocks()

    def move_to_cold(self) -> None:
        """Moves the arena's full blocks to the cold tier, and drops the tails."""
        for block in self.blocks():
            if not block.name.is_tail:
                payload = self.arena.slot(block.slot)[: self._plain_model.layout.payload_bytes]
                self.cold.put(block.name, payload, block.checksum)
        self.empty_arena()

    def spoil_arena(self, spoil: Callable[[Sequence[memoryview]], None]) -> None:
        """Changes bytes of blocks that nobody reads just now: between check and copy nobody could notice."""
        visit_idle(self.directory, lambda idle: spoil([self.arena.slot(block.slot) for block in idle]))

    def empty_arena(self) -> None:
        """Evicts everything."""
        self.directory.reject(self.blocks())

    async def settle(self) -> None:
        """Returns when all that died is buried, and replaced if that is to be."""
        while self._burials:
            await asyncio.gather(*self._burials)

    async def stop(self) -> None:
        for model in self.models.values():
            model.go_on()
        await self.settle()
        await super().stop()

    def _parts(self, name: str) -> Parts:
        parts = super()._parts(name)
        self.models[name] = FaultyModel(self._plain_model)
        self._be_poisoned(name)
        self.gates[name] = DirectoryGate(parts.tiers.directory)
        self.colds[name] = ColdGate(self.cold)
        return Parts(self.models[name], Tiers(parts.tiers.arena, self.gates[name], [self.colds[name]]))

    def _connect(self, address: str) -> Transport:
        faults = self.faults.setdefault(address, Faults())
        self.mortals[address] = MortalTransport(self.workers[address].service, faults, lambda: self._died(address))
        return self.mortals[address]

    def _broke(self, name: str) -> None:
        if not self.broken_ones_linger:
            self.crash(name)

    def _be_poisoned(self, name: str) -> None:
        if self._poison is not None:
            self.models[name].poison = self._poison
            self.models[name].on_poison = lambda: self.crash(name)

    def _died(self, name: str) -> None:
        self.gates[name].cut()
        self.dead.append(name)
        self.someone_died.set()
        self.listed.remove(name)
        burial = asyncio.create_task(self._bury(name))
        self._burials.add(burial)
        burial.add_done_callback(self._burials.discard)

    async def _bury(self, name: str) -> None:
        """What the system does about a dead process: its writes are given up, and another takes its place."""
        worker = self.workers[name]
        self.models[name].go_on()
        await worker.service.close()
        await asyncio.to_thread(worker.close)
        for writer in self.gates[name].names:
            self.directory.writer_died(writer)
        if self.replace_dead:
            await self.add(Role.PREFILL if name.startswith("p") else Role.DECODE)

    async def _apply(self, draining: str = "") -> None:
        """Makes the cluster what `listed` says."""
        async with self._applying:
            await super().enlist(*self.listed, draining=draining)

    def _new_name(self, role: Role) -> str:
        """One that no worker has had; pools that are made by size are counted from 0."""
        letter = role.value[0]
        numbers = [int(name[1:]) for name in (*self.models, *self.listed) if name.startswith(letter)]
        return f"{letter}{max(numbers, default=-1) + 1}"
