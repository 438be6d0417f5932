"""Hints of requests at an engine: passed on when a request is over, and only of prompts that were computed whole."""

from dataclasses import replace

import pytest

from engine.model.hash_model import HashModel
from engine.schedule.continuous_batcher import ContinuousBatcher
from kv_store.node.messages import KeepHint
from tests.harness.engines import ROOT, drive, make_core, request
from tests.harness.node import Node
from wire.block_names import digest_of, session_of
from wire.layout import KVLayout
from wire.sampling import SamplingParams

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
MODEL = HashModel(LAYOUT, vocab_size=300)
HINT = KeepHint(digest_of(ROOT), session_of(ROOT, "agent"), 60.0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.mark.parametrize("hint", [None, HINT])
def test_an_abort_amid_the_prompt_says_nothing_of_a_session(hint: KeepHint | None) -> None:
    node = Node(LAYOUT)
    core = make_core(MODEL, node, batcher=ContinuousBatcher(max_step_tokens=32, max_running=4))
    prompt = tuple(range(100))
    drive(core, [replace(request(prompt, GREEDY), hint=hint)])
    num_kept = node.directory.records.status().num_kept
    assert num_kept == (6 if hint else 0)
    other = replace(request((*prompt[:20], *range(200, 280)), GREEDY), hint=hint)
    core.add(other)
    for _ in range(3):
        core.step()
    core.abort(other.attempt_id)
    core.step()
    assert node.directory.records.status().num_kept == num_kept
    assert node.directory.records.check() == core.check() == []
