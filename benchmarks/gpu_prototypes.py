"""Triton kernels that are candidates: sums of blocks.

Their numbers are tested in the interpreter; benchmarks/gpu_lab.py times them. Nothing of the product imports them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import triton
import triton.language as tl

CHUNK_WORDS = 128
"""int64 words of a chunk of 1 KiB, which has two sums."""
NUM_KEYS = 4 * CHUNK_WORDS


@triton.jit
def sum_chunk(words, even_keys, odd_keys):
    """Sums (low half + key) * (high half + other key) of each chunk's words, halves modulo 2^32, sums modulo 2^64."""
    low, high = words.to(tl.uint32), (words >> 32).to(tl.uint32)
    products = (low + even_keys[None, :]).to(tl.uint64) * (high + odd_keys[None, :]).to(tl.uint64)
    return tl.sum(products, 1).to(tl.int64, bitcast=True)


@triton.jit
def sum_and_copy(
    from_ptr,  # [blocks, BLOCK_WORDS] int64
    to_ptr,  # likewise, or None: sums only
    sums_ptr,  # [num_blocks, BLOCK_WORDS // 128, 2] int64
    keys_ptr,  # [512] uint32
    sources_ptr,  # [num_blocks] int32
    targets_ptr,  # [num_blocks] int32
    num_parts,
    BLOCK_WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    # One program sums parts of blocks, CHUNKS chunks at a time, and copies them: parts p, p + programs, and so on.
    words = tl.arange(0, 128)
    first, second = tl.load(keys_ptr + words), tl.load(keys_ptr + 128 + words)
    third, fourth = tl.load(keys_ptr + 256 + words), tl.load(keys_ptr + 384 + words)
    part_chunks: tl.constexpr = BLOCK_WORDS // 128 // PARTS
    for one in range(tl.program_id(0), num_parts, tl.num_programs(0)):
        block = one // PARTS
        source = tl.load(sources_ptr + block).to(tl.int64) * BLOCK_WORDS
        target = tl.load(targets_ptr + block).to(tl.int64) * BLOCK_WORDS
        for chunk in range(0, part_chunks, CHUNKS):
            chunks = one % PARTS * part_chunks + chunk + tl.arange(0, CHUNKS)
            places = chunks[:, None] * 128 + words[None, :]
            values = tl.load(from_ptr + source + places)
            if to_ptr is not None:
                tl.store(to_ptr + target + places, values)
            sum_ptrs = sums_ptr + (block * (BLOCK_WORDS // 128) + chunks) * 2
            tl.store(sum_ptrs, sum_chunk(values, first, second))
            tl.store(sum_ptrs + 1, sum_chunk(values, third, fourth))
