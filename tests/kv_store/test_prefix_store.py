"""The library of prefixes: over host memory, a real Redis, files, and lists of these."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import redis
import torch

from baton import BatonError, PrefixStore, errors, tiers
from router.config import ClusterAccess, RouterConfig
from tests.harness.served import served_model
from wire.block_names import cover
from wire.layout import KVLayout
from wire.tier import ColdSettings, Tier

LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=8, block_size=4, dtype="float32")
SECRET = bytes(range(32))
MODEL = b"a model"
TOKENS = [*range(100, 122)]  # 5 full blocks, and 2 tokens of a sixth
AMPLE_BYTES = 16 << 20


def kv_of(tokens: Sequence[int], layout: KVLayout = LAYOUT) -> torch.Tensor:
    """Numbers of which each token, layer and head has its own, in the layout's dtype."""
    num_layers, two, num_heads, _, head_dim = layout.shape
    rest = torch.arange(num_layers * two * num_heads * head_dim, dtype=torch.float32)
    kv = rest.view(num_layers, two, num_heads, 1, head_dim) / 1024 + torch.tensor(tokens).view(-1, 1)
    return kv.to(getattr(torch, layout.dtype))


def open_store(
    settings: Sequence[ColdSettings],
    *,
    model: bytes = MODEL,
    layout: KVLayout = LAYOUT,
    secret: bytes = SECRET,
    tenant: str = "default",
) -> PrefixStore:
    return PrefixStore(settings, model=model, layout=layout, secret=secret, tenant=tenant)


def found(store: PrefixStore, tokens: Sequence[int]) -> int:
    """Counts the tokens found; their KV is right."""
    prefix = store.get_closest(tokens)
    assert torch.equal(prefix.kv, kv_of(tokens[: prefix.num_tokens], store.layout))
    assert prefix.kv.shape[3] == prefix.num_tokens
    return prefix.num_tokens


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis), "files", "memory and files"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> list[ColdSettings]:
    in_memory, in_files = tiers.host_memory(AMPLE_BYTES), tiers.files(str(tmp_path), AMPLE_BYTES)
    if request.param == "redis":
        url = request.getfixturevalue("redis_url") + "?db=6"
        with redis.Redis.from_url(url) as client:
            client.flushdb()
        return [tiers.redis(url)]
    return {"memory": [in_memory], "files": [in_files], "memory and files": [in_memory, in_files]}[request.param]


@pytest.fixture
def store(settings: list[ColdSettings]) -> Iterator[PrefixStore]:
    with open_store(settings) as opened:
        yield opened


def test_full_blocks_come_back(store: PrefixStore) -> None:
    assert found(store, TOKENS) == 0
    assert store.put(TOKENS, kv_of(TOKENS)) == 20
    assert [found(store, TOKENS[:num]) for num in (22, 20, 19, 4, 3, 0)] == [20, 20, 16, 4, 0, 0]
    assert [one.errors + one.corrupt + one.forged for one in store.status()] == [0] * len(store.status())


def test_the_longest_common_beginning_is_found(store: PrefixStore) -> None:
    store.put(TOKENS, kv_of(TOKENS))
    assert found(store, TOKENS + [7] * 9) == 20
    assert found(store, [*TOKENS[:10], 7, *TOKENS[11:]]) == 8
    assert found(store, [7, *TOKENS[1:]]) == 0


def test_sequences_share_the_blocks_of_their_beginning(store: PrefixStore) -> None:
    store.put(TOKENS, kv_of(TOKENS))
    other = [*TOKENS[:8], *range(8)]
    assert store.put(other, kv_of(other)) == 16
    assert {one.written for one in store.status()} == {5 + 2}
    assert (found(store, other), found(store, TOKENS)) == (16, 20)


def test_contained_tokens_have_all_their_full_blocks(store: PrefixStore) -> None:
    store.put(TOKENS, kv_of(TOKENS))
    assert store.contains(TOKENS)
    assert store.contains(TOKENS[:4])
    assert not store.contains(TOKENS[:3])
    assert not store.contains([*TOKENS, 1, 2])


def test_evicted_blocks_are_gone_and_others_stay(store: PrefixStore) -> None:
    store.put(TOKENS, kv_of(TOKENS))
    store.evict(TOKENS, from_token=7)
    assert found(store, TOKENS) == 8
    store.evict(TOKENS)
    assert found(store, TOKENS) == 0
    store.put(TOKENS, kv_of(TOKENS))
    assert found(store, TOKENS) == 20


