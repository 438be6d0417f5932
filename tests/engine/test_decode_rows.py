from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kv.retention import BlockTable
from engine.model.hash_model import HashModel
from engine.request import ChoiceSoFar, EngineRequest
from engine.sequence import Sequence
from engine.step.decode_rows import DecodeRows
from tests.harness.engines import ROOT
from wire.ids import AttemptId, PageId
from wire.layout import KVLayout
from wire.sampling import SamplingParams

BLOCK = 16
MODEL = HashModel(KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=BLOCK, dtype="float32"), 997, 256)
_handles = count()


def decoding(num_known: int) -> Sequence:
    """A sequence with one token of output, and pages for all."""
    request = EngineRequest(
        attempt_id=AttemptId("r"),
        root=ROOT,
        prompt_ids=tuple(range(num_known - 1)),
        sampling=SamplingParams(temperature=0),
    )
    sequence = Sequence(next(_handles), request, ChoiceSoFar(0, (7,)), MODEL)
    num_pages = -(-num_known // BLOCK)
    sequence.kv.table = BlockTable(PageId(100 * sequence.handle + index) for index in range(num_pages))
    sequence.begin_run(num_known - 1)
    return sequence


def step(rows: DecodeRows, num_rows: int) -> None:
    """Gives the first rows pages, and a token each."""
    full = rows.full(num_rows)
    for row in full:
        sequence = rows.sequences[row]
        sequence.kv.table.extend([PageId(100 * sequence.handle + len(sequence.kv.table))])
    if full:
        rows.grow(full, [rows.sequences[row].kv.table[-1:][0] for row in full])
    assert rows.check() == []
    tokens = np.arange(500, 500 + num_rows)
    rows.advance(tokens)
    for sequence, token in zip(rows.sequences, tokens.tolist(), strict=False):
        sequence.output_ids.append(token)


@given(st.lists(st.tuples(st.sampled_from(["put", "remove", "step", "some"]), st.integers(0, 63)), max_size=80))
def test_rows_are_their_sequences_whatever_happens(orders: list[tuple[str, int]]) -> None:
    rows = DecodeRows(MODEL, num_pages=64)
    for order, number in orders:
        present = list(rows.sequences)
        match order:
            case "put" if len(present) < 64:
                rows.put(decoding(number + 2))
            case "remove" if present:
                rows.remove(present[number % len(present)])
            case "step":
                step(rows, len(rows))
            case "some" if present:
                chosen = [one for index, one in enumerate(present) if (index + number) % 3]
                rows.bring_first(chosen)
                assert rows.sequences[: len(chosen)] == chosen
                step(rows, len(chosen))
        assert rows.check() == []


def test_rows_move_when_there_are_more_than_expected() -> None:
    rows = DecodeRows(MODEL, num_pages=64)
    for number in range(70):
        rows.put(decoding(number + 2))
    assert len(rows) == 70
    assert rows.check() == []


def test_a_sequence_that_has_no_row_is_not_taken_out() -> None:
    rows = DecodeRows(MODEL, num_pages=64)
    rows.put(decoding(20))
    rows.remove(decoding(20))
    assert len(rows) == 1


@pytest.mark.parametrize(
    ("sampling", "is_plain"),
    [
        (SamplingParams(temperature=0), True),
        (SamplingParams(temperature=0, min_tokens=1), True),
        (SamplingParams(temperature=0, min_tokens=2), False),
        (SamplingParams(temperature=0, logprobs=0), False),
        (SamplingParams(temperature=0, presence_penalty=0.5), False),
        (SamplingParams(temperature=1.0), False),
    ],
)
def test_a_row_is_plain_if_the_likeliest_token_is_all(sampling: SamplingParams, is_plain: bool) -> None:
    model = HashModel(MODEL.layout, 997, 256, eos_token_ids=(3,))
    rows = DecodeRows(model, num_pages=64)
    request = EngineRequest(attempt_id=AttemptId("r"), root=ROOT, prompt_ids=(1, 2), sampling=sampling)
    sequence = Sequence(0, request, ChoiceSoFar(0, (7,)), model)
    sequence.kv.table = BlockTable([PageId(5)])
    sequence.begin_run(2)
    rows.put(sequence)
    assert bool(rows.is_plain[0]) is is_plain


def test_the_batch_after_a_step_has_the_columns_that_the_rows_will_have() -> None:
    """Also where a row gets a further page for it, which its sequence has already and the row has not."""
    rows = DecodeRows(MODEL, num_pages=64)
    for num_known in (2, 15, 16, 17, 31, 32, 40):
        rows.put(decoding(num_known))
    for _ in range(3 * BLOCK):
        full = rows.full(len(rows), num_ahead=1)
        for row in full:
            sequence = rows.sequences[row]
            sequence.kv.table.extend([PageId(100 * sequence.handle + len(sequence.kv.table))])
        assert rows.check(num_ahead=1) == []
        tokens = torch.arange(500, 500 + len(rows))
        after = rows.after(len(rows), tokens, full, [rows.sequences[row].kv.table[-1:][0] for row in full])
        rows.advance(tokens.numpy())
        for sequence, token in zip(rows.sequences, tokens.tolist(), strict=True):
            sequence.output_ids.append(token)
        assert rows.check(num_ahead=1) == []
        rows.grow(full, [rows.sequences[row].kv.table[-1:][0] for row in full])
        assert rows.check() == []
        assert after.token_ids.tolist() == rows.token_ids[: len(rows)].tolist()
        assert after.positions.tolist() == rows.positions[: len(rows)].tolist()
        assert after.slot_mapping.tolist() == rows.slots[: len(rows)].tolist()
        assert after.context_lens.tolist() == rows.context_lens[: len(rows)].tolist()
        width = after.block_tables.shape[1]
        assert (after.block_tables.numpy() == rows.tables[: len(rows), :width]).all()
        assert width == -(-max(after.context_lens.tolist()) // BLOCK)


def test_a_row_that_lacks_two_pages_shows() -> None:
    rows = DecodeRows(MODEL, num_pages=64)
    rows.put(one := decoding(BLOCK + 1))
    one.kv.table.extend([PageId(901), PageId(902)])
    assert rows.check() == ["row 0 is not its sequence's"]


def test_a_wrong_row_shows() -> None:
    rows = DecodeRows(MODEL, num_pages=64)
    rows.put(decoding(40))
    rows.tables[0, 1] += 1
    assert rows.check() == ["row 0 is not its sequence's"]
