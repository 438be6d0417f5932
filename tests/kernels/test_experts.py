"""The operations of a mixture of experts, against float64; a row's bits are those of its expert's matrix alone."""

import pytest
import torch
from torch import Tensor

from kernels.backend import Activation, Backend, Experts
from kernels.cpu.backend import CpuBackend
from kernels.routing import Gating, Routing
from tests.kernels.backends import NAMES, PRODUCTS, make_backend
from tests.kernels.quantized_matrices import DRAWS
from tests.kernels.test_operations import close, each_dtype

SHAPES = ((1, 2, 1), (1, 32, 4), (3, 8, 8), (8, 32, 4), (13, 5, 2), (64, 3, 2), (64, 64, 7))
"""Rows, experts, chosen."""

NUM_ALONE = 20
"""Rows of a product that are multiplied alone, too."""

each_shape = pytest.mark.parametrize(("num_rows", "num_experts", "num_chosen"), SHAPES)


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> Backend:
    return make_backend(str(request.param))


def draw_routing(num_rows: int, num_experts: int, num_chosen: int) -> Routing:
    """Draws experts that are chosen by many rows and by none."""
    likely = torch.rand(num_experts).pow(3).log()
    ranked = (likely - torch.rand(num_rows, num_experts).log().neg().log()).argsort(1)
    experts = ranked[:, :num_chosen].sort(1).values.int().contiguous()
    return Routing(experts, torch.rand(num_rows, num_chosen))


@each_shape
@each_dtype
@pytest.mark.parametrize("shares", Gating)
def test_a_routing(
    backend: Backend, dtype: torch.dtype, shares: Gating, num_rows: int, num_experts: int, num_chosen: int
) -> None:
    logits = (torch.randn(num_rows, num_experts) * 3).to(dtype)
    routing = backend.route(logits, num_chosen, shares)
    assert (routing.experts.dtype, routing.shares.dtype) == (torch.int32, torch.float32)
    ranked = logits.double().sort(dim=1, descending=True, stable=True).indices[:, :num_chosen]
    experts = ranked.sort(1).values
    assert torch.equal(routing.experts.long(), experts)
    expected = logits.double().softmax(1).gather(1, experts)
    if shares is Gating.OF_ALL_NORMED:
        expected = expected / expected.sum(1, keepdim=True)
    if shares is Gating.OF_CHOSEN:
        expected = logits.double().gather(1, experts).softmax(1)
    close(routing.shares, expected, torch.float32)
    into = Routing(torch.empty_like(routing.experts), torch.empty_like(routing.shares))
    assert torch.equal(backend.route(logits, num_chosen, shares, into).shares, routing.shares)
    assert torch.equal(into.experts, routing.experts)
    for row in torch.randperm(num_rows)[:NUM_ALONE].tolist():
        alone = backend.route(logits[row : row + 1], num_chosen, shares)
        assert torch.equal(alone.experts[0], routing.experts[row])
        assert torch.equal(alone.shares[0], routing.shares[row])


@each_dtype
def test_ties_and_numbers_that_are_none_have_a_choice(backend: Backend, dtype: torch.dtype) -> None:
    nan, inf = torch.nan, torch.inf
    rows = [
        ([0.0, 1, 1, 0, 1], [1, 2]), ([nan, -1, nan, -2, nan], [1, 3]), ([nan] * 5, [0, 1]),
        ([-inf] * 5, [0, 1]), ([1, inf, 2, inf, inf], [1, 3]), ([-inf, nan, 0, nan, -inf], [0, 2]),
    ]  # fmt: skip
    logits = torch.tensor([row for row, _ in rows]).to(dtype)
    for shares in Gating:
        routing = backend.route(logits, 2, shares)
        assert routing.experts.tolist() == [experts for _, experts in rows]
        assert routing.shares[0].isfinite().all()
        assert routing.shares[2].isnan().all()
    assert backend.route(logits, 2, Gating.OF_CHOSEN).shares[1].isfinite().all()
    assert backend.route(logits, 2, Gating.OF_ALL).shares[1].isnan().all()
    assert backend.route(logits[:0], 2, Gating.OF_ALL).experts.shape == (0, 2)


