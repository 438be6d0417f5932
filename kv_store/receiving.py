"""Bytes from a socket, as many as were asked for."""

from collections.abc import Callable


def receive_exactly(receive_some: Callable[[memoryview], int], into: memoryview) -> memoryview:
    """Fills `into`, however few bytes come at a time, and returns it.

    receive_some: fills the start of what is left, as `socket.recv_into` does, and raises OSError if that takes too
    long. Raises ConnectionError if the other side hangs up.
    """
    left = into
    while left:
        num_received = receive_some(left)
        if not num_received:
            raise ConnectionError("the other side has hung up")
        left = left[num_received:]
    return into
