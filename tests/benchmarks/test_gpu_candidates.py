"""Candidates are asked in processes of their own, one after another."""

import sys

import torch

from benchmarks.gpu_candidates import ask_in_turn, join_pages

CHILD = """
import sys, threading
print("ready", flush=True)
sys.stdin.readline()
if sys.argv[1] == "hangs":
    threading.Event().wait()
print("measured", flush=True)
sys.exit("out of luck" if sys.argv[1] == "fails" else 0)
"""


def test_a_candidate_that_hangs_or_fails_takes_no_other_along() -> None:
    lines = list(ask_in_turn([sys.executable, "-c", CHILD], ["hangs", "fails", "answers"], measuring_s=1.0))
    assert lines == [
        "hangs: DID NOT END in 1 s",
        "measured  fails",
        "fails: FAILED with 1: out of luck",
        "measured  answers",
    ]


def test_a_candidate_that_ends_before_it_is_prepared_says_why() -> None:
    lines = list(ask_in_turn([sys.executable, "-c", "raise SystemExit('no device')"], ["one"]))
    assert lines == ["one: FAILED with 1: no device"]


def test_keys_and_values_end_with_a_prompt_within_its_last_page() -> None:
    pages = torch.randn(3, 2, 2, 16, 8)
    for plane, joined in enumerate(join_pages(pages, 37)):
        tokens = [pages[token // 16, plane, :, token % 16] for token in range(37)]
        assert torch.equal(joined, torch.stack(tokens))
