# SPDX-License-Identifier: Apache-2.0
"""A snapshot is read as it was written, or refused by name and whole."""

from __future__ import annotations

import io
from pathlib import Path

import kv_batches as kv
import pytest

from indexer.hashing import HashKey
from indexer.holders import HolderTable
from indexer.identity import WorkerId, WorkerRank
from indexer.index import IndexLimits, open_index
from indexer.snapshot.format import (
    MAGIC,
    Header,
    RankSection,
    Refused,
    SnapshotError,
    StreamSection,
    WorkerSection,
    encode_worker,
    pieces,
    read,
)
from indexer.snapshot.keeping import SnapshotFile
from indexer.snapshot.making import Made, SnapshotMaker
from indexer.snapshot.sections import Recalled, take
from indexer.stream import EventStream
from indexer.subscriber import EventSubscriber, RankEndpoints

KEY_ID, RECORDS = "key", "native-1"
LIMIT = 10_000
WORKER = WorkerId("w")


def section(name: str = "tcp://a:1") -> WorkerSection:
    stream = StreamSection(0, name, 7, 99, 12.5)
    return WorkerSection("m", False, [stream], [RankSection(b"\x01" * 32, 16, "lost")], b"\x02" * 64)


def snapshot(*sections: WorkerSection, key_id: str = KEY_ID, records: str = RECORDS) -> bytes:
    return b"".join(pieces(Header(key_id, records, 1.0), [encode_worker(one) for one in sections]))


def refusal(data: bytes, limit: int = LIMIT) -> Refused:
    with pytest.raises(SnapshotError) as caught:
        read(io.BytesIO(data), KEY_ID, RECORDS, limit)
    return caught.value.reason


def test_what_was_written_is_read() -> None:
    both = [section(), section("tcp://b:1")]
    assert read(io.BytesIO(snapshot(*both)), KEY_ID, RECORDS, LIMIT) == both
    assert read(io.BytesIO(snapshot()), KEY_ID, RECORDS, LIMIT) == []


def test_a_snapshot_of_another_key_format_or_version_is_refused_by_name() -> None:
    assert refusal(snapshot(section(), key_id="other")) is Refused.OTHER_KEY
    assert refusal(snapshot(section(), records="reference-1")) is Refused.OTHER_FORMAT
    assert refusal(b"PMINDEX2" + snapshot(section())[len(MAGIC) :]) is Refused.OTHER_VERSION
    assert refusal(b"{}" * 100) is Refused.DAMAGED


def test_a_snapshot_longer_than_the_limit_is_refused() -> None:
    whole = snapshot(section())
    assert refusal(whole, len(whole) - 1) is Refused.TOO_LARGE
    assert len(read(io.BytesIO(whole), KEY_ID, RECORDS, len(whole))) == 1


def test_a_length_that_lies_takes_no_memory() -> None:
    assert refusal(MAGIC + b"\xff\xff\xff\xff" + b"x" * 100) is Refused.TOO_LARGE


def test_a_snapshot_cut_or_changed_anywhere_is_refused() -> None:
    whole = snapshot(section())
    for cut in range(len(whole)):
        refusal(whole[:cut])
    for i in range(len(whole)):
        refusal(whole[:i] + bytes([whole[i] ^ 0x41]) + whole[i + 1 :])


class Running:
    """A table with one worker and its stream, fed without sockets."""

    def __init__(self, folder: Path, max_bytes: int = LIMIT) -> None:
        self.holders = HolderTable(open_index(HashKey(kv.KEY_BYTES), IndexLimits()), lambda: 1.0)
        self.subscriber = EventSubscriber(self.holders, lambda: 1.0)
        self.maker = SnapshotMaker(self.holders, self.subscriber, "key", lambda: 5.0, max_bytes)
        self.file = SnapshotFile(folder / "index.snapshot", self.maker, 3600.0)


@pytest.fixture
def running(tmp_path: Path):
    one = Running(tmp_path)
    one.subscriber.start()
    yield one
    one.subscriber.stop()


def test_no_file_is_no_fault_and_a_bad_one_is_named_and_left(running: Running, tmp_path: Path) -> None:
    recalled = Recalled()
    running.file.load(recalled)
    assert running.file.view()["refused"] is None
    (tmp_path / "index.snapshot").write_bytes(b"nonsense")
    running.file.load(recalled)
    assert running.file.view()["refused"].startswith("damaged")
    assert (tmp_path / "index.snapshot").read_bytes() == b"nonsense"
    assert len(recalled) == 0


