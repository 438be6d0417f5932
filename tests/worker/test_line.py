import asyncio
from collections.abc import Sequence

import pytest

from wire.convert import error_from_pb
from wire.errors import Cancelled, InvalidRequest, RequestExists
from wire.ids import AttemptId
from wire.pb import inference_pb2, worker_pb2
from worker import line as line_module
from worker.convert import ended_with
from worker.line import WorkerLine

A, B = (AttemptId(f"{name}/1") for name in "ab")
TIMEOUT_S = 20.0
Order = tuple[str, object]


class Worker:
    """Writes down the orders it gets."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.refusal: Exception | None = None

    def begin(self, line: WorkerLine, begin: worker_pb2.Begin) -> None:
        self.orders.append(("begin", (begin.id, len(begin.prompt.ids))))
        if self.refusal is not None:
            raise self.refusal

    def abort(self, line: WorkerLine, attempt: AttemptId) -> None:
        self.orders.append(("abort", attempt))

    def renew(self, line: WorkerLine, attempts: list[AttemptId]) -> None:
        self.orders.append(("renew", attempts))

    def release(self, attempts: list[AttemptId]) -> None:
        self.orders.append(("release", attempts))

    def answer(self, line: WorkerLine, ask: worker_pb2.Ask) -> None:
        self.orders.append(("answer", ask.number))

    def end_choice(self, line: WorkerLine, attempt: AttemptId, index: int) -> None:
        self.orders.append(("end_choice", (attempt, index)))

    def recall(self, line: WorkerLine, attempt: AttemptId) -> None:
        self.orders.append(("recall", attempt))

    def prefetch(self, order: worker_pb2.Prefetch) -> None:
        self.orders.append(("prefetch", order.id))

    def line_ended(self, line: WorkerLine) -> None:
        self.orders.append(("line_ended", line))


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def line(worker: Worker) -> WorkerLine:
    return WorkerLine(worker, worker)


def update(attempt: AttemptId, position: int, num_tokens: int = 1, index: int = 0) -> worker_pb2.Update:
    token_ids = range(position, position + num_tokens)
    tokens = worker_pb2.ChoiceTokens(index=index, first_position=position, token_ids=token_ids)
    return worker_pb2.Update(id=attempt, choices=[tokens])


def scores(first: int, num_tokens: int) -> worker_pb2.Update:
    logprobs = [inference_pb2.TokenLogprobs(logprob=-position) for position in range(first, first + num_tokens)]
    return worker_pb2.Update(id=A, scores=worker_pb2.PromptScores(first_position=first, logprobs=logprobs))


def begin(attempt: AttemptId, prompt_len: int = 3) -> worker_pb2.Begin:
    return worker_pb2.Begin(
        id=attempt, prompt=inference_pb2.TokenIds(ids=[(1 << 20) + one for one in range(prompt_len)])
    )


def pieces(attempt: AttemptId, data: bytes, num_pieces: int) -> list[worker_pb2.ConnectRequest]:
    """A Begin of that many bytes in so many messages; the last piece is marked."""
    size = -(-len(data) // num_pieces)
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    return [
        worker_pb2.ConnectRequest(piece=worker_pb2.BeginPart(id=attempt, data=part, last=number == len(parts)))
        for number, part in enumerate(parts, start=1)
    ]


def take_all(line: WorkerLine, requests: Sequence[worker_pb2.ConnectRequest]) -> None:
    for request in requests:
        line.take(request)


async def read(line: WorkerLine) -> worker_pb2.ConnectResponse:
    async with asyncio.timeout(TIMEOUT_S):
        response = await line.next()
    assert response is not None
    return response


async def read_tokens(line: WorkerLine) -> list[tuple[AttemptId, int, list[int]]]:
    """Of each update of the next message: its attempt, the first position and the tokens of its one choice."""
    updates = (await read(line)).updates
    return [(AttemptId(one.id), one.choices[0].first_position, list(one.choices[0].token_ids)) for one in updates]


async def read_errors(line: WorkerLine) -> list[tuple[AttemptId, type[Exception]]]:
    return [(AttemptId(one.id), type(error_from_pb(one.end.error))) for one in (await read(line)).updates]


async def test_what_is_not_sent_joins_to_one_update_of_each_attempt(line: WorkerLine) -> None:
    for position in range(3):
        line.send(update(A, position))
        line.send(update(B, 10 * position, num_tokens=10))
    assert await read_tokens(line) == [(A, 0, [0, 1, 2]), (B, 0, list(range(30)))]


async def test_what_is_sent_is_not_said_again(line: WorkerLine) -> None:
    line.send(update(A, 0))
    await read(line)
    line.send(update(A, 1))
    assert await read_tokens(line) == [(A, 1, [1])]


async def test_waits_for_news(line: WorkerLine) -> None:
    reading = asyncio.create_task(line.next())
    await asyncio.sleep(0)
    assert not reading.done()
    line.send(update(A, 0))
    response = await reading
    assert response is not None
    assert [AttemptId(one.id) for one in response.updates] == [A]


async def test_answers_go_with_the_news(line: WorkerLine) -> None:
    line.send(update(A, 0))
    for number in (4, 5):
        line.send_answer(worker_pb2.WorkerReply(number=number))
    response = await read(line)
    assert ([one.number for one in response.answers], len(response.updates)) == ([4, 5], 1)


async def test_a_message_has_about_so_many_tokens_and_the_rest_follows(
    line: WorkerLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_module, "MAX_MESSAGE_TOKENS", 10)
    attempts = [AttemptId(f"{number}/1") for number in range(5)]
    for attempt in attempts:
        line.send(update(attempt, 0, num_tokens=6))
    line.send_answer(worker_pb2.WorkerReply(number=1))
    assert [len((await read(line)).updates) for _ in range(3)] == [2, 2, 1]


async def test_a_finished_line_says_what_waits_and_then_ends(line: WorkerLine, worker: Worker) -> None:
    line.send(update(A, 0))
    line.finish()
    line.send(update(A, 1))
    line.send_answer(worker_pb2.WorkerReply(number=1))
    assert await read_tokens(line) == [(A, 0, [0])]
    assert await line.next() is None
    assert await line.next() is None
    assert worker.orders == []


async def test_a_closed_line_says_and_takes_nothing_more(line: WorkerLine, worker: Worker) -> None:
    line.send(update(A, 0))
    line.close()
    line.send(update(A, 1))
    line.take(worker_pb2.ConnectRequest(begins=[begin(A)]))
    assert await line.next() is None
    assert worker.orders == [("line_ended", line)]


async def test_closing_wakes_the_reader(line: WorkerLine) -> None:
    reading = asyncio.create_task(line.next())
    await asyncio.sleep(0)
    line.close()
    async with asyncio.timeout(TIMEOUT_S):
        assert await reading is None


def test_orders_of_a_message_are_carried_out_in_order(line: WorkerLine, worker: Worker) -> None:
    line.take(
        worker_pb2.ConnectRequest(
            aborts=[A, B],
            recalls=[A],
            renewals=[A, B],
            ended_choices=[worker_pb2.EndedChoice(attempt=A, index=2)],
            releases=[B],
            asks=[worker_pb2.Ask(number=1), worker_pb2.Ask(number=2)],
            begins=[begin(A)],
        )
    )
    assert worker.orders == [
        ("abort", A),
        ("abort", B),
        ("end_choice", (A, 2)),
        ("renew", [A, B]),
        ("release", [B]),
        ("answer", 1),
        ("answer", 2),
        ("begin", (A, 3)),
        ("recall", A),
    ]


async def test_an_attempt_that_cannot_begin_ends_alone(line: WorkerLine, worker: Worker) -> None:
    line.send(update(B, 0))
    worker.refusal = RequestExists("it runs")
    line.take(worker_pb2.ConnectRequest(begins=[begin(A)]))
    told, ended = (await read(line)).updates
    assert (AttemptId(told.id), told.HasField("end")) == (B, False)
    assert (AttemptId(ended.id), type(error_from_pb(ended.end.error))) == (A, RequestExists)


async def test_an_abort_takes_back_what_is_not_sent(line: WorkerLine, worker: Worker) -> None:
    line.send(update(A, 0))
    line.send(update(B, 0))
    line.take(worker_pb2.ConnectRequest(aborts=[A]))
    assert await read_tokens(line) == [(B, 0, [0])]
    assert worker.orders == [("abort", A)]


@pytest.mark.parametrize("num_pieces", [1, 2, 7])
def test_a_long_begin_comes_in_pieces(line: WorkerLine, worker: Worker, num_pieces: int) -> None:
    take_all(line, pieces(A, begin(A, prompt_len=1000).SerializeToString(), num_pieces))
    assert worker.orders == [("begin", (A, 1000))]


def test_short_orders_pass_between_the_pieces(line: WorkerLine, worker: Worker) -> None:
    first, last = pieces(A, begin(A, prompt_len=1000).SerializeToString(), 2)
    between = worker_pb2.ConnectRequest(aborts=[B], renewals=[B])
    take_all(line, [first, between, last])
    assert worker.orders == [("abort", B), ("renew", [B]), ("begin", (A, 1000))]


async def test_an_abort_between_the_pieces_ends_them(line: WorkerLine, worker: Worker) -> None:
    first, second, _ = pieces(A, begin(A, prompt_len=1000).SerializeToString(), 3)
    abort = worker_pb2.ConnectRequest(aborts=[A])
    take_all(line, [first, second, abort, *pieces(B, begin(B, prompt_len=500).SerializeToString(), 2)])
    assert worker.orders == [("abort", A), ("begin", (B, 500))]


async def test_an_aborted_begin_is_not_made_whole(line: WorkerLine, worker: Worker) -> None:
    first, last = pieces(A, begin(A, prompt_len=1000).SerializeToString(), 2)
    take_all(line, [first, worker_pb2.ConnectRequest(aborts=[A]), last])
    assert worker.orders == [("abort", A)]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\xff" * 100, id="no message"),
        pytest.param(b"\x0a\x03\x0a\x01\xff", id="an id that is not UTF-8"),
        pytest.param(begin(A, prompt_len=1000).SerializeToString()[:-7], id="cut off"),
        pytest.param(begin(B).SerializeToString(), id="of another attempt"),
    ],
)
async def test_pieces_that_are_not_the_begin_they_claim_to_be_end_their_attempt(
    line: WorkerLine, worker: Worker, data: bytes
) -> None:
    take_all(line, pieces(A, data, 2))
    assert await read_errors(line) == [(A, InvalidRequest)]
    assert worker.orders == []


async def test_a_begin_that_is_too_long_ends_its_attempt_and_the_rest_of_it_is_passed_over(
    line: WorkerLine, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_module, "MAX_BEGIN_BYTES", 1000)
    whole = begin(A).SerializeToString()
    take_all(line, pieces(A, whole * 300, 300))
    assert await read_errors(line) == [(A, InvalidRequest)]
    line.send(ended_with(B, Cancelled("it is over")))
    assert await read_errors(line) == [(B, Cancelled)]
    assert worker.orders == []


async def test_a_begin_of_another_attempt_takes_the_place_of_a_half_one(line: WorkerLine, worker: Worker) -> None:
    first, _ = pieces(A, begin(A, prompt_len=1000).SerializeToString(), 2)
    take_all(line, [first, *pieces(B, begin(B, prompt_len=500).SerializeToString(), 2)])
    assert worker.orders == [("begin", (B, 500))]


async def test_a_long_update_goes_in_parts(line: WorkerLine) -> None:
    """Scores of a prompt before tokens, other attempts behind it; the end in the last part."""
    line.send(scores(1, line_module.MAX_UPDATE_TOKENS + 5))
    line.send(update(A, 0, line_module.MAX_UPDATE_TOKENS))
    line.send(worker_pb2.Update(id=A, end=worker_pb2.End(spans=[inference_pb2.Span(name="decode.queue")])))
    line.send(update(B, 7))
    parts = [(await read(line)).updates for _ in range(3)]
    assert [[AttemptId(one.id) for one in part] for part in parts] == [[A], [A], [A, B]]
    told = [part[0] for part in parts]
    assert [one.scores.first_position for one in told] == [1, 1 + line_module.MAX_UPDATE_TOKENS, 0]
    assert [len(one.scores.logprobs) for one in told] == [line_module.MAX_UPDATE_TOKENS, 5, 0]
    tokens = [token for one in told for choice in one.choices for token in choice.token_ids]
    assert tokens == list(range(line_module.MAX_UPDATE_TOKENS))
    assert [one.HasField("end") for one in told] == [False, False, True]


async def test_updates_join_choice_by_choice_with_all_that_they_have(line: WorkerLine) -> None:
    source = worker_pb2.PromptSource(computed_tokens=3)
    end = worker_pb2.End(spans=[inference_pb2.Span(name="decode.queue")])
    for number, index in enumerate([0, 1, 1, 0]):
        line.send(update(A, number, index=index) if index else update(A, number // 3))
    last = update(A, 3, index=1)
    last.choices[0].logprobs.add(token_id=3, logprob=-0.5)
    last.choices[0].finish_reason = inference_pb2.FINISH_REASON_STOP
    last.choices[0].stop_token_id = 3
    for later in (worker_pb2.Update(id=A, prompt=source, num_held_blocks=4), last, worker_pb2.Update(id=A, end=end)):
        line.send(later)
    (told,) = (await read(line)).updates
    assert [(one.index, one.first_position, list(one.token_ids)) for one in told.choices] == [
        (0, 0, [0, 1]),
        (1, 1, [1, 2, 3]),
    ]
    assert [(one.token_id, one.logprob) for one in told.choices[1].logprobs] == [(3, -0.5)]
    assert (told.choices[1].finish_reason, told.choices[1].stop_token_id) == (inference_pb2.FINISH_REASON_STOP, 3)
    assert (told.choices[0].finish_reason, told.choices[0].HasField("stop_token_id")) == (0, False)
    assert (told.prompt, told.num_held_blocks, told.end) == (source, 4, end)


@pytest.mark.parametrize("sizes", [(3, 4), (5, 5, 5), (11,), (10, 1), (25, 1)])
async def test_scores_follow_one_another_in_parts_that_a_message_takes(
    line: WorkerLine, monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int]
) -> None:
    monkeypatch.setattr(line_module, "MAX_UPDATE_TOKENS", 10)
    first = 1
    for size in sizes:
        line.send(scores(first, size))
        first += size
    line.send(update(A, 0, 3))
    told: list[float] = []
    while not told or told[-1] != 1 - first:
        (one,) = (await read(line)).updates
        assert one.scores.first_position == len(told) + 1
        assert len(one.scores.logprobs) + sum(len(choice.token_ids) for choice in one.choices) <= 10
        told += [score.logprob for score in one.scores.logprobs]
    assert told == [-position for position in range(1, first)]
    if not one.choices:
        assert await read_tokens(line) == [(A, 0, [0, 1, 2])]
