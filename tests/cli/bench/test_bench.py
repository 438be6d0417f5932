"""`baton bench` against a scripted service, and the load that it draws."""

import json
from pathlib import Path

import pytest

from cli.__main__ import main, make_parser
from cli.bench.bench import draw_load
from cli.bench.schedule import Arrival
from tests.baton.scripted_service import ScriptedService, Step, served
from wire.errors import InvalidRequest, Overloaded
from wire.pb import inference_pb2 as pb

ANSWER: list[Step] = [
    pb.GenerateResponse(chunk=pb.Chunk(token_ids=[1])),
    pb.GenerateResponse(chunk=pb.Chunk(token_ids=[2, 3])),
    pb.GenerateResponse(complete=pb.Complete()),
]
LOAD = ["bench", "--rate", "100", "--num-requests", "3", "--input-len", "5", "--output-len", "7"]


def drawn(*flags: str, max_context_len: int = 2048) -> tuple[str, list[Arrival]]:
    return draw_load(make_parser().parse_args([*LOAD, *flags]), max_context_len)


def test_figures_of_a_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service, file = ScriptedService(ANSWER), tmp_path / "figures.json"
    with served(service) as address:
        assert main([*LOAD, "--address", address, "--json", str(file), "--slo", "ttft=60000"]) == 0
    assert [len(one.token_ids.ids) for one in service.requests] == [5, 5, 5]
    assert {one.sampling_params.max_tokens for one in service.requests} == {7}
    told = capsys.readouterr().out
    assert "Poisson, 100 requests a second 3 of them, 5 tokens in, 7 out" in told
    assert "\x1b" not in told
    assert [line.split() for line in told.splitlines() if "ended / sent" in line] == [
        ["requests", "ended", "/", "sent", "3", "/", "3"]
    ]
    figures = json.loads(file.read_text())
    assert figures["limits"] == {"ttft_s": 60, "tpot_s": None}
    assert (figures["summary"]["num_ended"], figures["summary"]["good_share"]) == (3, 1)
    assert [len(one["chunks"]) for one in figures["requests"]] == [2, 2, 2]


def test_requests_that_fail(capsys: pytest.CaptureFixture[str]) -> None:
    with served(ScriptedService([Overloaded("full")])) as address:
        assert main([*LOAD, "--address", address, "--color", "always"]) == 1
    told = capsys.readouterr()
    assert "3 RESOURCE_EXHAUSTED" in told.out
    assert "nan" not in told.out
    assert "\x1b" in told.out
    assert told.err.strip() == "baton: 3 RESOURCE_EXHAUSTED, the first of them: full"  # after a bar that is gone


def test_chats_have_a_word_for_each_token(capsys: pytest.CaptureFixture[str]) -> None:
    service = ScriptedService(ANSWER)
    with served(service) as address:
        assert main([*LOAD, "--address", address, "--chat", "--slo", "tpot=60000"]) == 0
    turns = [one.messages.messages for one in service.requests]
    assert {(len(turn), turn[0].role, len(turn[0].content.split())) for turn in turns} == {(1, "user", 5)}
    assert len({turn[0].content for turn in turns}) == 3
    assert "5 words of a chat in, 7 out" in capsys.readouterr().out


@pytest.mark.parametrize("door", [("--address", "127.0.0.1:1"), ("--url", "http://127.0.0.1:1/v1")])
def test_a_door_that_is_shut(door: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LOAD, *door]) == 1
    assert capsys.readouterr().err.startswith("baton: ")


def test_prompts_share_the_prefix_that_is_asked_for_and_no_more() -> None:
    _, cold = drawn()
    load, shared = drawn("--prefix-len", "4")
    assert "the first 4 the same in all" in load
    assert len({one.prompt[:4] for one in shared}) == 1
    assert len({one.prompt for one in shared}) == len({one.prompt[:4] for one in cold}) == len(cold) == 3
    assert {len(one.prompt) for one in shared} == {5}


def test_a_trace_is_sent_at_the_rate_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "code.csv"
    rows = [f"2023-11-16 18:17:{second:02}.0000000,{100 * second},8" for second in range(1, 5)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    load, arrivals = drawn("--trace", str(path), "--length-factor", "0.5", max_context_len=104)
    assert load.startswith("code.csv: 3 requests, arrivals 66.7 times as fast, lengths x 0.5, 1 of 3 cut")
    assert [(len(one.prompt), one.output_len) for one in arrivals] == [(50, 4), (100, 4), (100, 4)]


@pytest.mark.parametrize("content", ["", "A,B\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,1\n"])
def test_a_file_that_is_no_trace(content: str, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match="trace"):
        drawn("--trace", str(path))
