# SPDX-License-Identifier: Apache-2.0
"""A reader of server-sent events that only looks: it is fed the raw pieces of a stream and never changes a byte.

Format: WHATWG HTML, section 9.2.6. Lines end in LF, CRLF or CR, a blank line ends an event. A piece may end anywhere:
inside ``data:``, inside the JSON, or between the two bytes of a CRLF. What is unfinished is kept, up to a bound; an
event above the bound is passed over and counts as content.

Most pieces are whole events that carry neither usage, nor an error, nor the end mark; three substring searches tell
so and nothing is parsed. Inside a JSON string a quote is escaped, so the text of an answer cannot hold ``"usage"``.
"""

from __future__ import annotations

from router.gateway.usage import read_envelope, usage_of
from router.request import Usage

MAX_EVENT_BYTES = 1024 * 1024
_DONE = b"[DONE]"


class EventStream:
    """State of one stream, as far as it was fed.

    Time per piece of n bytes: O(n). Memory: O(``max_event_bytes``).
    """

    __slots__ = (
        "_after_cr",
        "_data",
        "_data_bytes",
        "_error_type",
        "_line",
        "_line_bytes",
        "_max_event_bytes",
        "_open",
        "content_seen",
        "done",
        "error_code",
        "error_seen",
        "usage",
    )

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._line: list[bytes] = []
        self._line_bytes = 0
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._error_type = False
        self._open = False
        self._after_cr = False
        self.usage: Usage | None = None
        """From the last event whose ``usage`` is not null."""
        self.done = False
        """``[DONE]`` was seen."""
        self.error_seen = False
        self.error_code: int | None = None
        """HTTP-like code of the error event, where it has one."""
        self.content_seen = False
        """An event other than an error, the end mark or a lone usage was seen."""

    @property
    def at_boundary(self) -> bool:
        """Whether the stream stands between two events."""
        return not self._open and self._line_bytes == 0

    def feed(self, piece: bytes) -> None:
        """Look at the next bytes of the stream, however they were cut."""
        if self._is_plain_content(piece):
            self.content_seen = True
            return
        if self._after_cr and piece:
            self._after_cr = False
            piece = piece.removeprefix(b"\n")
        if not piece:
            return
        self._after_cr = piece.endswith(b"\r")
        for line in piece.splitlines(keepends=True):
            self._take(line)

    def end(self) -> None:
        """The stream is over; an event that lacks its blank line still counts, as clients read it so."""
        if self._line_bytes:
            self._end_line(b"")
        self._end_event()

    def _is_plain_content(self, piece: bytes) -> bool:
        return (
            piece.startswith(b"data:")
            and piece.endswith(b"\n\n")
            and b'"usage"' not in piece
            and b"error" not in piece
            and _DONE not in piece
            and b"\r" not in piece
            and self.at_boundary
            and not self._after_cr
        )

    def _take(self, line: bytes) -> None:
        """One line with its end, or the unfinished last one."""
        if line[-1] in b"\r\n":
            self._end_line(line.rstrip(b"\r\n"))
            return
        self._line_bytes += len(line)
        if self._line_bytes > self._max_event_bytes:
            self._line.clear()
        else:
            self._line.append(line)

    def _end_line(self, rest: bytes) -> None:
        whole = self._line_bytes + len(rest)
        if self._line_bytes == 0:
            line = rest
        elif whole > self._max_event_bytes:
            line = b"data"  # unreadable: stands for content
        else:
            line = b"".join((*self._line, rest))
        self._line.clear()
        self._line_bytes = 0
        if not line:
            self._end_event()
            return
        self._open = True
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data_bytes += len(value)
            if self._data_bytes <= self._max_event_bytes:
                self._data.append(value.removeprefix(b" "))
            else:
                self._data = [b""]
        elif field == b"event":
            self._error_type = value.strip() == b"error"

    def _end_event(self) -> None:
        if self._data or self._error_type:
            self._judge(b"\n".join(self._data))
        self._data = []
        self._data_bytes = 0
        self._error_type = False
        self._open = False

    def _judge(self, data: bytes) -> None:
        if data.strip() == _DONE:
            self.done = True
            return
        if not self._error_type and b'"usage"' not in data and b"error" not in data:
            self.content_seen = True
            return
        event = read_envelope(data)
        if event is None:
            self._note(error=self._error_type, error_body=None, content=True)
            return
        self.usage = usage_of(event.usage) or self.usage
        self._note(
            error=self._error_type or event.error is not None or event.kind == "error",
            error_body=event.error if isinstance(event.error, dict) else {"code": event.code},
            content=event.choices != [],
        )

    def _note(self, *, error: bool, error_body: dict[str, object] | None, content: bool) -> None:
        if not error:
            self.content_seen = self.content_seen or content
            return
        self.error_seen = True
        code = error_body.get("code") if error_body else None
        if isinstance(code, int) and not isinstance(code, bool):
            self.error_code = code
