"""KV of requests, and how many fit on a device beside a model's weights. Pure.

Counts whole blocks, after weights and reserve, as `deploy.plan.sizing` does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cli.size.shape import BITS, ModelShape
from deploy.plan.sizing import GPU_RESERVE_BYTES
from wire.kv_policy import Dropping, Rule
from wire.layout import QUANTIZATIONS, KVLayout, Window

COMMON_WINDOW = 4096
_QUARTER = Dropping(Rule.SNAPKV, 25, "%")


@dataclass(frozen=True)
class RequestKV:
    """KV of one request while it decodes. bits: bits of a number.

    window: tokens that are kept, besides sinks; None for all. dropping: a policy that drops KV of the prompt;
    `num_tokens` then counts the prompt alone.
    """

    layout: KVLayout
    num_tokens: int
    bits: int
    window: int | None = None
    dropping: Dropping | None = None

    def kept_in(self, dtype: str) -> "RequestKV":
        """Returns the same request with KV in another dtype of BITS, scales included."""
        quantization = dtype if dtype in QUANTIZATIONS else "none"
        return replace(self, layout=replace(self.layout, quantization=quantization), bits=BITS[dtype])

    @property
    def bytes_per_token(self) -> int:
        return self.block_bytes // self.layout.block_size

    @property
    def bytes_per_token_per_layer(self) -> int:
        return self.bytes_per_token // self.layout.num_layers

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in a pool, scales included."""
        return self.layout.payload_bytes * self.bits // self.layout.item_bits

    @property
    def num_blocks(self) -> int:
        """Blocks at the request's end. A window begins and ends within a block, which costs one more."""
        if self.dropping is not None:
            return self.dropping.num_blocks(self.num_tokens, self.layout.block_size) + 1
        num_blocks, num_sinks = self.layout.num_blocks(self.num_tokens), Window(self.layout).num_sink_blocks
        in_window = num_blocks if self.window is None else self.layout.num_blocks(self.window) + 1
        return min(num_blocks, num_sinks + in_window)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True)
class Fit:
    """Requests on one device. num_shared_blocks: blocks of each request that all requests share."""

    device_bytes: int
    weight_bytes: int
    kv: RequestKV
    num_shared_blocks: int = 0

    @property
    def kv_room_bytes(self) -> int:
        return max(0, self.device_bytes - self.weight_bytes - GPU_RESERVE_BYTES)

    @property
    def request_bytes(self) -> int:
        """Bytes that each further request takes."""
        return (self.kv.num_blocks - self.num_shared_blocks) * self.kv.block_bytes

    @property
    def max_requests(self) -> int:
        room_bytes = self.kv_room_bytes - self.num_shared_blocks * self.kv.block_bytes
        return max(0, room_bytes) // self.request_bytes

    @property
    def limited_by(self) -> str:
        """The first of weights, activations and KV that exceeds the device."""
        if self.weight_bytes > self.device_bytes:
            return "weights"
        return "activations" if self.weight_bytes + GPU_RESERVE_BYTES > self.device_bytes else "kv"

    def total_bytes(self, num_requests: int) -> int:
        """Sums weights, reserve and the KV of `num_requests`."""
        return self.weight_bytes + GPU_RESERVE_BYTES + num_requests * self.kv.num_bytes


@dataclass(frozen=True)
class Technique:
    """A technique, and the requests that fit with it. `status`: whether Baton has it."""

    name: str
    fit: Fit
    status: str


def techniques(shape: ModelShape, fit: Fit) -> Iterator[Technique]:
    """Yields each technique that changes the figures, applied alone."""
    kv = fit.kv
    for dtype in ("int8", "int4"):
        if BITS[dtype] < kv.bits:
            yield Technique(f"KV in {dtype}", replace(fit, kv=kv.kept_in(dtype)), "yes")
    window = shape.window or COMMON_WINDOW
    if kv.window is None and window < kv.num_tokens:
        windowed = replace(fit, kv=replace(kv, window=window))
        yield Technique(f"only the last {window:,} tokens kept", windowed, "where the model does")
    if kv.window is None and kv.dropping is None and _QUARTER.num_copied(kv.num_tokens, kv.layout.block_size):
        yield Technique(f"KV dropped, {_QUARTER}", replace(fit, kv=replace(kv, dropping=_QUARTER)), "after prefill")
    if kv.window is None and kv.num_blocks > 1:
        yield Technique("first half of all prompts the same", replace(fit, num_shared_blocks=kv.num_blocks // 2), "yes")
    if shape.weight_bits > BITS["int8"]:
        yield Technique("weights in int8", replace(fit, weight_bytes=shape.weight_bytes(BITS["int8"])), "on a CPU")
    if not shape.is_latent:
        for num_heads, name in ((shape.num_heads, "a KV head for each query head"), (1, "a single KV head")):
            if num_heads != shape.num_kv_heads:
                other = replace(kv, layout=replace(kv.layout, num_kv_heads=num_heads))
                yield Technique(name, replace(fit, kv=other), "another model")
