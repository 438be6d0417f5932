"""The operations of a mixture of experts, against float64; a row's bits are those of its expert's matrix alone."""

import pytest
import torch
from torch import Tensor

from kernels.backend import Activation, Backend, Experts
from kernels.routing import Routing, Shares
from tests.kernels.backends import NAMES, make_backend
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
@pytest.mark.parametrize("shares", Shares)
def test_a_routing(
    backend: Backend, dtype: torch.dtype, shares: Shares, num_rows: int, num_experts: int, num_chosen: int
) -> None:
    logits = (torch.randn(num_rows, num_experts) * 3).to(dtype)
    routing = backend.route(logits, num_chosen, shares)
    assert (routing.experts.dtype, routing.shares.dtype) == (torch.int32, torch.float32)
    ranked = logits.double().sort(dim=1, descending=True, stable=True).indices[:, :num_chosen]
    experts = ranked.sort(1).values
    assert torch.equal(routing.experts.long(), experts)
    expected = logits.double().softmax(1).gather(1, experts)
    if shares is Shares.OF_ALL_NORMED:
        expected = expected / expected.sum(1, keepdim=True)
    if shares is Shares.OF_CHOSEN:
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
    for shares in Shares:
        routing = backend.route(logits, 2, shares)
        assert routing.experts.tolist() == [experts for _, experts in rows]
        assert routing.shares[0].isfinite().all()
        assert routing.shares[2].isnan().all()
    assert backend.route(logits, 2, Shares.OF_CHOSEN).shares[1].isfinite().all()
    assert backend.route(logits, 2, Shares.OF_ALL).shares[1].isnan().all()
    assert backend.route(logits[:0], 2, Shares.OF_ALL).experts.shape == (0, 2)


def check_products(backend: Backend, experts: Experts, num_rows: int, num_chosen: int, dtype: torch.dtype) -> None:
    """Compares products, of rows for all their experts and row by row, with `linear` of each row alone."""
    num_experts, depth = len(experts.weights), experts.weights[0].depth
    routing = draw_routing(num_rows, num_experts, num_chosen)
    bias = torch.randn(num_experts, experts.columns).to(dtype)
    chosen = routing.experts.flatten().tolist()
    for count, added in ((num_rows, None), (num_rows * num_chosen, bias)):
        states = torch.randn(count, depth).to(dtype)
        out = torch.empty(len(chosen), experts.columns, dtype=dtype)
        assert backend.expert_linear(states, experts, routing, added, out) is out
        of_rows = states.repeat_interleave(len(chosen) // count, 0)
        for row in torch.randperm(len(chosen))[:NUM_ALONE].tolist():
            expert = chosen[row]
            own = None if added is None else added[expert]
            alone = backend.linear(of_rows[row : row + 1], experts.weights[expert], own)
            assert torch.equal(out[row], alone[0])


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
def test_products_are_near_the_sums_in_float64(backend: Backend, dtype: torch.dtype) -> None:
    matrices, states = draw_matrices(6, 40, 96, dtype), torch.randn(17, 96).to(dtype)
    routing, bias = draw_routing(17, 6, 3), torch.randn(6, 40).to(dtype)
    chosen, wide = routing.experts.long(), torch.stack(matrices).double()
    expected = torch.einsum("td,tjcd->tjc", states.double(), wide[chosen]) + bias[chosen].double()
    experts = backend.experts([backend.pack(one) for one in matrices])
    close(backend.expert_linear(states, experts, routing, bias), expected.flatten(0, 1), dtype)
    assert backend.expert_linear(states[:0], experts, draw_routing(0, 6, 3), bias).shape == (0, 40)


def test_experts_of_other_shapes_are_refused(backend: Backend) -> None:
    with pytest.raises(ValueError, match="one shape"):
        backend.experts([backend.pack(torch.randn(3, 4)), backend.pack(torch.randn(4, 4))])


@each_dtype
@pytest.mark.parametrize(("columns", "num_chosen"), [(7, 1), (96, 4), (33, 8)])
def test_rows_of_experts_are_added_up_in_their_order(
    backend: Backend, dtype: torch.dtype, columns: int, num_chosen: int
) -> None:
    routing = draw_routing(19, 9, num_chosen)
    rows, residual = torch.randn(19 * num_chosen, columns).to(dtype), torch.randn(19, columns).to(dtype)
    total = torch.zeros(19, columns)
    for choice in range(num_chosen):
        total += routing.shares[:, choice, None] * rows.view(19, num_chosen, columns)[:, choice].float()
    assert torch.equal(backend.combine(rows, routing), total.to(dtype))
    expected = (residual.float() + total).to(dtype)
    assert torch.equal(backend.combine(rows, routing, residual), expected)
    assert backend.combine(rows, routing, residual, out=residual) is residual
    assert torch.equal(residual, expected)


@each_dtype
def test_a_clamped_gate(dtype: torch.dtype) -> None:
    backend = make_backend("torch")
    gate_up = torch.randn(5, 62).to(dtype) * 6
    gate_up[0, :4] = torch.tensor([-300.0, -89.0, 89.0, 300.0])
    gate_up[1, 40:42] = torch.tensor([-300.0, 300.0])
    gate, up = gate_up.double().chunk(2, dim=-1)
    gate = gate.clamp(max=7)
    expected = gate * (1.702 * gate).sigmoid() * (up.clamp(-7, 7) + 1)
    close(backend.gate(gate_up, Activation.CLAMPED_SWISH), expected, dtype)
    gate_up[2, 3], gate_up[2, 35] = torch.nan, torch.nan
    assert backend.gate(gate_up, Activation.CLAMPED_SWISH)[2].isnan().sum() == 2
