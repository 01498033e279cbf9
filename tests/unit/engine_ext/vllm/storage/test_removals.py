# SPDX-License-Identifier: Apache-2.0
"""The ring of what was removed last."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine_ext.vllm.storage import removals
from engine_ext.vllm.storage.catalogue import FileId
from engine_ext.vllm.storage.removals import REMOVALS_NAME, Removals

MINE, OTHERS = "0a" * 16, "0b" * 16


def file(number: int, folder: str = MINE, key_bytes: int = 36) -> FileId:
    return FileId(folder, number.to_bytes(key_bytes, "big").hex())


def test_the_last_ones_of_one_fingerprint_come_back_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removals, "RECORDS", 8)
    ring = Removals(tmp_path)
    assert ring.recent(MINE) == []
    for number in range(5):
        ring.note(file(number))
        ring.note(file(number, OTHERS))
    assert ring.recent(MINE) == [file(number) for number in range(1, 5)]
    assert Removals(tmp_path).recent(OTHERS) == [file(number, OTHERS) for number in range(1, 5)]


def test_keys_of_any_length_that_fits_and_a_key_that_went_twice_come_once(tmp_path: Path) -> None:
    ring = Removals(tmp_path)
    noted = [file(1, key_bytes=1), file(2, key_bytes=87), file(1, key_bytes=1), file(3, key_bytes=88)]
    for one in noted:
        ring.note(one)
    assert ring.recent(MINE) == noted[:2]


@pytest.mark.parametrize("bytes_left", [0, 3, 8, 60, 8 + 104 + 50])
def test_a_file_that_was_cut_off_tells_what_is_left_of_it(tmp_path: Path, bytes_left: int) -> None:
    ring = Removals(tmp_path)
    for number in range(3):
        ring.note(file(number))
    os.truncate(tmp_path / REMOVALS_NAME, bytes_left)
    assert ring.recent(MINE) == ([file(0)] if bytes_left > 8 + 104 else [])


def test_a_note_that_cannot_be_written_costs_nothing_but_itself(tmp_path: Path) -> None:
    ring = Removals(tmp_path / "missing")
    ring.note(file(1))
    assert ring.recent(MINE) == []
