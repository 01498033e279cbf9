# SPDX-License-Identifier: Apache-2.0
"""An index in a file, read by others: here within one process, which the region cannot tell from several."""

from __future__ import annotations

import os
import re
from pathlib import Path

import kv_batches as kv
import pytest

from indexer.hashing import HashKey
from indexer.identity import WorkerId
from indexer.index import IndexLimits, PrefixIndex, open_index, open_reader
from indexer.slot_names import SlotName, parse_slot_name
from indexer.writer_lock import WriterLockedError

KEY = HashKey(kv.KEY_BYTES)
LIMITS = IndexLimits(max_blocks=100_000)
NAMES = [1, 2, 3, 4]


def writer(path: Path, *, blocks: int = 4, worker: str = "w") -> tuple[PrefixIndex, int]:
    index = open_index(KEY, LIMITS, path=path)
    slot = index.open("m", False, SlotName(WorkerId(worker), 0, 1).encode())
    index.apply([slot], 0, slot, kv.batch(kv.stored(NAMES[:blocks])))
    return index, slot


def prompt_hashes(index: PrefixIndex) -> bytes:
    return index.hash_blocks(kv.prompt(NAMES), kv.BLOCK, "m", "", [])


def test_a_reader_answers_as_the_writer_does(tmp_path: Path) -> None:
    index, slot = writer(tmp_path / "index", blocks=3)
    index.publish()
    reader = open_reader(tmp_path / "index", KEY)
    assert reader.match(prompt_hashes(index)) == (1, [(slot, 0, 0, 3, False)])
    assert reader.match(prompt_hashes(index))[1] == index.match(prompt_hashes(index))
    index.apply([slot], 0, slot, kv.batch(kv.removed([2])))
    assert reader.match(prompt_hashes(index))[1] == [(slot, 0, 0, 1, False)]
    assert reader.counts(slot).hbm == 2
    assert reader.version == index.version
    assert reader.distinct_blocks == 2
    index.retire(slot)
    assert reader.match(prompt_hashes(index))[1] == []
    assert reader.counts(slot).hbm == 0


def test_a_reader_knows_whose_a_slot_is_and_whether_it_is_under_suspicion(tmp_path: Path) -> None:
    index, slot = writer(tmp_path / "index", worker="10.0.0.1:8000 a")
    store = index.open("m", False, SlotName(WorkerId("w"), 0, 3, is_store=True).encode())
    index.publish()
    reader = open_reader(tmp_path / "index", KEY)
    index.suspect(store, True)
    generation, slots = reader.slots()
    assert (generation, [(number, suspect) for number, _, suspect in slots]) == (
        1,
        [(slot, False), (store, True)],
    )
    assert [parse_slot_name(name) for _, name, _ in slots] == [
        SlotName(WorkerId("10.0.0.1:8000 a"), 0, 1),
        SlotName(WorkerId("w"), 0, 3, is_store=True),
    ]
    index.suspect(store, False)
    index.retire(slot)
    again = index.open("m", False, "n" * 1000)
    assert [one[0] for one in reader.slots()[1]] == [again, store]
    assert reader.slots()[1][0] == (again, b"n" * 320, False)


def test_readers_stay_with_the_old_index_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "index"
    old, slot = writer(path, blocks=2)
    old.publish()
    reader = open_reader(path, KEY)
    hashes = prompt_hashes(old)
    del old  # as when its process died: nobody else may write there while it lives
    new, new_slot = writer(path, blocks=4)
    assert reader.match(hashes) == (1, [(slot, 0, 0, 2, False)])
    new.publish()
    assert reader.match(hashes) == (2, [(new_slot, 0, 0, 4, False)])
    assert reader.generation == 2


def test_a_reader_finds_a_new_index_that_nobody_told_it_of(tmp_path: Path) -> None:
    path = tmp_path / "index"
    old, _ = writer(path, blocks=2)
    old.publish()
    reader = open_reader(path, KEY)
    elsewhere, _ = writer(tmp_path / "other", blocks=4)
    elsewhere.publish()
    (tmp_path / "other").rename(path)
    hashes = prompt_hashes(old)
    assert reader.match(hashes)[1][0][3] == 2
    reader.refresh()
    assert reader.match(hashes)[1][0][3] == 4


def test_a_reader_keeps_answering_when_the_file_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "index"
    index, slot = writer(path)
    index.publish()
    reader = open_reader(path, KEY)
    hashes = prompt_hashes(index)
    path.unlink()
    del index
    reader.refresh()
    assert reader.match(hashes) == (1, [(slot, 0, 0, 4, False)])


def test_what_is_no_index_of_ours_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index"
    with pytest.raises(OSError, match="No such file"):
        open_reader(path, KEY)
    index, _ = writer(path)
    with pytest.raises(OSError, match="No such file"):
        open_reader(path, KEY)
    index.publish()
    with pytest.raises(ValueError, match="another hash key"):
        open_reader(path, HashKey(bytes(16)))
    path.write_bytes(bytes(8192))
    with pytest.raises(ValueError, match="not an index"):
        open_reader(path, KEY)
    with pytest.raises(OSError, match="No such file"):
        open_index(KEY, LIMITS, path=tmp_path / "nowhere" / "index")


def test_a_second_writer_at_the_path_is_refused_and_told_who_the_first_is(tmp_path: Path) -> None:
    path = tmp_path / "index"
    index, _ = writer(path)
    with pytest.raises(WriterLockedError, match=re.escape(f"{path} is written by process {os.getpid()}")):
        open_index(KEY, LIMITS, path=path)
    del index
    again, slot = writer(path)
    assert again.counts(slot).hbm == 4


def test_an_index_that_is_never_published_leaves_no_file(tmp_path: Path) -> None:
    index, _ = writer(tmp_path / "index")
    del index
    assert list(tmp_path.iterdir()) == []
