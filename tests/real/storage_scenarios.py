# SPDX-License-Identifier: Apache-2.0
"""Runs in the engine's venv: PointsmanStorageTier below vLLM's tiering manager, without an engine.

    python storage_scenarios.py ROOT NAME ...    one JSON line: {name: what came out}; all of them without a name

Each scenario has a directory of its own below ROOT. Chunks are filled and compared here, with none of the code under test.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offloading import offloading_config
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

from engine_ext.vllm.spec import PointsmanOffloadingSpec

CHUNK_BYTES = 4096
CHUNK_TOKENS = 16
FILE_BYTES = 64 + CHUNK_BYTES
CHUNKS = 16
"""Of the host tier."""
PATIENCE_S = 30.0


def key_of(number: int) -> OffloadKey:
    return make_offload_key(hashlib.sha256(b"%d" % number).digest(), 0)


def content_of(key: OffloadKey) -> bytes:
    return hashlib.shake_128(key).digest(CHUNK_BYTES)


@dataclass(slots=True)
class Node:
    """A tiering manager that is stepped by hand, and a listener to its events."""

    manager: Any
    requests: int = 0
    held: set[bytes] = field(default_factory=set)
    order: list[tuple[bytes, bool]] = field(default_factory=list)
    ownerships: set[Any] = field(default_factory=set)

    def step(self) -> None:
        with _lock(self.manager):
            self.manager.on_schedule_end(ScheduleEndContext(set(), set()))
            for event in self.manager.take_events():
                if event.medium is not Medium.STORAGE:
                    continue
                self.ownerships.add((event.ownership, event.removal_expected, event.removed))
                self.order += [(bytes(key), event.removed) for key in event.keys]
                if event.removed:
                    self.held.difference_update(event.keys)
                else:
                    self.held.update(event.keys)

    def settle(self) -> None:
        """Steps until nothing is left to do."""
        deadline = time.monotonic() + PATIENCE_S
        while self.manager.has_pending_work():
            self.step()
            assert time.monotonic() < deadline, "work is left"
            time.sleep(0.001)
        self.step()

    def request(self, keys: Sequence[OffloadKey], params: dict[str, Any] | None = None) -> ReqContext:
        self.requests += 1
        context = ReqContext(f"r{self.requests}", kv_transfer_params=params)
        for i, key in enumerate(keys):
            context.set_offload_key_position(key, CHUNK_TOKENS * (i + 1))
        with _lock(self.manager):
            self.manager.on_new_request(context)
        return context

    def store(self, keys: Sequence[OffloadKey], params: dict[str, Any] | None = None) -> None:
        context = self.request(keys, params)
        view = self.manager.primary_tier.get_kv_memoryview()
        with _lock(self.manager):
            prepared = self.manager.prepare_store(keys, context)
            for key, chunk in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
                view[int(chunk) : int(chunk) + 1].cast("B")[:] = content_of(key)
            self.manager.complete_store(prepared.keys_to_store, context)
            self.manager.on_request_finished(context)
        self.settle()

    def load(self, keys: Sequence[OffloadKey]) -> tuple[int, int]:
        """As the scheduler looks up a prefix: chunks that came, and of them those with wrong bytes."""
        context = self.request(keys)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with _lock(self.manager):
                results = [self.manager.lookup(key, context) for key in keys]
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING}.intersection(results):
                break
            self.step()
            assert time.monotonic() < deadline, f"still {results}"
            time.sleep(0.001)
        good = [key for key, result in zip(keys, results, strict=True) if result is LookupResult.HIT]
        wrong = 0
        view = self.manager.primary_tier.get_kv_memoryview()
        with _lock(self.manager):
            if good:
                spec = self.manager.prepare_load(good, context)
                for key, chunk in zip(good, spec.chunk_ids, strict=True):
                    wrong += bytes(view[int(chunk) : int(chunk) + 1].cast("B")) != content_of(key)
                self.manager.complete_load(good, context)
            self.manager.on_request_finished(context)
        self.settle()
        return len(good), wrong

    def forget_ram(self) -> None:
        with _lock(self.manager):
            self.manager.reset_cache()
            if hasattr(self.manager, "on_reset_flushed"):
                self.manager.on_reset_flushed()
        self.settle()

    def counters(self) -> dict[str, float]:
        """Of the storage tier, since the last call."""
        stats = self.manager.get_stats()
        rows = stats.reduce() if stats is not None else {}
        return {
            name.removeprefix("vllm:pointsman_storage_"): value
            for name, value in rows.items()
            if name.startswith("vllm:pointsman_storage_")
        }


def _lock(manager: Any) -> contextlib.AbstractContextManager[Any]:
    return getattr(manager, "lock", contextlib.nullcontext())


@contextlib.contextmanager
def node(root: Path, capacity_chunks: int = 1000, tenant: str = "", **entry: Any) -> Any:
    tier = {
        "type": "PointsmanStorageTier",
        "module_path": "engine_ext.vllm.tier",
        "root_dir": str(root),
        "capacity_bytes": capacity_chunks * FILE_BYTES,
        "trust_s": 0.0,
        "tenant": tenant,
        **entry,
    }
    extra = {
        "spec_name": "PointsmanOffloadingSpec",
        "spec_module_path": "engine_ext.vllm.spec",
        "cpu_bytes_to_use": CHUNKS * CHUNK_BYTES,
        "secondary_tiers": [tier],
    }
    spec = PointsmanOffloadingSpec(offloading_config(extra, block_bytes=CHUNK_BYTES))
    made = Node(spec.get_manager())
    try:
        made.settle()
        yield made
    finally:
        made.manager.shutdown()


def files(root: Path) -> set[bytes]:
    return {bytes.fromhex(path.name) for path in root.glob("*/*/*") if not path.name.startswith(".")}


def reload(root: Path) -> dict[str, Any]:
    """Stored, lost from RAM, promoted from disk; again after a restart; and what was said of it."""
    keys = [key_of(number) for number in range(10)]
    with node(root) as one:
        one.store(keys)
        before = one.load(keys)
        one.forget_ram()
        after = one.load(keys)
        counters = one.counters()
        heard = one.held == files(root) == {bytes(key) for key in keys}
        ownerships = sorted(map(repr, one.ownerships))
    with node(root, report_keys_per_step=3) as again:
        reported = again.held == files(root)
        restarted = again.load(keys)
    return {
        "in_ram": before,
        "from_disk": after,
        "heard": heard,
        "ownerships": ownerships,
        "reported": reported,
        "restarted": restarted,
        "read_blocks": counters["read_blocks"],
        "bytes": counters["bytes"],
    }


def churn(root: Path) -> dict[str, Any]:
    """Two managers on one small directory, at random: every load exact or a miss, capacity kept, events true."""
    rng = random.Random(7)
    capacity = 24
    wrong = came = largest = 0
    with node(root, capacity) as one, node(root, capacity) as other:
        for _ in range(120):
            worker = rng.choice([one, other])
            keys = [key_of(number) for number in rng.sample(range(60), rng.randint(1, 8))]
            if rng.random() < 0.5:
                worker.store(keys)
            else:
                if rng.random() < 0.5:
                    worker.forget_ram()
                good, bad = worker.load(keys)
                came, wrong = came + good, wrong + bad
            largest = max(largest, sum(path.stat().st_size for path in root.glob("*/*/*")))
        said = []
        for worker in (one, other):
            store = next(tier for tier in worker.manager.secondary_tiers)._store
            store._begin_scan(0.0)
            while store._tasks.scanning.is_set():
                time.sleep(0.001)
            worker.settle()
            said.append(worker.held == files(root))
        evictions = sum(worker.counters().get("evictions", 0) for worker in (one, other))
        ordered = all(_stored_before_removed(worker.order) for worker in (one, other))
    return {
        "wrong": wrong,
        "came": came,
        "kept": largest <= capacity * FILE_BYTES,
        "said": said,
        "ordered": ordered,
        "evictions": evictions,
    }


def _stored_before_removed(order: Sequence[tuple[bytes, bool]]) -> bool:
    held: set[bytes] = set()
    for key, removed in order:
        if removed and key not in held:
            return False
        (held.discard if removed else held.add)(key)
    return True


def damage(root: Path) -> dict[str, Any]:
    """One file is damaged, one is gone: those two are computed again, at once and only once."""
    keys = [key_of(number) for number in range(6)]
    with node(root) as one:
        one.store(keys)
        one.forget_ram()
        paths = {path.name: path for path in root.glob("*/*/*")}
        paths[bytes(keys[1]).hex()].write_bytes(b"!" * FILE_BYTES)
        paths[bytes(keys[4]).hex()].unlink()
        first = one.load(keys)
        counters = one.counters()
        one.store(keys)
        one.forget_ram()
        second = one.load(keys)
        heard = one.held == files(root)
    errors = {name: value for name, value in counters.items() if name.startswith("errors")}
    return {"first": first, "second": second, "heard": heard, "errors": errors}


def tenants(root: Path) -> dict[str, Any]:
    """Two tenants, and two hash seeds, on one root."""
    keys = [key_of(number) for number in range(4)]
    with node(root, tenant="blue") as blue, node(root, tenant="red") as red:
        blue.store(keys)
        blue.forget_ram()
        counts = [blue.load(keys)[0], red.load(keys)[0]]
        red.store(keys)
    kept = kv_cache_utils.NONE_HASH
    kv_cache_utils.NONE_HASH = kv_cache_utils.BlockHash(b"another seed".ljust(32))
    try:
        with node(root, tenant="blue") as reseeded:
            counts.append(reseeded.load(keys)[0])
            reseeded.store(keys)
    finally:
        kv_cache_utils.NONE_HASH = kept
    return {"found": counts, "folders": len([path for path in root.iterdir() if path.is_dir()])}


def hints(root: Path) -> dict[str, Any]:
    """What the router says of a request: its pinned head stays, its private tail is not written."""
    plan = {
        "version": 1,
        "plan_id": "p",
        "evict": {"pinned_tokens": 2 * CHUNK_TOKENS, "private_from_token": 64},
    }
    head = [key_of(number) for number in range(8)]
    with node(root, capacity_chunks=6) as one:
        one.store(head, {"pointsman": plan})
        stored = len(files(root))
        for start in (100, 200, 300):
            one.store([key_of(start + number) for number in range(5)])
        kept = sum(bytes(key) in files(root) for key in head[:2])
        size = len(files(root))
    return {"stored": stored, "kept": kept, "size": size}


def hung(root: Path) -> dict[str, Any]:
    """Reads hang: requests go on at the deadline, and no late byte reaches the chunks that others use by then."""
    import threading

    from engine_ext.vllm.storage import directory

    keys = [key_of(number) for number in range(4)]
    gate, real = threading.Event(), directory._read_whole

    def hang(fd: int, buffer: memoryview) -> int:
        assert gate.wait(PATIENCE_S)
        return int(real(fd, buffer))

    with node(root, load_deadline_s=0.2, read_threads=4) as one:
        one.store(keys)
        one.forget_ram()
        directory._read_whole = hang
        started_s = time.monotonic()
        first = one.load(keys)
        seconds = time.monotonic() - started_s
        others = [key_of(100 + number) for number in range(CHUNKS)]
        one.store(others)
        gate.set()
        deadline = time.monotonic() + PATIENCE_S
        while one.counters().get("read_blocks", 0) < len(keys):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        directory._read_whole = real
        second = one.load(others)
        one.forget_ram()
        third = one.load(keys)
    return {"first": first, "quick": seconds < 5, "others": second, "later": third}


def refused(root: Path) -> dict[str, str]:
    """What a start is refused with."""
    said = {}
    for name, entry in {"typo": {"rootdir": "/x"}, "small": {"capacity_bytes": 100}}.items():
        try:
            with node(root, **entry):
                said[name] = "accepted"
        except ValueError as error:
            said[name] = str(error)
    (root / "file").write_text("")
    try:
        with node(root / "file"):
            said["root"] = "accepted"
    except ValueError as error:
        said["root"] = str(error)
    return said


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    one.__name__: one for one in (reload, churn, damage, tenants, hints, hung, refused)
}

if __name__ == "__main__":
    kv_cache_utils.init_none_hash(sha256)
    base = Path(sys.argv[1])
    played = {}
    for name in sys.argv[2:] or SCENARIOS:
        (base / name).mkdir(parents=True)
        played[name] = SCENARIOS[name](base / name)
    print(json.dumps(played))
