"""Messages between two processes of a run: whole, in their order, and the end after the last."""

from __future__ import annotations

import itertools
import socket
import threading
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.worker.protocol import Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a channel."""
    one, other = (Channel(end.detach()) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_messages_of_every_size_arrive_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    """Also those that no socket holds at once."""
    one, other = ends
    messages = [(number, b"x" * size) for number, size in enumerate((0, 1, 70_000, 3_000_000, 5))]
    threading.Thread(target=lambda: [one.send(message) for message in (*messages, "last")]).start()
    assert [other.receive() for _ in messages] == messages
    assert other.receive() == "last"


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=200), max_size=8), st.lists(st.integers(1, 60), min_size=1))
def test_messages_arrive_however_their_bytes_are_divided(
    messages: list[bytes], pieces: list[int]
) -> None:
    """A stream knows no messages: what is read may end in the midst of one."""
    read, written = socket.socketpair()
    sender = Channel(written.detach())
    for message in messages:
        sender.send(message)
    sender.close()
    raw = b"".join(iter(lambda: read.recv(1 << 16), b""))
    read.close()
    again, theirs = socket.socketpair()
    receiver = Channel(theirs.detach())
    threading.Thread(target=_send_in_pieces, args=(again, raw, pieces)).start()
    assert [receiver.receive() for _ in messages] == messages
    with pytest.raises(EOFError):
        receiver.receive()


def _send_in_pieces(to: socket.socket, raw: bytes, pieces: list[int]) -> None:
    with to:
        for size in itertools.cycle(pieces):
            if not raw:
                return
            to.sendall(raw[:size])
            raw = raw[size:]


def test_a_large_message_is_not_kept(ends: tuple[Channel, Channel]) -> None:
    """A worker that has sent a trace may send nothing more for hours."""
    one, other = ends
    threading.Thread(target=one.send, args=(b"x" * 8_000_000,)).start()
    tracemalloc.start()
    try:
        assert len(other.receive()) == 8_000_000
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


def test_the_end_comes_after_what_was_sent(ends: tuple[Channel, Channel]) -> None:
    """The sender is gone, and has not even read what was sent to it."""
    one, other = ends
    other.send("never read")
    one.send("before the end")
    one.close()
    assert other.receive() == "before the end"
    with pytest.raises((EOFError, ConnectionResetError)):
        other.receive()


def test_a_message_that_cannot_be_read_takes_no_other_along(ends: tuple[Channel, Channel]) -> None:
    """Its class is not known here, say."""
    one, other = ends
    one.send(_Unreadable())
    one.send("next")
    with pytest.raises(LookupError):
        other.receive()
    assert other.receive() == "next"


class _Unreadable:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return _refuse, ("as asked",)


def _refuse(why: str) -> None:
    raise LookupError(why)