def check_products(backend: Backend, experts: Experts, num_rows: int, num_chosen: int, dtype: torch.dtype) -> None:
    """Compares products, of rows for all their experts and row by row, with `linear` of each row alone."""
    num_experts, depth = len(experts.weights), experts.weights[0].depth
    routing = draw_routing(num_rows, num_experts, num_chosen)
    bias = torch.randn(num_experts, experts.columns).to(dtype)
    places = [(token, choice) for token in range(num_rows) for choice in range(num_chosen)]
    for sizes, added in (((num_rows,), None), ((num_rows, num_chosen), bias)):
        states = torch.randn(*sizes, depth).to(dtype)
        out = torch.empty(num_rows, num_chosen, experts.columns, dtype=dtype)
        assert backend.expert_linear(states, experts, routing, added, out) is out
        for index in torch.randperm(len(places))[:NUM_ALONE].tolist():
            token, choice = places[index]
            expert, row = (
                int(routing.experts[token, choice]),
                states[token].view(-1, depth)[choice if added is not None else 0],
            )
            own = None if added is None else added[expert]
            assert torch.equal(out[token, choice], backend.linear(row[None], experts.weights[expert], own)[0])


def draw_matrices(num_experts: int, columns: int, depth: int, dtype: torch.dtype) -> list[Tensor]:
    return [(torch.randn(columns, depth) / depth**0.5).to(dtype) for _ in range(num_experts)]


@each_shape
@each_dtype
@pytest.mark.parametrize(("columns", "depth"), [(33, 63), (150, 64)])
def test_a_row_is_multiplied_as_by_its_experts_matrix_alone(
    backend: Backend, dtype: torch.dtype, columns: int, depth: int, num_rows: int, num_experts: int, num_chosen: int
) -> None:
    matrices = draw_matrices(num_experts, columns, depth, dtype)
    experts = backend.experts([backend.pack(one) for one in matrices])
    check_products(backend, experts, num_rows, num_chosen, dtype)


@each_dtype
@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("isa", PRODUCTS)
def test_experts_of_codes_stay_packed(isa: str, name: str, dtype: torch.dtype) -> None:
    """A matrix of two parts, of which the first fills no panel; the last expert is plain."""
    backend, parts = make_backend(isa), [[DRAWS[name](size, 256) for size in (33, 40)] for _ in range(5)]
    plain = backend.pack(torch.cat([one.dequantize().to(dtype) for one in parts[-1]]))
    experts = backend.experts([*(backend.pack_codes(own, dtype) for own in parts[:-1]), plain])
    for num_rows, num_chosen in ((1, 3), (7, 2), (64, 2)):
        check_products(backend, experts, num_rows, num_chosen, dtype)


@pytest.mark.parametrize("isa", PRODUCTS)
def test_no_bit_depends_on_the_number_of_threads(isa: str) -> None:
    backend = make_backend(isa)
    assert isinstance(backend, CpuBackend)
    experts = backend.experts([backend.pack(one) for one in draw_matrices(8, 200, 96, torch.bfloat16)])
    states, routing, products = torch.randn(40, 96).bfloat16(), draw_routing(40, 8, 3), []
    for num_threads in (1, 2, 3, 8, 1):
        backend.set_num_threads(num_threads)
        products.append(backend.expert_linear(states, experts, routing, None))
    assert all(torch.equal(one, products[0]) for one in products)


