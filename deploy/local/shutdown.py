"""What `baton down` does: from a cluster in whatever state to nothing left."""

from pathlib import Path

from deploy.local.client import metadata, operator
from deploy.local.state import ClusterPhase, ClusterState, StateFile
from deploy.local.teardown import interrupt, tear_down
from deploy.processes import process_record
from deploy.processes.process import wait_for_end
from wire.errors import BatonError
from wire.pb import cluster_pb2

ASK_TIMEOUT_S = 10.0
ACTORS_TIMEOUT_S = 40.0


async def shut_down(file: StateFile, state: ClusterState) -> list[str]:
    """Ends a cluster, gently if it can still be asked, and by force what is left then. What could not be ended.

    Touches nothing but what the state names. The state is removed once there is nothing left to know.
    """
    interrupt(state)
    if state.phase is ClusterPhase.RUNNING:
        await _ask(state)
    problems = tear_down(state)
    if not problems:
        file.remove()
    return problems


async def _ask(state: ClusterState) -> None:
    """Lets the controller end all actors, and waits for them. A cluster that does not answer is not waited for."""
    try:
        async with operator(state) as stub:
            await stub.Shutdown(cluster_pb2.ShutdownRequest(), metadata=metadata(state), timeout=ASK_TIMEOUT_S)
    except BatonError:
        return
    for actor in process_record.living(Path(state.run_dir)):
        wait_for_end(actor.pid, ACTORS_TIMEOUT_S)
