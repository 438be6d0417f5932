"""Experts in Triton, against torch: interpreted here, or compiled on a machine with a GPU."""

import pytest
import torch

from kernels.cpu.library import NoKernels
from kernels.products import experts as operations
from kernels.routing import Gating, Routing
from kernels.torch_backend import TorchBackend
from kernels.triton_backend import TritonBackend
from tests.kernels.quantized_matrices import DRAWS
from tests.kernels.test_experts import draw_matrices, draw_routing
from tests.kernels.test_operations import each_dtype
from tests.kernels.test_packed_products import assert_close

BACKEND = TritonBackend()
SHAPES = ((1, 2, 1, 33, 63), (1, 32, 4, 64, 96), (8, 6, 6, 100, 128), (40, 3, 2, 65, 160), (64, 64, 7, 33, 31))
"""Rows, experts, chosen, columns, depth."""


@each_dtype
@pytest.mark.parametrize(("num_rows", "num_experts", "num_chosen", "columns", "depth"), SHAPES)
def test_products_of_experts(
    device: torch.device,
    dtype: torch.dtype,
    num_rows: int,
    num_experts: int,
    num_chosen: int,
    columns: int,
    depth: int,
) -> None:
    matrices = torch.stack(draw_matrices(num_experts, columns, depth, dtype)).to(device)
    drawn = draw_routing(num_rows, num_experts, num_chosen)
    routing, bias = Routing(drawn.experts.to(device), drawn.shares.to(device)), torch.randn(num_experts, columns)
    experts = BACKEND.experts([BACKEND.pack(one) for one in matrices])
    added, own = bias.to(dtype).to(device), matrices.double()[routing.experts.long()]
    states = torch.randn(num_rows, depth, device=device).to(dtype)
    expected, of_bias = torch.einsum("td,tjcd->tjc", states.double(), own), added.double()[routing.experts.long()]
    magnitudes = torch.einsum("td,tjcd->tjc", states.double().abs(), own.abs())
    assert_close(BACKEND.expert_linear(states, experts, routing, None), expected, magnitudes, dtype)
    of_rows = states[:, None].expand(-1, num_chosen, -1).contiguous()
    out = torch.full((num_rows, num_chosen, columns), torch.nan, dtype=dtype, device=device)
    assert BACKEND.expert_linear(of_rows, experts, routing, added, out) is out
    assert_close(out, expected + of_bias, magnitudes + of_bias.abs(), dtype)


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "rows_of_tile"), [(1, 1, 16), (16, 1, 16), (17, 4, 4), (90, 7, 16)]
)
def test_each_row_is_in_one_tile_of_its_expert(num_rows: int, num_experts: int, rows_of_tile: int) -> None:
    chosen = draw_routing(num_rows, num_experts, 1).experts.flatten()
    order, tiles = operations.sort_by_expert(chosen, num_experts, rows_of_tile)
    seen: list[int] = []
    for expert, begin, end in tiles.tolist():
        assert end - begin <= rows_of_tile
        rows = order[begin : max(begin, end)].tolist()
        assert all(int(chosen[row]) == expert for row in rows)
        seen += rows
    assert sorted(seen) == list(range(num_rows))


@each_dtype
def test_no_row_depends_on_the_others(device: torch.device, dtype: torch.dtype) -> None:
    """A row alone has a tile of its own; numpy, which interprets, sums in an order that depends on a tile."""
    matrices = [BACKEND.pack(one.to(device)) for one in draw_matrices(3, 70, 200, dtype)]
    experts = BACKEND.experts(matrices)
    states = torch.randn(100, 200, device=device).to(dtype)
    whole = Routing(torch.tensor([[0, 2]], dtype=torch.int32).repeat(100, 1).to(device), torch.rand(100, 2).to(device))
    product = BACKEND.expert_linear(states, experts, whole, None)
    for row in (0, 17, 99):
        alone = Routing(whole.experts[:1], whole.shares[:1])
        again = BACKEND.expert_linear(states[row : row + 1], experts, alone, None)
        torch.testing.assert_close(again[0], product[row], rtol=0, atol=0 if device.type == "cuda" else 1e-2)


@each_dtype
@pytest.mark.parametrize(("columns", "num_chosen"), [(7, 1), (600, 4)])
def test_rows_of_experts_are_added_up(device: torch.device, dtype: torch.dtype, columns: int, num_chosen: int) -> None:
    rows, residual = (torch.randn(*sizes, columns, device=device).to(dtype) for sizes in ((9, num_chosen), (9,)))
    routing = BACKEND.route(torch.randn(9, 5, device=device), num_chosen, Gating.OF_CHOSEN)
    for added in (None, residual):
        assert torch.equal(BACKEND.combine(rows, routing, added), TorchBackend().combine(rows, routing, added))
    assert BACKEND.combine(rows[:0], Routing(routing.experts[:0], routing.shares[:0])).shape == (0, columns)


def test_experts_of_codes_are_refused() -> None:
    with pytest.raises(NoKernels, match="packed codes"):
        BACKEND.experts([BACKEND.pack_codes([DRAWS["Q8_0"](32, 64)], torch.bfloat16)])
