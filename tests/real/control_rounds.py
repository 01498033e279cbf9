# SPDX-License-Identifier: Apache-2.0
"""Scenarios of real links. Reads their names from standard input, one a line; answers each with a line of JSON.

One process for all of them: importing nixl takes seconds. test_control.py says what must come out.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import msgspec
from control_pair import End, LinkProcess, SourceProcess, key, preload
from transfer_pair import BLOCK_BYTES, PATIENCE_S, content, fingerprint

from engine_ext.transfer.control.peer import (
    BlocksNotPulled,
    BlocksPulled,
    BlocksReleased,
    Found,
    NotFound,
)
from engine_ext.transfer.events import FailReason

TCP = "tcp,self"


@contextlib.contextmanager
def closing(*ends: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for end in ends:
            end.close()


def pulls() -> dict[str, Any]:
    """Random keys from two sources, several pulls at a time."""
    order, blocks = random.Random(1), 128
    reader, sources = End(blocks), [SourceProcess(blocks, seed) for seed in (10, 11)]
    wrong = pulled = failed = 0
    with closing(reader, *sources):
        for _ in range(10):
            reader.empty(range(blocks))
            mine, jobs, expected = order.sample(range(blocks), blocks), [], {}
            while mine:
                seed = order.choice((10, 11))
                to, mine = mine[:30], mine[30:]
                of = order.sample(range(blocks), len(to))
                found = reader.find(sources[seed - 10].address, [*of, 1000, 1001])
                assert isinstance(found, Found)
                assert found.keys == {key(block) for block in of}
                jobs.append((found, reader.pull(found, dict(zip(of, to, strict=True)))))
                expected.update({t: content(seed, o) for o, t in zip(of, to, strict=True)})
            for found, job in jobs:
                end = reader.end_of(job)
                pulled += isinstance(end, BlocksPulled)
                failed += isinstance(end, BlocksNotPulled)
                reader.link.forget(found.find_id)
            wrong += sum(reader.block(block) != expected[block] for block in range(blocks))
        for source in sources:
            reader.until(lambda source=source: not source.tell()["leases"])
        told = [source.tell() for source in sources]
        return {
            "pulled": pulled,
            "failed": failed,
            "wrong_blocks": wrong,
            "asked": sum(one["asked"] for one in told),
            "read": sum(one["read"] for one in told),
            "idle": reader.link.idle(),
        }


def refusals() -> dict[str, Any]:
    """Each field of the fingerprint in turn."""
    source = SourceProcess(4, 1)
    names = {}
    with closing(source):
        for field in fingerprint().__struct_fields__:
            value: Any = 2 * BLOCK_BYTES if field == "block_length_bytes" else "another"
            reader = End(4, print_=msgspec.structs.replace(fingerprint(), **{field: value}))
            with closing(reader):
                reader.empty(range(4))
                answer = reader.find(source.address, [0])
                pull = reader.link.pull(answer.find_id, {key(0): 0}, time.monotonic() + 1)
                reason = answer.reason.value if isinstance(answer, NotFound) else "found"
                detail = answer.detail.split(":")[0] if isinstance(answer, NotFound) else ""
                names[field] = [reason, detail, reader.end_of(pull).reason.value, reader.untouched(range(4))]  # type: ignore[union-attr]
        return {"names": names, "asked": source.tell()["asked"]}


def dead_addresses() -> dict[str, Any]:
    """A port where nobody listens, one that accepts and says nothing, one that answers with garbage."""
    reader = End(4, handshake_timeout_s=0.3)
    results: dict[str, list[Any]] = {}
    with closing(reader), socket.socket() as closed, socket.create_server(("127.0.0.1", 0)) as mute:
        closed.bind(("127.0.0.1", 0))
        garbage = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=_speak_garbage, args=(garbage,), daemon=True).start()
        for name, one in (("closed", closed), ("mute", mute), ("garbage", garbage)):
            began = time.monotonic()
            answer = reader.find(f"127.0.0.1:{one.getsockname()[1]}", [0], within_s=20)
            seconds = time.monotonic() - began
            results[name] = [answer.reason.value if isinstance(answer, NotFound) else "found", seconds]
        garbage.close()
        source = SourceProcess(4, 1)
        with closing(source):
            found = reader.find(source.address, [0])
            assert isinstance(found, Found)
            lives = isinstance(reader.end_of(reader.pull(found, {0: 0})), BlocksPulled)
        return {"results": results, "lives": lives and reader.block(0) == content(1, 0)}


def _speak_garbage(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(random.Random(0).randbytes(4096))
                connection.recv(1 << 16)


def restarts() -> dict[str, Any]:
    """A source restarts twenty times at its address, by kill, while it is being read."""
    blocks, order = 64, random.Random(2)
    reader = End(blocks, TCP, transfer={"settle_s": 0.05}, handshake_timeout_s=0.3, retry_s=0)
    wrong = pulled = 0
    asked_per_life, not_found, not_pulled = [], set(), set()
    port, source = 0, None
    with closing(reader):
        for life in range(20):
            source = SourceProcess(blocks, life, TCP, port=port)
            port = int(source.address.rsplit(":", 1)[1])
            asked = 0
            while True:
                answer = reader.find(source.address, range(32), within_s=5)
                asked += 1
                if isinstance(answer, NotFound):
                    not_found.add(answer.reason.value)
                    continue
                target = order.sample(range(blocks), 32)
                end = reader.end_of(
                    reader.pull(answer, dict(zip(range(32), target, strict=True)), within_s=5)
                )
                reader.link.forget(answer.find_id)
                good = (
                    range(32)
                    if isinstance(end, BlocksPulled)
                    else [of for of, to in enumerate(target) if to in end.arrived]
                )
                wrong += sum(reader.block(target[of]) != content(life, of) for of in good)
                if isinstance(end, BlocksPulled):
                    pulled += 1
                    break
                not_pulled.add(end.reason.value)
            asked_per_life.append(asked)
            cut = reader.find(source.address, range(blocks), within_s=5)
            if isinstance(cut, Found) and life % 2:
                job = reader.pull(cut, {block: block for block in range(blocks)}, within_s=5)
                time.sleep(order.random() * 0.004)
                source.close()
                end = reader.end_of(job)
                if isinstance(end, BlocksNotPulled):
                    not_pulled.add(end.reason.value)
                    wrong += sum(reader.block(block) != content(life, block) for block in end.arrived)
            source.close()
            reader.link.forget(cut.find_id)
        reader.until(lambda: reader.link.idle() and not reader.link.counts()[0].finds)
        counts = reader.link.counts()
        return {
            "pulled": pulled,
            "wrong_blocks": wrong,
            "asked_per_life": asked_per_life,
            "not_found": sorted(not_found),
            "not_pulled": sorted(not_pulled),
            "transfers_after": counts[1].transfers,
            "quarantined_after": counts[1].quarantined_blocks,
            "finds_after": counts[0].finds,
        }


def quick_restart() -> dict[str, Any]:
    """A source that is back before anybody could have missed it: the next words find it out."""
    reader = End(8)
    first = SourceProcess(8, 1)
    with closing(reader):
        found = reader.find(first.address, [0, 1])
        assert isinstance(found, Found)
        port = int(first.address.rsplit(":", 1)[1])
        first.close()
        second = SourceProcess(8, 2, port=port)
        with closing(second):
            began = time.monotonic()
            stale = reader.end_of(reader.pull(found, {0: 0}, within_s=5))
            stale_s = time.monotonic() - began
            reasons = []
            while isinstance(answer := reader.find(second.address, [1], within_s=5), NotFound):
                reasons.append(answer.reason.value)
            end = reader.end_of(reader.pull(answer, {1: 1}))
            reader.link.forget(answer.find_id)
            return {
                "stale": stale.reason.value if isinstance(stale, BlocksNotPulled) else "pulled",
                "stale_s": stale_s,
                "not_found": reasons,
                "pulled": isinstance(end, BlocksPulled),
                "right": reader.block(1) == content(2, 1),
            }


def frozen_source() -> dict[str, Any]:
    """A source that stands still: lookups end at their deadlines, and it serves again once it goes on."""
    reader, source = End(8), SourceProcess(8, 1)
    with closing(reader, source):
        warm = reader.find(source.address, [0])
        reader.link.forget(warm.find_id)
        source.signal(signal.SIGSTOP)
        began = time.monotonic()
        frozen = [reader.find(source.address, [0], within_s=0.2) for _ in range(3)]
        seconds = time.monotonic() - began
        source.signal(signal.SIGCONT)
        stop_s = time.monotonic() + PATIENCE_S
        while isinstance(after := reader.find(source.address, [3], within_s=2), NotFound):
            assert time.monotonic() < stop_s
        end = reader.end_of(reader.pull(after, {3: 3}))
        reader.link.forget(after.find_id)
        reader.until(lambda: not source.tell()["leases"])
        return {
            "frozen": [one.reason.value for one in frozen if isinstance(one, NotFound)],
            "seconds": seconds,
            "pulled": isinstance(end, BlocksPulled) and reader.block(3) == content(1, 3),
        }


def _read_and_stand_still(pipe: Connection, address: str, blocks: int, tls: str | None) -> None:
    """Pulls everything, is stopped by its parent meanwhile, and says what it made of it."""
    end = End(blocks, tls)
    end.empty(range(blocks))
    pipe.send("ready")
    while pipe.recv() == "pull":
        found = end.find(address, range(blocks))
        assert isinstance(found, Found)
        pipe.send("found")
        job = end.pull(found, {block: block for block in range(blocks)})
        if tls is not None:  # else it is over before anybody could see it begin
            end.until(lambda: not end.untouched([0]))
            pipe.send("begun")
        one = end.end_of(job)
        end.link.forget(found.find_id)
        end.until(end.link.idle)
        old = [end.block(block) == content(1, block) for block in range(blocks)]
        good = range(blocks) if isinstance(one, BlocksPulled) else one.arrived
        reason = one.reason.value if isinstance(one, BlocksNotPulled) else "pulled"
        pipe.send((reason, sum(not old[block] for block in good), len(good), sum(old)))
        end.empty(range(blocks))
    end.close()
    pipe.send("closed")
    os._exit(0)


def frozen_reader() -> dict[str, Any]:
    """A reader is stopped with a lease in hand; the source's owner reuses the blocks as soon as it may."""
    blocks, lease_s = 512, 1.0
    rounds: list[dict[str, Any]] = []
    for tls in (TCP, None):
        source = End(blocks, tls, lease_s=lease_s, lease_margin_s=0.2)
        source.holds = {key(block): block for block in range(blocks)}
        reader = LinkProcess(_read_and_stand_still, source.link.address, blocks, tls)
        with closing(reader, source):
            for _ in range(2):
                source.fill(1, range(blocks))
                ended = source.ended
                reader.pipe.send("pull")
                while not reader.pipe.poll(0.0005):
                    source.play()
                assert reader.receive() == "found"
                if tls is not None:
                    assert reader.receive() == "begun"
                reader.signal(signal.SIGSTOP)
                began = time.monotonic()
                source.until(lambda: source.ended > ended)  # noqa: B023
                held_s = time.monotonic() - began
                source.fill(2, range(blocks))  # somebody else's now
                reader.signal(signal.SIGCONT)
                while not reader.pipe.poll(0.0005):
                    source.play()
                reason, wrong, used, old = reader.receive()
                rounds.append(
                    {"tls": tls, "reason": reason, "wrong": wrong, "used": used, "held_s": held_s, "old": old}
                )
            reader.pipe.send("end")
            while not reader.pipe.poll(0.0005):
                source.play()
    return {"rounds": rounds}


