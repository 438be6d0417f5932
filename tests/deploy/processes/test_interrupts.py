import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from deploy.processes.interrupts import SIGNALS, Interrupts


@pytest.fixture(autouse=True)
def _no_signal_ends_the_tests() -> Iterator[None]:
    earlier = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    yield
    for number, handler in earlier.items():
        signal.signal(number, handler)


def _raise_all() -> None:
    for number in SIGNALS:
        signal.raise_signal(number)


@contextmanager
def _undone(done: list[str]) -> Iterator[None]:
    try:
        yield
    finally:
        _raise_all()
        done.append("undone")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_wait_is_interrupted_once(number: signal.Signals) -> None:
    done: list[str] = []
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.awaited(), _undone(done):
            signal.raise_signal(number)
        _raise_all()
    assert done == ["undone"]


@pytest.mark.parametrize("number", SIGNALS)
def test_other_work_is_not_and_the_next_wait_does_not_begin(number: signal.Signals) -> None:
    done = []
    with Interrupts() as interrupts:
        signal.raise_signal(number)
        done.append("work")
        with pytest.raises(KeyboardInterrupt), interrupts.awaited():
            done.append("wait")
    assert done == ["work"]


class Interrupted:
    """An object that a signal meets as it goes."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_a_signal_that_comes_amid_a_destructor_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt), interrupts.awaited():
        Interrupted()


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupts() as interrupts, interrupts.awaited():
        signal.raise_signal(signal.SIGHUP)


def test_afterwards_signals_do_what_they_did_before() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) not in before
    assert [signal.getsignal(number) for number in SIGNALS] == before
