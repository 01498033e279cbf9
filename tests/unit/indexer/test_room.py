# SPDX-License-Identifier: Apache-2.0
"""How many blocks an index may hold where nobody has said it."""

from __future__ import annotations

from pathlib import Path

import pytest

from indexer.room import FEWEST_BLOCKS, MOST_BLOCKS, blocks_for, blocks_that_fit, memory_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("memory", "room", "blocks"),
    [
        (2 * GIB, None, GIB // 64),
        (2 * GIB, 64 * GIB, GIB // 64),
        (64 * GIB, GIB, GIB * 3 // 4 // 64),
        (1024 * GIB, None, MOST_BLOCKS),
        (1024, 0, FEWEST_BLOCKS),
    ],
)
def test_half_of_the_memory_and_most_of_the_room_are_used(memory: int, room: int | None, blocks: int) -> None:
    assert blocks_for(memory, room) == blocks


def fake_root(root: Path, groups: str, **limits: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in limits.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_max", ".max")
        path = path.with_name(path.name.replace("limit", "memory.limit_in_bytes"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_least_limit_of_the_groups_above_counts(tmp_path: Path) -> None:
    root = fake_root(
        tmp_path, "0::/a/b\n", a__b__memory_max="max\n", a__memory_max=f"{GIB}\n", memory_max="junk"
    )
    assert memory_bytes(root) == GIB


def test_limits_of_the_older_groups_and_of_a_container_count(tmp_path: Path) -> None:
    root = fake_root(tmp_path, "4:cpu:/x\n3:memory:/not/visible\n0::/\n", memory__limit=f"{GIB}\n")
    assert memory_bytes(root) == GIB


def test_without_limits_it_is_the_memory_of_the_machine(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) > 2**26
    assert FEWEST_BLOCKS <= blocks_that_fit(tmp_path) <= MOST_BLOCKS


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        blocks_that_fit(tmp_path / "nowhere")