def _read_and_die(pipe: Connection, address: str, blocks: int) -> None:
    end = End(blocks, TCP)
    end.empty(range(blocks))
    found = end.find(address, range(blocks))
    assert isinstance(found, Found)
    end.pull(found, {block: block for block in range(blocks)})
    end.until(lambda: not end.untouched([0]))
    pipe.send("dying")
    os.kill(os.getpid(), signal.SIGKILL)


def dead_reader() -> dict[str, Any]:
    """A reader is killed in the middle of a pull: others go on, and its lease ends by itself."""
    blocks, lease_s = 256, 1.5
    source, reader = SourceProcess(blocks, 1, TCP, lease_s=lease_s), End(blocks, TCP)
    with closing(reader, source):
        victim = LinkProcess(_read_and_die, source.address, blocks)
        died_s = time.monotonic()
        victim.close()
        during = source.tell()
        found = reader.find(source.address, range(64))
        assert isinstance(found, Found)
        end = reader.end_of(reader.pull(found, {block: block for block in range(64)}))
        reader.link.forget(found.find_id)
        wrong = sum(reader.block(block) != content(1, block) for block in range(64))
        reader.until(lambda: not source.tell()["leases"])
        return {
            "lease_kept": during["leases"],
            "pulled": isinstance(end, BlocksPulled),
            "wrong_blocks": wrong,
            "ended_s": time.monotonic() - died_s,
            "told": source.tell(),
            "alive": source.process.is_alive(),
        }


