"""What each kind of fault does to a simulated cluster."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from kv_store.frame import FrameSeal, checksum_of
from kv_store.node.arena import Arena
from kv_store.node.messages import Block
from tests.harness.idle import visit_idle
from tests.simulator.invariants import LAYOUT
from tests.simulator.plan import Fault, Kind
from tests.simulator.redis import MAC_KEY
from wire.block_names import BlockName

if TYPE_CHECKING:
    from tests.simulator.worker import SimWorker
    from tests.simulator.world import World

LONG_AFTER_S = 100.0
HOUR_S = 3600.0


def strike(world: World, fault: Fault, here: SimWorker) -> None:
    """Lets a fault happen, at the worker that came to its step or at another."""
    others = [worker for worker in world.alive if worker is not here]
    victim = others[fault.victim % len(others)] if fault.victim and others else here
    _STRIKES[fault.kind](world, victim, fault.amount)


def _crash(world: World, worker: SimWorker, amount: float) -> None:
    world.crash(worker)


def _break(world: World, worker: SimWorker, amount: float) -> None:
    for connection in worker.connections:
        connection.break_off()


def _mute(world: World, worker: SimWorker, amount: float) -> None:
    for connection in worker.connections:
        connection.lose(connection.to_router)


def _deaf(world: World, worker: SimWorker, amount: float) -> None:
    for connection in worker.connections:
        connection.lose(connection.to_worker)


def _fail(world: World, worker: SimWorker, amount: float) -> None:
    worker.model.num_failing = 1


def _no_numbers(world: World, worker: SimWorker, amount: float) -> None:
    worker.model.num_without_numbers = 1


def _hang(world: World, worker: SimWorker, amount: float) -> None:
    worker.stalled_until_s = inf


def _stall(world: World, worker: SimWorker, amount: float) -> None:
    worker.stalled_until_s = max(worker.stalled_until_s, worker.clock() + amount)


def _node_gone(world: World, worker: SimWorker, amount: float) -> None:
    world.lose(worker.node, amount)


def _node_joins(world: World, worker: SimWorker, amount: float) -> None:
    world.errand(world.grow(worker.role, world.open_node()))


def _node_drains(world: World, worker: SimWorker, amount: float) -> None:
    world.errand(world.drain_node(worker.node, 30.0 if amount > 1 else amount))


def _router_dies(world: World, worker: SimWorker, amount: float) -> None:
    world.lose_router(world.draw.randrange(len(world.routers)) if len(world.routers) > 1 else 0)


def _controller_dies(world: World, worker: SimWorker, amount: float) -> None:
    world.lose_controller(amount)


def _head_dies(world: World, worker: SimWorker, amount: float) -> None:
    world.lose_controller(amount)
    world.lose_router()


def _roll(world: World, worker: SimWorker, amount: float) -> None:
    world.errand(world.roll(worker, 30.0 if amount > 1 else amount))


def _change(world: World, worker: SimWorker, amount: float) -> None:
    world.errand(world.change_role(worker))


def _delay(world: World, worker: SimWorker, amount: float) -> None:
    for connection in worker.connections:
        connection.to_router.delay_s = connection.to_worker.delay_s = amount / 10


def _twice(world: World, worker: SimWorker, amount: float) -> None:
    for connection in worker.connections:
        connection.to_router.num_twice = connection.to_worker.num_twice = 3


def _drain(world: World, worker: SimWorker, amount: float) -> None:
    world.errand(world.leave(worker, amount if amount > 1 else 0.0))


def _shrink(world: World, worker: SimWorker, amount: float) -> None:
    world.errand(world.leave(worker, 30.0))


def _grow(world: World, worker: SimWorker, amount: float) -> None:
    world.errand(world.grow(worker.role))


def _evict(world: World, worker: SimWorker, amount: float) -> None:
    for node in world.nodes:
        node.evict()


def _move(world: World, worker: SimWorker, amount: float) -> None:
    for node in world.nodes:
        for block in node.directory.state.blocks():
            payload = node.arena.slot(block.slot)[: LAYOUT.payload_bytes]
            if not block.name.is_tail and checksum_of(payload) == block.checksum:
                world.redis.put(block.name, payload, block.checksum)
    _evict(world, worker, amount)


def _flip(world: World, worker: SimWorker, amount: float) -> None:
    """Flips a bit in blocks that no process reads just now: between check and copy none could notice."""

    def flip(arena: Arena, idle: list[Block]) -> None:
        for block in idle:
            if world.draw.random() < 0.7:
                arena.slot(block.slot)[world.draw.randrange(LAYOUT.payload_bytes)] ^= 1

    for node in world.nodes:
        visit_idle(node.directory, partial(flip, node.arena))


def _expire(world: World, worker: SimWorker, amount: float) -> None:
    worker.node.ahead_s += LONG_AFTER_S


def _wall(world: World, worker: SimWorker, amount: float) -> None:
    world.wall_s += world.draw.choice([-HOUR_S, HOUR_S])


def _restart(world: World, worker: SimWorker, amount: float) -> None:
    worker.node.restart()
    _away(world, worker, amount)


def _away(world: World, worker: SimWorker, amount: float) -> None:
    node = worker.node
    node.away_until_s = max(node.away_until_s, world.loop.time() + amount)


def _lost_call(world: World, worker: SimWorker, amount: float) -> None:
    worker.num_lost_calls += 1


def _lost_answer(world: World, worker: SimWorker, amount: float) -> None:
    worker.num_lost_answers += 1


def _cold_down(world: World, worker: SimWorker, amount: float) -> None:
    world.redis.down_until_s = world.loop.time() + amount


def _cold_slow(world: World, worker: SimWorker, amount: float) -> None:
    world.redis.slow_until_s = world.loop.time() + amount


def _cold_full(world: World, worker: SimWorker, amount: float) -> None:
    world.redis.full_until_s = world.loop.time() + amount


def _cold_cut(world: World, worker: SimWorker, amount: float) -> None:
    world.redis.num_cut += 1


def _peer_away(world: World, worker: SimWorker, amount: float) -> None:
    for node in world.nodes:
        node.port_away_until_s = world.loop.time() + amount


def _peer_slow(world: World, worker: SimWorker, amount: float) -> None:
    for node in world.nodes:
        node.port_slow_until_s = world.loop.time() + amount


def _peer_cut(world: World, worker: SimWorker, amount: float) -> None:
    for one in world.alive:
        one.num_cut_blocks += 1


def _peer_twice(world: World, worker: SimWorker, amount: float) -> None:
    for one in world.alive:
        one.num_blocks_twice += 3


def _events_lost(world: World, worker: SimWorker, amount: float) -> None:
    for connection in (connection for one in world.alive for connection in one.connections):
        connection.num_lost_pages += 1


def _events_old(world: World, worker: SimWorker, amount: float) -> None:
    """Pages come again, of a dead epoch where the directory has restarted since."""
    for connection in (connection for one in world.alive for connection in one.connections):
        connection.num_old_pages += 3


def _cold_empty(world: World, worker: SimWorker, amount: float) -> None:
    world.redis.frames.clear()


def _cold_corrupt(world: World, worker: SimWorker, amount: float) -> None:
    """Spoils every value: a flipped bit, a value cut short or too long, another's value, one of another namespace."""
    _move(world, worker, amount)
    values, seal = list(world.redis.frames.values()), FrameSeal(LAYOUT, MAC_KEY)
    for key, value in world.redis.frames.items():
        at = world.draw.randrange(len(value))
        flipped = bytearray(value)
        flipped[at] ^= 1
        payload = memoryview(world.truth.foreign[key])
        of_another = BlockName(key, bytes(32), bytes(32), bytes(32))
        elsewhere = seal.seal(of_another, payload, checksum_of(payload)) + payload
        spoilt = [bytes(flipped), value[:at], value + b"x", world.draw.choice(values), elsewhere]
        world.redis.frames[key] = world.draw.choice(spoilt)


