"""Workers and a gateway are killed amid streams of a real cluster: each goes on as an undisturbed engine has it."""

import http.client
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton import Client, Completion
from benchmarks.baton_service import num_in_use
from engine.engine import ChoiceOutput, Engine
from tests.cluster.served_cluster import ALWAYS, ServedCluster, wait_until
from tests.harness.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.harness.fork_server import ForkServer
from wire.sampling import SamplingParams

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
NUM_TOKENS = 2_400
NUM_AFTER_RESTART = 200
"""Tokens of each answer that the restarted gateway streams."""
NUM_STREAMS = 8
PROMPT_LEN = 3_000
CONTEXT_LEN = 8_192
TIMEOUT_S = 100.0
DISPATCH_S = 0.5
"""Time for requests to reach a worker that does not go on with them; longer, and the router takes it for hung."""
BIAS = dict.fromkeys(range(64, 72), 100.0)
"""Leaves eight tokens to choose from, by KV and seed as before: of so few some come as n-grams foretell."""
SERVED = {
    "windows of int4": ("mistral-window", {"kv_dtype": "int4"}, ["--kv-dtype", "int4"]),
    "experts": ("gpt-oss", {}, []),
    "sinks": ("llama-gqa", {"kv_policy": "sinks=4+60"}, ["--kv-policy", "sinks=4+60"]),
}
"""Architecture, what an engine and what `baton up` is told; all of them speculate."""


@dataclass
class Asked:
    """A prompt, its settings, the right answer, and what of it has come over gRPC or over HTTP."""

    prompt_ids: tuple[int, ...]
    settings: dict[str, Any]
    expected: ChoiceOutput
    token_ids: list[int] = field(default_factory=list)
    text: str = ""

    def over_grpc(self, client: Client) -> Completion:
        with client.stream(self.prompt_ids, **self.settings) as stream:
            for chunk in stream:
                self.token_ids += chunk.token_ids
                self.text += chunk.text
            return stream.completion

    def over_http(self, address: str, **settings: Any) -> bool:
        """Reads events to the end or until the connection breaks; returns whether all have come."""
        body = {"prompt": self.prompt_ids, "stream": True, **self.settings, **settings}
        self.text = ""
        connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        try:
            for line in filter(bytes.strip, connection.getresponse()):
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return True
                self.text += json.loads(data)["choices"][0]["text"]
        except (http.client.HTTPException, ConnectionError):
            pass
        finally:
            connection.close()
        return False


