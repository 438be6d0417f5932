"""The plan of a simulated run, drawn from its seed: requests with their clients, and faults. Pure."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

from router.config import Disaggregation
from tests.harness.answer import ask
from wire.kv_policy import Sinks
from wire.pb import inference_pb2 as pb

NUM_KINDS = 96
POISON = 300
"""A token, and the kind of a request with it: every worker dies in the step that meets it."""
MAX_TRANSPARENT_LOSSES = 2
"""Losses of workers that no client may notice: a request is given up with the third."""


class Client(Enum):
    """How a client behaves. `amount` of its Ask: tokens until it leaves, stalls or aborts; seconds of a deadline."""

    STAYS = "stays"
    DAWDLES = "dawdles"
    LEAVES = "leaves"
    ABORTS = "aborts"
    HURRIES = "hurries"
    STALLS = "stalls"
    POISONS = "poisons"


@dataclass(frozen=True)
class Ask:
    """A request of the catalogue, the time of its arrival, and its client.

    tenant: of its caller. session: whose KV is to be kept for `keep_s`; 0 for none.
    """

    kind: int
    arrives_s: float
    client: Client
    amount: float
    tenant: int = 0
    session: int = 0
    keep_s: float = 0.0

    @property
    def time_left_s(self) -> float:
        return self.amount / 10 if self.client is Client.HURRIES else 60.0


class Kind(Enum):
    """What goes wrong. `victim` of a Fault is the worker at the step, or another; `amount` is in seconds."""

    CRASH = "crash"
    BREAK = "line breaks"
    MUTE = "line mute"
    DEAF = "line deaf"
    FAIL = "step fails"
    HANG = "engine hangs"
    NODE_GONE = "node gone"
    DELAY = "line slow"
    TWICE = "line doubles"
    STALL = "engine stalls"
    NO_NUMBERS = "no numbers"
    DRAIN = "drain"
    GROW = "scale up"
    SHRINK = "scale down"
    EVICT = "eviction"
    MOVE = "moved to cold"
    FLIP = "arena flips"
    EXPIRE = "claims expire"
    WALL = "wall clock"
    RESTART = "directory dies"
    AWAY = "directory away"
    LOST_CALL = "call lost"
    LOST_ANSWER = "answer lost"
    COLD_DOWN = "cold down"
    COLD_SLOW = "cold slow"
    COLD_EMPTY = "cold flushed"
    COLD_CORRUPT = "cold corrupt"
    COLD_FULL = "cold full"
    COLD_CUT = "cold cut short"
    ROUTER_DIES = "router dies"
    NODE_JOINS = "node joins"
    NODE_DRAINS = "node drains"
    PEER_AWAY = "block port away"
    PEER_CUT = "block port breaks"
    PEER_SLOW = "block port slow"
    PEER_TWICE = "blocks come twice"
    EVENTS_LOST = "events lost"
    EVENTS_OLD = "events come again"
    CONTROLLER_DIES = "controller dies"
    HEAD_DIES = "head dies"
    ROLL = "worker rolled"
    CHANGE = "role changes"


LOSSES = (Kind.CRASH, Kind.BREAK, Kind.MUTE, Kind.DEAF, Kind.FAIL, Kind.HANG, Kind.NODE_GONE)
"""Kinds that end the attempts of a worker."""
DEATHS = (Kind.CONTROLLER_DIES, Kind.HEAD_DIES, Kind.ROLL)
"""Kinds that `_with_deaths` draws, from a stream of its own."""
LATER_KINDS = (*DEATHS, Kind.CHANGE)
"""Kinds that only streams of their own draw."""
MAX_TENANTS = 3
MAX_SESSIONS = 3
STEPS = (
    "prefill begin",
    "prefill lease",
    "prefill leased",
    "prefill release",
    "prefill turn",
    "prefill reserve",
    "prefill reserved",
    "prefill commit",
    "prefill committed",
    "prefill update",
    "decode begin",
    "decode lease",
    "decode leased",
    "decode release",
    "decode released",
    "decode turn",
    "decode reserve",
    "decode reserved",
    "decode commit",
    "decode update",
    "prefill cold",
    "decode cold",
    "prefill peer",
    "decode peer",
    "prefill peer block",
    "decode peer block",
)
"""Steps of the hand-off, by the role of the worker that comes to it; `lease` is before the call, `leased` after it.