_STRIKES: dict[Kind, Callable[[World, SimWorker, float], None]] = {
    Kind.CRASH: _crash,
    Kind.BREAK: _break,
    Kind.MUTE: _mute,
    Kind.DEAF: _deaf,
    Kind.FAIL: _fail,
    Kind.HANG: _hang,
    Kind.NO_NUMBERS: _no_numbers,
    Kind.NODE_GONE: _node_gone,
    Kind.DELAY: _delay,
    Kind.TWICE: _twice,
    Kind.STALL: _stall,
    Kind.DRAIN: _drain,
    Kind.GROW: _grow,
    Kind.SHRINK: _shrink,
    Kind.EVICT: _evict,
    Kind.MOVE: _move,
    Kind.FLIP: _flip,
    Kind.EXPIRE: _expire,
    Kind.WALL: _wall,
    Kind.RESTART: _restart,
    Kind.AWAY: _away,
    Kind.LOST_CALL: _lost_call,
    Kind.LOST_ANSWER: _lost_answer,
    Kind.COLD_DOWN: _cold_down,
    Kind.COLD_SLOW: _cold_slow,
    Kind.COLD_EMPTY: _cold_empty,
    Kind.COLD_CORRUPT: _cold_corrupt,
    Kind.COLD_FULL: _cold_full,
    Kind.COLD_CUT: _cold_cut,
    Kind.ROUTER_DIES: _router_dies,
    Kind.CONTROLLER_DIES: _controller_dies,
    Kind.HEAD_DIES: _head_dies,
    Kind.ROLL: _roll,
    Kind.CHANGE: _change,
    Kind.NODE_JOINS: _node_joins,
    Kind.NODE_DRAINS: _node_drains,
    Kind.PEER_AWAY: _peer_away,
    Kind.PEER_CUT: _peer_cut,
    Kind.PEER_SLOW: _peer_slow,
    Kind.PEER_TWICE: _peer_twice,
    Kind.EVENTS_LOST: _events_lost,
    Kind.EVENTS_OLD: _events_old,
}