@pytest.mark.parametrize(
    "other",
    [
        {"model": b"another model"},
        {"secret": bytes(32)},
        {"tenant": "another"},
        {"layout": replace(LAYOUT, dtype="bfloat16")},
        {"layout": replace(LAYOUT, block_size=2)},
        {"layout": replace(LAYOUT, num_kv_heads=2)},
        {"layout": replace(LAYOUT, window=64)},
    ],
    ids=str,
)
def test_another_model_secret_tenant_or_layout_is_a_miss(
    tmp_path: Path, other: dict[str, bytes | str | KVLayout]
) -> None:
    in_files = [tiers.files(str(tmp_path), AMPLE_BYTES)]
    with open_store(in_files) as store, open_store(in_files, **other) as another:  # type: ignore[arg-type]
        store.put(TOKENS, kv_of(TOKENS))
        assert found(another, TOKENS) == 0
        assert not another.contains(TOKENS)
        another.evict(TOKENS)
        assert another.put(TOKENS, kv_of(TOKENS, another.layout)) >= 20
        assert (found(another, TOKENS) >= 20, found(store, TOKENS)) == (True, 20)
        assert [(one.corrupt, one.forged) for one in store.status() + another.status()] == [(0, 0)] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_comes_back_bit_by_bit(tmp_path: Path, dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    with open_store([tiers.files(str(tmp_path), AMPLE_BYTES)], layout=layout) as store:
        store.put(TOKENS, kv_of(TOKENS, layout))
        assert found(store, TOKENS) == 20


def test_a_second_store_on_the_same_folder_finds_it(tmp_path: Path) -> None:
    in_files = [tiers.files(str(tmp_path), AMPLE_BYTES)]
    with open_store(in_files) as store:
        store.put(TOKENS, kv_of(TOKENS))
    with open_store([tiers.host_memory(AMPLE_BYTES), *in_files]) as store:
        assert (found(store, TOKENS), found(store, TOKENS)) == (20, 20)
        memory, files = store.status()
        assert (files.hits, memory.written, memory.hits) == (5, 5, 5)


def test_a_damaged_block_ends_the_prefix_and_is_replaced(tmp_path: Path) -> None:
    with open_store([tiers.files(str(tmp_path), AMPLE_BYTES)]) as store:
        store.put(TOKENS[:8], kv_of(TOKENS[:8]))
        for path in tmp_path.glob("??/*"):
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert found(store, TOKENS) == 0
        store.put(TOKENS[:8], kv_of(TOKENS[:8]))
        store.evict(TOKENS[:8], from_token=4)
        assert found(store, TOKENS) == 4


@pytest.mark.parametrize("damaged", [{0}, {1}, {2}, {0, 1, 2}])
def test_a_block_damaged_in_the_nearer_tier_is_read_from_the_next(tmp_path: Path, damaged: set[int]) -> None:
    near, far = (tiers.files(str(tmp_path / name), AMPLE_BYTES) for name in ("near", "far"))
    with open_store([near, far]) as store:
        store.put(TOKENS[:12], kv_of(TOKENS[:12]))
        for place, key in enumerate(name.key for name in cover(store.root, TOKENS[:12], LAYOUT.block_size)):
            [path] = [one for one in (tmp_path / "near").glob("??/*") if key.hex() in one.parent.name + one.name]
            if place in damaged:
                path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert found(store, TOKENS) == 12


def test_memory_keeps_what_is_used_and_its_bound() -> None:
    with open_store([tiers.host_memory(4 * LAYOUT.block_bytes)]) as store:
        assert store.put(TOKENS, kv_of(TOKENS)) == found(store, TOKENS) == 12
        old, new = [1] * 8, [2] * 8
        store.put(old, kv_of(old))
        store.put(new, kv_of(new))
        assert found(store, old) == 8
        third = [3] * 8
        store.put(third, kv_of(third))
        assert (found(store, old), found(store, third)) == (8, 8)
        assert found(store, new) == 0


def test_pinned_blocks_are_not_evicted_before_their_end(tmp_path: Path) -> None:
    in_files = tiers.files(str(tmp_path), AMPLE_BYTES)
    with open_store([tiers.host_memory(6 * LAYOUT.block_bytes), in_files]) as store:
        store.put(TOKENS, kv_of(TOKENS))
        flood = [[number] * 16 for number in range(8)]
        for one in flood:
            store.put(one, kv_of(one))
        pin = store.pin(TOKENS)
        assert pin.num_tokens == 20
        for one in flood:
            store.put(one, kv_of(one))
        assert num_read_from_files(store) == 0
        store.unpin(pin)
        store.unpin(pin)
        for one in flood:
            store.put([*one, *one], kv_of([*one, *one]))
        assert num_read_from_files(store) > 0


def num_read_from_files(store: PrefixStore) -> int:
    before = store.status()[1].hits
    assert found(store, TOKENS) == 20
    return store.status()[1].hits - before


def test_a_pin_has_the_tokens_that_fit_beside_other_pins() -> None:
    with open_store([tiers.host_memory(4 * LAYOUT.block_bytes)]) as store:
        first, second = TOKENS[:12], [1] * 8
        store.put(first, kv_of(first))
        pin = store.pin(first)
        assert pin.num_tokens == 12
        assert store.put(second[:4], kv_of(second[:4])) == 4
        assert store.pin(second).num_tokens == 4
        assert store.put([2] * 4, kv_of([2] * 4)) == 0
        store.unpin(pin)
        assert store.put([2] * 4, kv_of([2] * 4)) == 4


def test_a_store_without_host_memory_pins_nothing(tmp_path: Path) -> None:
    with open_store([tiers.files(str(tmp_path), AMPLE_BYTES)]) as store, pytest.raises(errors.Unsupported):
        store.pin(TOKENS)


def test_kv_that_does_not_fit_the_layout_is_refused(store: PrefixStore) -> None:
    for kv in (kv_of(TOKENS[:-1]), kv_of(TOKENS)[:1], kv_of(TOKENS)[..., :4], kv_of(TOKENS).bfloat16(), torch.ones(3)):
        with pytest.raises(errors.InvalidRequest, match="kv: "):
            store.put(TOKENS, kv)
    assert not store.contains(TOKENS[:4])


@pytest.mark.parametrize("token", [-1, 1 << 32, "text", 1.5])
def test_tokens_that_are_no_ids_are_refused(store: PrefixStore, token: int) -> None:
    tokens = [token] * 4
    for call in (store.contains, store.get_closest, store.evict):
        with pytest.raises(errors.InvalidRequest, match="tokens: "):
            call(tokens)


@pytest.mark.parametrize("ttl_s", [0, -1, 3601, float("nan")])
def test_a_pin_has_a_bounded_time(ttl_s: float) -> None:
    with open_store([tiers.host_memory(AMPLE_BYTES)]) as store, pytest.raises(errors.InvalidRequest, match="ttl_s"):
        store.pin(TOKENS, ttl_s)


def test_a_quantized_layout_has_no_tensors() -> None:
    with open_store([tiers.host_memory(AMPLE_BYTES)], layout=replace(LAYOUT, quantization="int8")) as store:
        with pytest.raises(errors.Unsupported, match="int8"):
            store.put(TOKENS, kv_of(TOKENS))
        with pytest.raises(errors.Unsupported, match="int8"):
            store.get_closest(TOKENS)
        assert not store.contains(TOKENS)


def test_a_store_without_tiers_or_secret_is_refused(tmp_path: Path) -> None:
    refused = [
        ([], SECRET),
        ([tiers.host_memory(AMPLE_BYTES)], b"short"),
        ([tiers.host_memory(100)], SECRET),
        ([tiers.files(str(tmp_path / "no" / "folder"), AMPLE_BYTES)], SECRET),
        ([tiers.redis("http://no.redis")], SECRET),
    ]
    for settings, secret in refused:
        with pytest.raises(errors.ConfigError):
            open_store(settings, secret=secret)
    assert issubclass(errors.ConfigError, BatonError)


def test_a_server_that_is_away_is_a_miss_and_other_tiers_serve(tmp_path: Path) -> None:
    gone = tiers.redis(f"unix://{tmp_path}/no.sock", timeout_s=0.5)
    with open_store([gone, tiers.files(str(tmp_path), AMPLE_BYTES)]) as store:
        assert store.put(TOKENS, kv_of(TOKENS)) == 20
        assert found(store, TOKENS) == 20
    with open_store([gone]) as store:
        assert store.put(TOKENS, kv_of(TOKENS)) == 0
        assert found(store, TOKENS) == 0


def test_threads_may_share_a_store(tmp_path: Path) -> None:
    with open_store([tiers.host_memory(8 * LAYOUT.block_bytes), tiers.files(str(tmp_path), AMPLE_BYTES)]) as store:
        sequences = [[number] * 16 for number in range(4)]
        wrong: list[int] = []

        def work(tokens: list[int]) -> None:
            for _ in range(20):
                store.put(tokens, kv_of(tokens))
                if not torch.equal(store.get_closest(tokens).kv, kv_of(tokens)):
                    wrong.append(tokens[0])

        threads = [threading.Thread(target=work, args=(tokens,)) for tokens in sequences]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []
        assert [(one.tier, one.corrupt, one.errors) for one in store.status()] == [
            (Tier.HOST, 0, 0),
            (Tier.FILES, 0, 0),
        ]


def test_names_are_the_same_as_of_a_cluster_with_the_same_secret_model_and_tenant() -> None:
    fingerprint = bytes(range(32, 64))
    model = served_model(LAYOUT, fingerprint_hex=fingerprint.hex())
    access = ClusterAccess("token", SECRET.hex())
    router = RouterConfig(model=model, cluster=access)
    for tenant in ("default", "other"):
        with open_store([tiers.host_memory(AMPLE_BYTES)], model=fingerprint, tenant=tenant) as store:
            assert store.root == router.root_of(tenant)
