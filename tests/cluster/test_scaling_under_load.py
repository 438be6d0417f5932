"""No request fails while pools grow, shrink and drain under it: clients of a real cluster, and tokens compared."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton import Client, Completion
from tests.cluster.served_cluster import ServedCluster, wait_until
from tests.harness.checkpoints import Continuation, choose_prompt

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
NUM_CLIENTS = 6
NUM_TOKENS = 64
LENGTHS = (17, 100)


class Load:
    """Clients that ask one request after another, and stop at the first failure of any."""

    def __init__(self, address: str, prompts: list[Continuation]) -> None:
        self.answers: list[tuple[Continuation, Completion]] = []
        self._address = address
        self._prompts = prompts
        self._is_over = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Raises what a client's request failed with."""
        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            clients = [threads.submit(self._ask_on, number) for number in range(NUM_CLIENTS)]
            try:
                yield
            finally:
                self._is_over.set()
                for client in clients:
                    client.result()

    def wait_for_more(self, num_answers: int) -> None:
        goal = len(self.answers) + num_answers
        wait_until(lambda: len(self.answers) >= goal or self._is_over.is_set(), f"{num_answers} answers more")
        assert not self._is_over.is_set(), "a client has failed"

    def _ask_on(self, number: int) -> None:
        prompt = self._prompts[number % len(self._prompts)]
        try:
            with Client(self._address, timeout_s=60) as client:
                while not self._is_over.is_set():
                    answer = client.generate(prompt.prompt_ids, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
                    self.answers.append((prompt, answer))
        finally:
            self._is_over.set()


def test_no_request_fails_while_pools_change(cluster: ServedCluster, checkpoint: Path) -> None:
    load = Load(cluster.status()["address"], [choose_prompt(checkpoint, length, NUM_TOKENS) for length in LENGTHS])
    with load.running():
        for num_prefill, num_decode in ((2, 2), (1, 1), (0, 2), (1, 2), (0, 2), (1, 2)):
            cluster.do("scale", "--prefill", str(num_prefill), "--decode", str(num_decode))
            load.wait_for_more(2 * NUM_CLIENTS)
        cluster.do("drain", max(cluster.workers("decode")))  # a worker that was started to prefill
    assert [answer.choices[0].token_ids for _, answer in load.answers] == [
        prompt.token_ids for prompt, _ in load.answers
    ]
    assert len({answer.timeline.decode_worker for _, answer in load.answers}) >= 3
    # Of two idle workers one may get all prompts, but one that starts where there was none gets the next.
    assert len({answer.timeline.prefill_worker for _, answer in load.answers} - {None}) >= 3
    wait_until(cluster.is_sound, "all invariants hold")
    assert (len(cluster.workers("prefill")), len(cluster.workers("decode"))) == (1, 1)


def test_a_worker_changes_its_role_under_streams_in_the_same_process(cluster: ServedCluster, checkpoint: Path) -> None:
    cluster.do("scale", "--prefill", "2", "--decode", "1")
    before = cluster.workers("prefill")
    load = Load(cluster.status()["address"], [choose_prompt(checkpoint, length, NUM_TOKENS) for length in LENGTHS])
    with load.running():
        load.wait_for_more(NUM_CLIENTS)
        cluster.do("scale", "--prefill", "1", "--decode", "2")
        (changed,) = cluster.workers("decode").keys() & before.keys()
        load.wait_for_more(4 * NUM_CLIENTS)
    assert cluster.workers("decode")[changed]["pid"] == before[changed]["pid"]
    assert [answer.choices[0].token_ids for _, answer in load.answers] == [
        prompt.token_ids for prompt, _ in load.answers
    ]
    assert changed in {answer.timeline.decode_worker for _, answer in load.answers}, "it gives tokens"
    assert f"worker {changed} serves decode now" in cluster.do("status")
    wait_until(cluster.is_sound, "all invariants hold")
    cluster.do("drain", changed)
