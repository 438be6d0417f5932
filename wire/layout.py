"""The shape of a KV block, for all processes, and the blocks that rows read; no tensors."""

from dataclasses import asdict, dataclass

import msgpack

from wire.errors import WireError

PAGE_ALIGNMENT = 4096
KV_DTYPES = ("auto", "int8", "fp8", "int4")
"""The dtypes of KV: the compute dtype, or codes."""
QUANTIZATIONS = ("none", *KV_DTYPES[1:])
_ITEM_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}
_CODE_BITS = {"int8": 8, "fp8": 8, "int4": 4}
_SCALE_BYTES = 2
INT4_HEAD_STEP = 4
"""Head sizes with int4 are multiples of it: two numbers share a byte, and scales are at even bytes."""


@dataclass(frozen=True)
class KVLayout:
    """`[num_layers, 2, num_kv_heads]` head blocks, one behind the other; the 2 is key and value.

    A head block is, from byte to byte:

        0            data_bytes   [block_size, head_dim] of `dtype`, or codes: int8, or fp8, which is e4m3
        data_bytes   head_bytes   [block_size] scales of codes, bfloat16

    int4 has `[num_layers, num_kv_heads]` blocks of keys and values together, since their scales differ:

        0            data_bytes   codes of keys, [block_size, head_dim / 2]: numbers i and i + head_dim / 2 share a byte
        data_bytes   key_bytes    [head_dim] scales of their channels, bfloat16
        key_bytes    + data_bytes codes of values
        ...          + head_bytes [block_size] scales of their tokens, bfloat16

    dtype: the compute dtype. window, num_sinks: tokens that a row sees, as in `Window`; they change the names of
    blocks, not their bytes.
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
    def has_open_blocks(self) -> bool:
        """Whether a block stays in the compute dtype, and without a name, until it is full."""
        return self.quantization == "int4"

    @property
    def item_bits(self) -> int:
        return _CODE_BITS[self.quantization] if self.is_quantized else _ITEM_BITS[self.dtype]

    @property
    def data_bytes(self) -> int:
        """Bytes of a head block without its scales."""
        return self.block_size * self.head_dim * self.item_bits // 8

    @property
    def head_bytes(self) -> int:
        """Bytes of a head block of values; also of keys, except with int4."""
        return self.data_bytes + (self.block_size * _SCALE_BYTES if self.is_quantized else 0)

    @property
    def key_bytes(self) -> int:
        """Bytes of one layer's and one KV head's keys in a block."""
        return self.data_bytes + self.head_dim * _SCALE_BYTES if self.has_open_blocks else self.head_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of a block, and of a page."""
        return self.num_layers * self.num_kv_heads * (self.key_bytes + self.head_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes a block takes in an arena: the payload, padded to 4 KiB."""
        return padded(self.payload_bytes)

    def num_blocks(self, num_tokens: int) -> int:
        """Counts the blocks of `num_tokens` tokens, the tail included."""
        return -(-num_tokens // self.block_size)

    def encode(self) -> bytes:
        """Encodes equal layouts as the same bytes on every machine."""
        return bytes(msgpack.packb(sorted(asdict(self).items())))

    @classmethod
    def decode(cls, data: bytes) -> "KVLayout":
        """Decodes a layout. Raises WireError for other bytes."""
        try:
            layout = cls(**dict(msgpack.unpackb(data)))
            sizes = [layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size]
            sizes += [] if layout.window is None else [layout.window]
            sizes += [layout.num_sinks] if layout.num_sinks or type(layout.num_sinks) is not int else []
            is_one = (
                layout.dtype in _ITEM_BITS
                and layout.quantization in QUANTIZATIONS
                and layout.num_sinks < (layout.window or 1)
            )
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise WireError("not a KV layout") from error
        if not is_one or any(type(size) is not int or size < 1 for size in sizes) or not _is_whole(layout):
            raise WireError("a KV layout with an impossible field")
        return layout


@dataclass(frozen=True)
class Window:
    """The tokens that a row sees: the first `layout.num_sinks` and the latest `layout.window`, itself included, or all.

    ```
    blocks   0 .. num_sink_blocks   behind(position)   first_block(position) .. the row's own
    read     yes                    by no later row    yes
    ```
    """

    layout: KVLayout

    @property
    def num_sink_blocks(self) -> int:
        return self.layout.num_blocks(self.layout.num_sinks)

    def first_block(self, position: int) -> int:
        """Finds the first block of the window of the row at a position."""
        return 0 if self.layout.window is None else max(0, position + 1 - self.layout.window) // self.layout.block_size

    def behind(self, position: int) -> range:
        """Finds the blocks between sinks and window, which the row at a position and later rows do not read."""
        return range(self.num_sink_blocks, max(self.num_sink_blocks, self.first_block(position)))

    def needed(self, num_blocks: int, position: int) -> list[int]:
        """Lists the blocks that the row at a position reads, of the first `num_blocks`."""
        behind = self.behind(position)
        return [place for place in range(num_blocks) if place not in behind]

    @property
    def most_needed(self) -> int | None:
        """The most blocks that a sequence needs at once; None if it needs all."""
        layout = self.layout
        return None if layout.window is None else self.num_sink_blocks + layout.num_blocks(layout.window - 1) + 1

    def num_needed(self, num_tokens: int) -> int:
        """Counts the most blocks that a sequence needs at once while it grows to `num_tokens` tokens."""
        num_blocks = self.layout.num_blocks(num_tokens)
        return num_blocks if self.most_needed is None else min(num_blocks, self.most_needed)

    def max_len(self, num_pages: int, context_len: int) -> int:
        """Computes the longest context of a sequence in `num_pages` pages."""
        fits = self.num_needed(context_len) <= num_pages
        return context_len if fits else min(context_len, num_pages * self.layout.block_size)


def _is_whole(layout: KVLayout) -> bool:
    """Whether heads fill whole bytes, and scales are at even bytes."""
    return not layout.has_open_blocks or layout.head_dim % INT4_HEAD_STEP == 0


def padded(payload_bytes: int) -> int:
    """Rounds bytes up to whole 4 KiB."""
    return -(-payload_bytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
