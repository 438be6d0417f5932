import asyncio

import pytest

from router.requests.outbox import Outbox
from wire.errors import DeadlineExceeded, Overloaded
from wire.pb import inference_pb2 as pb


def takes(outbox: Outbox, one: pb.GenerateResponse) -> bool:
    try:
        outbox.put(one)
    except Overloaded:
        return False
    return True


def event(name: str) -> pb.GenerateResponse:
    return pb.GenerateResponse(request_id=name)


async def read(outbox: Outbox) -> list[str]:
    return [response.request_id async for response in outbox]


async def test_events_come_in_order_and_end_with_the_last() -> None:
    outbox = Outbox(10)
    reading = asyncio.create_task(read(outbox))
    for name in "ab":
        outbox.put(event(name))
        await asyncio.sleep(0)
    outbox.complete(event("c"))
    assert await reading == ["a", "b", "c"]


async def test_an_error_comes_after_what_is_there() -> None:
    outbox = Outbox(10)
    outbox.put(event("a"))
    outbox.fail(DeadlineExceeded("too late"))
    assert (await anext(outbox)).request_id == "a"
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            await anext(outbox)


@pytest.mark.parametrize("num_tokens", [7, 0], ids=["a prompt", "an end before"])
async def test_tokens_of_the_prompt_are_waited_for(num_tokens: int) -> None:
    outbox = Outbox(10)
    assert not outbox.begun.done()
    if num_tokens:
        outbox.begin(num_tokens)
    else:
        outbox.fail(DeadlineExceeded("too late"))
    assert await outbox.begun == num_tokens
    assert outbox.writing_since is None, "metadata is no message"
    outbox.begin(9)  # of a later attempt
    assert await outbox.begun == num_tokens


async def test_it_is_bounded_but_for_the_last_message() -> None:
    outbox = Outbox(2)
    assert [takes(outbox, event(name)) for name in "abc"] == [True, True, False]
    outbox.complete(event("d"))
    assert await read(outbox) == ["a", "b", "d"]


def chunk(index: int, *token_ids: int) -> pb.GenerateResponse:
    text = "".join(map(chr, token_ids))
    logprobs = [pb.TokenLogprobs(token_id=token_id) for token_id in token_ids]
    return pb.GenerateResponse(chunk=pb.Chunk(index=index, token_ids=token_ids, text=text, logprobs=logprobs))


async def test_chunks_of_a_choice_join_the_one_that_waits() -> None:
    outbox = Outbox(10)
    for one in (chunk(0, 65), chunk(1, 66), chunk(0, 67, 68), chunk(1, 69)):
        outbox.put(one)
    assert await anext(outbox) == chunk(0, 65, 67, 68)
    assert takes(outbox, chunk(0, 70)), "the one that was taken grows no more"
    outbox.complete(event("last"))
    assert [one async for one in outbox] == [chunk(1, 66, 69), chunk(0, 70), event("last")]


async def test_tokens_are_bounded_however_they_come() -> None:
    outbox = Outbox(3)
    assert [takes(outbox, chunk(0, token_id)) for token_id in (65, 66, 67, 68)] == [True, True, True, False]
    assert await anext(outbox) == chunk(0, 65, 66, 67)
    assert [takes(outbox, chunk(0, 68, 69, 70)), takes(outbox, chunk(0, 71))] == [True, False]


async def test_it_tells_since_when_the_reader_has_been_away() -> None:
    outbox = Outbox(2)

    def is_away() -> bool:
        return outbox.writing_since is not None

    assert not is_away()
    outbox.put(event("a"))
    await anext(outbox)
    assert is_away()
    waiting = asyncio.create_task(read(outbox))
    await asyncio.sleep(0)
    assert not is_away()
    outbox.complete(event("b"))
    await waiting
    assert is_away()


async def test_a_slow_reader_is_refused_by_the_setting() -> None:
    outbox = Outbox(1)
    outbox.put(event("a"))
    with pytest.raises(Overloaded, match=r"^1 tokens wait .*, the limit \(router\.max_buffered_tokens\)$"):
        outbox.put(event("b"))
