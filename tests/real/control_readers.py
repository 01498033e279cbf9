# SPDX-License-Identifier: Apache-2.0
"""Scenarios of real links: readers that stand still, die, or give a pull up."""

from __future__ import annotations

import os
import random
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

from control_pair import TCP, End, LinkProcess, SourceProcess, closing, key
from transfer_pair import content

from engine_ext.transfer.control.peer import BlocksNotPulled, BlocksPulled, BlocksReleased, Found
from engine_ext.transfer.events import FailReason


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
