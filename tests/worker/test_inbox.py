import threading
import time

from wire.ids import AttemptId
from worker.loop import Abort, Inbox

FIRST, SECOND = (Abort(AttemptId(f"r/{number}")) for number in (1, 2))


def test_takes_in_order() -> None:
    inbox: Inbox = Inbox()
    assert inbox.put(FIRST)
    assert inbox.put(SECOND)
    assert inbox.take(0.0) == [FIRST, SECOND]
    assert inbox.take(0.0) == []


def test_waits_no_longer_than_it_may() -> None:
    start_s = time.monotonic()
    assert Inbox().take(0.05) == []
    assert time.monotonic() - start_s >= 0.05


def test_the_bell_ends_the_wait_once() -> None:
    inbox: Inbox = Inbox()
    threading.Thread(target=inbox.ring).start()
    assert inbox.take(20.0) == []
    inbox.put(FIRST)
    assert inbox.take(20.0) == [FIRST]
    start_s = time.monotonic()
    inbox.take(0.05)
    assert time.monotonic() - start_s >= 0.05


def test_a_bell_rung_before_the_wait_is_heard() -> None:
    inbox: Inbox = Inbox()
    inbox.ring()
    assert inbox.take(20.0) == []


def test_a_closed_inbox_lets_nothing_in_and_everything_out() -> None:
    inbox: Inbox = Inbox()
    inbox.put(FIRST)
    inbox.close()
    assert not inbox.put(SECOND)
    assert inbox.take(20.0) == [FIRST]
    assert inbox.take(20.0) == []
