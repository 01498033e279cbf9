# SPDX-License-Identifier: Apache-2.0
"""The server's side of one HTTP/2 connection (RFC 9113), without I/O: bytes in, calls to streams, bytes out.

Streams are those of gRPC: one header block, data both ways, trailers at the end. Nothing is pushed, priorities are
ignored. Both directions obey flow control: what does not fit into the peer's windows waits here, and a stream whose
answers wait is given no room to send more, so no stream holds more than its window and what answers it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from router.extproc.http2 import frames as f
from router.extproc.http2.frames import ConnectionFaultError
from router.extproc.http2.hpack import HeaderDecoder, Headers, HpackError

STREAM_WINDOW_BYTES = 4 * 2**20
"""What a peer may send on one stream ahead of us."""
CONNECTION_WINDOW_BYTES = 2**30
"""Of all streams together: no limit of its own beside that of each stream."""
_MAX_BLOCK_BYTES = 65_536
_MAX_IDLE_FRAMES = 10_000
"""Frames in a row that carry nothing for a stream; only a flood has so many."""


class StreamEvents(Protocol):
    """Whoever serves a stream."""

    def data(self, data: bytes) -> None:
        """Bytes have come."""

    def ended(self) -> None:
        """No more will come."""

    def gone(self) -> None:
        """The peer or the connection is gone; nothing can be sent any more."""


class Stream:
    """What the connection keeps of one stream."""

    __slots__ = (
        "events",
        "id",
        "no_more_in",
        "queue",
        "queued_bytes",
        "receive_window",
        "send_window",
        "taken_bytes",
        "trailers",
    )

    def __init__(self, stream_id: int, send_window: int) -> None:
        self.id = stream_id
        self.send_window = send_window
        self.receive_window = STREAM_WINDOW_BYTES
        self.taken_bytes = 0
        """Received and not yet given back to the peer's window."""
        self.queue: deque[bytes] | None = None
        """What waits to be sent; seldom anything does."""
        self.queued_bytes = 0
        self.trailers: bytes | None = None
        """To be sent behind the queue."""
        self.no_more_in = False
        self.events: StreamEvents | None = None