def ask(checkpoint: Path, served: dict[str, Any]) -> list[Asked]:
    """Prompts, greedy and seeded in turns, with what an engine in this process answers to them."""
    engine = Engine.load(str(checkpoint), num_blocks=NUM_STREAMS * (PROMPT_LEN + NUM_TOKENS) // 16, **served)
    prompts = [
        tuple((number * 101 + place * place * 7 + place // 3) % VOCAB_SIZE for place in range(PROMPT_LEN))
        for number in range(NUM_STREAMS)
    ]
    asked = []
    for temperature, some in enumerate((prompts[::2], prompts[1::2])):
        settings: dict[str, Any] = {"temperature": temperature, "seed": 7, "ignore_eos": True, "max_tokens": NUM_TOKENS}
        right = engine.generate(some, SamplingParams(logit_bias=tuple(BIAS.items()), **settings))
        asked.append([Asked(one.prompt_ids, {**settings, "logit_bias": BIAS}, one.choices[0]) for one in right])
    return [one for pair in zip(*asked, strict=True) for one in pair]


def kill_amid(streams: Sequence[Future[Any]], pid: int) -> None:
    """Kills a process; on a busy machine some streams may be read to their end before."""
    ended = [stream.result() for stream in streams if stream.done()]
    assert all(ended), "a stream broke before the kill"
    assert len(ended) < len(streams), "all streams ended before the kill"
    psutil.Process(pid).kill()


def wait_for_one(asked: Sequence[Asked], num_characters: int) -> None:
    """Waits for the first answer of that length: others may start seconds later, when it has ended."""
    wait_until(lambda: any(len(one.text) >= num_characters for one in asked), "text of an answer", pause_s=0.001)


def has_stream(cluster: ServedCluster, worker_id: str) -> bool:
    """Tells whether a decode worker runs a stream that has a token of its own."""
    worker = cluster.workers("decode")[worker_id]
    return bool(worker["num_running"] and worker["generated_tokens"])


def num_spans(answers: Sequence[Completion], names: set[str]) -> int:
    """Counts the spans of these names in the answer with the most of them."""
    return max(sum(span.name in names for span in answer.timeline.spans) for answer in answers)


@pytest.mark.parametrize("served", SERVED)
def test_each_stream_equals_an_undisturbed_run(served: str, tmp_path: Path, forks: ForkServer) -> None:
    arch, settings, flags = SERVED[served]
    checkpoint = make_checkpoint(arch, tmp_path / "model", max_position_embeddings=CONTEXT_LEN)
    asked = ask(checkpoint, settings)
    over_grpc, over_http = asked[: NUM_STREAMS // 2], asked[NUM_STREAMS // 2 :]
    cluster = ServedCluster(f"k{os.getpid()}", tmp_path, forks=forks)
    try:
        flags = ["--prefill", "1", "--decode", "2", "--grpc-port", "0", "--speculate", "ngram", *ALWAYS, *flags]
        cluster.do("up", "--model", str(checkpoint), *flags)
        status = cluster.status()
        (_, prefill), (decode_id, decode) = (min(cluster.workers(role).items()) for role in ("prefill", "decode"))
        gateway = cluster.actor("gateway-0").pid
        with ThreadPoolExecutor(NUM_STREAMS) as threads, Client(status["address"], timeout_s=TIMEOUT_S) as client:
            psutil.Process(prefill["pid"]).suspend()  # so that it has prompts when it is killed
            answers = [threads.submit(one.over_grpc, client) for one in over_grpc]
            time.sleep(DISPATCH_S)
            kill_amid(answers, prefill["pid"])
            # A stream over gRPC alone tells of its attempts: only such streams are there yet.
            wait_until(lambda: has_stream(cluster, decode_id), "a stream at the decode worker", pause_s=0.01)
            events = [threads.submit(one.over_http, status["http_address"]) for one in over_http]
            wait_for_one(over_grpc, 100)
            kill_amid(answers, decode["pid"])
            wait_for_one(over_http, 200)
            kill_amid(events, gateway)
            are_whole = [stream.result() for stream in events]  # as the gateway may have sent one before it was killed
            completions = [answer.result() for answer in answers]
        assert [one.token_ids for one in over_grpc] == [one.expected.token_ids for one in over_grpc]
        assert [one.text for one in over_grpc] == [one.expected.text for one in over_grpc]
        assert any(one.text for one in over_http)
        assert all(one.expected.text.startswith(one.text) for one in over_http)
        assert not all(are_whole), "the gateway had no stream"
        lens = [(len(one.text), len(one.expected.text)) for one in over_http]
        assert all(got == expected or not whole for whole, (got, expected) in zip(are_whole, lens, strict=True))
        assert num_spans(completions, {"decode.call", "decode.generate"}) > 1, "the decode worker had no stream"
        assert num_spans(completions, {"prefill.call", "decode.compute"}) > 0, "the prefill worker had no prompt"
        assert any(completion.usage.accepted_tokens for completion in completions), "no guess has come true"

        wait_until(lambda: all(one["is_alive"] for one in cluster.status()["gateways"]), "the gateway is replaced")
        assert all(one.over_http(status["http_address"], max_tokens=NUM_AFTER_RESTART) for one in over_http)
        assert [len(one.text) for one in over_http] == [NUM_AFTER_RESTART] * len(over_http), "each token is a character"
        assert all(one.expected.text.startswith(one.text) for one in over_http)
        wait_until(lambda: not num_in_use(cluster.status()), "all pages, leases and holds are given back")
        wait_until(cluster.is_sound, "all invariants hold")
    finally:
        cluster.run("down")
    assert cluster.left_behind() == []
