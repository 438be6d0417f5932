"""Sums of blocks: compiled C++, torch and Triton against the definition in whole numbers; what they find."""

import ctypes
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import checksums, reference
from kernels.cpu.checksums import (
    CHUNK_WORDS,
    KEYS,
    PIECE_CHUNKS,
    PIECE_WORDS,
    UNIT,
    compiled_sums,
    num_pieces,
    sum_pieces,
)
from kernels.cpu.library import ISA_TO_FEATURES, NoKernels, can_run, load_unit

CHUNK_BYTES, PIECE_BYTES = 8 * CHUNK_WORDS, 8 * PIECE_WORDS
LENGTHS = [8, 16, 1024, 1032, 7 * 1024 + 8, PIECE_BYTES, PIECE_BYTES + 8, 2 * PIECE_BYTES + 5 * CHUNK_BYTES]
OF_CHUNK, OF_PIECE = np.frombuffer(KEYS, np.uint32).reshape(2, CHUNK_WORDS, 2).tolist()
Sum = Callable[[bytes], list[int]]


def defined(payload: bytes) -> list[int]:
    """The sums as kernels/cpu/checksums.py defines them, in Python's numbers."""

    def sums_of_words(words: dict[int, int], keys: list[list[int]]) -> list[int]:
        products = {
            at: (word + keys[at][0] & 0xFFFFFFFF) * ((word >> 32) + keys[at][1] & 0xFFFFFFFF)
            for at, word in words.items()
        }
        second = sum((CHUNK_WORDS // 8 - at // 8) * product + words[at] for at, product in products.items())
        return [sum(products.values()) % (1 << 64), second % (1 << 64)]

    words = np.frombuffer(payload.ljust(-(-len(payload) // 8) * 8, b"\0"), np.uint64).tolist()
    sums = []
    for start in range(0, len(words), PIECE_WORDS):
        piece = words[start : start + PIECE_WORDS]
        both: dict[int, int] = {}
        for place in range(-(-len(piece) // CHUNK_WORDS)):
            chunk = dict(enumerate(piece[place * CHUNK_WORDS : (place + 1) * CHUNK_WORDS]))
            both[place], both[PIECE_CHUNKS + place] = sums_of_words(chunk, OF_CHUNK)
        sums += sums_of_words(both, OF_PIECE)
    return sums


def on_device(sum_pages: Callable[..., None], device: torch.device) -> Sum:
    """Sums a payload as the second page chosen of three."""

    def sum_one(payload: bytes) -> list[int]:
        pages = torch.randint(-(2**63), 2**63 - 1, (3, len(payload) // 8), dtype=torch.int64)
        pages[2] = torch.from_numpy(np.frombuffer(payload, np.int64).copy())
        out = torch.empty(2, num_pieces(pages.shape[1]), 2, dtype=torch.int64, device=device)
        keys = torch.frombuffer(bytearray(KEYS), dtype=torch.int32).to(device)
        sum_pages(pages.to(device), torch.tensor([0, 2], dtype=torch.int32, device=device), keys, out)
        return [one % (1 << 64) for one in out[1].flatten().tolist()]

    return sum_one


def compiled(isa: str) -> Sum:
    if not can_run(isa):
        raise NoKernels(f"this machine has no {isa}")
    library = load_unit(isa, UNIT)

    def sum_one(payload: bytes) -> list[int]:
        words, sums = np.frombuffer(payload, np.uint64), np.zeros(2 * num_pieces(len(payload) // 8), np.uint64)
        places = [one.ctypes.data_as(ctypes.c_void_p) for one in (words, sums)]
        library.baton_sum_pieces(places[0], ctypes.c_int64(len(words)), KEYS, places[1])
        return [int(one) for one in sums]

    return sum_one


def sums_of(payload: bytes | bytearray) -> list[int]:
    return [int(one) for one in np.frombuffer(sum_pieces(memoryview(payload)), np.uint64)]


def random_payload(length: int) -> bytes:
    return random.Random(length).randbytes(length)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("sum_pages", [reference.sum_pages, checksums.sum_pages], ids=["torch", "triton"])
def test_a_device_computes_the_sums_as_they_are_defined(
    sum_pages: Callable[..., None], length: int, device: torch.device
) -> None:
    for payload in (random_payload(length), b"\xff" * length, bytes(length)):
        assert on_device(sum_pages, device)(payload) == defined(payload)


@pytest.mark.parametrize("isa", ISA_TO_FEATURES)
def test_every_instruction_set_computes_the_sums_as_they_are_defined(isa: str) -> None:
    try:
        sum_one = compiled(isa)
    except NoKernels as error:  # of an instruction set, or of a compiler
        pytest.skip(str(error))
    for length in LENGTHS:
        for payload in (random_payload(length), b"\xff" * length, bytes(length)):
            assert sum_one(payload) == defined(payload)


@pytest.mark.parametrize("length", [1, 7, 1025, PIECE_BYTES + 3])
def test_bytes_that_fill_no_word_count_with_zeros_behind_them(length: int) -> None:
    payload = random_payload(length)
    assert sums_of(payload) == defined(payload)


def test_without_a_compiler_torch_computes_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(isa: str, unit: str) -> None:
        raise NoKernels("there is no C++ compiler")

    payload = random_payload(PIECE_BYTES + 1032)
    expected = sums_of(payload)
    with monkeypatch.context() as patch:
        patch.setattr("kernels.cpu.checksums.load_unit", refuse)
        compiled_sums.cache_clear()
        assert sums_of(payload) == expected
    compiled_sums.cache_clear()


def test_a_change_of_a_word_whose_product_stays_shows_in_the_second_sum() -> None:
    """The high half and its key make zero, so that the low half multiplies nothing."""
    high = -OF_CHUNK[5][1] % (1 << 32)
    payload = bytearray(random_payload(CHUNK_BYTES))
    payload[44:48] = high.to_bytes(4, "little")
    found = []
    for low in (0, 1, 1 << 31):
        payload[40:44] = low.to_bytes(4, "little")
        found.append(sums_of(payload))
    assert len({*map(tuple, found)}) == 3


@settings(deadline=None)
@given(st.integers(0, 2 * PIECE_BYTES - 1), st.integers(0, 7))
def test_a_flipped_bit_shows(place: int, bit: int) -> None:
    payload = bytearray(random_payload(2 * PIECE_BYTES))
    before = sums_of(payload)
    payload[place] ^= 1 << bit
    assert sums_of(payload) != before


@pytest.mark.parametrize("part_bytes", [4, 8, 512, CHUNK_BYTES, 4096])
def test_parts_that_are_swapped_zeroed_or_doubled_show(part_bytes: int) -> None:
    payload = random_payload(2 * PIECE_BYTES)
    before = sums_of(payload)
    parts = [payload[at : at + part_bytes] for at in range(0, len(payload), part_bytes)]
    chosen = random.Random(part_bytes)
    for _ in range(50):
        one, other = chosen.sample(range(len(parts)), 2)
        for value_of_one, value_of_other in (
            (parts[other], parts[one]),
            (bytes(part_bytes), parts[other]),
            (parts[other], parts[other]),
        ):
            changed = [*parts]
            changed[one], changed[other] = value_of_one, value_of_other
            assert sums_of(b"".join(changed)) != before
