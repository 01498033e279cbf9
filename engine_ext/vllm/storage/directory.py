# SPDX-License-Identifier: Apache-2.0
"""The block files below one root: written, read and found together with other workers. I/O threads only.

Files appear by rename and disappear by unlink while the ledger is held, so their order is one for all workers. They
never change in between, and an open file stays whole when another worker unlinks it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_ext.vllm.storage.block_file import HEADER_BYTES, encode_header, find_defect
from engine_ext.vllm.storage.catalogue import FileId
from engine_ext.vllm.storage.errors import BlockDefective, BlockMissing, LedgerBusy
from engine_ext.vllm.storage.known import KnownFiles
from engine_ext.vllm.storage.room import Reservation, Room
from engine_ext.vllm.storage.value import Use, Weight

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One block to write: the content of its file, with room for the header in front."""

    key: bytes
    content: memoryview
    weight: Weight


class BlockDirectory:
    """`fsync` is done before a file appears."""

    def __init__(
        self,
        root: Path,
        fingerprint_digest: bytes,
        block_bytes: int,
        known: KnownFiles,
        room: Room,
        *,
        fsync: bool,
    ) -> None:
        self.root = root
        self.block_bytes = block_bytes
        self.file_bytes = HEADER_BYTES + block_bytes
        self._digest = fingerprint_digest
        self._known = known
        self._room = room
        self._fsync = fsync

    def path_of(self, file: FileId) -> Path:
        return self.root / file.folder / file.name[:2] / file.name

    def read(self, key: bytes, buffer: memoryview, weight: Weight) -> memoryview:
        """The block's bytes inside `buffer` (of `file_bytes`), verified. Counts as a use.

        Raises:
            BlockMissing, BlockDefective: and the file is forgotten.
            OSError: the file system failed.
        """
        file = self._known.file_of(key)
        path = self.path_of(file)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._known.forget(file)
            raise BlockMissing(file.name) from None
        try:
            status = os.fstat(fd)
            got = _read_whole(fd, buffer) if status.st_size == self.file_bytes else 0
            defect = find_defect(buffer, got, self._digest, key, self.block_bytes)
            if defect is None:
                use = self._next_use(status, weight)
                with contextlib.suppress(
                    OSError
                ):  # another user's file: its own workers say what it is worth
                    os.utime(fd, ns=(use.to_mtime_ns(), use.to_mtime_ns()))
                self._refresh(file, status, use)
        finally:
            os.close(fd)
        if defect is not None:
            self._discard(file, path, status)
            raise BlockDefective(f"{file.name}: {defect.value}")
        return buffer[HEADER_BYTES:]

    def probe(self, key: bytes) -> bool:
        """Whether the file is there now."""
        file = self._known.file_of(key)
        started_s = time.monotonic()
        try:
            status = self.path_of(file).stat()
        except FileNotFoundError:
            self._known.forget(file, unless_seen_since_s=started_s)
            return False
        self._refresh(file, status, Use.from_mtime_ns(status.st_mtime_ns))
        return status.st_size == self.file_bytes

    def write(self, blocks: Sequence[Outgoing], still_wanted: Callable[[], bool]) -> int:
        """Writes those that are not there yet, after evicting for them; how many appeared.

        None of them appears if `still_wanted` has become false meanwhile.

        Raises:
            NoRoom: they exceed the capacity.
            LedgerBusy, OSError: what had not appeared leaves nothing behind.
        """
        missing = [block for block in blocks if not self._already_there(block)]
        if not missing:
            return 0
        try:
            return self._write(missing, still_wanted)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
        # The disk is smaller than the capacity, or others fill it: as much as is to be written makes way.
        with self._room.ledger.held():
            self._room.enter(-self._room.evict(len(missing) * self.file_bytes))
        return self._write(missing, still_wanted)

    def _write(self, missing: Sequence[Outgoing], still_wanted: Callable[[], bool]) -> int:
        with (
            self._room.reserve(len(missing) * self.file_bytes) as reservation,
            contextlib.ExitStack() as stack,
        ):
            aside = [(block, stack.enter_context(self._written_aside(block))) for block in missing]
            with self._room.ledger.held():
                try:
                    if still_wanted():
                        self._commit(aside, reservation)
                finally:
                    self._room.settle(reservation)
        return reservation.used_bytes // self.file_bytes

    @contextlib.contextmanager
    def _written_aside(self, block: Outgoing) -> Iterator[Path]:
        """The whole file under a name that nobody looks for; gone at the end."""
        shelf = self.path_of(self._known.file_of(block.key)).parent
        aside = shelf / f".{block.key.hex()[:32]}.{secrets.token_hex(8)}.tmp"
        block.content[:HEADER_BYTES] = encode_header(self._digest, block.key, block.content[HEADER_BYTES:])
        mtime_ns = _first_use(block).to_mtime_ns()
        shelf.mkdir(parents=True, exist_ok=True)
        fd = os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            try:
                left = block.content
                while left:
                    left = left[os.write(fd, left) :]
                if self._fsync:
                    os.fsync(fd)
                os.utime(fd, ns=(mtime_ns, mtime_ns))
            finally:
                os.close(fd)
            yield aside
        finally:
            with contextlib.suppress(FileNotFoundError):
                aside.unlink()

    def _commit(self, aside: Sequence[tuple[Outgoing, Path]], reservation: Reservation) -> None:
        """Renames into place what nobody else has put there meanwhile. Hold the ledger."""
        for block, path in aside:
            file = self._known.file_of(block.key)
            target = self.path_of(file)
            if target.exists():
                continue
            use = Use.from_mtime_ns(path.stat().st_mtime_ns)
            path.rename(target)
            reservation.used_bytes += self.file_bytes
            self._known.seen(file, self.file_bytes, use)

    def _already_there(self, block: Outgoing) -> bool:
        """A block that is stored was computed again: its bytes are equal, and it was used."""
        file = self._known.file_of(block.key)
        path = self.path_of(file)
        try:
            status = path.stat()
            if status.st_size != self.file_bytes:
                self._discard(file, path, status)
                return False
            use = self._next_use(status, block.weight)
            with contextlib.suppress(PermissionError):
                os.utime(path, ns=(use.to_mtime_ns(), use.to_mtime_ns()))
        except FileNotFoundError:
            return False
        self._refresh(file, status, use)
        return True

    def _next_use(self, status: os.stat_result, weight: Weight) -> Use:
        use = Use.from_mtime_ns(status.st_mtime_ns)
        return use.again(time.time(), weight.rebuild_s, self._known.half_life_s)

    def _refresh(self, file: FileId, status: os.stat_result, use: Use) -> None:
        """A file that was found. An unknown one is looked at again while nobody can be evicting it."""
        if self._known.get(file) is not None:
            self._known.seen(file, status.st_size, use)
            return
        with contextlib.suppress(FileNotFoundError, LedgerBusy), self._room.ledger.held():
            again = self.path_of(file).stat()
            self._known.seen(file, again.st_size, Use.from_mtime_ns(again.st_mtime_ns))

    def _discard(self, file: FileId, path: Path, status: os.stat_result) -> None:
        """Removes a defective file, unless another one has its place by now."""
        with self._room.ledger.held():
            try:
                if not os.path.samestat(path.stat(), status):
                    return
                self._room.removals.note(file)
                path.unlink()
                self._room.enter(-status.st_size)
            except FileNotFoundError:
                pass
            self._known.forget(file)


def _first_use(block: Outgoing) -> Use:
    return Use(int(time.time()), block.weight.rebuild_s, block.weight.depth)


def _read_whole(fd: int, buffer: memoryview) -> int:
    got = 0
    while got < len(buffer):
        count = os.readv(fd, [buffer[got:]])
        if count == 0:
            break
        got += count
    return got
