# SPDX-License-Identifier: Apache-2.0
"""The sending half of an HTTP/2 connection: answers within the peer's windows, behind what waits already. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from router.extproc.http2 import frames as f
from router.extproc.http2.frames import ConnectionFaultError
from router.extproc.http2.streams import STREAM_WINDOW_BYTES, Stream


class Sender:
    """Frames that are to be sent, and data that may not be sent yet."""

    def __init__(self, streams: dict[int, Stream], output: list[bytes]) -> None:
        """``streams``: those that are open, by id; an answer that ends takes its stream away. ``output`` goes first."""
        self._streams = streams
        self._output: list[bytes | memoryview] = [*output]
        self._peer_window = f.DEFAULT_WINDOW_BYTES
        self._peer_frame_bytes = f.MIN_FRAME_BYTES
        self._send_window = f.DEFAULT_WINDOW_BYTES
        self._waiting: dict[int, Stream] = {}
        self.room = True
        """False: the network does not take what was sent; data waits here until ``has_room``."""

    # Answers

    def begin(self, stream: Stream, block: bytes) -> None:
        """The headers of the answer; small enough for one frame."""
        self._output.append(f.frame_header(len(block), f.HEADERS, f.END_HEADERS, stream.id) + block)

    def send(self, stream: Stream, parts: Iterable[bytes]) -> None:
        """Data of the answer, behind what waits already."""
        data = b"".join(parts)
        length = len(data)
        fits = length <= stream.send_window and length <= self._send_window and self.room
        if fits and not stream.queue:
            self._write(stream, data)
            return
        if stream.queue is None:
            stream.queue = deque()
        stream.queue.append(data)
        stream.queued_bytes += length
        self._waiting[stream.id] = stream
        self._flush(stream)

    def end(self, stream: Stream, block: bytes) -> None:
        """The trailers, behind everything; the stream is over then."""
        stream.trailers = block
        if not stream.queue:
            self._close(stream)

    # What else is said

    def frame(self, data: bytes) -> None:
        """Any other frame, whole."""
        self._output.append(data)

    def probe(self) -> None:
        """Make the peer say something."""
        self._output.append(f.ping(b"pointsmn", ack=False))

    def has_room(self) -> None:
        """The network takes more."""
        self.room = True
        self._pump()

    def take_output(self) -> list[bytes | memoryview]:
        """What is to be sent now."""
        output, self._output = self._output, []
        return output

    @property
    def has_output(self) -> bool:
        return bool(self._output)

    # What the peer allows

    @property
    def first_window(self) -> int:
        """That of a new stream."""
        return self._peer_window

    def settings(self, values: Iterable[tuple[int, int]]) -> None:
        """The peer's settings have come, and are acknowledged.

        Raises:
            ConnectionFaultError: a value out of bounds.
        """
        for name, value in values:
            if name == f.INITIAL_WINDOW_SIZE:
                if value > f.MAX_WINDOW_BYTES:
                    raise ConnectionFaultError(f.FLOW_CONTROL_ERROR, "a window above the limit")
                more, self._peer_window = value - self._peer_window, value
                for stream in self._streams.values():
                    stream.send_window += more
            elif name == f.MAX_FRAME_SIZE:
                if not f.MIN_FRAME_BYTES <= value <= f.MAX_FRAME_BYTES:
                    raise ConnectionFaultError(f.PROTOCOL_ERROR, "a frame size out of bounds")
                self._peer_frame_bytes = value
        self._output.append(f.frame_header(0, f.SETTINGS, f.ACK, 0))
        self._pump()

    def wider(self, stream: Stream | None, more: int) -> None:
        """The peer takes so many more bytes: on a stream, or (None) on all of them together.

        Raises:
            ConnectionFaultError: none, or more than a window can be.
        """
        window = self._send_window if stream is None else stream.send_window
        if more == 0 or window + more > f.MAX_WINDOW_BYTES:
            raise ConnectionFaultError(f.FLOW_CONTROL_ERROR, "a window out of bounds")
        if stream is None:
            self._send_window += more
            self._pump()
        else:
            stream.send_window += more
            if stream.id in self._waiting:
                self._flush(stream)

    def give_room(self, stream: Stream) -> None:
        """Let the peer send again what was taken, unless it does not take the answers."""
        if stream.taken_bytes * 2 >= STREAM_WINDOW_BYTES and stream.queued_bytes < STREAM_WINDOW_BYTES:
            self._output.append(f.window_update(stream.id, stream.taken_bytes))
            stream.receive_window += stream.taken_bytes
            stream.taken_bytes = 0

    def forget(self, stream: Stream) -> None:
        """Nothing more goes out on it."""
        self._waiting.pop(stream.id, None)

    def _pump(self) -> None:
        for stream in [*self._waiting.values()]:
            self._flush(stream)

    def _flush(self, stream: Stream) -> None:
        while stream.queue and self.room:
            size = min(len(stream.queue[0]), stream.send_window, self._send_window)
            if size <= 0 < len(stream.queue[0]):
                return
            first = stream.queue.popleft()
            if size < len(first):
                stream.queue.appendleft(first[size:])
            stream.queued_bytes -= size
            self._write(stream, first[:size])
        if not stream.queue:
            self._waiting.pop(stream.id, None)
            self.give_room(stream)
            if stream.trailers is not None:
                self._close(stream)

    def _write(self, stream: Stream, data: bytes) -> None:
        length, most = len(data), self._peer_frame_bytes
        stream.send_window -= length
        self._send_window -= length
        if length <= most:
            self._output += (f.frame_header(length, f.DATA, 0, stream.id), data)
            return
        view = memoryview(data)
        for start in range(0, length, most):
            part = view[start : start + most]
            self._output += (f.frame_header(len(part), f.DATA, 0, stream.id), part)

    def _close(self, stream: Stream) -> None:
        block, stream.events = stream.trailers or b"", None
        flags = f.END_HEADERS | f.END_STREAM
        self._output.append(f.frame_header(len(block), f.HEADERS, flags, stream.id) + block)
        if self._streams.pop(stream.id, None) is not None and not stream.no_more_in:
            self._output.append(f.reset(stream.id, f.NO_ERROR))  # section 8.1: the rest is not wanted
