"""The records and actors of an earlier controller, from which the next one takes over."""

import os
from pathlib import Path

from deploy.actors.actor_host import ActorHost
from deploy.controller.event_log import EventLog
from deploy.controller.pools import Pools
from deploy.plan.authority import Authority
from deploy.plan.cluster_plan import CONTROLLER
from deploy.processes.atomic_file import AtomicFile
from deploy.processes.process import recorded_names
from router.config import LOOPBACK
from wire.pools import PoolSizes
from wire.typed_reader import from_json, to_json


class Predecessor:
    """The actors and records in a run folder. Made before the controller that takes over records itself there."""

    def __init__(self, run_dir: Path, host: ActorHost, events: EventLog) -> None:
        self.pools_record = AtomicFile(run_dir / "pools.json")
        self._authority_record = AtomicFile(run_dir / "authority.json")
        self._events = events
        self._left = [name for name in host.names() if name != CONTROLLER]
        self._known = recorded_names(run_dir)
        self.was_there = bool(self._left) or os.path.lexists(self.pools_record.path)
        self.problem = ""

    def pools(self, planned: PoolSizes) -> Pools:
        """Returns the recorded pools; by the workers found where the record is damaged or lost."""
        if (recorded := self.pools_record.recall(Pools.from_json)) is not None:
            return recorded
        pools = Pools.recovered(planned, self._left, self._known)
        if self.was_there:
            sizes = f"{pools.sizes.prefill} prefill and {pools.sizes.decode} decode workers"
            self._events.note(f"pools.json is damaged or lost: the pools have {sizes} now, by the workers found")
        return pools

    def authority(self) -> Authority:
        """Returns the cluster's authority; the first controller makes it, in a file that its user alone can read.

        Makes another where that file is damaged or lost, which the processes of before do not trust: that is an event,
        and the `problem` from then on. Raises OSError for a first one that cannot be written.
        """
        if (known := self._authority_record.recall(_usable_authority)) is not None:
            return known
        made = Authority.make()
        if not self.was_there:
            self._authority_record.write(to_json(made).encode())
        else:
            self._authority_record.try_write(to_json(made).encode())
            lost = "authority.json is damaged or lost: processes that start from now on are strangers to those that run"
            self._events.note(lost)
            self.problem = f"{lost}: `baton down` and `baton up` mend it"
        return made


def _usable_authority(text: str) -> Authority:
    """Reads an authority that can certify. Raises ConfigError or ValueError for any other."""
    authority = from_json(Authority, text, "authority")
    authority.issue(CONTROLLER, LOOPBACK)
    return authority
