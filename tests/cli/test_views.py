from baton.results import Completion, Draft
from cli.generate import render_timeline, to_object
from cli.terminal import render
from wire.convert import tiers_to_pb
from wire.pb import inference_pb2 as pb


def test_a_table_aligns_numbers_to_the_right() -> None:
    assert render(("name", "size"), [("a", "5"), ("long", "10.5")]) == "name  size\na        5\nlong  10.5"


def test_a_table_without_rows_is_its_head() -> None:
    assert render(("name", "size"), []) == "name  size"


def test_a_timeline_shows_steps_and_sums_up_what_lies_between() -> None:
    spans = [
        pb.Span(name="router.check", worker="router", start_ms=0, duration_ms=0.5),
        pb.Span(name="network", worker="router", start_ms=0.5, duration_ms=1.5),
        pb.Span(
            name="prefill.fetch",
            worker="prefill-1",
            start_ms=2,
            duration_ms=3,
            counts={"blocks_device": 2, "tokens_device": 32, "blocks_redis": 1, "tokens_redis": 16, "blocks_host": 0},
        ),
        pb.Span(name="prefill.compute", worker="prefill-1", start_ms=5, duration_ms=4, counts={"tokens_computed": 7}),
    ]
    complete = pb.Complete(
        usage=pb.Usage(prompt_tokens=55, completion_tokens=1, cached_tokens=tiers_to_pb({"device": 32, "redis": 16})),
        timeline=pb.Timeline(prefill_worker="prefill-1", spans=spans, total_ms=10),
    )
    shown = [" ".join(line.split()) for line in render_timeline(_completion(complete)).splitlines()]
    assert shown == [
        "at ms took ms worker step",
        "0.0 0.5 router check",
        "2.0 3.0 prefill-1 fetch 2 blocks from device, 1 block from redis",
        "5.0 4.0 prefill-1 compute 7 tokens computed",
        "",
        "55 prompt tokens (48 cached: 32 device, 16 redis), 1 generated, 10.0 ms (2.5 ms of it between processes)",
    ]


def _chunk(index: int, text: str, *token_ids: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(request_id="r", chunk=pb.Chunk(index=index, text=text, token_ids=token_ids))


def _completion(complete: pb.Complete, *chunks: pb.GenerateResponse) -> Completion:
    draft = Draft()
    for response in (*chunks, pb.GenerateResponse(request_id="r", complete=complete)):
        draft.accept(response)
    return draft.require_completion()


def test_choices_are_gathered_apart_and_the_first_stands_at_the_top() -> None:
    length, stop = pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP
    choices = [pb.Choice(index=0, finish_reason=length), pb.Choice(index=1, finish_reason=stop, stop_token_id=9)]
    complete = pb.Complete(choices=choices, timeline=pb.Timeline(decode_worker="decode-0"))
    answer = to_object(_completion(complete, _chunk(1, "x", 9), _chunk(0, "a", 1, 2), _chunk(0, "b", 3)))
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("ab", (1, 2, 3), "length")
    assert [one["text"] for one in answer["choices"]] == ["ab", "x"]
    assert [one["matched_stop"] for one in answer["choices"]] == [None, 9]
    assert answer["workers"] == {"prefill": None, "decode": "decode-0"}


def test_logprobs_are_there_if_they_were_asked_for() -> None:
    top = [pb.TopLogprob(token_id=4, logprob=-0.5)]
    chunk = pb.Chunk(index=0, token_ids=[4], logprobs=[pb.TokenLogprobs(token_id=4, logprob=-0.5, top=top)])
    complete = pb.Complete(choices=[pb.Choice(index=0)])
    answer = to_object(_completion(complete, pb.GenerateResponse(chunk=chunk)))
    assert answer["choices"][0]["logprobs"] == [
        {"token_id": 4, "logprob": -0.5, "top": [{"token_id": 4, "logprob": -0.5}]}
    ]


def test_decode_generates_the_tokens_after_the_first() -> None:
    span = pb.Span(name="decode.generate", worker="d", duration_ms=6.0, counts={"tokens": 2})
    for prefill_worker, told in (("p", "2 tokens after the first"), ("d", "2 tokens"), ("", "2 tokens")):
        timeline = pb.Timeline(prefill_worker=prefill_worker, decode_worker="d", spans=[span])
        assert told in render_timeline(_completion(pb.Complete(timeline=timeline))).splitlines()[1].split("  ")


def test_a_gate_is_shown_if_it_took_time() -> None:
    spans = [
        pb.Span(name="router.wait_room", worker="router", start_ms=0, duration_ms=0.4),
        pb.Span(name="decode.wait_pages", worker="d", start_ms=0.4, duration_ms=6.0),
    ]
    shown = render_timeline(_completion(pb.Complete(timeline=pb.Timeline(spans=spans, total_ms=6.4))))
    assert "wait_room" not in shown
    assert "wait_pages" in shown
    assert "(0.0 ms of it between processes)" in shown
