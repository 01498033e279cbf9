# SPDX-License-Identifier: Apache-2.0
"""Reads header blocks of HTTP/2 (RFC 7541). What this package writes uses no table and no Huffman code.

The code of appendix B is canonical: sorted by length, then by symbol, each code is the one before plus one. So the
symbols of each length say all of it.
"""

from __future__ import annotations

from collections import deque

Headers = tuple[tuple[bytes, bytes], ...]

_STATIC: Headers = (
    (b":authority", b""), (b":method", b"GET"), (b":method", b"POST"), (b":path", b"/"), (b":path", b"/index.html"),
    (b":scheme", b"http"), (b":scheme", b"https"), (b":status", b"200"), (b":status", b"204"), (b":status", b"206"),
    (b":status", b"304"), (b":status", b"400"), (b":status", b"404"), (b":status", b"500"), (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"), (b"accept-language", b""), (b"accept-ranges", b""), (b"accept", b""),
    (b"access-control-allow-origin", b""), (b"age", b""), (b"allow", b""), (b"authorization", b""),
    (b"cache-control", b""), (b"content-disposition", b""), (b"content-encoding", b""), (b"content-language", b""),
    (b"content-length", b""), (b"content-location", b""), (b"content-range", b""), (b"content-type", b""),
    (b"cookie", b""), (b"date", b""), (b"etag", b""), (b"expect", b""), (b"expires", b""), (b"from", b""),
    (b"host", b""), (b"if-match", b""), (b"if-modified-since", b""), (b"if-none-match", b""), (b"if-range", b""),
    (b"if-unmodified-since", b""), (b"last-modified", b""), (b"link", b""), (b"location", b""), (b"max-forwards", b""),
    (b"proxy-authenticate", b""), (b"proxy-authorization", b""), (b"range", b""), (b"referer", b""), (b"refresh", b""),
    (b"retry-after", b""), (b"server", b""), (b"set-cookie", b""), (b"strict-transport-security", b""),
    (b"transfer-encoding", b""), (b"user-agent", b""), (b"vary", b""), (b"via", b""), (b"www-authenticate", b""),
)  # fmt: skip
_BY_LENGTH: dict[int, bytes] = {
    5: b"012aceiost",
    6: b" %-./3456789=A_bdfghlmnpru",
    7: b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz",
    8: b"&*,;XZ",
    10: b'!"()?',
    11: b"'+|",
    12: b"#>",
    13: b"\x00$@[]~",
    14: b"^}",
    15: b"<`{",
    19: b"\\\xc3\xd0",
    20: b"\x80\x82\x83\xa2\xb8\xc2\xe0\xe2",
    21: b"\x99\xa1\xa7\xac\xb0\xb1\xb3\xd1\xd8\xd9\xe3\xe5\xe6",
    22: b"\x81\x84\x85\x86\x88\x92\x9a\x9c\xa0\xa3\xa4\xa9\xaa\xad\xb2\xb5\xb9\xba\xbb\xbd\xbe\xc4\xc6\xe4\xe8\xe9",
    23: b"\x01\x87\x89\x8a\x8b\x8c\x8d\x8f\x93\x95\x96\x97\x98\x9b\x9d\x9e\xa5\xa6\xa8\xae\xaf\xb4\xb6\xb7\xbc\xbf"
    b"\xc5\xe7\xef",
    24: b"\t\x8e\x90\x91\x94\x9f\xab\xce\xd7\xe1\xec\xed",
    25: b"\xc7\xcf\xea\xeb",
    26: b"\xc0\xc1\xc8\xc9\xca\xcd\xd2\xd5\xda\xdb\xee\xf0\xf2\xf3\xff",
    27: b"\xcb\xcc\xd3\xd4\xd6\xdd\xde\xdf\xf1\xf4\xf5\xf6\xf7\xf8\xfa\xfb\xfc\xfd\xfe",
    28: b"\x02\x03\x04\x05\x06\x07\x08\x0b\x0c\x0e\x0f\x10\x11\x12\x13\x14\x15\x17\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f"
    b"\x7f\xdc\xf9",
    30: b"\n\r\x16",
}
_ENTRY_BYTES = 32
"""What an entry counts beside its name and value (section 4.1)."""
_KEPT_BLOCKS = 256


class HpackError(Exception):
    """A header block that cannot be read; the table is lost, so the connection is over."""


def _codes() -> dict[tuple[int, int], int]:
    codes: dict[tuple[int, int], int] = {}
    code = length = 0
    for bits, symbols in _BY_LENGTH.items():
        code <<= bits - length
        length = bits
        for symbol in symbols:
            codes[bits, code] = symbol
            code += 1
    return codes


_CODES = _codes()


def huffman_decoded(data: bytes) -> bytes:
    """The text of a Huffman code.

    Raises:
        HpackError: not a code, or padding that is not the beginning of the end symbol.
    """
    found = bytearray()
    code = length = 0
    for byte in data:
        for shift in range(7, -1, -1):
            code = code << 1 | (byte >> shift & 1)
            length += 1
            symbol = _CODES.get((length, code))
            if symbol is not None:
                found.append(symbol)
                code = length = 0
            elif length > 30:
                raise HpackError("no Huffman code")
    if length > 7 or code != (1 << length) - 1:
        raise HpackError("bad padding of a Huffman code")
    return bytes(found)


class HeaderDecoder:
    """The receiving side of one connection: every header block of it, in order."""

    def __init__(self, max_table_bytes: int = 4096, max_list_bytes: int = 65_536) -> None:
        """``max_list_bytes``: names and values of one block, so that a short block cannot stand for very much."""
        self._allowed_bytes = self._max_bytes = max_table_bytes
        self._max_list_bytes = max_list_bytes
        self._table: deque[tuple[bytes, bytes]] = deque()
        self._table_bytes = 0
        self._kept: dict[bytes, Headers] = {}
        """Blocks that changed nothing, and what they mean while the table stays as it is: a proxy's are all alike."""
        self._changed = False

    def decode(self, block: bytes) -> Headers:
        """Names and values.

        Raises:
            HpackError: the block is malformed or stands for too much.
        """
        kept = self._kept.get(block)
        if kept is not None:
            return kept
        self._changed = False
        headers = tuple(self._fields(block))
        if self._changed:
            self._kept.clear()
        elif len(self._kept) < _KEPT_BLOCKS:
            self._kept[block] = headers
        return headers

    def _fields(self, block: bytes) -> list[tuple[bytes, bytes]]:
        found: list[tuple[bytes, bytes]] = []
        at, room = 0, self._max_list_bytes
        while at < len(block):
            first = block[at]
            if first & 0x80:
                index, at = _integer(block, at, 7)
                entry = self._entry(index)
            elif first & 0xE0 == 0x20:
                if found:
                    raise HpackError("a change of the table's size within a block")
                size, at = _integer(block, at, 5)
                self._resize(size)
                continue
            else:
                adds = first & 0xC0 == 0x40
                index, at = _integer(block, at, 6 if adds else 4)
                if index:
                    name = self._entry(index)[0]
                else:
                    name, at = _text(block, at)
                value, at = _text(block, at)
                entry = (name, value)
                if adds:
                    self._add(entry)
            room -= len(entry[0]) + len(entry[1]) + _ENTRY_BYTES
            if room < 0:
                raise HpackError("too many headers")
            found.append(entry)
        return found

    def _entry(self, index: int) -> tuple[bytes, bytes]:
        if 1 <= index <= len(_STATIC):
            return _STATIC[index - 1]
        index -= len(_STATIC) + 1
        if not 0 <= index < len(self._table):
            raise HpackError("no such entry in the table")
        return self._table[index]

    def _add(self, entry: tuple[bytes, bytes]) -> None:
        self._changed = True
        self._table.appendleft(entry)
        self._table_bytes += len(entry[0]) + len(entry[1]) + _ENTRY_BYTES
        self._evict()

    def _resize(self, size: int) -> None:
        if size > self._allowed_bytes:
            raise HpackError("a table larger than allowed")
        self._changed = True
        self._max_bytes = size
        self._evict()

    def _evict(self) -> None:
        while self._table_bytes > self._max_bytes:
            name, value = self._table.pop()
            self._table_bytes -= len(name) + len(value) + _ENTRY_BYTES


def _integer(block: bytes, at: int, prefix_bits: int) -> tuple[int, int]:
    """(value, index behind it), section 5.1."""
    limit = (1 << prefix_bits) - 1
    value = block[at] & limit
    at += 1
    if value < limit:
        return value, at
    shift = 0
    while True:
        if at >= len(block) or shift > 28:
            raise HpackError("an integer that does not end")
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _text(block: bytes, at: int) -> tuple[bytes, int]:
    if at >= len(block):
        raise HpackError("a block that ends too soon")
    coded = block[at] & 0x80
    length, at = _integer(block, at, 7)
    data = block[at : at + length]
    if len(data) < length:
        raise HpackError("a text that ends too soon")
    return huffman_decoded(data) if coded else data, at + length


def literal(name: bytes, value: bytes) -> bytes:
    """A header that no table keeps, as bytes of a block."""
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(length: int) -> bytes:
    if length < 127:
        return bytes((length,))
    rest, encoded = length - 127, bytearray(b"\x7f")
    while rest >= 0x80:
        encoded.append(rest & 0x7F | 0x80)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded)