def test_a_snapshot_without_workers_does_not_replace_one_that_has_some(
    running: Running, tmp_path: Path
) -> None:
    path = tmp_path / "index.snapshot"
    path.write_bytes(b"of before")
    running.file.save()
    assert (path.read_bytes(), sorted(one.name for one in tmp_path.iterdir())) == (b"of before", [path.name])


def test_a_file_that_cannot_be_written_is_named(running: Running, tmp_path: Path) -> None:
    (tmp_path / "index.snapshot.new").mkdir()
    running.file.save()
    assert running.file.view()["failed"]


def stream_at(holders: HolderTable, batches: int) -> EventStream:
    stream = EventStream(has_replay=False)
    stream.connected(0.0)
    for seq in range(batches):
        payload = kv.batch(kv.stored([seq + 1]))
        for action in stream.live(seq, payload, 0.0):
            holders.apply(WorkerRank(WORKER), action.seq, action.payload)  # type: ignore[union-attr]
    return stream


def test_a_worker_that_may_be_another_process_or_said_nothing_is_left_out(running: Running) -> None:
    holders = running.holders
    holders.register(WORKER, "m", 1)
    endpoints = RankEndpoints(WorkerRank(WORKER), "tcp://a:1", None)
    assert take(holders, WORKER, [(endpoints, stream_at(holders, 0))]) is None
    stream = stream_at(holders, 2)
    assert take(holders, WORKER, [(endpoints, stream)]) is not None
    holders.suspect(WorkerRank(WORKER), "reconnected")
    assert take(holders, WORKER, [(endpoints, stream)]) is None


def test_records_that_are_none_leave_an_empty_worker(running: Running) -> None:
    holders, recalled = running.holders, Recalled()
    endpoints = [RankEndpoints(WorkerRank(WORKER), "tcp://a:1", None)]
    bad = WorkerSection("m", False, section().streams, [RankSection(b"\x01" * 31, 4)], b"")
    recalled.add([bad], "peer")
    holders.register(WORKER, "m", 1)
    assert recalled.adopt(holders, WORKER, endpoints) == endpoints
    assert (holders.index.distinct_blocks, recalled.restored) == (0, {})


def test_a_section_fills_only_the_worker_that_it_is_of_and_only_once(running: Running) -> None:
    holders, recalled = running.holders, Recalled()
    holders.register(WORKER, "m", 1)
    made = take(
        holders,
        WORKER,
        [(RankEndpoints(WorkerRank(WORKER), "tcp://a:1", None), stream_at(holders, 3))],
    )
    assert made is not None
    recalled.add([made], "snapshot")
    for model, endpoint in (("other", "tcp://a:1"), ("m", "tcp://b:1")):
        holders.register(WORKER, model, 1)
        endpoints = [RankEndpoints(WorkerRank(WORKER), endpoint, None)]
        assert recalled.adopt(holders, WORKER, endpoints) == endpoints
    holders.register(WORKER, "m", 1)
    (resumed,) = recalled.adopt(holders, WORKER, [RankEndpoints(WorkerRank(WORKER), "tcp://a:1", None)])
    assert resumed.resume is not None
    assert (resumed.resume.seq, recalled.restored, len(recalled)) == (2, {"snapshot": 1}, 0)
    assert holders.index.counts(holders.workers()[WORKER].ranks[0].slot).hbm == 3


def test_workers_that_do_not_fit_are_left_out_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Running(tmp_path, max_bytes=600)
    for name, blocks in (("small", 1), ("large", 200), ("late", 1)):
        one.holders.register(WorkerId(name), "m", 1)
        slot = one.holders.workers()[WorkerId(name)].ranks[0].slot
        one.holders.index.apply([slot], 0, slot, kv.batch(kv.stored(range(1, blocks + 1))))

    def without_thread(self: SnapshotMaker, worker: WorkerId) -> WorkerSection | None:
        endpoints = RankEndpoints(WorkerRank(worker), f"tcp://{worker}:1", None)
        stream = EventStream(has_replay=False)
        stream.connected(0.0)
        stream.live(0, b"", 0.0)
        return take(self.holders, worker, [(endpoints, stream)])

    monkeypatch.setattr(SnapshotMaker, "_take", without_thread)
    made = Made()
    whole = b"".join(one.maker.pieces(made))
    assert (made.workers, made.left_out) == (2, ["large"])
    assert len(read(io.BytesIO(whole), "key", one.holders.index.export_format, LIMIT)) == 2
