# SPDX-License-Identifier: Apache-2.0
"""Scenarios of real transfers. Reads their names from standard input, one a line; answers each with a line of JSON.

One process for all of them: importing nixl takes seconds. test_transfer.py says what must come out.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from transfer_pair import (
    BLOCK_BYTES,
    EMPTY,
    PATIENCE_S,
    Reader,
    Source,
    content,
    ending,
    fingerprint,
    preload,
    use_transport,
)

from engine_ext.transfer.config import TransferConfig
from engine_ext.transfer.errors import AgentError
from engine_ext.transfer.events import PeerLost, Pulled, PullFailed, PullRequest, Released
from engine_ext.transfer.node import new_boot_id, open_node
from engine_ext.transfer.region import Region
from engine_ext.transfer.thread import PullThread

TCP = "tcp,self"


def ended(job: int) -> Any:
    return lambda events: [e for e in events if isinstance(e, Pulled | PullFailed) and e.job_id == job]


def released(job: int, blocks: int) -> Any:
    """All of its quarantined blocks."""
    return lambda events: (
        sum(len(e.blocks) for e in events if isinstance(e, Released) and e.job_id == job) == blocks
    )


def lists(tls: str | None) -> dict[str, Any]:
    """Random block lists, several pulls at a time, from two sources."""
    order, blocks = random.Random(1), 256
    reader = Reader(blocks, tls)
    sources = [Source(blocks, seed, tls) for seed in (10, 11)]
    with ending(reader, *sources):
        for source in sources:
            reader.connect(str(source.seed), source)
        wrong = pulled = 0
        for _ in range(6):
            reader.empty(range(blocks))
            mine = order.sample(range(blocks), order.randint(20, 200))
            expected: dict[int, bytes] = {}
            jobs = []
            while mine:
                source, count = order.choice(sources), order.randint(1, 60)
                to, mine = mine[:count], mine[count:]
                first = order.randrange(blocks - len(to))
                of = (
                    list(range(first, first + len(to)))
                    if order.random() < 0.5
                    else order.choices(range(blocks), k=len(to))
                )
                expected.update((t, content(source.seed, o)) for o, t in zip(of, to, strict=True))
                jobs.append(reader.submit(str(source.seed), source.boot_id, of, to))
            events = reader.drive(lambda events: len(events) == len(jobs))  # noqa: B023
            pulled += sum(isinstance(event, Pulled) for event in events)
            empty = bytes([EMPTY]) * BLOCK_BYTES
            wrong += sum(reader.read(block) != expected.get(block, empty) for block in range(blocks))
        return {"pulled": pulled, "failed": reader.engine.counts().failed, "wrong_blocks": wrong}


def killed() -> dict[str, Any]:
    """A source is killed in the middle of a pull and comes back at its address."""
    blocks = 1024
    reader = Reader(blocks, TCP, settle_s=0.2)
    source = Source(blocks, 1, TCP)
    with ending(reader):
        offer = reader.connect("peer", source)
        everything = list(range(blocks))
        job = reader.submit("peer", offer.boot_id, everything, everything, within_s=20)
        reader.drive(lambda _: not reader.untouched([200]))
        source.end()
        began = time.monotonic()
        events = reader.drive(ended(job))
        took_s = time.monotonic() - began
        failed = next(event for event in events if isinstance(event, PullFailed))
        held = reader.engine.busy(failed.quarantined)
        wrong = sum(reader.read(block) != content(1, block) for block in failed.arrived)
        freed = reader.drive(released(job, len(failed.quarantined)))
        after = reader.engine.counts()

        again = Source(64, 2, TCP)
        with ending(again):
            reader.connect("peer", again)
            stale = reader.submit("peer", offer.boot_id, [0], [0])
            target = list(failed.quarantined[:16])
            fresh = reader.submit("peer", again.boot_id, list(range(16)), target)
            late = reader.drive(lambda events: ended(stale)(events) and ended(fresh)(events))
            wrong += sum(reader.read(to) != content(2, of) for of, to in enumerate(target))
        return {
            "reason": failed.reason.value,
            "seconds": took_s,
            "arrived": len(failed.arrived),
            "quarantined": len(failed.quarantined),
            "held": held,
            "proofs": sorted({e.proof.value for e in [*events, *freed] if isinstance(e, Released)}),
            "lost": [e.reason.value for e in [*events, *freed] if isinstance(e, PeerLost)],
            "transfers_after": after.transfers,
            "quarantined_after": after.quarantined_blocks,
            "stale": [e.reason.value for e in late if isinstance(e, PullFailed)],
            "fresh": [e.size_bytes for e in late if isinstance(e, Pulled)],
            "wrong_blocks": wrong,
        }


def late() -> dict[str, Any]:
    """A source freezes past a pull's deadline and thaws: its bytes still come, and find nobody else's blocks."""
    blocks = 64
    reader = Reader(blocks, TCP)
    frozen, other = Source(blocks, 1, TCP), Source(blocks, 2, TCP)
    with ending(reader, frozen, other):
        a, b = reader.connect("frozen", frozen), reader.connect("other", other)
        warm = [reader.submit("frozen", a.boot_id, [0], [60]), reader.submit("other", b.boot_id, [0], [61])]
        reader.drive(lambda events: len(events) == len(warm))
        frozen.signal(signal.SIGSTOP)
        target = list(range(16))
        began = time.monotonic()
        job = reader.submit("frozen", a.boot_id, target, target, within_s=0.3)
        (failed,) = ended(job)(reader.drive(ended(job)))
        failed_s = time.monotonic() - began
        untouched_at_deadline = reader.untouched(target)
        refused = reader.submit("other", b.boot_id, target[:2], target[:2])
        (no,) = ended(refused)(reader.drive(ended(refused)))
        elsewhere = list(range(20, 36))
        meanwhile = reader.submit("other", b.boot_id, target, elsewhere)
        reader.drive(ended(meanwhile))
        frozen.signal(signal.SIGCONT)
        events = reader.drive(released(job, len(failed.quarantined)))
        landed = sum(reader.read(block) == content(1, block) for block in target)
        again = reader.submit("other", b.boot_id, target, target)
        reader.drive(ended(again))
        stop_s = time.monotonic() + 0.3
        reader.drive(lambda _: time.monotonic() > stop_s)
        wrong = sum(reader.read(to) != content(2, of) for of, to in enumerate(target))
        wrong += sum(reader.read(to) != content(2, of) for of, to in enumerate(elsewhere))
        return {
            "reason": failed.reason.value,
            "failed_s": failed_s,
            "quarantined": sorted(failed.quarantined),
            "untouched_at_deadline": untouched_at_deadline,
            "reuse": no.reason.value,
            "proofs": sorted({e.proof.value for e in events if isinstance(e, Released)}),
            "landed_late": landed,
            "wrong_blocks": wrong,
            "transfers_after": reader.engine.counts().transfers,
        }


def endless() -> dict[str, Any]:
    """A transfer that never ends: its agent is destroyed, another pull goes on, nothing lands afterwards."""
    blocks = 64
    reader = Reader(blocks, TCP, linger_limit_s=0.5)
    frozen, other = Source(blocks, 1, TCP), Source(blocks, 2, TCP)
    with ending(reader, frozen, other):
        a, b = reader.connect("frozen", frozen), reader.connect("other", other)
        warm = [reader.submit("frozen", a.boot_id, [0], [60]), reader.submit("other", b.boot_id, [0], [61])]
        reader.drive(lambda events: len(events) == len(warm))
        frozen.signal(signal.SIGSTOP)
        target = list(range(16))
        job = reader.submit("frozen", a.boot_id, target, target, within_s=0.2)
        began = time.monotonic()
        (failed,) = ended(job)(reader.drive(ended(job)))
        events = reader.drive(released(job, len(failed.quarantined)))
        took_s = time.monotonic() - began
        reader.empty(target)
        elsewhere = list(range(20, 36))
        after = reader.submit("other", b.boot_id, target, elsewhere)
        (pulled,) = ended(after)(reader.drive(ended(after)))
        frozen.signal(signal.SIGCONT)
        stop_s = time.monotonic() + 0.5
        reader.drive(lambda _: time.monotonic() > stop_s)
        counts = reader.engine.counts()
        return {
            "reason": failed.reason.value,
            "proofs": sorted({e.proof.value for e in events if isinstance(e, Released)}),
            "seconds": took_s,
            "agents_destroyed": counts.agents_destroyed,
            "agents": counts.agents,
            "pulled_after": isinstance(pulled, Pulled),
            "wrong_blocks": sum(reader.read(to) != content(2, of) for of, to in enumerate(elsewhere)),
            "untouched": reader.untouched(target),
            "transfers_after": counts.transfers,
        }


def restarts() -> dict[str, Any]:
    """A source restarts again and again at its address while it is being read, by kill and at once."""
    blocks, wrong, reasons = 64, 0, set()
    reader = Reader(blocks, TCP, settle_s=0.05)
    with ending(reader):
        for life in range(5):
            source = Source(blocks, life, TCP)
            offer = reader.connect("peer", source)
            target = [(life * 7 + i) % blocks for i in range(24)]
            reader.drive(lambda _: not reader.engine.busy(target))  # noqa: B023 - quarantine of the last life
            first = reader.submit("peer", offer.boot_id, list(range(24)), target)
            (pulled,) = ended(first)(reader.drive(ended(first)))
            wrong += not isinstance(pulled, Pulled)
            wrong += sum(reader.read(to) != content(life, of) for of, to in enumerate(target))
            cut = reader.submit("peer", offer.boot_id, list(range(48)), list(range(48)), within_s=5)
            reader.engine.poll()
            source.end()
            (outcome,) = ended(cut)(reader.drive(ended(cut)))
            reasons.add(outcome.reason.value if isinstance(outcome, PullFailed) else "pulled")
        reader.drive(lambda _: not reader.engine.counts().quarantined_blocks)
        counts = reader.engine.counts()
    return {
        "wrong_blocks": wrong,
        "reasons": sorted(reasons),
        "transfers_after": counts.transfers,
        "agents": counts.agents,
    }


def many() -> dict[str, Any]:
    """Ten thousand transfers, and nodes that come and go: handles, descriptors and memory return to where they were."""
    blocks = 256
    order = random.Random(3)
    reader, source = Reader(blocks, depth=16), Source(blocks, 1)
    with ending(reader, source):
        offer = reader.connect("peer", source)

        def rounds(count: int) -> None:
            for _ in range(count // 20):
                mine = order.sample(range(blocks), 40)
                for i in range(20):
                    reader.submit(
                        "peer", offer.boot_id, order.sample(range(blocks), 2), mine[2 * i : 2 * i + 2]
                    )
                reader.drive(lambda events: len(events) == 20)
            reader.events.clear()

        rounds(2000)
        before = _resources()
        rounds(10_000)
        after = _resources()
        counts = reader.engine.counts()
    node_before = _resources()
    for _ in range(3):
        with ending(Reader(16)):
            pass
    node_after = _resources()
    return {
        "pulled": counts.pulled,
        "failed": counts.failed,
        "transfers_after": counts.transfers,
        "open_blocks_after": counts.open_blocks,
        "before": before,
        "after": after,
        "node_before": node_before,
        "node_after": node_after,
    }


def rollback() -> dict[str, Any]:
    """A region that a backend cannot register, a backend that does not exist, a second agent that fails."""
    use_transport(None)
    with ending(Reader(16)):  # whatever the first agent of a process leaves for good
        pass
    before = _resources()
    reader = Reader(16)
    errors = []
    for memory, backends in (("VRAM", ("UCX",)), ("DRAM", ("UCX", "NOPE"))):
        region = Region(reader.region.base_address, BLOCK_BYTES, 16, memory)
        try:
            open_node(TransferConfig(backends=backends), fingerprint(), region, new_boot_id())
        except AgentError as error:
            errors.append(error.step)
    reader.end()
    return {"errors": errors, "before": before, "after": _resources()}


def dead_address() -> dict[str, Any]:
    """A peer that is gone before its first transfer, and an offer under a name that is not the metadata's."""
    reader = Reader(16, TCP)
    with ending(reader):
        source = Source(16, 1, TCP)
        offer = reader.greet(source)
        source.end()
        began = time.monotonic()
        reader.engine.connect("gone", offer)
        job = reader.submit("gone", offer.boot_id, [0], [0], within_s=10)
        (failed,) = ended(job)(reader.drive(ended(job)))
        took_s = time.monotonic() - began
        return {
            "reason": failed.reason.value,
            "seconds": took_s,
            "free": not reader.engine.busy([0]),
            "peers": reader.engine.counts().peers,
        }


