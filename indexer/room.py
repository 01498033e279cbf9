# SPDX-License-Identifier: Apache-2.0
"""How large an index may grow where nobody has said it: by the memory that this process may use, and its file may."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

BYTES_PER_BLOCK = 64
"""What a block takes at most, its part of the file and of the writer's memory together."""
FEWEST_BLOCKS = 1 << 16
MOST_BLOCKS = 1 << 27


def blocks_for(memory_bytes: int, room_bytes: int | None = None) -> int:
    """Blocks for half of the memory and three quarters of the room on the file system (None: no file)."""
    bytes_ = memory_bytes // 2
    if room_bytes is not None:
        bytes_ = min(bytes_, room_bytes // 4 * 3)
    return max(FEWEST_BLOCKS, min(bytes_ // BYTES_PER_BLOCK, MOST_BLOCKS))


def blocks_that_fit(directory: Path | None = None) -> int:
    """``blocks_for`` this process, with the file in that directory.

    Raises:
        OSError: there is no such directory.
    """
    return blocks_for(memory_bytes(), _free_bytes(directory) if directory is not None else None)


def memory_bytes(root: Path = Path("/")) -> int:
    """The least of the machine's memory and of the limits of this process's control groups, of either version."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _limit_files(root):
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return min(limits)


def _limit_files(root: Path) -> Iterable[Path]:
    """``Documentation/admin-guide/cgroup-v2.rst``; in a container the group's own path may not be visible."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup"
        name = "memory.max"
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            base, name = base / "memory", "memory.limit_in_bytes"
        group = base / path.lstrip("/")
        yield base / name
        while group != base and base in group.parents:
            yield group / name
            group = group.parent


def _free_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
