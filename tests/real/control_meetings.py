# SPDX-License-Identifier: Apache-2.0
"""Scenarios of real links: a reader meets sources, those that refuse it, and addresses without one."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from typing import Any

import msgspec
from control_pair import End, SourceProcess, closing, key
from transfer_pair import BLOCK_BYTES, content, fingerprint

from engine_ext.transfer.control.peer import BlocksNotPulled, BlocksPulled, Found, NotFound


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