@pytest.mark.parametrize("isa", PRODUCTS)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("shares", Gating)
def test_a_program_runs_experts_on_its_first_rows(isa: str, is_packed: bool, shares: Gating) -> None:
    backend, dtype, bias = make_backend(isa), torch.bfloat16, torch.randn(6, 96).bfloat16()
    draw = DRAWS["Q4_K" if is_packed else "Q8_0"]

    def experts_of(columns: int, depth: int) -> Experts:
        drawn = [draw(columns, depth) for _ in range(6)]
        packed = [backend.pack_codes([one], dtype) for one in drawn]
        return backend.experts(packed if is_packed else [backend.pack(one.dequantize().to(dtype)) for one in drawn])

    up, down = experts_of(96, 256), experts_of(256, 48)
    states, logits = torch.randn(9, 256).to(dtype) / 16, torch.randn(9, 6)
    routing = Routing(torch.empty(9, 2, dtype=torch.int32), torch.empty(9, 2))
    gate_up, gated, rows, out = (
        torch.zeros(size, dtype=dtype) for size in ((9, 2, 96), (9, 2, 48), (9, 2, 256), (9, 256))
    )

    def layer(to: Backend) -> None:
        to.route(logits, 2, shares, routing)
        to.expert_linear(states, up, routing, bias, gate_up)
        to.gate(gate_up, Activation.CLAMPED_SWISH, gated)
        to.expert_linear(gated, down, routing, None, rows)
        to.combine(rows, routing, states, out)

    recorder = backend.record()
    assert recorder is not None
    layer(recorder)
    assert not out.any()
    program = recorder.finish()
    for num_rows in (4, 1, 9):
        out.zero_()
        program.run(num_rows, 0, 0)
        assert not out[num_rows:].any()
        recorded = out.clone()
        layer(backend)
        assert torch.equal(out[:num_rows], recorded[:num_rows])


@each_dtype
def test_products_are_near_the_sums_in_float64(backend: Backend, dtype: torch.dtype) -> None:
    matrices, states = draw_matrices(6, 40, 96, dtype), torch.randn(17, 96).to(dtype)
    routing, bias = draw_routing(17, 6, 3), torch.randn(6, 40).to(dtype)
    chosen, wide = routing.experts.long(), torch.stack(matrices).double()
    expected = torch.einsum("td,tjcd->tjc", states.double(), wide[chosen]) + bias[chosen].double()
    experts = backend.experts([backend.pack(one) for one in matrices])
    close(backend.expert_linear(states, experts, routing, bias), expected, dtype)
    assert backend.expert_linear(states[:0], experts, draw_routing(0, 6, 3), bias).shape == (0, 3, 40)


def test_experts_of_other_shapes_are_refused(backend: Backend) -> None:
    with pytest.raises(ValueError, match="one shape"):
        backend.experts([backend.pack(torch.randn(3, 4)), backend.pack(torch.randn(4, 4))])


@each_dtype
@pytest.mark.parametrize(("columns", "num_chosen"), [(7, 1), (96, 4), (33, 8)])
def test_rows_of_experts_are_added_up_in_their_order(
    backend: Backend, dtype: torch.dtype, columns: int, num_chosen: int
) -> None:
    routing = draw_routing(19, 9, num_chosen)
    rows, residual = torch.randn(19, num_chosen, columns).to(dtype), torch.randn(19, columns).to(dtype)
    total = torch.zeros(19, columns)
    for choice in range(num_chosen):
        total += routing.shares[:, choice, None] * rows[:, choice].float()
    assert torch.equal(backend.combine(rows, routing), total.to(dtype))
    expected = (residual.float() + total).to(dtype)
    assert torch.equal(backend.combine(rows, routing, residual), expected)
    assert backend.combine(rows, routing, residual, out=residual) is residual
    assert torch.equal(residual, expected)


@each_dtype
def test_a_clamped_gate(backend: Backend, dtype: torch.dtype) -> None:
    gate_up = torch.randn(5, 62).to(dtype) * 6
    gate_up[0, :4] = torch.tensor([-300.0, -89.0, 89.0, 300.0])
    gate_up[1, 40:42] = torch.tensor([-300.0, 300.0])
    gate, up = gate_up.double().chunk(2, dim=-1)
    gate = gate.clamp(max=7)
    expected = gate * (1.702 * gate).sigmoid() * (up.clamp(-7, 7) + 1)
    close(backend.gate(gate_up, Activation.CLAMPED_SWISH), expected, dtype)
    of_experts = backend.gate(gate_up[:4].view(2, 2, 62), Activation.CLAMPED_SWISH)
    close(of_experts, expected[:4].view(2, 2, 31), dtype)
    gate_up[2, 3], gate_up[2, 35] = torch.nan, torch.nan
    assert backend.gate(gate_up, Activation.CLAMPED_SWISH)[2].isnan().sum() == 2
