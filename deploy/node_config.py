"""What a node's service is started with, as one JSON text."""

from dataclasses import dataclass

from wire.layout import KVLayout
from wire.settings import to_json


@dataclass(frozen=True)
class NodeConfig:
    """`directory_path`: the Unix socket on which the books are kept; without `redis_url` nothing is written there.

    redis_timeout_s: as of `kv_store.tiers.redis_tier.RedisTier`.
    """

    arena_path: str
    directory_path: str
    layout_hex: str
    num_slots: int
    redis_url: str | None
    redis_timeout_s: float

    @property
    def layout(self) -> KVLayout:
        return KVLayout.decode(bytes.fromhex(self.layout_hex))

    def to_json(self) -> str:
        return to_json(self)
