"""Sessions of an arena: the blocks that each session's latest request has used, and blocks kept for a while.

A session's next request takes over the blocks that it uses, too, and supersedes the others, unless another session has
used them. A request after which nothing is to be kept supersedes all. Each indexed slot is in one list at most, so that
more requests need no more memory.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kv_store.ledger import Ledger
from kv_store.node.copies import Copies
from kv_store.node.expiring import Expiring, Ranking
from kv_store.node.messages import KeepHint
from wire.ids import SlotId


@dataclass(frozen=True)
class KeepLimits:
    """Bounds on the hints of requests.

    max_keep_s: the longest time; a longer hint is cut. share: the part of a tenant's slots that may be kept.
    """

    max_keep_s: float = 600.0
    share: float = 0.75


DEFAULT_LIMITS = KeepLimits()


@dataclass(eq=False)
class _SessionUse:
    """The slots of a session's latest request, in the order of its blocks, and whether each is kept until `end_s`."""

    namespace: bytes
    slots: dict[SlotId, bool] = field(default_factory=dict)
    end_s: float = 0.0


class Sessions:
    """The uses of an arena's slots by sessions. Not thread-safe.

    Each call takes constant time for each block, amortised, besides the eviction order's.
    """

    def __init__(self, ledger: Ledger[SlotId], copies: Copies, clock: Callable[[], float], limits: KeepLimits) -> None:
        self._slots, self._order = ledger.pages, ledger.order
        self._copies = copies
        self._limits = limits
        self._uses: dict[bytes, _SessionUse] = {}
        self._used_by: dict[SlotId, bytes] = {}
        self._is_shared = bytearray(ledger.num_pages)
        self._clock = clock
        self._ends: Expiring[bytes, bytes] = Expiring(clock)
        self._num_kept = Counter[bytes]()
        self._latest: dict[bytes, Ranking[bytes]] = {}
        self._num_unnamed = 0

    @property
    def num_kept(self) -> int:
        """Counts the kept slots."""
        return self._num_kept.total()

    def note(self, hint: KeepHint, slots: Sequence[SlotId], max_slots: int) -> int:
        """Notes the slots that a session's latest request has used, and keeps its blocks within the limits.

        Beyond the tenant's share, blocks with the latest end are no longer kept, a request's last block first. slots:
        in the order of the blocks. max_slots: the tenant's bound. Returns the number of kept blocks.
        """
        if not (hint.session or hint.keep_s):
            return 0
        name = hint.session or self._new_name()
        self._end_keep(name)
        self._supersede(name, slots)
        use = self._uses[name] = self._uses.get(name) or _SessionUse(hint.namespace)
        for slot in slots:
            if self._used_by.get(slot) != name:
                self._is_shared[slot] = slot in self._used_by or self._is_shared[slot]
                self._remove(slot)
                self._used_by[slot] = name
            use.slots[slot] = False
        if not slots:
            self._uses.pop(name)
        elif hint.keep_s:
            self._keep(name, min(hint.keep_s, self._limits.max_keep_s))
            self._shorten(hint.namespace, int(max_slots * self._limits.share))
        elif hint.keep_s == 0.0:
            self._supersede(name, ())
        return sum(use.slots.values())

    def unindex(self, slot: SlotId) -> None:
        """Forgets a block that is no longer indexed."""
        self._is_shared[slot] = 0
        self._remove(slot)

    def expire(self) -> None:
        """Ends the keeping of blocks past their end."""
        for name in self._ends.expire():
            self._end_keep(name)

    def check(self) -> list[str]:
        """Lists violated invariants; empty if none."""
        used = {slot: name for name, use in self._uses.items() for slot in use.slots}
        kept = [(slot, use) for use in self._uses.values() for slot, is_kept in use.slots.items() if is_kept]
        slots = self._slots
        rules = {
            "slots are used by other sessions than is noted": all(
                used.get(slot) == self._used_by.get(slot) for slot in slots
            ),
            "kept slots differ from those of sessions": {slot for slot, _ in kept}
            == {slot for slot in slots if self._order.is_kept(slot)},
            "the counts of kept slots differ from the slots": +self._num_kept
            == Counter(use.namespace for _, use in kept),
            "a session without blocks is remembered": all(use.slots for use in self._uses.values()),
            "the namespaces with kept slots differ from the slots": self._latest.keys() == {*self._num_kept},
        }
        return [problem for problem, holds in rules.items() if not holds]

    def _new_name(self) -> bytes:
        """Names the use of a request without a session; no session's digest is as short."""
        self._num_unnamed += 1
        return b"%d" % self._num_unnamed

    def _supersede(self, name: bytes, slots: Sequence[SlotId]) -> None:
        """Supersedes the blocks that a session has used before and does not use now."""
        still_used, use = {*slots}, self._uses.get(name, _SessionUse(b""))
        for slot in [slot for slot in use.slots if slot not in still_used]:
            self._remove(slot)
            if not self._is_shared[slot]:
                self._copies.supersede(slot)

    def _keep(self, name: bytes, keep_s: float) -> None:
        use = self._uses[name]
        use.end_s = self._clock() + keep_s
        for slot in use.slots:
            use.slots[slot] = True
            self._order.keep(slot, use.end_s)
        self._num_kept[use.namespace] += len(use.slots)
        self._ends.put(name, name, keep_s)
        self._latest.setdefault(use.namespace, Ranking()).put(name, -use.end_s)

    def _shorten(self, namespace: bytes, most: int) -> None:
        """Ends the keeping of a namespace's blocks beyond `most`, the latest end first."""
        while (num_more := self._num_kept[namespace] - most) > 0 and (name := self._latest[namespace].first()):
            use = self._uses[name]
            kept = [slot for slot, is_kept in reversed(use.slots.items()) if is_kept]
            if len(kept) <= num_more:
                self._latest[namespace].discard(name)
            for slot in kept[:num_more]:
                use.slots[slot] = False
                self._count_ended(use, slot)

    def _end_keep(self, name: bytes) -> None:
        use = self._uses.get(name, _SessionUse(b""))
        self._forget_end(name, use)
        for slot, is_kept in use.slots.items():
            if is_kept:
                use.slots[slot] = False
                self._count_ended(use, slot)

    def _remove(self, slot: SlotId) -> None:
        """Takes a slot out of its session's use, if any."""
        name = self._used_by.pop(slot, None)
        if name is None:
            return
        use = self._uses[name]
        if use.slots.pop(slot):
            self._count_ended(use, slot)
        if not use.slots:
            del self._uses[name]
            self._forget_end(name, use)

    def _forget_end(self, name: bytes, use: _SessionUse) -> None:
        self._ends.pop(name)
        if use.namespace in self._latest:
            self._latest[use.namespace].discard(name)

    def _count_ended(self, use: _SessionUse, slot: SlotId) -> None:
        self._order.end_keep(slot)
        self._num_kept[use.namespace] -= 1
        if not self._num_kept[use.namespace]:
            del self._num_kept[use.namespace], self._latest[use.namespace]
