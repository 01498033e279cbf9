# SPDX-License-Identifier: Apache-2.0
"""The server's side of one HTTP/2 connection (RFC 9113), without I/O: bytes in, calls to streams. ``sending`` answers.

Streams are those of gRPC: one header block, data both ways, trailers at the end. Nothing is pushed, priorities are
ignored. Both directions obey flow control: what does not fit into the peer's windows waits, and a stream whose answers
wait is given no room to send more, so no stream holds more than its window and what answers it.
"""

from __future__ import annotations

from collections.abc import Callable

from router.extproc.http2 import frames as f
from router.extproc.http2.frames import ConnectionFaultError
from router.extproc.http2.hpack import HeaderDecoder, Headers, HpackError
from router.extproc.http2.sending import Sender
from router.extproc.http2.streams import STREAM_WINDOW_BYTES, Stream, StreamEvents

CONNECTION_WINDOW_BYTES = 2**30
"""Of all streams together: no limit of its own beside that of each stream."""
_MAX_BLOCK_BYTES = 65_536
_MAX_IDLE_FRAMES = 10_000
"""Frames in a row that carry nothing for a stream; only a flood has so many."""


class Connection:
    """Feed it with ``receive``, send what ``out.take_output`` returns."""

    def __init__(self, accept: Callable[[Stream, Headers], StreamEvents]) -> None:
        """``accept`` is called for each new stream with its headers, and may answer at once."""
        self._accept = accept
        self._decoder = HeaderDecoder(max_list_bytes=_MAX_BLOCK_BYTES)
        self._rest = b""
        self._greeted = self._set = False
        self._block: tuple[int, int, bytearray] | None = None
        """Stream, flags and bytes of a header block that goes on in the next frame."""
        self._last_id = 0
        self._taken_bytes = 0
        self._idle_frames = 0
        self.streams: dict[int, Stream] = {}
        greeting = [
            f.settings_frame(
                {f.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES, f.MAX_HEADER_LIST_SIZE: _MAX_BLOCK_BYTES}
            ),
            f.window_update(0, CONNECTION_WINDOW_BYTES - f.DEFAULT_WINDOW_BYTES),
        ]
        self.out = Sender(self.streams, greeting)
        """The other half."""
        self.over = False
        """A fault has ended it: send the output, then close."""
        self.heard = 0
        """Counts calls of ``receive``: whether a silent peer is there."""

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

    def refuse_new(self) -> None:
        """Tell the peer to open no more streams here.

        Those that are under way are served: where one is refused, some proxies fail the request that it is for.
        """
        if not self.over:
            self.out.frame(f.goaway(f.MAX_STREAM_ID, f.NO_ERROR))

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
            self.out.frame(f.window_update(0, self._taken_bytes))
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
            self.out.give_room(stream)

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
            stream = self.streams[stream_id] = Stream(stream_id, self.out.first_window)
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
                self.out.frame(f.ping(payload, ack=True))
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
        self.out.settings(f.read_settings(payload))

    def _window_update(self, stream_id: int, payload: bytes) -> None:
        _need(len(payload) == 4, "WINDOW_UPDATE")
        more = f.word(payload) & 0x7FFF_FFFF
        stream = self._known(stream_id) if stream_id else None
        if stream is not None or not stream_id:
            self.out.wider(stream, more)
        elif more == 0:
            raise ConnectionFaultError(f.FLOW_CONTROL_ERROR, "a window out of bounds")

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

    def _drop(self, stream: Stream) -> None:
        self.out.forget(stream)
        events, stream.events = stream.events, None
        if self.streams.pop(stream.id, None) is not None and events is not None:
            events.gone()

    def _fail(self, code: int, text: str) -> None:
        self.out.frame(f.goaway(self._last_id, code, text))
        self.lost()


def _need(right: bool, name: str) -> None:
    if not right:
        raise ConnectionFaultError(f.FRAME_SIZE_ERROR, f"a malformed {name}")
