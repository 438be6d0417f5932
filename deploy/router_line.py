"""The router as the fleet knows it."""

import json
from dataclasses import asdict

from deploy.sole_actor import SoleActor
from wire.ids import WorkerId
from wire.pools import Worker

TELL_TIMEOUT_S = 20.0


class RouterLine:
    """A RouterPort, over Ray."""

    def __init__(self, router: SoleActor) -> None:
        self._router = router

    async def set_members(self, members: list[Worker]) -> dict[WorkerId, str]:
        listed = json.dumps([{**asdict(one), "role": one.role.value, "state": one.state.value} for one in members])
        refused = json.loads(await self._router.actor.call("set_members", listed, timeout_s=TELL_TIMEOUT_S))
        return {WorkerId(worker_id): reason for worker_id, reason in refused.items()}
