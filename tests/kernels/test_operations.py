"""The operations of each backend against float64, and their promise: a row has the same bits whatever is beside it."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import reference
from kernels.backend import Activation, Angles, AttentionVariant, Backend, Heads, KVPages, Scores, Tables
from kernels.cpu.backend import CpuBackend
from kernels.torch_backend import TorchBackend
from kernels.triton_backend import TritonBackend
from tests.kernels.backends import ISAS, NAMES, PRODUCTS, make_backend
from tests.kernels.paged_batch import Heads as Shape
from tests.kernels.paged_batch import PagedBatch, dense_attention, empty_codes, make_paged_batch, turned_back

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DTYPE_TO_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
KEPT = ("int8", "fp8")
BATCH_SIZES = (1, 2, 3, 7, 8, 12, 13, 32, 100)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> Backend:
    return make_backend(str(request.param))


@pytest.fixture(params=["torch", *PRODUCTS])
def attending(request: pytest.FixtureRequest) -> Backend:
    return make_backend(str(request.param))


@pytest.fixture(params=[*NAMES, *(f"{isa}-{weights}" for isa in ISAS for weights in ("int8", "int4"))])
def any_backend(request: pytest.FixtureRequest) -> Backend:
    return make_backend(str(request.param))


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = DTYPE_TO_TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@each_dtype
@pytest.mark.parametrize(("columns", "depth"), [(1, 2), (32, 64), (33, 63), (100, 576), (300, 7)])
def test_a_linear_layer(backend: Backend, dtype: torch.dtype, columns: int, depth: int) -> None:
    states, weight = torch.randn(13, depth).to(dtype), (torch.randn(columns, depth) / depth**0.5).to(dtype)
    bias, residual = torch.randn(columns).to(dtype), torch.randn(13, columns).to(dtype)
    packed = backend.pack(weight)
    product = states.double() @ weight.double().T
    close(backend.linear(states, packed, None), product, dtype)
    added = product + bias.double() + residual.double()
    close(backend.linear(states, packed, bias, residual), added, dtype)
    assert backend.linear(states, packed, bias, residual, out=residual) is residual
    close(residual, added, dtype)
    logits = backend.logits(states, packed)
    assert logits.dtype == torch.float32
    close(logits, product, dtype)


@each_dtype
def test_an_embedding_is_the_row_that_was_packed(backend: Backend, dtype: torch.dtype) -> None:
    table = torch.randn(77, 31).to(dtype)
    ids = torch.tensor([76, 0, 33, 33, 31])
    assert torch.equal(backend.embed(ids, backend.pack(table)), table[ids])
    assert torch.equal(backend.embed(ids, backend.pack(table), 2.3), table[ids] * 2.3)


@each_dtype
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("columns", "depth"), [(1, 2), (33, 63), (70, 64), (100, 577)])
def test_int8_weights_are_the_nearest_of_255(isa: str, dtype: torch.dtype, columns: int, depth: int) -> None:
    backend = make_backend(f"{isa}-int8")
    states, weight = torch.randn(13, depth).to(dtype), (torch.randn(columns, depth) / depth**0.5).to(dtype)
    weight[0] = 0
    rounded = backend.embed(torch.arange(columns), backend.pack(weight.float()))
    groups = weight.float().split(64, dim=1)
    step = torch.cat([group.abs().amax(1, keepdim=True).expand_as(group) / 127 for group in groups], dim=1)
    assert ((rounded - weight).abs() <= step * 0.5001).all()
    packed = backend.pack(weight)
    close(backend.linear(states, packed, None), states.double() @ rounded.double().T, dtype)
    close(backend.embed(torch.arange(columns), packed), rounded.to(dtype), dtype)


@each_dtype
@pytest.mark.parametrize("columns", [16, 31, 576])
def test_a_norm(backend: Backend, dtype: torch.dtype, columns: int) -> None:
    states, weight = torch.randn(5, columns).to(dtype), torch.randn(columns).to(dtype)
    expected = F.rms_norm(states.double(), (columns,), weight.double(), 1e-5)
    close(backend.rms_norm(states, weight, 1e-5), expected, dtype)
    close(backend.rms_norm(states, weight.float(), 1e-5), expected, dtype)
    residual = torch.randn(5, columns).to(dtype)
    added = residual.double() + expected
    assert backend.rms_norm(states, weight, 1e-5, residual, out=residual) is residual
    close(residual, added, dtype)


def test_a_wide_norm_is_rounded_once(backend: Backend) -> None:
    states, weight = torch.randn(50, 64).bfloat16(), torch.randn(64)
    expected = F.rms_norm(states.float(), (64,), weight, 1e-5)
    off_by = (backend.rms_norm(states, weight, 1e-5).view(torch.int16) - expected.bfloat16().view(torch.int16)).abs()
    assert off_by.max() <= 1
    assert off_by.float().mean() < 0.01
    twice = (expected / weight).bfloat16() * weight.bfloat16()
    assert not torch.equal(twice, expected.bfloat16())


@each_dtype
def test_a_norm_of_parts_of_rows(backend: Backend, dtype: torch.dtype) -> None:
    rows, weight = torch.randn(5, 96).to(dtype), torch.randn(32).to(dtype)
    before, part = rows.clone(), rows[:, 32:64]
    expected = backend.rms_norm(part.contiguous(), weight, 1e-5)
    backend.rms_norm(part, weight, 1e-5, out=part)
    assert torch.equal(part, expected)
    assert torch.equal(rows[:, :32], before[:, :32])
    assert torch.equal(rows[:, 64:], before[:, 64:])


@each_dtype
@pytest.mark.parametrize("columns", [16, 31, 1536])
def test_a_gate(backend: Backend, dtype: torch.dtype, columns: int) -> None:
    gate_up = torch.randn(5, 2 * columns).to(dtype) * 4
    gate_up[0, :4] = torch.tensor([-300.0, -89.0, 89.0, 300.0])
    gate, up = gate_up.double().chunk(2, dim=-1)
    close(backend.gate(gate_up, Activation.SILU), F.silu(gate) * up, dtype)
    close(backend.gate(gate_up, Activation.GELU_TANH), F.gelu(gate, approximate="tanh") * up, dtype)


def test_a_soft_cap(backend: Backend) -> None:
    states = torch.tensor([[-1e30, -50.0, -1e-6, 0.0, 1e-6, 0.5, 29.0, 1e30]]).repeat(3, 1)
    same, out = backend.pack(torch.eye(8)), torch.empty(3, 8)
    assert torch.equal(backend.logits(states, same), states)
    assert backend.logits(states, same, 30.0, out) is out
    close(out, 30 * torch.tanh(states.double() / 30), torch.float32)
    assert backend.logits(states[:0], same, 30.0).shape == (0, 8)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@each_dtype
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("size", [6, 32, 80])
def test_rotation_and_write(backend: Backend, dtype: torch.dtype, has_norms: bool, size: int) -> None:
    query_norm, key_norm = (torch.rand(size).to(dtype) + 0.5 if has_norms else None for _ in range(2))
    heads = Heads(num_queries=4, num_kv=2, size=size, query_norm=query_norm, key_norm=key_norm, norm_eps=1e-6)
    radians = torch.rand(50, size // 2) * 6
    angles = Angles(radians.cos(), radians.sin())
    qkv, positions = torch.randn(7, 8 * size).to(dtype), torch.tensor([0, 3, 49, 2, 2, 17, 5])
    layers = [torch.full((3, 3, 2, 2, 16, size), torch.nan).to(dtype)[:, 1] for _ in range(2)]
    slots = torch.tensor([5, 40, 16, -1, 0, 47, 15])
    expected = TorchBackend().rotate_and_write(qkv.clone(), heads, angles.at(positions), KVPages(layers[0]), slots)
    close(
        backend.rotate_and_write(qkv.clone(), heads, angles.at(positions), KVPages(layers[1]), slots), expected, dtype
    )
    assert torch.equal(layers[0].isnan(), layers[1].isnan())
    close(layers[1].nan_to_num(), layers[0].nan_to_num(), dtype)


@each_dtype
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("size", [6, 32, 80])
def test_a_quantized_write_is_that_of_the_oracle_bit_by_bit(
    backend: Backend, dtype: torch.dtype, kept: str, size: int
) -> None:
    """A rotation by no angle leaves keys as they are: no backend's rounding of it shows."""
    heads, still = (
        Heads(num_queries=4, num_kv=2, size=size, query_norm=None, key_norm=None, norm_eps=1e-6),
        Angles(torch.ones(9, size // 2), torch.zeros(9, size // 2)),
    )
    qkv = torch.randn(9, 8, size) * torch.logspace(-30, 4, 9)[:, None, None]
    qkv[0] = 0
    qkv[1, 4:] = torch.linspace(-1, 1, size)
    qkv[2, 5, 3], qkv[2, 7, 0] = torch.inf, torch.nan
    qkv = qkv.to(dtype)
    pages = empty_codes(3, Shape(4, 2, size), 16, kept, "cpu")
    slots = torch.tensor([5, 40, 16, -1, 0, 47, 15, 1, 2])
    backend.rotate_and_write(qkv.flatten(1).clone(), heads, still, pages, slots)
    assert pages.scales is not None
    codes, scales = reference.quantize(qkv[:, 4:].unflatten(1, (2, 2)), pages.data.dtype)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert_same(pages.scales[slot // 16, :, :, slot % 16], scales[token])
            seen = scales[token].isfinite()
            assert_same(pages.data[slot // 16, :, :, slot % 16].float()[seen], codes[token].float()[seen])
    assert scales[2].isnan().sum() == 2
    assert pages.scales.isfinite().sum() == 2 * 2 * 8 - 2


@each_dtype
@pytest.mark.parametrize("size", [8, 32, 80])
@pytest.mark.parametrize("block_size", [8, 16])
def test_a_block_of_int4_is_that_of_the_oracle_bit_by_bit(
    backend: Backend, dtype: torch.dtype, size: int, block_size: int
) -> None:
    """Pages 2 and 0 are filled by other tokens in between, page 1 is not; a block that was closed is closed again."""
    heads, still = (
        Heads(num_queries=4, num_kv=2, size=size, query_norm=None, key_norm=None, norm_eps=1e-6),
        Angles(torch.ones(1, size // 2), torch.zeros(1, size // 2)),
    )
    slots = torch.cat([torch.arange(block_size) + 2 * block_size, torch.arange(block_size - 1) + block_size])
    slots = torch.cat([slots, torch.tensor([-1]), torch.arange(block_size)])
    qkv = torch.randn(len(slots), 8, size) * torch.logspace(-3, 3, size)
    qkv[: block_size // 2, 4:] = 0
    qkv[:, 4, 0], qkv[:, 5, 1] = 0, torch.linspace(-1, 1, len(slots))
    qkv[2, 7, 0], qkv[2, 5, 3], qkv[-1, 4, 2] = torch.nan, torch.inf, -torch.inf
    qkv[2, 5, 3 + size // 2] = qkv[-1, 4, 2 + size // 2] = torch.nan  # as infinity is rotated, by any angle
    qkv = qkv.to(dtype)
    pages = empty_codes(3, Shape(4, 2, size), block_size, "int4", "cpu", dtype)
    expected = KVPages(pages.data.clone(), pages.scales, pages.int4)
    assert pages.scales is not None
    assert pages.int4 is not None
    for rows in (slice(0, 5), slice(5, len(slots)), slice(3, len(slots))):
        angles = Angles(still.cosines.expand(len(slots[rows]), -1), still.sines.expand(len(slots[rows]), -1))
        contiguous = Angles(angles.cosines.contiguous(), angles.sines.contiguous())
        backend.rotate_and_write(qkv[rows].flatten(1).clone(), heads, contiguous, pages, slots[rows])
    for page, first, num_lost in ((2, 0, [2, 1]), (0, 2 * block_size, [2, 0])):
        keys, values = qkv[first : first + block_size, 4:].unflatten(1, (2, 2)).permute(1, 2, 0, 3)
        (key_codes, key_scales), (value_codes, value_scales) = (
            reference.quantize_int4(one, dim) for one, dim in ((keys, -2), (values, -1))
        )
        assert_same(pages.int4.key_scales[page], key_scales)
        assert_same(pages.scales[page], value_scales)
        found_keys, found_values = reference.unpack_int4(pages.data[page])
        key_has, value_has = key_scales.isfinite(), value_scales.isfinite()
        assert torch.equal(found_keys.mT[key_has], key_codes.mT[key_has])
        assert torch.equal(found_values[value_has], value_codes[value_has])
        assert [int((~key_has).sum()), int((~value_has).sum())] == num_lost
    assert torch.equal(pages.data[1], expected.data[1])
    assert pages.scales[1].isnan().all()


@pytest.mark.parametrize("dim", [-1, -2])
def test_codes_of_int4_are_the_nearest(dim: int) -> None:
    """Within half a step, but for numbers as large as the largest and of the other sign, which are short by one."""
    numbers = torch.randn(50, 16, 16, dtype=torch.float64) * torch.logspace(-20, 20, 50)[:, None, None]
    codes, scales = reference.quantize_int4(numbers, dim)
    steps = scales.unsqueeze(dim).double()
    errors = (codes * steps - numbers).abs() / steps.abs()
    assert (codes.amin(dim) == -8).all()
    assert (errors[numbers / steps <= 7.5] <= 0.51 + 8 / 512).all()
    assert errors.max() <= 1 + 8 / 256


def test_int4_packs_the_halves_of_a_head() -> None:
    codes = torch.tensor([[-8, 7, 0, -1]], dtype=torch.int8)
    assert reference.pack_int4(codes).tolist() == [[0x80, 0x7F]]
    assert torch.equal(reference.unpack_int4(reference.pack_int4(codes)), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kept", "step"), [("int8", 1 / 127), ("fp8", 1 / 8)])
def test_codes_are_the_nearest(dtype: torch.dtype, kept: str, step: float) -> None:
    """Within half a step: of the largest number, for fp8 of each number, up to an eighth of it."""
    heads = (torch.randn(200, 64) * torch.logspace(-20, 20, 200)[:, None]).to(dtype).double()
    codes, scales = reference.quantize(heads, torch.int8 if kept == "int8" else torch.float8_e4m3fn)
    largest = heads.abs().amax(-1, keepdim=True)
    size = largest if kept == "int8" else heads.abs() + largest / 4000
    assert ((codes.double() * scales[:, None].double() - heads).abs() <= size * step * 0.51).all()


@each_dtype
def test_a_row_has_the_same_bits_in_any_batch(any_backend: Backend, dtype: torch.dtype) -> None:
    backend = any_backend
    states, weight = torch.randn(100, 144).to(dtype), torch.randn(200, 144).to(dtype)
    packed, bias, norm = backend.pack(weight), torch.randn(200).to(dtype), torch.randn(144).to(dtype)
    operations: list[Callable[[Tensor], Tensor]] = [
        lambda rows: backend.linear(rows, packed, bias),
        lambda rows: backend.logits(rows, packed),
        lambda rows: backend.rms_norm(rows, norm, 1e-5),
        lambda rows: backend.gate(rows, Activation.SILU),
        lambda rows: backend.gate(rows, Activation.GELU_TANH),
        lambda rows: backend.logits(rows, packed, 3.0),
        lambda rows: backend.rms_norm(rows, norm.float(), 1e-5, rows),
    ]
    for operate in operations:
        whole = operate(states)
        for size in BATCH_SIZES:
            for first in (0, 100 - size):
                assert torch.equal(operate(states[first : first + size].contiguous()), whole[first : first + size])


@each_dtype
def test_a_row_of_a_deep_product_has_the_same_bits_in_any_batch(any_backend: Backend, dtype: torch.dtype) -> None:
    """The depth is several chunks and not a whole one, and the sums of all rows are more than are kept at once."""
    states = torch.randn(700, 1100).to(dtype)
    packed = any_backend.pack(torch.randn(70, 1100).to(dtype))
    whole = any_backend.linear(states, packed, None)
    for size in (*range(1, 14), 32, 575, 577):
        first = 700 - size
        assert torch.equal(any_backend.linear(states[first:].contiguous(), packed, None), whole[first:])


def random_turns(num_rows: int, head_size: int) -> Angles:
    radians = torch.rand(num_rows, head_size // 2) * 6.28
    return Angles(radians.cos(), radians.sin())


def attend(
    backend: Backend,
    batch: PagedBatch,
    query: Tensor,
    first: int,
    end: int,
    variant: AttentionVariant,
    turns: Angles | None = None,
) -> Tensor:
    """Attends with the rows at positions first to end - 1 of the only sequence, as a decoding row if there is one."""
    lens = torch.tensor([end], dtype=torch.int32)
    starts = torch.tensor([0, end - first], dtype=torch.int32)
    own = None if turns is None else turns.at(torch.arange(first, end))
    tables = Tables(batch.block_tables, lens, starts, int(end - first == 1), own)
    return backend.attend(query[first:end], batch.pages, tables, variant)


@pytest.mark.parametrize("name", ["torch", *PRODUCTS, "triton"])
@pytest.mark.parametrize(("num_sinks", "window"), [(1, 1), (4, 5), (4, 300), (70, 33), (100, 130)])
@pytest.mark.parametrize(("soft_cap", "sink", "kept"), [(None, None, "none"), (1.5, 2.0, "none"), (None, None, "int8")])
def test_sinks_behind_the_window(
    name: str, num_sinks: int, window: int, soft_cap: float | None, sink: float | None, kept: str
) -> None:
    """Contexts with the sinks in the window, partly behind it, and far; what lies between is of pages of NaN."""
    backend = TritonBackend() if name == "triton" else make_backend(name)
    far = num_sinks + window + 150
    lens, query_lens = [1, window, window + num_sinks, window + 3, far, far, 131, 40], [1, 1, 1, 1, 1, 1, 131, 30]
    batch = make_paged_batch(Shape(6, 2, 32), lens, 16, kept=kept)
    for table, context_len, query_len in zip(batch.block_tables, lens, query_lens, strict=True):
        table[-(-num_sinks // 16) : max(0, context_len - query_len - window + 1) // 16] = table[-1]
    num_rows = sum(query_lens)
    query, turns = batch.random_query(num_rows), random_turns(num_rows, 32)
    variant = batch.variant(window, soft_cap, sink, num_sinks)
    starts = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)
    tables = Tables(batch.block_tables, batch.context_lens, starts, 6, turns)
    parts = zip(query.split(query_lens), turned_back(query, turns).split(query_lens), strict=True)
    expected = [
        dense_attention(own, key, value, variant, turned)
        for (own, turned), key, value in zip(parts, batch.keys, batch.values, strict=True)
    ]
    close(backend.attend(query, batch.pages, tables, variant), torch.cat(expected), torch.float32)


def test_sinks_without_turns_are_refused(backend: Backend) -> None:
    batch = make_paged_batch(Shape(2, 1, 32), [70], 16)
    if isinstance(backend, CpuBackend):
        with pytest.raises(ValueError, match="turned back"):
            attend(backend, batch, batch.random_query(70), 0, 70, batch.variant(5, num_sinks=4))
    with pytest.raises(ValueError, match="not float32"):
        Angles(torch.ones(1, 16, dtype=torch.float64), torch.ones(1, 16))


@each_dtype
@pytest.mark.parametrize(("window", "num_sinks"), [(None, 0), (5, 0), (100, 0), (50, 4), (300, 140)])
@pytest.mark.parametrize(
    ("soft_cap", "sink", "kept"),
    [(None, None, "none"), (1.5, 2.0, "none"), (None, None, "int8"), (1.5, 2.0, "fp8"), (None, None, "int4")],
)
def test_attention_gives_a_row_the_same_bits_alone_and_in_any_chunk(
    attending: Backend,
    dtype: torch.dtype,
    window: int | None,
    num_sinks: int,
    soft_cap: float | None,
    sink: float | None,
    kept: str,
) -> None:
    """Positions before, at and behind the ends of pieces and segments of keys."""
    batch = make_paged_batch(Shape(6, 2, 24), [1100], 16, dtype, kept=kept)
    query, variant = batch.random_query(1100), batch.variant(window, soft_cap, sink, num_sinks)
    turns = random_turns(1100, 24)
    whole = attend(attending, batch, query, 0, 1100, variant, turns)
    for position in (0, 1, 15, 16, 49, 50, 54, 127, 128, 129, 299, 300, 370, 1023, 1024, 1025, 1099):
        assert torch.equal(attend(attending, batch, query, position, position + 1, variant, turns)[0], whole[position])
    for first, end in ((0, 16), (16, 116), (120, 140), (1000, 1060), (100, 1100)):
        assert torch.equal(attend(attending, batch, query, first, end, variant, turns), whole[first:end])


@each_dtype
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
@pytest.mark.parametrize(("window", "soft_cap", "sink"), [(None, None, None), (70, None, None), (None, 1.5, 2.0)])
def test_attention_over_codes(
    attending: Backend,
    dtype: torch.dtype,
    kept: str,
    block_size: int,
    window: int | None,
    soft_cap: float | None,
    sink: float | None,
) -> None:
    """Rows of a chunk and decoding ones, over what the codes stand for; all else in the pool has scales of NaN."""
    batch = make_paged_batch(Shape(6, 2, 80), [300, 33], block_size, dtype, kept=kept)
    query, variant = batch.random_query(100 + 1), batch.variant(window, soft_cap, sink)
    tables = Tables(
        batch.block_tables.flip(0), batch.context_lens.flip(0), torch.tensor([0, 1, 101], dtype=torch.int32), 1
    )
    expected = [
        dense_attention(query[rows], batch.keys[of], batch.values[of], variant)
        for rows, of in ((slice(1), 1), (slice(1, 101), 0))
    ]
    close(attending.attend(query, batch.pages, tables, variant), torch.cat(expected), dtype)


@each_dtype
@pytest.mark.parametrize(("soft_cap", "sink"), [(None, None), (1.5, 2.0)])
@pytest.mark.parametrize("num_sinks", [0, 140])
def test_attention_gives_a_decoding_row_the_same_bits_among_others(
    attending: Backend, dtype: torch.dtype, soft_cap: float | None, sink: float | None, num_sinks: int
) -> None:
    batch = make_paged_batch(Shape(4, 2, 64), [1100, 1, 140, 0, 1024, 1025], 16, dtype)
    query, variant = batch.random_query(6), batch.variant(200 if num_sinks else None, soft_cap, sink, num_sinks)
    starts, turns = torch.arange(7, dtype=torch.int32), random_turns(6, 64)
    tables = Tables(batch.block_tables, batch.context_lens, starts, 6, turns)
    whole = attending.attend(query, batch.pages, tables, variant)
    for row in range(6):
        own = slice(row, row + 1)
        turn = turns.at(torch.tensor([row]))
        tables = Tables(batch.block_tables[own], batch.context_lens[own], starts[:2], 1, turn)
        assert torch.equal(attending.attend(query[own], batch.pages, tables, variant), whole[own])


@pytest.mark.parametrize("name", ISAS)
def test_a_program_attends_as_its_variant_says(name: str) -> None:
    backend = make_backend(name)
    batch = make_paged_batch(Shape(4, 2, 64), [300, 5], 16)
    query, variant, packed = batch.random_query(2), batch.variant(100, 1.5, 2.0, 4), backend.pack(torch.randn(8, 256))
    starts = torch.arange(3, dtype=torch.int32)
    tables = Tables(batch.block_tables, batch.context_lens, starts, 2, random_turns(2, 64))
    attended, logits = torch.empty(2, 4, 64), torch.empty(2, 8)
    recorder = backend.record()
    assert recorder is not None
    recorder.attend(query, batch.pages, tables, variant, attended)
    recorder.logits(attended.flatten(1), packed, out=logits)
    recorder.finish().run(2, 2, 2)
    assert torch.equal(attended, backend.attend(query, batch.pages, tables, variant))
    assert torch.equal(logits, backend.logits(attended.flatten(1), packed))


@pytest.mark.parametrize("soft_cap", [4.0, 1e4])
def test_a_soft_cap_is_exact_at_any_score(backend: Backend, soft_cap: float) -> None:
    """A row that sees one key, of the value 1, beside a sink of 0 tells its score: the output is its sigmoid."""
    batch = make_paged_batch(Shape(1, 1, 32), [1], 16)
    batch.pages.data[batch.block_tables[0, 0], :, :, 0] = 1.0
    magnitudes = torch.logspace(-30, 30, 301)
    scores = torch.cat([magnitudes, -magnitudes, torch.linspace(-40, 40, 1000), torch.tensor([0.0, torch.inf])])
    query = torch.zeros(len(scores), 1, 32)
    query[:, 0, 0] = scores
    starts, lens = torch.arange(len(scores) + 1, dtype=torch.int32), torch.ones(len(scores), dtype=torch.int32)
    tables = Tables(batch.block_tables.expand(len(scores), -1).contiguous(), lens, starts, len(scores))
    attended = backend.attend(
        query, batch.pages, tables, AttentionVariant(1.0, scores=Scores(soft_cap, torch.zeros(1)))
    )
    expected = (soft_cap * (scores.double() / soft_cap).tanh()).sigmoid()
    torch.testing.assert_close(attended[:, 0, 7].double(), expected, rtol=2e-5, atol=1e-37)


def test_a_sink_may_outweigh_everything(backend: Backend) -> None:
    batch = make_paged_batch(Shape(201, 1, 32), [1], 16)
    batch.pages.data[batch.block_tables[0, 0], :, :, 0] = 1.0
    sinks = torch.linspace(-100, 100, 201)
    tables = Tables(batch.block_tables, batch.context_lens, torch.tensor([0, 1], dtype=torch.int32), 1)
    attended = backend.attend(
        torch.zeros(1, 201, 32), batch.pages, tables, AttentionVariant(1.0, scores=Scores(sinks=sinks))
    )
    torch.testing.assert_close(attended[0, :, 7].double(), (-sinks.double()).sigmoid(), rtol=2e-5, atol=1e-37)


@pytest.mark.parametrize("name", ISAS)
def test_no_bit_depends_on_the_number_of_threads(name: str) -> None:
    backend = make_backend(name)
    assert isinstance(backend, CpuBackend)
    batch = make_paged_batch(Shape(6, 2, 64), [700, 30, 260], 16, torch.bfloat16)
    query, weight = batch.random_query(3), backend.pack(torch.randn(999, 384).bfloat16())
    tables = Tables(batch.block_tables, batch.context_lens, torch.arange(4, dtype=torch.int32), 3)

    def run() -> list[Tensor]:
        attended = backend.attend(query, batch.pages, tables, batch.variant())
        return [attended, backend.logits(attended.flatten(1), weight)]

    runs = []
    for num_threads in (1, 2, 3, 8, 1):
        backend.set_num_threads(num_threads)
        runs.append(run())
    assert all(torch.equal(one, other) for results in runs for one, other in zip(results, runs[0], strict=True))


@each_dtype
def test_a_row_that_is_no_number_stays_alone(attending: Backend, dtype: torch.dtype) -> None:
    states, packed = torch.randn(16, 64).to(dtype), attending.pack(torch.randn(64, 64).to(dtype))
    expected = attending.linear(states, packed, None)
    states[5, 7], states[6] = torch.nan, torch.inf
    actual = attending.linear(states, packed, None)
    assert not actual[5:7].isfinite().any()
    assert torch.equal(actual[:5], expected[:5])
    assert torch.equal(actual[7:], expected[7:])
    batch = make_paged_batch(Shape(2, 1, 32), [70], 16, dtype)
    query = batch.random_query(70)
    expected = attend(attending, batch, query, 0, 70, batch.variant())
    query[66] = torch.nan
    actual = attend(attending, batch, query, 0, 70, batch.variant())
    assert actual[66].isnan().all()
    assert torch.equal(actual[:66], expected[:66])
    assert torch.equal(actual[67:], expected[67:])


@each_dtype
@pytest.mark.parametrize("window", [None, 5])
def test_an_infinite_value_reaches_only_the_rows_that_see_it(
    backend: Backend, dtype: torch.dtype, window: int | None
) -> None:
    batch = make_paged_batch(Shape(2, 1, 32), [70], 16, dtype)
    query, variant = batch.random_query(70), batch.variant(window)
    expected = attend(backend, batch, query, 0, 70, variant)
    batch.pages.data[batch.block_tables[0, 40 // 16], 1, 0, 40 % 16, 3] = torch.inf
    actual = attend(backend, batch, query, 0, 70, variant)
    seen_until = 70 if window is None else 40 + window
    assert not actual[40:seen_until].isfinite().all(-1).any()
    assert torch.equal(actual[:40], expected[:40])
    assert torch.equal(actual[seen_until:], expected[seen_until:])


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_a_wide_gate_does_not_depend_on_its_company(backend: Backend) -> None:
    gate_up = torch.randn(7, 2 * 11008)
    whole = backend.gate(gate_up, Activation.SILU)
    assert all(torch.equal(backend.gate(gate_up[row : row + 1], Activation.SILU)[0], whole[row]) for row in range(7))
