import json
from pathlib import Path

import pytest

from tests.cluster.served_cluster import ServedCluster
from tests.harness.checkpoints import choose_prompt

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]
NUM_TOKENS = 64


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100, 700])
def test_tokens_equal_transformers_and_decode_computes_no_prompt(
    on_ray: ServedCluster, checkpoint: Path, length: int
) -> None:
    expected = choose_prompt(checkpoint, length, NUM_TOKENS)
    before = {name: worker["computed_prompt_tokens"] for name, worker in on_ray.workers("decode").items()}
    answer = on_ray.generate(expected.prompt_ids, "--max-tokens", str(NUM_TOKENS), "--ignore-eos")
    assert tuple(answer["token_ids"]) == expected.token_ids
    assert answer["finish_reason"] == "length"
    after = {name: worker["computed_prompt_tokens"] for name, worker in on_ray.workers("decode").items()}
    assert after == before
    assert answer["workers"]["prefill"] in on_ray.workers("prefill")
    assert answer["workers"]["decode"] in after


def test_a_prefix_that_was_there_is_not_computed_again(on_ray: ServedCluster, checkpoint: Path) -> None:
    prompt_ids = choose_prompt(checkpoint, 100, NUM_TOKENS, seed=1).prompt_ids
    first, second = (on_ray.generate(prompt_ids, "--max-tokens", "8") for _ in range(2))
    assert first["usage"] == {
        "prompt_tokens": 100,
        "completion_tokens": 8,
        "cached_tokens": {"device": 0, "host": 0, "peers": 0, "redis": 0, "files": 0},
        "guessed_tokens": 0,
        "accepted_tokens": 0,
        "reasoning_tokens": 0,
    }
    assert sum(second["usage"]["cached_tokens"].values()) == 96
    assert second["token_ids"] == first["token_ids"]


def test_decode_fetches_the_prompt_from_the_host_tier(on_ray: ServedCluster, checkpoint: Path) -> None:
    answer = on_ray.generate(choose_prompt(checkpoint, 100, NUM_TOKENS, seed=2).prompt_ids, "--max-tokens", "4")
    (fetch,) = (span for span in answer["timeline"]["spans"] if span["name"] == "decode.fetch")
    assert fetch["worker"] == answer["workers"]["decode"]
    assert fetch["counts"] == {"blocks_host": 7, "tokens_host": 100}
    spans = answer["timeline"]["spans"]
    assert sum(span["duration_ms"] for span in spans) == pytest.approx(answer["timeline"]["total_ms"])


def test_seeded_samples_are_reproducible_and_differ(on_ray: ServedCluster) -> None:
    settings = ("--n", "4", "--seed", "5", "--temperature", "1", "--max-tokens", "16", "--ignore-eos")
    first, second = (on_ray.generate(range(10, 40), *settings) for _ in range(2))
    assert first["choices"] == second["choices"]
    assert first["seed"] == 5
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert len({tuple(choice["token_ids"]) for choice in first["choices"]}) == 4


def test_text_in_and_text_out(on_ray: ServedCluster) -> None:
    done = on_ray.run("generate", "It was a dark and stormy night", "--max-tokens", "12", "--ignore-eos")
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "prefill-" in done.stderr
    assert "decode-" in done.stderr
    assert "30 prompt tokens" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--token-ids", "1,2,256"), "token_ids"),
        (("x", "--max-tokens", "100000"), "max_tokens"),
        (("x", "--temperature", "3"), "temperature"),
        (("x", "--n", "17"), "n"),
    ],
)
def test_a_bad_request_is_refused_by_name_and_the_next_is_served(
    on_ray: ServedCluster, arguments: tuple[str, ...], named: str
) -> None:
    refused = on_ray.run("generate", *arguments)
    assert refused.returncode == 2
    assert named in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert on_ray.generate([1, 2, 3], "--max-tokens", "2", "--ignore-eos")["usage"]["completion_tokens"] == 2


def test_the_doctor_finds_nothing_wrong(on_ray: ServedCluster) -> None:
    checks = json.loads(on_ray.do("doctor", "--json"))["checks"]
    assert {one["verdict"] for one in checks.values()} == {"ok"}
    assert checks["tokens"]["found"] == "2 workers give the same 8 tokens"


@pytest.mark.parametrize("door", ["gRPC", "HTTP"])
def test_a_bench_of_either_door(on_ray: ServedCluster, door: str, tmp_path: Path) -> None:
    flags = ["--url", f"http://{on_ray.status()['http_address']}/v1"] if door == "HTTP" else []
    load = ["--rate", "20", "--num-requests", "10", "--input-len", "50", "--output-len", "6", "--prefix-len", "32"]
    on_ray.do("bench", *flags, *load, "--json", str(tmp_path / "figures.json"))
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["summary"]["num_ended"] == 10
    assert {sum(count for _, count in one["chunks"]) for one in figures["requests"]} == {6}
    assert figures["summary"]["cached_prompt_share"] > 0
