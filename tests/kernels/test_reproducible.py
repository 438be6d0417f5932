"""Instruction sets with the order of sums of AMX: each has the bits of the first that this machine has."""

import pytest
import torch
from torch import Tensor

from kernels.backend import Activation, Angles, Backend, Heads, KVPages, Tables
from kernels.cpu import library
from kernels.cpu.backend import CpuBackend
from kernels.cpu.library import ISA_TO_FEATURES, NoKernels
from kernels.routing import Gating, Routing
from kernels.selection import select_backend
from tests.kernels.backends import TILES, make_backend
from tests.kernels.paged_batch import Heads as Shape
from tests.kernels.paged_batch import empty_codes, empty_layer, make_paged_batch
from tests.kernels.quantized_matrices import DRAWS
from tests.kernels.test_operations import each_dtype, random_turns

NUM_ROWS = (1, 2, 3, 5, 16, 17, 41)
CPU = torch.device("cpu")

each_kept = pytest.mark.parametrize("kept", ["none", "int8", "fp8", "int4"])


@pytest.fixture(params=TILES[1:])
def both(request: pytest.FixtureRequest) -> tuple[CpuBackend, CpuBackend]:
    first, other = make_backend(TILES[0]), make_backend(str(request.param))
    assert isinstance(first, CpuBackend)
    assert isinstance(other, CpuBackend)
    return first, other


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Draws numbers of all magnitudes up to 16: subnormal ones, and zeros of both signs."""
    drawn = torch.randn(shape) * 2.0 ** torch.randint(-12, 2, shape)
    small = torch.randn(shape) * 2.0 ** torch.randint(-140, -120, shape)
    return torch.where(torch.rand(shape) < 0.05, small, drawn).to(dtype)


def bits(tensor: Tensor) -> Tensor:
    """Numbers as integers: zeros of both signs differ, and NaN equals itself."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
    return tensor.contiguous().view(kind)


def assert_same(first: Tensor, other: Tensor) -> None:
    assert torch.equal(bits(first), bits(other))


@each_dtype
@pytest.mark.parametrize(("columns", "depth"), [(1, 2), (33, 63), (70, 600), (200, 1536)])
def test_products(both: tuple[Backend, Backend], dtype: torch.dtype, columns: int, depth: int) -> None:
    weight, bias = numbers(columns, depth, dtype=dtype), numbers(columns, dtype=dtype)
    packed = [(one, one.pack(weight)) for one in both]
    assert_same(*(one.embed(torch.arange(columns), own, 0.3) for one, own in packed))
    for num_rows in NUM_ROWS:
        rows, residual = numbers(num_rows, depth, dtype=dtype), numbers(num_rows, columns, dtype=dtype)
        assert_same(*(one.linear(rows, own, None) for one, own in packed))
        assert_same(*(one.linear(rows, own, bias, residual) for one, own in packed))
        assert_same(*(one.logits(rows, own) for one, own in packed))


@each_dtype
@pytest.mark.parametrize("name", DRAWS)
def test_products_of_packed_weights(both: tuple[Backend, Backend], dtype: torch.dtype, name: str) -> None:
    for columns, depth in ((33, 288), (70, 1200)):
        matrix = DRAWS[name](columns, depth)
        packed = [(one, one.pack_codes([matrix], dtype)) for one in both]
        for num_rows in NUM_ROWS:
            rows = numbers(num_rows, depth, dtype=dtype)
            assert_same(*(one.linear(rows, weight, None) for one, weight in packed))
            assert_same(*(one.logits(rows, weight) for one, weight in packed))
        assert_same(*(one.embed(torch.arange(columns), weight, 0.3) for one, weight in packed))


@each_dtype
@each_kept
@pytest.mark.parametrize(("group", "head_size"), [(1, 64), (3, 24), (7, 128)])
@pytest.mark.parametrize(("window", "num_sinks"), [(None, 0), (100, 0), (50, 4)])
def test_attention(
    both: tuple[Backend, Backend],
    dtype: torch.dtype,
    kept: str,
    group: int,
    head_size: int,
    window: int | None,
    num_sinks: int,
) -> None:
    """Of decoding rows and of a prompt; with a soft cap and learned sinks, too."""
    lens, query_lens = [1, 63, 300, 600, 130], [1, 1, 1, 1, 130]
    batch = make_paged_batch(Shape(2 * group, 2, head_size), lens, 16, dtype, kept=kept)
    query = batch.random_query(sum(query_lens))
    starts = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)
    tables = Tables(batch.block_tables, batch.context_lens, starts, 4, random_turns(len(query), head_size))
    for soft_cap, sink in ((None, None), (1.5, 2.0)):
        variant = batch.variant(window, soft_cap, sink, num_sinks)
        assert_same(*(one.attend(query, batch.pages, tables, variant) for one in both))