`peer` is a question to another node, `peer block` a block on its way from there.
"""
SPLIT_STEPS = ("prefill group", "decode group", "prefill jump", "decode jump")
"""Steps where prefixes are split: a group of blocks is ordered, and a sequence has found blocks of one."""
_COMMON_STEPS = ("prefill begin", "prefill turn", "prefill update", "decode begin", "decode turn", "decode update")
LEAVING_STEPS = (
    "prefill change",
    "decode change",
    "prefill changed",
    "decode changed",
    "prefill leave",
    "decode leave",
)
"""Steps of a worker that a controller has leave its pool: the order to change its role or to drain has come, and the
worker has changed.
"""
_AMID_LEAVING = (Kind.CONTROLLER_DIES, Kind.CONTROLLER_DIES, Kind.HEAD_DIES, Kind.ROUTER_DIES, Kind.CHANGE, Kind.DRAIN)
"""Kinds that strike a cluster whose worker comes to one of LEAVING_STEPS; a crash does, too."""
RETURN_STEP = "prefill return"
"""The step of a worker that returns a prompt to its router, for another worker."""
_AMID_MOVES = (Kind.ROUTER_DIES, Kind.CONTROLLER_DIES, Kind.DRAIN, Kind.GROW, Kind.CHANGE, Kind.DELAY, Kind.TWICE)
_PEER_STEPS = ("prefill peer", "decode peer", "decode peer block")
_WORST_STEPS = {
    Kind.EXPIRE: ("prefill leased", "decode leased"),
    Kind.FLIP: ("prefill update", "decode begin"),
    Kind.EVICT: ("prefill reserved", "decode lease"),
    Kind.COLD_CORRUPT: ("prefill lease", "decode lease"),
    Kind.COLD_EMPTY: ("prefill cold", "decode cold"),
    Kind.CRASH: ("prefill reserved", "decode reserved", "prefill committed", "decode leased"),
    Kind.NODE_GONE: ("prefill update", *_PEER_STEPS),
    Kind.PEER_AWAY: _PEER_STEPS,
    Kind.PEER_CUT: _PEER_STEPS,
    Kind.PEER_SLOW: _PEER_STEPS,
    Kind.PEER_TWICE: _PEER_STEPS,
    Kind.COLD_CUT: ("prefill cold", "decode cold"),
}
"""Steps between which a fault of a kind does most harm: every other one strikes there."""


@dataclass(frozen=True)
class Fault:
    """A fault that strikes when any worker comes to a step for the `nth` time."""

    kind: Kind
    step: str
    nth: int
    victim: int
    amount: float

    def __str__(self) -> str:
        where = "there" if not self.victim else f"at another ({self.victim})"
        return f"{self.kind.value} at {self.step} {self.nth}, {where}, {self.amount:g} s"


@dataclass(frozen=True)
class Layout:
    """The nodes that workers of each role begin on, in turns."""

    prefill: tuple[int, ...] = (0,)
    decode: tuple[int, ...] = (0,)

    @property
    def num_nodes(self) -> int:
        return 1 + max(*self.prefill, *self.decode)


ALONE = Layout()
APART = Layout(decode=(1,))
SPREAD = Layout(decode=(1, 2))
WINDOW, SINKS = Sinks(0, 40), Sinks(20, 40)
LONG_KINDS = range(15, NUM_KINDS, 16)
"""Requests of the catalogue with prompts of 17 blocks, each two with the same beginning."""
FAR_BLOCKS_S = (0.02, 0.03, 0.05)
LAYOUTS = (ALONE, ALONE, APART, APART, Layout((0, 1), (0, 1)), Layout((0, 1), (1, 2)), Layout((0,), (1, 0)))


@dataclass(frozen=True)
class Plan:
    """`num_pages` of each worker, which hold any request of the catalogue; `num_slots` of each arena.

    max_queued: the bound of the router on requests without a first token. window: of the model, with its sinks.
    disaggregation: of the router. far_block_s: what workers expect to compute a block in, and to read one from another
    node or a cold tier, where it takes as long: they split prefixes; 0 for reads that take no time. num_routers: each
    tenant's requests go to one of them while it lives.
    """

    seed: int
    layout: Layout
    num_prefill: int
    num_decode: int
    num_pages: int
    num_slots: int
    max_queued: int
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    window: Sinks | None = None
    disaggregation: Disaggregation = Disaggregation.ALWAYS
    far_block_s: float = 0.0
    num_routers: int = 1

    @property
    def is_transparent(self) -> bool:
        """Whether every client that stays is promised its whole answer. The end of a node counts twice."""
        kinds = [fault.kind for fault in self.faults if fault.kind in LOSSES]
        return len(kinds) + kinds.count(Kind.NODE_GONE) <= MAX_TRANSPARENT_LOSSES

    def is_transparent_to(self, ask: Ask) -> bool:
        """Whether this client is promised its whole answer.

        Each router tries requests alone by itself, so a request that one tries alone may meet another's poison.
        """
        poisons = {one.tenant % self.num_routers for one in self.asks if one.client is Client.POISONS}
        return self.is_transparent and poisons <= {ask.tenant % self.num_routers}

    def __str__(self) -> str:
        asks = [f"  request {number}: {one}" for number, one in enumerate(self.asks)]
        faults = [f"  {fault}" for fault in self.faults]
        head = f"seed {self.seed}: {self.num_prefill} prefill workers on nodes {list(self.layout.prefill)}, "
        head += f"{self.num_decode} decode workers on {list(self.layout.decode)}, "
        head += f"{self.num_pages} pages each, {self.num_slots} slots, {self.max_queued} queued"
        head += f", a window of {self.window.window}, {self.window.num_sinks} sinks" if self.window else ""
        head += f", prefill pool used: {self.disaggregation}"
        head += f", {self.far_block_s:g} s for a block from afar" if self.far_block_s else ""
        head += f", {self.num_routers} routers" if self.num_routers > 1 else ""
        return "\n".join([head, *asks, *faults])


def draw_plan(seed: int) -> Plan:
    draw = random.Random(seed)
    asks = tuple(_draw_ask(draw) for _ in range(draw.randint(4, 12)))
    max_losses = draw.choice([0, 1, 2, 2, 2, 6])
    losses = [_draw_fault(draw, (*LOSSES, *[Kind.CRASH] * 4)) for _ in range(draw.randint(0, max_losses))]
    others = tuple(kind for kind in Kind if kind not in LOSSES and kind not in LATER_KINDS)
    faults = losses + [_draw_fault(draw, others) for _ in range(draw.randint(0, 8))]
    if not draw.randrange(10):
        asks += (Ask(POISON, draw.random(), Client.POISONS, 0.0),)
        faults = faults[len(losses) :]
    num_prefill, num_decode = draw.randint(0, 2), draw.randint(1, 3)
    num_pages, num_slots = draw.choice([20, 24, 40]), draw.choice([8, 16, 48])
    max_queued = draw.choice([3, *[512] * 9])
    layout = draw.choice(LAYOUTS)
    window = draw.choice([None, None, WINDOW])
    window = SINKS if window and draw.random() < 0.5 else window
    mode = draw.choice([Disaggregation.ALWAYS, Disaggregation.CONDITIONAL])
    plan = Plan(
        seed, layout, num_prefill, num_decode, num_pages, num_slots, max_queued, asks, tuple(faults), window, mode
    )
    return _with_moves(_with_changes(_with_deaths(_with_splits(plan))))


def _with_splits(plan: Plan) -> Plan:
    """Lets workers of several nodes split prefixes, in half of the plans without windows, and adds faults amid that.

    Draws from a stream of its own: the other plans are as they were.
    """
    draw = random.Random(f"splits of {plan.seed}")
    if plan.window or draw.random() < 0.5:
        return plan
    longs = [replace(_draw_ask(draw), kind=draw.choice(LONG_KINDS)) for _ in range(draw.randint(1, 3))]
    is_poisoned = any(one.client is Client.POISONS for one in plan.asks)
    kinds = [kind for kind in Kind if kind not in LOSSES and kind not in LATER_KINDS] + [Kind.CRASH] * 4 * (
        not is_poisoned
    )
    amid = [
        Fault(draw.choice(kinds), draw.choice(SPLIT_STEPS), draw.choice([1, 1, 2]), draw.choice([0, 0, 1, 2]), 1.0)
        for _ in range(draw.randint(0, 4))
    ]
    return replace(
        plan,
        layout=draw.choice([layout for layout in LAYOUTS if layout.num_nodes > 1]),
        num_prefill=max(1, plan.num_prefill),
        asks=(*longs, *plan.asks),
        faults=(*plan.faults, *amid),
        far_block_s=draw.choice(FAR_BLOCKS_S),
    )


def _with_deaths(plan: Plan) -> Plan:
    """Gives half of the plans several tenants and sessions, deaths of controller and head, and rolls of workers.

    Draws from a stream of its own: the other plans are as they were.
    """
    draw = random.Random(f"deaths of {plan.seed}")
    if draw.random() < 0.5:
        return plan
    num_tenants, num_sessions = draw.randint(1, MAX_TENANTS), draw.randint(0, MAX_SESSIONS)
    asks = tuple(
        replace(
            one,
            tenant=draw.randrange(num_tenants),
            session=draw.randint(0, num_sessions),
            keep_s=draw.choice([0.0, 0.5, 60.0]),
        )
        for one in plan.asks
    )
    deaths = [_draw_fault(draw, DEATHS) for _ in range(draw.randint(0, 3))]
    return replace(plan, asks=asks, faults=(*plan.faults, *deaths))


def _with_changes(plan: Plan) -> Plan:
    """Has workers of half of the plans change their roles or be rolled, and others die while workers leave a pool.

    Half of these plans have two routers. Draws from a stream of its own: the other plans are as they were.
    """
    draw = random.Random(f"changes of {plan.seed}")
    if draw.random() < 0.5:
        return plan
    is_poisoned = any(one.client is Client.POISONS for one in plan.asks)
    kinds = [*_AMID_LEAVING, *[Kind.CRASH] * (not is_poisoned)]
    changes = [
        replace(_draw_fault(draw, (Kind.CHANGE, Kind.CHANGE, Kind.ROLL)), step=draw.choice(_COMMON_STEPS))
        for _ in range(draw.randint(1, 3))
    ]
    amid = [
        Fault(
            draw.choice(kinds),
            draw.choice(LEAVING_STEPS),
            draw.choice([1, 1, 2]),
            draw.choice([0, 0, 1]),
            draw.choice([0.1, 1.0, 4.0]),
        )
        for _ in range(draw.randint(0, 3))
    ]
    num_prefill, num_decode = max(1, plan.num_prefill), max(2, plan.num_decode)
    return replace(
        plan,
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_routers=draw.choice([1, 2]),
        faults=(*plan.faults, *changes, *amid),
    )


def _with_moves(plan: Plan) -> Plan:
    """Has a third of the plans begin with a burst of prompts amid which a prefill worker starts, to which some move.

    Others die as prompts move. Draws from a stream of its own: the other plans are as they were.
    """
    draw = random.Random(f"moves of {plan.seed}")
    if draw.random() < 2 / 3:
        return plan
    is_poisoned = any(one.client is Client.POISONS for one in plan.asks)
    kinds = [*_AMID_MOVES, *[Kind.CRASH] * 2 * (not is_poisoned)]
    burst = tuple(replace(_draw_ask(draw), arrives_s=draw.random() * 0.01) for _ in range(draw.randint(4, 10)))
    start = Fault(Kind.GROW, draw.choice(["prefill begin", "prefill turn"]), draw.randint(1, 3), 0, 1.0)
    amid = [
        Fault(draw.choice(kinds), RETURN_STEP, draw.choice([1, 1, 2]), draw.choice([0, 0, 1, 2]), 1.0)
        for _ in range(draw.randint(0, 3))
    ]
    return replace(
        plan,
        num_prefill=max(1, plan.num_prefill),
        num_slots=max(48, plan.num_slots),
        asks=(*burst, *plan.asks),
        faults=(start, *plan.faults, *amid),
        disaggregation=Disaggregation.ALWAYS,
    )


def _draw_ask(draw: random.Random) -> Ask:
    clients = [Client.STAYS] * 6 + list(Client)[1:-1]
    arrives_s = draw.random() * draw.choice([0.1, 0.5, 2.0])
    return Ask(draw.randrange(NUM_KINDS), arrives_s, draw.choice(clients), float(draw.randint(0, 20)))


def _draw_fault(draw: random.Random, kinds: tuple[Kind, ...]) -> Fault:
    kind, nth = draw.choice(kinds), 1 + int(draw.expovariate(1 / 6))
    step = draw.choice(draw.choice([STEPS, _WORST_STEPS.get(kind, STEPS)]))
    return Fault(kind, step, nth, draw.choice([0, 0, 1, 2]), draw.choice([0.1, 1.0, 4.0]))


@cache
def request_of(kind: int) -> pb.GenerateRequest:
    """A request of the catalogue: of every sort, with long beginnings in common."""
    if kind == POISON:
        return ask((POISON, *range(40)), 8)
    num_prompt = 270 + kind % 7 if kind % 16 == 15 else 8 + kind * 7 % 72
    prompt = tuple((kind % 3 + position) % 300 for position in range(num_prompt))
    settings: list[dict[str, object]] = [
        {},
        {"temperature": 1.0, "n": 2},
        {},
        {"temperature": 0.7, "logprobs": 1, "presence_penalty": 1.0},
        {"stop": ["€", "a c"], "min_tokens": 3},
    ]
    return ask(prompt, 3 + kind * 5 % 29, **settings[kind % len(settings)])


def shrink(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """Drops faults, requests and nodes one by one while the run still fails."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in _smaller(plan):
            if fails(smaller):
                plan, is_smaller = smaller, True
                break
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    for index in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:index] + plan.faults[index + 1 :])
    for index in range(len(plan.asks)):
        yield replace(plan, asks=plan.asks[:index] + plan.asks[index + 1 :])
    if plan.layout != ALONE:
        yield replace(plan, layout=ALONE)
    if plan.far_block_s:
        yield replace(plan, far_block_s=0.0)
    if plan.num_routers > 1:
        yield replace(plan, num_routers=1)
