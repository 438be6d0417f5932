"""The lint of words, the state of the words, and the checks before a commit."""

import re
from pathlib import Path

import pytest
import yaml

from tests.docs import words

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "text",
    [
        "Probes a READY worker; STARTING and DRAINING ones report through their own task.",
        "Slots of the arena, by key. Raises StoreError where one is gone.",
        "Ends `who` and `those` by name.",
        "A request whose outbox is full.",
        " ".join(["word"] * 25) + "; " + " ".join(["word"] * 25) + ".",
    ],
)
def test_good_docstrings(text: str) -> None:
    assert list(words.check_docstring(text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "At one that is ready: whoever starts or dismisses one finds out.",
        "Slots. Nobody else gets them.",
        "Those that wait.",
        "What a server says.",
        "One of the slots.",
        "Lets go who waits.",
        " ".join(["word"] * 26) + ".",
    ],
)
def test_bad_docstrings(text: str) -> None:
    assert list(words.check_docstring(text)) != []


@pytest.mark.parametrize(
    "text",
    [
        "A model folder. dtype: the type of its rows; window: sees that many tokens.",
        "Seconds of a call.",
        "Connects once. One connection is enough, one thread reads it, and one process owns both.",
        "Takes a slot, a new one if none is free. The last reference is given back.",
        "Stages: `one of these`, in turns.",
        "Slots. One class is the arena's, one address is the node's.",
        "One\nmessage per step.",
    ],
)
def test_good_sentences(text: str) -> None:
    assert list(words.check_sentences(text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "A model folder. dtype: of the rows.",
        "A model folder. dtype: as of Rows.",
        "A tier. `shares`: theirs.",
        "Of the token to be drawn.",
        "As of the last epoch.",
    ],
)
def test_fields_without_a_noun(text: str) -> None:
    assert len(list(words.check_sentences(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "Probes workers. Ones that drain report themselves.",
        "Parses a message; one of ours may have no unknown field.",
        "Runs an attempt. The one that may be the last runs alone.",
        "Reads a tier. The ones whose copies are gone\nare skipped.",
        "Reads an object: a wrong one raises ModelError.",
        "Reads pages.\n\nOne waits for another.",
        "Renders. The last known one is run.",
        "A tier. No other one has it.",
        "A first one.",
    ],
)
def test_one_is_no_subject(text: str) -> None:
    assert len(list(words.check_sentences(text))) == 1


def test_a_later_sentence_may_be_long() -> None:
    assert list(words.check_docstring("Slots. " + " ".join(["word"] * 40) + ".")) == []


@pytest.mark.parametrize("page", ["# What is there", "Text for somebody.", "## Files\n\n| who | reads |"])
def test_bad_pages(page: str) -> None:
    assert list(words.check_page(page)) != []


def test_code_in_pages_is_not_prose() -> None:
    assert list(words.check_page("# Files\n\n```bash\n# who is there\nwho\n```\n\nRun `who`.")) == []


def test_names_of_tests() -> None:
    assert list(words.check_test_name("test_a_waiter_that_stops_has_no_turn")) == []
    assert len(list(words.check_test_name("test_those_who_wait_have_no_turn"))) == 2


def test_strings_below_constants_are_docstrings() -> None:
    source = '"""A module."""\nWAIT_S = 1.0\n"""Seconds."""\nclass A:\n    """A class."""\n    name = "none"\n'
    assert sorted(words.docstrings(source)) == [(1, "A module."), (3, "Seconds."), (5, "A class.")]


def test_all_words_name_the_thing() -> None:
    assert list(words.find_problems()) == []


def test_checks_before_a_commit_are_the_first_of_ci() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [(hook["id"], hook["entry"].removeprefix(".venv/bin/")) for hook in config["repos"][0]["hooks"]]
    steps = re.findall(r"^step (\w+) (.+)$", (ROOT / "tests/run.sh").read_text(), re.MULTILINE)
    assert hooks == steps[: len(hooks)]
    assert [name for name, _ in steps[len(hooks) :]] == ["stubs", "kernels", "tests"]