@each_dtype
@pytest.mark.parametrize("columns", [16, 31, 576])
def test_operations_of_rows(both: tuple[Backend, Backend], dtype: torch.dtype, columns: int) -> None:
    rows, weight = numbers(9, columns, dtype=dtype), numbers(columns, dtype=dtype)
    residual, gate_up = numbers(9, columns, dtype=dtype), numbers(9, 2 * columns, dtype=dtype) * 8
    logits = numbers(9, columns, dtype=torch.float32)
    assert_same(*(one.rms_norm(rows, weight, 1e-5) for one in both))
    assert_same(*(one.rms_norm(rows, weight.float(), 1e-5, residual) for one in both))
    for activation in Activation:
        assert_same(*(one.gate(gate_up, activation) for one in both))
    for shares in Gating:
        first, other = (one.route(logits.to(dtype), 4, shares) for one in both)
        assert torch.equal(first.experts, other.experts)
        assert_same(first.shares, other.shares)
        products = numbers(9, 4, columns, dtype=dtype)
        assert_same(*(one.combine(products, Routing(first.experts, first.shares), residual) for one in both))
    same = [(one, one.pack(torch.eye(columns))) for one in both]
    assert_same(*(one.logits(logits, weight, 30.0) for one, weight in same))


@each_dtype
@each_kept
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("size", [24, 80])
def test_rotation_and_write(
    both: tuple[Backend, Backend], dtype: torch.dtype, kept: str, has_norms: bool, size: int
) -> None:
    norms = [torch.rand(size).to(dtype) + 0.5 if has_norms else None for _ in range(2)]
    heads = Heads(num_queries=4, num_kv=2, size=size, query_norm=norms[0], key_norm=norms[1], norm_eps=1e-6)
    qkv, slots = numbers(32, 8 * size, dtype=dtype), torch.arange(16, 48)
    radians = torch.rand(32, size // 2) * 6
    found = []
    for one in both:
        torch.manual_seed(0)
        shape = Shape(4, 2, size)
        plain = kept == "none"
        pages = (
            KVPages(empty_layer(3, shape, 16, dtype, "cpu")) if plain else empty_codes(3, shape, 16, kept, "cpu", dtype)
        )
        queries = one.rotate_and_write(qkv.clone(), heads, Angles(radians.cos(), radians.sin()), pages, slots)
        found.append([queries, pages.data, *([] if pages.scales is None else [pages.scales])])
        found[-1] += [] if pages.int4 is None else [pages.int4.open, pages.int4.key_scales]
    for first, other in zip(*found, strict=True):
        assert_same(first, other)


def test_one_version_names_them_all(both: tuple[CpuBackend, CpuBackend]) -> None:
    """KV of one serves the other; weights lie in an order of each set's own, which the name tells."""
    first, other = both
    assert first.version == other.version
    assert first.name != other.name
    assert first.version != make_backend("avx2").version


def on(features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_features", lambda: set(features))
    monkeypatch.setattr(library, "may_use_tiles", lambda: True)


@pytest.mark.parametrize(
    ("features", "isa"), [("amx", "amx"), ("avx512", "reproducible_avx512"), ("avx2", "reproducible_avx2")]
)
def test_a_machine_takes_the_best_set_that_it_has(features: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on(ISA_TO_FEATURES[features], monkeypatch)
    assert library.reproducible_isa() == isa
    assert library.best_isa() == features


def test_a_machine_without_avx2_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    on((), monkeypatch)
    select_backend.cache_clear()
    for name in ("reproducible", "reproducible-int8"):
        with pytest.raises(NoKernels, match="this machine has no reproducible kernels, which need AVX2: it has portab"):
            select_backend(CPU, name)
