import threading
import time

from worker.inbox import Inbox


def test_takes_in_order() -> None:
    inbox: Inbox[int] = Inbox()
    assert inbox.put(1)
    assert inbox.put(2)
    assert inbox.take(0.0) == [1, 2]
    assert inbox.take(0.0) == []


def test_waits_no_longer_than_it_may() -> None:
    start_s = time.monotonic()
    assert Inbox[int]().take(0.05) == []
    assert time.monotonic() - start_s >= 0.05


def test_the_bell_ends_the_wait_once() -> None:
    inbox: Inbox[int] = Inbox()
    threading.Thread(target=inbox.ring).start()
    assert inbox.take(20.0) == []
    inbox.put(1)
    assert inbox.take(20.0) == [1]
    start_s = time.monotonic()
    inbox.take(0.05)
    assert time.monotonic() - start_s >= 0.05


def test_a_bell_rung_before_the_wait_is_heard() -> None:
    inbox: Inbox[int] = Inbox()
    inbox.ring()
    assert inbox.take(20.0) == []


def test_a_closed_inbox_lets_nothing_in_and_everything_out() -> None:
    inbox: Inbox[int] = Inbox()
    inbox.put(1)
    inbox.close()
    assert not inbox.put(2)
    assert inbox.take(20.0) == [1]
    assert inbox.take(20.0) == []
