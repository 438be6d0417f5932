"""KV write in Triton: new tokens' K and V into their slots of a paged layer."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import triton
import triton.language as tl
from torch import Tensor

LAUNCH_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@triton.jit
def write_token(
    key_ptr,  # [num_tokens, num_kv_heads, head_dim]
    value_ptr,  # [num_tokens, num_kv_heads, head_dim]
    kv_ptr,  # [num_pages, 2, num_kv_heads, block_size, head_dim]
    slot_mapping_ptr,  # [num_tokens] int64
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    kv_page_stride,
    kv_plane_stride,
    kv_head_stride,
    kv_offset_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    # One program moves one token: K and V of all its heads.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    heads = tl.arange(0, PADDED_HEADS)[:, None]
    dims = tl.arange(0, PADDED_DIM)[None, :]
    present = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)

    key = tl.load(key_ptr + token * key_token_stride + heads * key_head_stride + dims, mask=present)
    value = tl.load(value_ptr + token * value_token_stride + heads * value_head_stride + dims, mask=present)

    # The slot is int64, and so is all that is derived from it: a pool may hold more than 2^31 elements.
    row_ptr = kv_ptr + slot // BLOCK_SIZE * kv_page_stride + slot % BLOCK_SIZE * kv_offset_stride
    target_ptr = row_ptr + heads * kv_head_stride + dims
    tl.store(target_ptr, key, mask=present)
    tl.store(target_ptr + kv_plane_stride, value, mask=present)


def write_kv(key: Tensor, value: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
    """Does as `kernels.reference.write_kv`, on the current GPU.

    `key`, `value` and `kv_layer` may have any strides in front of a contiguous head_dim; `slot_mapping` is contiguous.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    write_token[(num_tokens,)](
        key,
        value,
        kv_layer,
        slot_mapping,
        *key.stride()[:2],
        *value.stride()[:2],
        *kv_layer.stride()[:4],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=kv_layer.shape[3],
        PADDED_HEADS=triton.next_power_of_2(num_kv_heads),
        PADDED_DIM=triton.next_power_of_2(head_dim),
        **LAUNCH_OPTIONS,
    )
