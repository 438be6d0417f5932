"""Requests whose prompts the router prefills in either pool, by times that workers are said to have learned."""

from contextlib import ExitStack

import pytest

from router.config import Disaggregation, RouterSettings
from tests.harness.answer import ask
from tests.harness.local_cluster import LocalCluster, Sizes
from tests.local_cluster.test_local_cluster import MODEL

PROMPT = [7, 3, 9] * 20
TOKEN_S = 0.001


@pytest.mark.parametrize(
    ("mode", "num_streams", "num_queued", "why", "prefiller"),
    [
        (Disaggregation.ALWAYS, 0, 900, "always", "p0"),
        (Disaggregation.NEVER, 90, 0, "never", ""),
        (Disaggregation.CONDITIONAL, 0, 0, "cheaper", ""),
        (Disaggregation.CONDITIONAL, 1, 0, "sooner", "p0"),
        (Disaggregation.CONDITIONAL, 1, 900, "busy", ""),
    ],
)
async def test_either_pool_gives_the_same_tokens(
    mode: Disaggregation, num_streams: int, num_queued: int, why: str, prefiller: str
) -> None:
    sizes = Sizes(settings=RouterSettings(disaggregation=mode))
    async with LocalCluster.running(MODEL, 1, 1, sizes) as cluster:
        with ExitStack() as stack:
            for member, num_choices, num_tokens in zip(
                cluster.router.members, (0, num_streams), (num_queued, 0), strict=True
            ):
                member.prefill_token_s = TOKEN_S
                stack.enter_context(member.assigned(num_choices, num_tokens))
            output = await cluster.generate(ask(PROMPT, 5))
        timeline = output.complete.timeline
        assert (timeline.prefill_reason, timeline.prefill_worker) == (why, prefiller)
        assert output.token_ids[0] == MODEL.oracle(PROMPT, 5)
        assert (await cluster.status()).problems == []


async def test_what_decode_workers_have_is_no_reason_for_a_hand_off() -> None:
    """The second turn has a few new tokens, which cost less than a hand-off though two streams wait for them."""
    sizes = Sizes(settings=RouterSettings(disaggregation=Disaggregation.CONDITIONAL))
    async with LocalCluster.running(MODEL, 1, 1, sizes) as cluster:
        first = await cluster.generate(ask(PROMPT * 4, 5))
        assert first.complete.timeline.prefill_reason == "not_learned"
        prefill, decode = cluster.router.members
        prefill.prefill_token_s = TOKEN_S
        with decode.assigned(2, 0):
            reasons = [
                (await cluster.generate(ask(prompt, 5))).complete.timeline.prefill_reason
                for prompt in (PROMPT * 4 + [1], [1] + PROMPT * 4)
            ]
        assert reasons == ["cheaper", "sooner"]