def abort_and_reuse() -> dict[str, Any]:
    """Blocks of an aborted pull are wanted at once: they come when nothing can land in them any more."""
    blocks, order = 192, random.Random(4)
    slow, other, reader = SourceProcess(blocks, 1, TCP), SourceProcess(blocks, 2, TCP), End(blocks, TCP)
    busy = held = wrong = 0
    with closing(reader, slow, other):
        for _ in range(10):
            reader.empty(range(blocks))
            a, b = reader.find(slow.address, range(blocks)), reader.find(other.address, range(blocks))
            assert isinstance(a, Found)
            assert isinstance(b, Found)
            job = reader.pull(a, {block: block for block in range(blocks)})
            time.sleep(order.random() * 0.01)
            reader.link.abort(job)
            end = reader.end_of(job)
            if isinstance(end, BlocksNotPulled) and end.quarantined:
                held += 1
                again = reader.end_of(reader.pull(b, {0: end.quarantined[0]}))
                busy += isinstance(again, BlocksNotPulled) and again.reason is FailReason.DESTINATION_BUSY
                count = len(reader.events)
                freed: set[int] = set()
                while not freed >= set(end.quarantined):
                    reader.play()
                    freed = {
                        block
                        for event in reader.events
                        if isinstance(event, BlocksReleased)
                        for block in event.blocks
                    }
                    assert count <= len(reader.events)
            for find in (a, b):
                reader.link.forget(find.find_id)
            fresh = reader.find(other.address, range(blocks))
            assert isinstance(fresh, Found)
            assert isinstance(
                reader.end_of(reader.pull(fresh, {block: block for block in range(blocks)})), BlocksPulled
            )
            reader.link.forget(fresh.find_id)
            time.sleep(0.005)  # for a late write, if there could be one
            wrong += sum(reader.block(block) != content(2, block) for block in range(blocks))
            reader.until(reader.link.idle)
            reader.events.clear()
        counts = reader.link.counts()[1]
        return {
            "held": held,
            "busy": busy,
            "wrong_blocks": wrong,
            "transfers_after": counts.transfers,
            "quarantined_after": counts.quarantined_blocks,
        }