def dead_reader() -> dict[str, Any]:
    """A reader that is killed in the middle of a pull leaves the source to others."""
    blocks = 512
    source = Source(blocks, 1, TCP)
    reader = Reader(blocks, TCP)
    with ending(reader, source):
        offer = reader.connect("peer", source)
        child = os.fork()
        if child == 0:  # a reader of its own: its agents are made after the fork
            other = Reader(blocks, TCP)
            other.engine.connect("peer", offer)
            other.submit("peer", offer.boot_id, list(range(blocks)), list(range(blocks)))
            other.drive(lambda _: not other.untouched([0]))
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        job = reader.submit("peer", offer.boot_id, list(range(64)), list(range(64)))
        (outcome,) = ended(job)(reader.drive(ended(job)))
        wrong = sum(reader.read(block) != content(1, block) for block in range(64))
        return {
            "pulled": isinstance(outcome, Pulled),
            "alive": source.process.is_alive(),
            "wrong_blocks": wrong,
        }


def idle() -> dict[str, Any]:
    """CPU of a source that nobody reads, and of a reader whose thread has nothing to do."""
    reader, source = Reader(16), Source(16, 1)
    with ending(source):
        offer = reader.connect("peer", source)
        thread = PullThread(reader.engine)
        try:
            job = thread.submit(
                PullRequest("peer", offer.boot_id, [3], [5], reader.engine.now_s() + PATIENCE_S)
            )
            stop_s = time.monotonic() + PATIENCE_S
            events: list[Any] = []
            while not ended(job)(events) and time.monotonic() < stop_s:
                events.extend(thread.take())
                time.sleep(0.001)
            right = reader.read(5) == content(1, 3)
            time.sleep(0.5)  # past the warm-up
            began, ours, theirs = time.monotonic(), time.process_time(), source.answer(b"cpu")
            time.sleep(3)
            seconds = time.monotonic() - began
            ours, theirs = time.process_time() - ours, source.answer(b"cpu") - theirs
        finally:
            closed = thread.close(PATIENCE_S)
            reader.node.serving.close()
    return {
        "right": right,
        "closed": closed,
        "reader_cores": ours / seconds,
        "source_cores": theirs / seconds,
    }


def _resources() -> dict[str, int]:
    """Descriptors and threads of this process, and its memory in KiB."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "rss_kib": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024,
    }


SCENARIOS = {
    "lists": lambda: lists(None),
    "lists_tcp": lambda: lists(TCP),
    **{
        f.__name__: f
        for f in (killed, late, endless, restarts, many, rollback, dead_address, dead_reader, idle)
    },
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # UCX writes its warnings to standard output
    preload()
    import nixl  # noqa: F401 - paid for once

    for line in sys.stdin:
        try:
            result = SCENARIOS[line.strip()]()
        except Exception:
            result = {"error": traceback.format_exc()}
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
