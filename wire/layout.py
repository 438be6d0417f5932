"""The shape of one KV block, as all processes know it: sizes and names, no tensor."""

from dataclasses import asdict, dataclass

import msgpack

from wire.errors import WireError

PAGE_ALIGNMENT = 4096
KV_DTYPES = ("auto", "int8", "fp8")
"""Choices of what KV is kept in: the dtype of the computation, or codes."""
QUANTIZATIONS = ("none", *KV_DTYPES[1:])
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CODE_BYTES, _SCALE_BYTES = 1, 2


@dataclass(frozen=True)
class KVLayout:
    """`[num_layers, 2, num_kv_heads]` head blocks, one behind the other; the 2 is key and value.

    A head block is, from byte to byte:

        0            data_bytes   [block_size, head_dim] of `dtype`, or codes: int8, or fp8, which is e4m3
        data_bytes   head_bytes   [block_size] scales of codes, bfloat16

    dtype: of the computation.
    window: tokens that a row sees, itself included, where that is bounded in every layer: no row needs the blocks
    before it. None: some layer sees all.
    num_sinks: first tokens that each row sees beside its window: their blocks are always needed.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    quantization: str = "none"
    window: int | None = None
    num_sinks: int = 0

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def is_quantized(self) -> bool:
        return self.quantization != "none"

    @property
    def item_bytes(self) -> int:
        return _CODE_BYTES if self.is_quantized else _ITEM_BYTES[self.dtype]

    @property
    def data_bytes(self) -> int:
        """Bytes of a head block without its scales."""
        return self.block_size * self.head_dim * self.item_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of a head block."""
        return self.data_bytes + (self.block_size * _SCALE_BYTES if self.is_quantized else 0)

    @property
    def payload_bytes(self) -> int:
        """Bytes of a block, and of a page."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes a block takes in an arena: the payload, padded to 4 KiB."""
        return padded(self.payload_bytes)

    def num_blocks(self, num_tokens: int) -> int:
        """Counts the blocks of so many tokens, the last one partly filled."""
        return -(-num_tokens // self.block_size)

    @property
    def num_sink_blocks(self) -> int:
        return self.num_blocks(self.num_sinks)

    def first_block(self, position: int) -> int:
        """Finds the first block of the window of the row at a position."""
        return 0 if self.window is None else max(0, position + 1 - self.window) // self.block_size

    def behind(self, position: int) -> range:
        """Finds the blocks between sinks and window that no row needs, from the one at a position on."""
        return range(self.num_sink_blocks, max(self.num_sink_blocks, self.first_block(position)))

    @property
    def most_needed(self) -> int | None:
        """The most blocks that a sequence needs at once; None if all of its blocks."""
        return None if self.window is None else self.num_sink_blocks + self.num_blocks(self.window - 1) + 1

    def num_needed(self, num_tokens: int) -> int:
        """Counts the most blocks that a sequence needs at once on its way to so many tokens."""
        num_blocks = self.num_blocks(num_tokens)
        return num_blocks if self.most_needed is None else min(num_blocks, self.most_needed)

    def max_len(self, num_pages: int, context_len: int) -> int:
        """Tokens of a context that a sequence may have in so many pages."""
        fits = self.num_needed(context_len) <= num_pages
        return context_len if fits else min(context_len, num_pages * self.block_size)

    def encode(self) -> bytes:
        """Encodes equal layouts as the same bytes on every machine."""
        return bytes(msgpack.packb(sorted(asdict(self).items())))

    @classmethod
    def decode(cls, data: bytes) -> "KVLayout":
        """Raises WireError if `data` is not an encoded layout."""
        try:
            layout = cls(**dict(msgpack.unpackb(data)))
            sizes = [layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size]
            is_one = layout.dtype in _ITEM_BYTES and layout.quantization in QUANTIZATIONS
            sizes += [] if layout.window is None else [layout.window]
            sizes += [layout.num_sinks] if layout.num_sinks or type(layout.num_sinks) is not int else []
            is_one = is_one and layout.num_sinks < (layout.window or 1)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise WireError("not a KV layout") from error
        if not is_one or any(type(size) is not int or size < 1 for size in sizes):
            raise WireError("a KV layout with an impossible field")
        return layout


def padded(payload_bytes: int) -> int:
    """Rounds bytes up to whole 4 KiB."""
    return -(-payload_bytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
