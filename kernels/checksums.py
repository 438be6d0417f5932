"""The sums of blocks on a GPU, in Triton; kernels/cpu/checksums.py defines them."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import triton
import triton.language as tl
from torch import Tensor

from kernels.cpu.checksums import CHUNK_WORDS, PIECE_CHUNKS, ROW_WORDS, num_pieces

OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
CHUNKS_AT_ONCE = 4


@triton.jit
def multiply_halves(words, keys_ptr, places, present):
    """Returns (low half + key) * (high half + other key) of each present word, halves modulo 2^32; else 0."""
    low = words.to(tl.uint32) + tl.load(keys_ptr + 2 * places).to(tl.uint32)
    high = (words >> 32).to(tl.uint32) + tl.load(keys_ptr + 2 * places + 1).to(tl.uint32)
    return tl.where(present, low.to(tl.uint64) * high.to(tl.uint64), 0)


@triton.jit
def sum_pieces(
    pages_ptr,  # [num_pages, PAGE_WORDS] int64
    chosen_ptr,  # [num_chosen] int32
    keys_ptr,  # [2, CHUNK_WORDS, 2] int32
    sums_ptr,  # [num_chosen, num_pieces, 2] int64
    PAGE_WORDS: tl.constexpr,
    CHUNK_WORDS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    PIECE_CHUNKS: tl.constexpr,
    MOST_CHUNKS: tl.constexpr,  # of a piece of this page
    CHUNKS: tl.constexpr,
):
    # One program sums one piece of one page, CHUNKS chunks at a time.
    rows: tl.constexpr = CHUNK_WORDS // ROW_WORDS
    one, piece = tl.program_id(0), tl.program_id(1)
    page_ptr = pages_ptr + tl.load(chosen_ptr + one).to(tl.int64) * PAGE_WORDS
    words, places = tl.arange(0, CHUNK_WORDS)[None, :], tl.arange(0, CHUNKS)
    weights = (rows - words // ROW_WORDS).to(tl.uint64)
    first, second = tl.zeros([CHUNKS], tl.uint64), tl.zeros([CHUNKS], tl.uint64)
    for begin in range(0, MOST_CHUNKS, CHUNKS):
        chunks = begin + places
        at = (piece * PIECE_CHUNKS + chunks)[:, None] * CHUNK_WORDS + words
        here = tl.load(page_ptr + at, mask=at < PAGE_WORDS, other=0).to(tl.uint64, bitcast=True)
        products = multiply_halves(here, keys_ptr, words, at < PAGE_WORDS)
        present = (piece * PIECE_CHUNKS + chunks) * CHUNK_WORDS < PAGE_WORDS
        for half in tl.static_range(2):
            # The sums of chunks are words of the piece: first the first sums, then the second.
            sums = tl.sum(products if half == 0 else weights * products + here, 1)
            place = half * PIECE_CHUNKS + chunks
            product = multiply_halves(sums, keys_ptr + 2 * CHUNK_WORDS, place, present)
            first += product
            second += (rows - place // ROW_WORDS).to(tl.uint64) * product + tl.where(present, sums, 0)
    sums_ptr += (one * tl.num_programs(1) + piece) * 2
    tl.store(sums_ptr, tl.sum(first, 0).to(tl.int64, bitcast=True))
    tl.store(sums_ptr + 1, tl.sum(second, 0).to(tl.int64, bitcast=True))


def sum_pages(pages: Tensor, chosen: Tensor, keys: Tensor, out: Tensor) -> None:
    """Sums each chosen page, in one launch, as `kernels.reference.sum_pages` does."""
    num_words = pages.shape[1]
    sum_pieces[(len(chosen), num_pieces(num_words))](
        pages,
        chosen,
        keys,
        out,
        PAGE_WORDS=num_words,
        CHUNK_WORDS=CHUNK_WORDS,
        ROW_WORDS=ROW_WORDS,
        PIECE_CHUNKS=PIECE_CHUNKS,
        MOST_CHUNKS=min(PIECE_CHUNKS, triton.cdiv(num_words, CHUNK_WORDS)),
        CHUNKS=CHUNKS_AT_ONCE,
        **OPTIONS,
    )
