"""The cold tiers of a node or a library, made from settings. A further tier is an entry of `_MAKERS`."""

from collections.abc import Callable, Sequence

from kv_store.tiers.arena_tier import ArenaTier
from kv_store.tiers.cold_tier import ColdTier
from kv_store.tiers.files_tier import FilesTier
from kv_store.tiers.redis_tier import RedisTier
from wire.layout import KVLayout
from wire.tier import ColdSettings, Tier

_MAKERS: dict[Tier, Callable[[ColdSettings, KVLayout, bytes], ColdTier]] = {
    Tier.HOST: lambda settings, layout, _: ArenaTier(layout, settings.max_bytes),
    Tier.REDIS: lambda settings, layout, mac_key: RedisTier(
        settings.place, layout, mac_key, settings.timeout_s, ttl_s=settings.ttl_s
    ),
    Tier.FILES: lambda settings, layout, mac_key: FilesTier(
        settings.place, layout, mac_key, settings.timeout_s, settings.max_bytes, ttl_s=settings.ttl_s
    ),
}


def open_tiers(settings: Sequence[ColdSettings], layout: KVLayout, mac_key: bytes) -> list[ColdTier]:
    """Opens the tiers of these settings, in order. Raises ConfigError."""
    return [_MAKERS[one.tier](one, layout, mac_key) for one in settings]
