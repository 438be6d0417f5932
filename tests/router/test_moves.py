"""The choice of queued prompts that move, as tables: a token takes a millisecond. And the books of a router."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import cast

import pytest

from router.moves import MAX_MOVES, PromptMoves, QueuedPrompt, choose_moves
from router.workers.line import Line
from router.workers.members import LONG_STEP_S, Member
from wire.ids import WorkerId
from wire.pb import worker_pb2
from wire.pools import Role, Worker, WorkerState

MS = 0.001


def prompt(
    num_tokens: int,
    priority: int = 0,
    may_move: bool = True,
    missing: int | None = None,
    is_deferred: bool = False,
) -> QueuedPrompt:
    """A prompt at p0; p1 misses as many of its tokens, or `missing`."""
    elsewhere = num_tokens if missing is None else missing
    return QueuedPrompt(
        member=member("p0", b"one"),
        num_tokens=num_tokens,
        priority=priority,
        missing=lambda _: elsewhere,
        recall=lambda: None,
        may_move=may_move,
        is_deferred=lambda: is_deferred,
    )


def chosen(*queues: list[QueuedPrompt]) -> list[QueuedPrompt]:
    return choose_moves(queues, WorkerId("p1"), MS)


def moved(*queues: tuple[int, ...]) -> list[int]:
    """The tokens of the prompts that move, of queues of prompts with so many tokens."""
    return [one.num_tokens for one in chosen(*[[prompt(num) for num in queue] for queue in queues])]


@pytest.mark.parametrize(
    ("queues", "tokens"),
    [
        ((), []),
        (((100,),), []),
        (((100, 200),), [200]),
        (((40, 200),), []),
        (((100, 101, 102, 103),), [102, 103]),
        (((100, 100, 100, 900),), [900]),
        (((900, 100, 100, 101),), [100, 100, 101]),
        (((100, 100, 101), (100, 100, 102)), [101, 102]),
        (((1000, 60),), [60]),
        (((1000, 1000, 2000, 90),), [2000, 90]),
        (((100,), (200,), (300,)), []),
    ],
    ids=[
        "no queue",
        "a prompt alone ends no sooner elsewhere",
        "the last of two",
        "a gain of less than LEAST_GAIN_S",
        "half of a queue, the first to arrive first",
        "a long prompt, behind which none would gain",
        "all that wait behind a long prompt",
        "the last prompts of the longest queues",
        "a short prompt behind a long one",
        "behind the last prompt goes the one before it",
        "each worker with one prompt keeps it",
    ],
)
def test_the_last_prompts_of_the_longest_queues_move(queues: tuple[tuple[int, ...], ...], tokens: list[int]) -> None:
    assert moved(*queues) == tokens


def test_a_gain_of_less_than_a_tenth_moves_nothing() -> None:
    assert moved((100, 1000)) == []
    assert moved((150, 1000)) == [1000]


def test_a_worker_is_given_a_bounded_number_of_prompts() -> None:
    assert len(moved((100,) * 10 * MAX_MOVES)) == MAX_MOVES


def test_prompts_that_stay_are_passed_over_and_the_least_urgent_move_first() -> None:
    urgent, usual, moved_before = prompt(200, -1), prompt(201, 1), prompt(202, 1, may_move=False)
    begun = prompt(100, may_move=False)
    assert chosen([begun, usual, moved_before, urgent]) == [urgent, usual]
    assert chosen([begun, usual, urgent]) == [usual]


def test_deferred_prompts_are_behind_others_of_their_priority_and_move_before_them() -> None:
    late, usual, unimportant = prompt(400, is_deferred=True), prompt(100), prompt(60, priority=1)
    begun = prompt(100, may_move=False)
    assert chosen([begun, late, usual]) == [late]
    assert chosen([begun, late, usual, unimportant]) == [late, unimportant]


def test_a_prompt_with_cached_blocks_moves_only_where_it_ends_sooner_without_them() -> None:
    """Its next attempt counts all that its new worker misses, and would go back to the end of the queue."""
    ahead = [prompt(1000, may_move=False) for _ in range(3)]
    assert chosen([*ahead, prompt(100, missing=10_100)]) == []
    assert chosen([*ahead, cached := prompt(100, missing=900)]) == [cached]
    assert chosen([*ahead, usual := prompt(100), prompt(100, missing=10_100)]) == [usual], (
        "one that stays bars no other"
    )


class Books:
    """The prompts of a router at three workers of two versions, and the prompts that were recalled, by name."""

    def __init__(self) -> None:
        versions = {"p0": b"one", "p1": b"one", "p2": b"two"}
        self.workers = {name: member(name, version) for name, version in versions.items()}
        self.ready = ["p0"]
        self.full: set[str] = set()
        self.recalled: list[str] = []
        self.moves = PromptMoves(lambda: [self.workers[name] for name in self.ready], lambda: self.full)
        self.ends: dict[str, ExitStack] = {}

    def queue(self, *names: str, at: str = "p0", may_move: bool = True) -> None:
        """Queues prompts of 200 tokens."""
        for name in names:
            recall = lambda name=name: self.recalled.append(name)  # noqa: E731
            one = QueuedPrompt(
                member=self.workers[at],
                num_tokens=200,
                priority=0,
                missing=lambda _: 200,
                recall=recall,
                may_move=may_move,
            )
            self.ends[name] = ExitStack()
            self.ends[name].enter_context(self.moves.queued(one))

    def end(self, *names: str) -> None:
        for name in names:
            self.ends.pop(name).close()

    def take_recalled(self) -> list[str]:
        recalled, self.recalled[:] = [*self.recalled], []
        return recalled


def member(name: str, fingerprint: bytes) -> Member:
    info = worker_pb2.WorkerInfo(worker_id=name, role="prefill", fingerprint=fingerprint, node_id=f"node of {name}")
    worker = Worker(WorkerId(name), Role.PREFILL, name, WorkerState.READY)
    return Member(worker=worker, info=info, line=cast(Line, None), prefill_token_s=MS)


@pytest.fixture
def books() -> Iterator[Books]:
    books = Books()
    yield books
    books.end(*books.ends)
    assert books.moves.check() == []


def test_a_worker_that_starts_is_given_prompts_once(books: Books) -> None:
    books.queue("a", "b", "c", "d")
    assert books.moves.check() == ["4 prompts are queued at p0"]
    books.moves.fill()
    assert books.take_recalled() == []
    books.ready.append("p1")
    books.moves.fill()
    assert books.take_recalled() == ["c", "d"]
    books.moves.fill()
    assert books.take_recalled() == [], "it waits for the recalled ones"


def test_a_worker_without_prompts_left_is_given_others(books: Books) -> None:
    books.ready.append("p1")
    books.queue("z", at="p1")
    books.queue("a", "b", "c")
    assert books.take_recalled() == []
    books.end("z")
    assert books.take_recalled() == ["c"]
    books.end("c")  # returned
    books.queue("c", at="p1")
    books.end("c")
    assert books.take_recalled() == ["b"]


def test_a_worker_that_has_computed_its_last_prompt_waits_for_no_prompt_that_another_keeps(books: Books) -> None:
    books.queue(*"abcdefgh")
    books.ready.append("p1")
    books.moves.fill()
    assert books.take_recalled() == ["e", "f", "g", "h"]
    books.end("e", "f", "g")  # returned; h is kept
    books.queue("e", "f", "g", at="p1", may_move=False)
    books.end("e", "f")
    assert books.take_recalled() == []
    books.end("g")
    assert books.take_recalled() == ["d", "h"], "a second recall of h asks anew, and harms nothing"


def test_a_worker_of_another_version_a_silent_one_and_a_full_node_are_given_nothing(books: Books) -> None:
    books.queue("a", "b", "c", "d")
    books.ready.append("p2")
    books.moves.fill()
    books.ready.append("p1")
    books.workers["p1"].engine_silent_s = LONG_STEP_S
    books.moves.fill()
    books.workers["p1"].engine_silent_s = 0.0
    books.full = {"node of p1"}
    books.moves.fill()
    assert books.take_recalled() == []
    books.full = set()
    books.moves.fill()
    assert books.take_recalled() == ["c", "d"]


def test_nothing_moves_before_a_worker_has_learned_its_speed(books: Books) -> None:
    for one in books.workers.values():
        one.prefill_token_s = None
    books.queue("a", "b", "c", "d")
    books.ready.append("p1")
    books.moves.fill()
    assert books.take_recalled() == []


def test_prompts_of_a_worker_that_leaves_move_too(books: Books) -> None:
    books.queue("a", "b", "c", "d")
    books.ready[:] = ["p1"]
    books.moves.fill()
    assert books.take_recalled() == ["c", "d"]
