"""What a controller that takes over from one that died must know of the pools, as a text.

It is written ahead of deeds, and names every worker that there may be; some may have died, or not been made yet.
"""

import json
from dataclasses import asdict
from typing import Any

from deploy.controller.pools import Pools, Stage, Worker
from wire.ids import WorkerId
from wire.pools import PoolSizes, Role


def encode(pools: Pools) -> str:
    workers = [asdict(one) | {"role": one.role.value, "stage": one.stage.value} for one in pools]
    sizes = {role.value: pools.sizes[role] for role in Role}
    named = {role.value: pools.num_named(role) for role in Role}
    return json.dumps({"sizes": sizes, "named": named, "workers": workers})


def decode(text: str) -> Pools:
    """The inverse of `encode`."""
    fields = json.loads(text)
    named = {Role(name): number for name, number in fields["named"].items()}
    return Pools(PoolSizes(**fields["sizes"]), [_worker(one) for one in fields["workers"]], named)


def _worker(fields: dict[str, Any]) -> Worker:
    return Worker(WorkerId(fields["worker_id"]), Role(fields["role"]), Stage(fields["stage"]), fields["address"])
