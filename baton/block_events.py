"""Events of the blocks in a cluster's nodes, for programs that follow them, as frozen values without protobuf."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from wire.pb import cluster_pb2, worker_pb2


@dataclass(frozen=True)
class BlockCursor:
    """A place in the events of a node: behind event `number` of an epoch. slot: of a snapshot under way, or 0.

    epoch: empty once the node is gone.
    """

    epoch: str
    number: int
    slot: int


@dataclass(frozen=True)
class BlockEvent:
    """Blocks "stored" in a tier of a node, or "removed" from it, by their keys of 32 bytes; "cleared": all are gone."""

    kind: str
    tier: str
    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class BlockPage:
    """The events of a node between two places. A subscriber goes on behind `cursor`."""

    node_id: str
    after: BlockCursor
    cursor: BlockCursor
    events: tuple[BlockEvent, ...]


def make_watch_request(after: Mapping[str, BlockCursor] | None) -> cluster_pb2.WatchBlocksRequest:
    cursors = {node_id: worker_pb2.EventCursor(**asdict(cursor)) for node_id, cursor in (after or {}).items()}
    return cluster_pb2.WatchBlocksRequest(after=cursors)


def read_page(page: worker_pb2.EventPage) -> BlockPage:
    events = tuple(BlockEvent(one.kind, one.tier, tuple(one.keys)) for one in page.events)
    return BlockPage(page.node_id, _cursor(page.after), _cursor(page.cursor), events)


def _cursor(message: worker_pb2.EventCursor) -> BlockCursor:
    return BlockCursor(message.epoch, message.number, message.slot)