def idle() -> dict[str, Any]:
    """CPU of a process with a link that has sessions in both directions and nothing to do."""
    a, b = End(16), End(16)
    with closing(a, b):
        b.fill(1, range(16))
        b.holds = {key(3): 3}
        find_id = a.link.find(b.link.address, [key(3)], "t", time.monotonic() + PATIENCE_S)
        a.until(lambda: b.play() or a.events)
        (found,) = a.events
        assert isinstance(found, Found)
        job = a.pull(found, {3: 5})
        right = isinstance(a.end_of(job), BlocksPulled) and a.block(5) == content(1, 3)
        a.link.forget(find_id)
        time.sleep(0.5)
        began, cpu = time.monotonic(), time.process_time()
        time.sleep(4)
        return {"right": right, "cores": (time.process_time() - cpu) / (time.monotonic() - began) / 2}


SCENARIOS = {
    f.__name__: f
    for f in (
        pulls,
        refusals,
        dead_addresses,
        restarts,
        quick_restart,
        frozen_source,
        frozen_reader,
        dead_reader,
        abort_and_reuse,
        idle,
    )
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # UCX writes its warnings to standard output
    preload()
    import nixl  # noqa: F401 - paid for once

    for line in sys.stdin:
        began = time.monotonic()
        try:
            result = SCENARIOS[line.strip()]()
            result["scenario_s"] = time.monotonic() - began
        except Exception:
            result = {"error": traceback.format_exc()}
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
