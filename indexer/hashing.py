# SPDX-License-Identifier: Apache-2.0
"""The key of the request hashes, and the hash chain in plain Python.

The chain here is the reference for the native one (``native/siphash.hpp``, ``native/index.cpp``):

    root        = SipHash-2-4(key; "namespace", len(model), model, len(lora), lora)
    hash(i)     = SipHash-2-4(key; hash(i - 1), number of tokens, tokens as u32, canonical extra keys)

all integers little-endian, lengths and counts 64 bits wide. SipHash-2-4: Aumasson and Bernstein, 2012.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from indexer.errors import HashKeyError

KEY_SIZE_BYTES = 16
_MASK = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class HashKey:
    """The secret of a deployment: hashes mean nothing to anybody without it."""

    secret: bytes

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_SIZE_BYTES:
            raise HashKeyError(f"the hash key has {KEY_SIZE_BYTES} bytes, not {len(self.secret)}")

    def __repr__(self) -> str:
        return f"HashKey(id={self.id!r})"

    @property
    def id(self) -> str:
        """A public name of the key: tells whether two replicas use the same one, and nothing else."""
        return hashlib.sha256(b"pointsman hash key id" + self.secret).hexdigest()[:16]


def load_or_make_key(path: Path) -> HashKey:
    """Read the key file, making it (mode 0600) at first start.

    Two processes that start together agree: the file appears whole, under one winner's name.

    Raises:
        HashKeyError: the file cannot be read or written, or does not hold a key.
    """
    try:
        if not path.exists():
            _make_key_file(path)
        text = path.read_text(encoding="ascii").strip()
        return HashKey(bytes.fromhex(text))
    except (OSError, ValueError) as error:
        raise HashKeyError(f"hash key file {path}: {error}") from error


def _make_key_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="ascii") as file:
        file.write(secrets.token_hex(KEY_SIZE_BYTES) + "\n")
        temporary = Path(file.name)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass  # another process was first; its key counts
    finally:
        temporary.unlink()


def _rotl(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (64 - bits))) & _MASK


def siphash(key: HashKey, message: bytes) -> int:
    """SipHash-2-4 with 64 bits of output."""
    k0, k1 = (int.from_bytes(key.secret[i : i + 8], "little") for i in (0, 8))
    v0, v1, v2, v3 = (
        k0 ^ 0x736F6D6570736575,
        k1 ^ 0x646F72616E646F6D,
        k0 ^ 0x6C7967656E657261,
        k1 ^ 0x7465646279746573,
    )

    def rounds(count: int) -> None:
        nonlocal v0, v1, v2, v3
        for _ in range(count):
            v0 = (v0 + v1) & _MASK
            v1 = _rotl(v1, 13) ^ v0
            v0 = _rotl(v0, 32)
            v2 = (v2 + v3) & _MASK
            v3 = _rotl(v3, 16) ^ v2
            v0 = (v0 + v3) & _MASK
            v3 = _rotl(v3, 21) ^ v0
            v2 = (v2 + v1) & _MASK
            v1 = _rotl(v1, 17) ^ v2
            v2 = _rotl(v2, 32)

    whole = len(message) // 8 * 8
    last = message[whole:].ljust(7, b"\0") + bytes([len(message) & 0xFF])
    for (word,) in struct.iter_unpack("<Q", message[:whole] + last):
        v3 ^= word
        rounds(2)
        v0 ^= word
    v2 ^= 0xFF
    rounds(4)
    return v0 ^ v1 ^ v2 ^ v3


def namespace_root(key: HashKey, model: str, lora: str) -> int:
    """Start of the chain of every prompt in a namespace; ``lora`` is empty for the base model."""
    model_bytes, lora_bytes = model.encode(), lora.encode()
    message = b"namespace" + struct.pack("<Q", len(model_bytes)) + model_bytes
    return siphash(key, message + struct.pack("<Q", len(lora_bytes)) + lora_bytes)


def next_hash(key: HashKey, parent: int, tokens: Sequence[int], extra: bytes) -> int:
    """Hash of a block from that of the one before it."""
    message = struct.pack(f"<QQ{len(tokens)}I", parent, len(tokens), *tokens)
    return siphash(key, message + extra)


def canonical_extra_keys(keys: Iterable[object] | None) -> bytes:
    """Extra keys of one block in the form that is hashed (as ``native/events.hpp`` describes).

    Raises:
        ValueError: a key of a kind that engines do not publish.
    """
    return b"".join(_canonical_key(key) for key in keys or ())


def _canonical_key(key: object) -> bytes:
    if key is None:
        return b"n"
    if isinstance(key, str):
        return _tagged(b"s", key.encode("utf-8", "surrogatepass"))
    if isinstance(key, bytes):
        return _tagged(b"b", key)
    if isinstance(key, int) and not isinstance(key, bool):
        return _tagged(b"m" if key < 0 else b"i", struct.pack("<Q", key & _MASK))
    if isinstance(key, (list, tuple)):
        return b"l" + struct.pack("<I", len(key)) + canonical_extra_keys(key)
    raise ValueError(f"an extra key of type {type(key).__name__}")


def _tagged(tag: bytes, payload: bytes) -> bytes:
    return tag + struct.pack("<I", len(payload)) + payload
