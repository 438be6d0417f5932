"""The sums of a block's payload, which hosts and devices compute alike at the speed of their memory.

word      8 bytes, little-endian: a low and a high half; a payload is padded with zeros to whole words
chunk     512 words, in 64 rows of 8; the product of a word is (low + key) * (high + other key), the halves modulo 2^32
          first sum    of the products: NH, of UMAC (RFC 4418)
          second sum   of (64 - row) * product + word; both modulo 2^64
piece     16 chunks; their first sums, then their second sums are 32 words, summed alike under other keys

Words that a payload does not have add nothing. The keys are fixed: sums find accidents, not forgery.
"""

import ctypes
import hashlib
import logging
from functools import cache

import numpy as np

from kernels.cpu.library import NoKernels, best_isa, load_unit

WORD_BYTES = 8
CHUNK_WORDS = 512
PIECE_CHUNKS = 16
PIECE_WORDS = CHUNK_WORDS * PIECE_CHUNKS
ROW_WORDS = 8
KEYS = hashlib.shake_256(b"keys of baton's sums").digest(2 * 8 * CHUNK_WORDS)
"""Keys of a chunk, then of a piece: `uint32 [2, CHUNK_WORDS, 2]`, the last for low and high halves."""
UNIT = "checksums.cpp"

logger = logging.getLogger(__name__)


def num_pieces(num_words: int) -> int:
    return -(-num_words // PIECE_WORDS)


def sum_pieces(payload: memoryview) -> bytearray:
    """Returns the two sums of each piece of a payload, uint64 `[num_pieces, 2]`."""
    words = np.frombuffer(payload, np.uint8)
    if len(words) % WORD_BYTES:
        words = np.pad(words, (0, -len(words) % WORD_BYTES))
    num_words = len(words) // WORD_BYTES
    sums = bytearray(2 * WORD_BYTES * num_pieces(num_words))
    if (library := compiled_sums()) is not None:
        into = (ctypes.c_char * len(sums)).from_buffer(sums)
        library.baton_sum_pieces(words.__array_interface__["data"][0], num_words, KEYS, into)
        return sums
    import torch  # here, since a node's service computes no sum, and starts a second sooner without

    from kernels.reference import sum_pages

    page = torch.from_numpy(words.view(np.int64).copy())[None]
    keys, out = torch.frombuffer(bytearray(KEYS), dtype=torch.int32), torch.frombuffer(sums, dtype=torch.int64)
    sum_pages(page, torch.zeros(1, dtype=torch.int32), keys, out.view(1, -1, 2))
    return sums


@cache
def compiled_sums() -> ctypes.CDLL | None:
    """Loads the compiled sums; None on a machine that cannot compile them."""
    try:
        library = load_unit(best_isa(has_tiles=False), UNIT)
    except NoKernels as error:
        logger.warning("checksums of blocks are computed by torch, several times slower: %s", error)
        return None
    library.baton_sum_pieces.restype = None
    library.baton_sum_pieces.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    return library
