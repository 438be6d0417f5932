"""The one table of span kinds: the page has it, and no other place of the product names a kind."""

import re

import pytest

from tests.docs import generated
from tests.docs.span_table import COMMAND, PAGE, named, named_in, table
from wire.journal import SpanPhase


def test_the_page_has_the_table() -> None:
    assert generated.read(generated.TIMELINE, COMMAND) == table(), f"run: {COMMAND}"


def test_no_other_place_of_the_product_names_a_kind() -> None:
    assert list(named()) == []


@pytest.mark.parametrize(
    "source",
    ['GATES = ("decode.wait_slot",)', 'name = f"{role}.fetch"', 'journal.begin("wait_room")', 'x.endswith(".publish")'],
)
def test_a_name_beside_the_table_is_found(source: str) -> None:
    assert len(list(named_in(source))) == 1


@pytest.mark.parametrize(
    "source", ['"""A span decode.fetch."""', 'command = "generate"', 'setting = "router.disaggregation"']
)
def test_words_that_are_no_names_of_spans_are_not(source: str) -> None:
    assert list(named_in(source)) == []


def test_the_live_page_has_a_colour_for_each_phase() -> None:
    [phases] = re.findall(r"^const SPAN_PHASES = \[(.*)\];$", PAGE.read_text(), re.MULTILINE)
    assert {one.strip('" ') for one in phases.split(",")} == {*SpanPhase, "lost"}