class Connection:
    """Feed it with ``receive``, send what ``take_output`` returns."""

    def __init__(self, accept: Callable[[Stream, Headers], StreamEvents]) -> None:
        """``accept`` is called for each new stream with its headers, and may answer at once."""
        self._accept = accept
        self._decoder = HeaderDecoder(max_list_bytes=_MAX_BLOCK_BYTES)
        self._rest = b""
        self._greeted = self._set = False
        self._block: tuple[int, int, bytearray] | None = None
        """Stream, flags and bytes of a header block that goes on in the next frame."""
        self._last_id = 0
        self._peer_window = f.DEFAULT_WINDOW_BYTES
        self._peer_frame_bytes = f.MIN_FRAME_BYTES
        self._send_window = f.DEFAULT_WINDOW_BYTES
        self._taken_bytes = 0
        self._idle_frames = 0
        self._waiting: dict[int, Stream] = {}
        self._output: list[bytes] = [
            f.settings_frame(
                {f.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES, f.MAX_HEADER_LIST_SIZE: _MAX_BLOCK_BYTES}
            ),
            f.window_update(0, CONNECTION_WINDOW_BYTES - f.DEFAULT_WINDOW_BYTES),
        ]
        self.streams: dict[int, Stream] = {}
        self.over = False
        """A fault has ended it: send the output, then close."""
        self.heard = 0
        """Counts calls of ``receive``: whether a silent peer is there."""
        self.room = True
        """False: the network does not take what was sent; data waits here until ``has_room``."""

    # In

    def receive(self, data: bytes) -> None:
        """The next bytes of the peer."""
        self.heard += 1
        if self.over:
            return
        try:
            self._frames(self._rest + data if self._rest else data)
        except ConnectionFaultError as fault:
            self._fail(fault.code, str(fault))
        except HpackError as fault:
            self._fail(f.COMPRESSION_ERROR, str(fault))

    def lost(self) -> None:
        """There is no connection any more."""
        self.over = True
        for stream in [*self.streams.values()]:
            self._drop(stream)

    def _frames(self, data: bytes) -> None:
        at, end = 0, len(data)
        if not self._greeted:
            if not data.startswith(f.PREFACE):
                if not f.PREFACE.startswith(data):
                    raise ConnectionFaultError(f.PROTOCOL_ERROR, "not HTTP/2")
                self._rest = data
                return
            self._greeted, at = True, len(f.PREFACE)
        while end - at >= f.HEADER_BYTES and not self.over:
            length, kind, flags, stream_id = f.read_header(data, at)
            if length > f.MIN_FRAME_BYTES:
                raise ConnectionFaultError(f.FRAME_SIZE_ERROR, "a frame above the limit")
            start = at + f.HEADER_BYTES
            if end - start < length:
                break
            at = start + length
            self._frame(kind, flags, stream_id, data[start:at])
        self._rest = data[at:]

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is not None:
            if kind != f.CONTINUATION or stream_id != self._block[0]:
                raise ConnectionFaultError(f.PROTOCOL_ERROR, "a header block that is not continued")
            self._continue_block(self._block, flags, payload)
            return
        if not self._set and kind != f.SETTINGS:
            raise ConnectionFaultError(f.PROTOCOL_ERROR, "no settings at the beginning")
        if kind == f.DATA:
            self._data(flags, stream_id, payload)
        elif kind == f.HEADERS:
            self._headers(flags, stream_id, payload)
        else:
            self._control(kind, flags, stream_id, payload)

    def _data(self, flags: int, stream_id: int, payload: bytes) -> None:
        stream = self._known(stream_id)
        length = len(payload)
        self._taken_bytes += length
        if self._taken_bytes >= CONNECTION_WINDOW_BYTES // 2:
            self._output.append(f.window_update(0, self._taken_bytes))
            self._taken_bytes = 0
        self._count_idle(length == 0 and not flags & f.END_STREAM)
        if stream is None:
            return  # it was reset by us, and the peer did not know yet
        if stream.no_more_in:
            raise ConnectionFaultError(f.STREAM_CLOSED, "data after the end of a stream")
        stream.receive_window -= length
        if stream.receive_window < 0:
            raise ConnectionFaultError(f.FLOW_CONTROL_ERROR, "more data than the window allows")
        stream.taken_bytes += length
        if flags & f.PADDED:
            payload = f.unpadded(payload, flags)
        if payload and stream.events is not None:
            stream.events.data(payload)
        if flags & f.END_STREAM:
            self._end_in(stream)
        else:
            self._give_room(stream)

    def _headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        payload = f.unpadded(payload, flags)
        if flags & f.HAS_PRIORITY:
            payload = payload[5:]
        if not stream_id & 1:
            raise ConnectionFaultError(f.PROTOCOL_ERROR, "a stream that no client can open")
        if flags & f.END_HEADERS:
            self._whole_block(stream_id, flags, payload)
        else:
            self._block = (stream_id, flags, bytearray(payload))

    def _continue_block(self, begun: tuple[int, int, bytearray], flags: int, payload: bytes) -> None:
        stream_id, first_flags, block = begun
        block += payload
        self._count_idle(not payload)
        if len(block) > _MAX_BLOCK_BYTES:
            raise ConnectionFaultError(f.ENHANCE_YOUR_CALM, "too many headers")
        if flags & f.END_HEADERS:
            self._block = None
            self._whole_block(stream_id, first_flags, bytes(block))

    def _whole_block(self, stream_id: int, flags: int, block: bytes) -> None:
        headers = self._decoder.decode(block)  # always, since the table must follow
        self._idle_frames = 0
        if stream_id > self._last_id:
            self._last_id = stream_id
            stream = self.streams[stream_id] = Stream(stream_id, self._peer_window)
            events = self._accept(stream, headers)
            if stream_id in self.streams:
                stream.events = events
        else:
            known = self.streams.get(stream_id)
            if known is None:
                return
            stream = known
            if stream.no_more_in or not flags & f.END_STREAM:
                raise ConnectionFaultError(f.PROTOCOL_ERROR, "headers that are no trailers")
        if flags & f.END_STREAM:
            self._end_in(stream)

    def _control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        self._count_idle(True)
        if kind == f.WINDOW_UPDATE:
            self._window_update(stream_id, payload)
        elif kind == f.RST_STREAM:
            _need(len(payload) == 4, "RST_STREAM")
            stream = self._known(stream_id)
            if stream is not None:
                self._drop(stream)
        elif kind == f.SETTINGS:
            self._settings(flags, stream_id, payload)
        elif kind == f.PING:
            _need(len(payload) == 8 and stream_id == 0, "PING")
            if not flags & f.ACK:
                self._output.append(f.ping(payload, ack=True))
        elif kind == f.GOAWAY:
            _need(len(payload) >= 8 and stream_id == 0, "GOAWAY")
        elif kind == f.PRIORITY:
            _need(len(payload) == 5 and stream_id != 0, "PRIORITY")
        elif kind in (f.PUSH_PROMISE, f.CONTINUATION):
            raise ConnectionFaultError(f.PROTOCOL_ERROR, "a frame that has no place here")

    def _settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        _need(stream_id == 0 and len(payload) % 6 == 0, "SETTINGS")
        if flags & f.ACK:
            _need(not payload, "SETTINGS")
            return
        self._set = True
        for name, value in f.read_settings(payload):
            if name == f.INITIAL_WINDOW_SIZE:
                if value > f.MAX_WINDOW_BYTES:
                    raise ConnectionFaultError(f.FLOW_CONTROL_ERROR, "a window above the limit")
                more, self._peer_window = value - self._peer_window, value
                for stream in self.streams.values():
                    stream.send_window += more
            elif name == f.MAX_FRAME_SIZE:
                if not f.MIN_FRAME_BYTES <= value <= f.MAX_FRAME_BYTES:
                    raise ConnectionFaultError(f.PROTOCOL_ERROR, "a frame size out of bounds")
                self._peer_frame_bytes = value
        self._output.append(f.frame_header(0, f.SETTINGS, f.ACK, 0))
        self._pump()

    def _window_update(self, stream_id: int, payload: bytes) -> None:
        _need(len(payload) == 4, "WINDOW_UPDATE")
        more = f.word(payload) & 0x7FFF_FFFF
        stream = self._known(stream_id) if stream_id else None
        window = self._send_window if not stream_id else stream.send_window if stream is not None else 0
        if more == 0 or window + more > f.MAX_WINDOW_BYTES:
            raise ConnectionFaultError(f.FLOW_CONTROL_ERROR, "a window out of bounds")
        if not stream_id:
            self._send_window += more
            self._pump()
        elif stream is not None:
            stream.send_window += more
            if stream_id in self._waiting:
                self._flush(stream)

    def _known(self, stream_id: int) -> Stream | None:
        """A stream that is open; None for one that was."""
        stream = self.streams.get(stream_id)
        if stream is None and (stream_id > self._last_id or not stream_id & 1):
            raise ConnectionFaultError(f.PROTOCOL_ERROR, "a frame of a stream that was never opened")
        return stream

    def _count_idle(self, idle: bool) -> None:
        self._idle_frames = self._idle_frames + 1 if idle else 0
        if self._idle_frames > _MAX_IDLE_FRAMES:
            raise ConnectionFaultError(f.ENHANCE_YOUR_CALM, "too many frames that carry nothing")

    def _end_in(self, stream: Stream) -> None:
        if stream.no_more_in:
            raise ConnectionFaultError(f.STREAM_CLOSED, "a stream that ends twice")
        stream.no_more_in = True
        if stream.events is not None and stream.id in self.streams:
            stream.events.ended()

    def _give_room(self, stream: Stream) -> None:
        """Let the peer send again what was taken, unless it does not take the answers."""
        if stream.taken_bytes * 2 >= STREAM_WINDOW_BYTES and stream.queued_bytes < STREAM_WINDOW_BYTES:
            self._output.append(f.window_update(stream.id, stream.taken_bytes))
            stream.receive_window += stream.taken_bytes
            stream.taken_bytes = 0

    # Out

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

    def refuse_new(self) -> None:
        """Tell the peer to open no more streams here.

        Those that are under way are served: where one is refused, some proxies fail the request that it is for.
        """
        if not self.over:
            self._output.append(f.goaway(f.MAX_STREAM_ID, f.NO_ERROR))

    def probe(self) -> None:
        """Make the peer say something."""
        self._output.append(f.ping(b"pointsmn", ack=False))

    def has_room(self) -> None:
        """The network takes more."""
        self.room = True
        self._pump()

    def take_output(self) -> list[bytes]:
        """What is to be sent now."""
        output, self._output = self._output, []
        return output

    @property
    def has_output(self) -> bool:
        return bool(self._output)

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
            self._give_room(stream)
            if stream.trailers is not None:
                self._close(stream)

    def _write(self, stream: Stream, data: bytes) -> None:
        length, most = len(data), self._peer_frame_bytes
        stream.send_window -= length
        self._send_window -= length
        if length <= most:
            self._output += (f.frame_header(length, f.DATA, 0, stream.id), data)
            return
        for start in range(0, length, most):
            part = data[start : start + most]
            self._output += (f.frame_header(len(part), f.DATA, 0, stream.id), part)

    def _close(self, stream: Stream) -> None:
        block, stream.events = stream.trailers or b"", None
        flags = f.END_HEADERS | f.END_STREAM
        self._output.append(f.frame_header(len(block), f.HEADERS, flags, stream.id) + block)
        if self.streams.pop(stream.id, None) is not None and not stream.no_more_in:
            self._output.append(f.reset(stream.id, f.NO_ERROR))  # section 8.1: the rest is not wanted

    def _drop(self, stream: Stream) -> None:
        self._waiting.pop(stream.id, None)
        events, stream.events = stream.events, None
        if self.streams.pop(stream.id, None) is not None and events is not None:
            events.gone()

    def _fail(self, code: int, text: str) -> None:
        self._output.append(f.goaway(self._last_id, code, text))
        self.lost()


def _need(right: bool, name: str) -> None:
    if not right:
        raise ConnectionFaultError(f.FRAME_SIZE_ERROR, f"a malformed {name}")
