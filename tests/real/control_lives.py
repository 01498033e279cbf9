# SPDX-License-Identifier: Apache-2.0
"""Scenarios of real links: sources that are killed, come back, or stand still."""

from __future__ import annotations

import random
import signal
import time
from typing import Any

from control_pair import TCP, End, SourceProcess, closing
from transfer_pair import PATIENCE_S, content

from engine_ext.transfer.control.peer import BlocksNotPulled, BlocksPulled, Found, NotFound


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
