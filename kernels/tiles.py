"""The tiles of each architecture: kernels/tiles.toml, a row for each role, kind, and size of heads or codes.

Launches read the table; tests/kernels/test_compilation.py compiles each row.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kernels.backend import ANY_DEVICE, AttentionVariant, KVPages

TABLE = Path(__file__).with_name("tiles.toml")
HEAD_DIMS = (128, 256)
"""Sizes of heads with a row; other sizes use the next larger row."""
CODES = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
Role = Literal["decode", "prompts"]
PRODUCTS = "products"
"""The role of products with packed weights."""
FEW_TO_MANY = ("few", "some", "many")
"""Kinds of products with packed weights, by their number of rows, from few to many."""
ORDERED = "ordered"
"""The role of products of one order with plain weights."""
KIND_TO_ROWS = {"few": 16, "some": 64, "more": 128, "many": 512}
"""Kinds of these products, with the most rows of each."""
MIN_LEFT_ROWS = 64
"""The fewest rows of the left operand of a Hopper's matrix instruction."""
MOST = "most"
"""The kind of more rows."""
WIDENED, ABOVE = "widened", "above"
"""The role and the kind of products for which packed weights are widened to memory first."""
GROUPS = "groups"
"""The role of prompts by warp groups of a Hopper (kernels/attention/hopper.py); kinds are the compiler's versions."""
EXACT, STEP_PERCENT = "exact", "step_percent"
"""The role and the kind of timed steps."""
MAX_STEP_PERCENT = 103
"""The longest decode step with products of one order, of a step with the library's, with which they are the default."""


@dataclass(frozen=True)
class Tile:
    """The shape of a program, its warps, and the stages of its loads.

    rows: rows of queries, or of a product. width: keys of one iteration, or columns of a product.
    """

    rows: int
    width: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class OrderedTile:
    """The shape of a program of a product of one order. step: the depth of an iteration."""

    rows: int
    columns: int
    step: int
    num_warps: int
    num_stages: int

    @property
    def is_turned(self) -> bool:
        """Whether rows are the right operand: as the left one, few have another matrix instruction."""
        return self.rows < MIN_LEFT_ROWS


@dataclass(frozen=True)
class GroupTile:
    """The keys of an iteration, and the tiles of keys, and of values, that are loaded ahead."""

    keys: int
    slots: int


Table = dict[str, dict[str, dict[str, dict[str, list[int]]]]]
"""Numbers of a tile, by architecture, role, kind, and size of heads.

Products have bits of codes in place of these, products of one order 1 for a matrix of one split and 2 for others.
The role `widened` has a number of rows in place of a tile, and `groups` keys and slots.
"""


def read_table(path: Path = TABLE) -> Table:
    """Reads a table of tiles."""
    return tomllib.loads(path.read_text())


def digest() -> str:
    """Computes a digest of the table, for the kernels' version: results depend on tiles."""
    return sha256(TABLE.read_bytes()).hexdigest()[:8]


def choose_tile(role: Role, query: Tensor, pages: KVPages, variant: AttentionVariant) -> Tile:
    """Returns the table's tile for a launch on the device of `query`; it does not depend on the batch."""
    return find_tile(architecture_of(query.device), role, kind_of(query.dtype, pages, variant), query.shape[-1])


def choose_group_tile(device: torch.device, head_dim: int) -> GroupTile | None:
    """Returns the table's tile for prompts by warp groups; None where no device has run what this Triton compiles.

    Gluon has no interpreter.
    """
    if device.type != "cuda":
        return None
    import triton

    version = triton.__version__.rpartition(".")[0].replace(".", "_")
    row = _table()[architecture_of(device)].get(GROUPS, {}).get(version, {})
    return GroupTile(*row[str(head_dim)]) if str(head_dim) in row else None


def choose_product_tile(device: torch.device, dtype: torch.dtype, bits: int, num_rows: int) -> Tile:
    """Returns the table's tile for a product of rows with codes: the first tile with enough rows, else the last."""
    kinds = ("float32",) if dtype is torch.float32 else FEW_TO_MANY
    tiles = [find_product_tile(architecture_of(device), kind, bits) for kind in kinds]
    return next((one for one in tiles if one.rows >= num_rows), tiles[-1])


def find_widened_rows(device: torch.device, dtype: torch.dtype, bits: int) -> int | None:
    """Returns the number of rows above which packed weights are widened to memory first; None for never."""
    above = _table()[architecture_of(device)].get(WIDENED, {}).get(ABOVE, {})
    [most_rows] = above.get(str(bits), [None]) if dtype is not torch.float32 else [None]
    return most_rows


def choose_ordered_tile(device: torch.device, dtype: torch.dtype, num_splits: int, num_rows: int) -> OrderedTile:
    """Returns the table's tile for a product of one order."""
    kind = next((kind for kind, most in KIND_TO_ROWS.items() if num_rows <= most), MOST)
    kind = "float32" if dtype is torch.float32 else kind
    return find_ordered_tile(architecture_of(device), kind, min(num_splits, 2))


def is_quick_in_order() -> bool:
    """Tells whether products of one order cost decode steps little on this machine's devices, as one has timed."""
    percents = _table().get(device_name(), {}).get(EXACT, {}).get(STEP_PERCENT, {})
    return bool(percents) and max(chain.from_iterable(percents.values())) <= MAX_STEP_PERCENT


def kind_of(dtype: torch.dtype, pages: KVPages, variant: AttentionVariant) -> str:
    """Names the kind of a launch, which decides about its registers: float32, pages' codes, or sinks and caps."""
    if dtype is torch.float32:
        return "float32"
    if pages.int4 is not None:
        return "int4"
    if pages.scales is not None:
        return CODES[pages.data.dtype]
    has_sinks = variant.num_sinks or variant.scores.sinks is not None
    return "plain" if variant.scores.soft_cap is None and not has_sinks else "sinks"


@cache
def find_tile(architecture: str, role: Role, kind: str, head_dim: int) -> Tile:
    """Reads a row of the table. Raises KeyError if the table lacks it."""
    wide = next((one for one in HEAD_DIMS if one >= head_dim), HEAD_DIMS[-1])
    return Tile(*_table()[architecture][role][kind][str(wide)])


@cache
def find_product_tile(architecture: str, kind: str, bits: int) -> Tile:
    """Reads a row of products. Raises KeyError if the table lacks it."""
    return Tile(*_table()[architecture][PRODUCTS][kind][str(bits)])


@cache
def find_ordered_tile(architecture: str, kind: str, num_splits: int) -> OrderedTile:
    """Reads a row of products of one order. Raises KeyError if the table lacks it."""
    return OrderedTile(*_table()[architecture][ORDERED][kind][str(num_splits)])


def architecture_of(device: torch.device) -> str:
    """Names a device's architecture in the table; sm_90 for interpreted kernels."""
    if device.type != "cuda":
        return "sm_90"
    return "gfx942" if torch.version.hip else nearest_of(torch.cuda.get_device_capability(device))


def device_name() -> str:
    """Names the architecture of this machine's devices, from which numbers follow; `any` without a device."""
    if not torch.cuda.is_available():
        return ANY_DEVICE
    if torch.version.hip:
        return torch.cuda.get_device_properties().gcnArchName.partition(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def nearest_of(capability: tuple[int, int]) -> str:
    """Names the table's architecture for an NVIDIA device.

    Tiles of sm_80 fit the 99 KiB of shared memory of sm_86, sm_89 and sm_120.
    """
    return {9: "sm_90", 10: "sm_100"}.get(capability[0], "sm_80")


@cache
def _table() -> Table:
    return read_table()
