# SPDX-License-Identifier: Apache-2.0
"""Both ends of the peer tier without an engine: vLLM's own tiering managers, in processes of their own.

Runs in the engine's venv. A `Node` is a manager with a host tier that is driven as the engine's scheduler does it;
`Remote` is one in another process, stepped all the time.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from offloading import offloading_config
from signals import send_signal
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import OffloadingModelConfig
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from engine_ext.vllm.reports.sink import NoReports
from engine_ext.vllm.spec import PointsmanOffloadingSpec

CHUNK_BYTES = 64 << 10
CHUNK_TOKENS = 16
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where vLLM keeps the region; a killed process leaves its file
PATIENCE_S = 60.0
STEP_PAUSE_S = 0.0005
SETTLED = (LookupResult.HIT, LookupResult.MISS)
OURS = {"type": "PointsmanTier", "module_path": "engine_ext.vllm.tier", "weights_revision": "r"}


def keys_of(seed: int, count: int, first: int = 0) -> list[OffloadKey]:
    """Keys of the chunks of one prompt."""
    return [
        make_offload_key(hashlib.sha256(f"{seed}.{i}".encode()).digest(), 0)
        for i in range(first, first + count)
    ]


def content(key: bytes) -> bytes:
    """What a chunk of this key holds, wherever it is."""
    return random.Random(key).randbytes(CHUNK_BYTES)


class Said(NoReports):
    """Keeps what a router would hear of failures."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    def failed(self, req_id: str, source: str, outcome: str, seconds: float) -> None:
        self._said.append(outcome)


class Node:
    """One manager. Every call holds its lock where it has one, as vLLM's scheduler does."""

    def __init__(
        self,
        chunks: int,
        tier: Mapping[str, Any],
        *,
        hash_algorithm: str = "sha256_cbor",
        stock: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
        model: str = "model",
        dtype: str = "bfloat16",
        **config: Any,
    ) -> None:
        init_none_hash(get_hash_fn_by_name(hash_algorithm))
        extra = {"cpu_bytes_to_use": chunks * chunk_bytes, "secondary_tiers": [dict(tier)]}
        spec = TieringOffloadingSpec if stock else PointsmanOffloadingSpec
        per_chunk = config.get("blocks_per_chunk", 1)
        made = offloading_config(
            extra, block_bytes=chunk_bytes // per_chunk, tokens_per_block=CHUNK_TOKENS // per_chunk, **config
        )
        self.spec = spec(replace(made, model=OffloadingModelConfig(model, dtype)))
        self.manager: Any = self.spec.get_manager()
        self.tier: Any = self.manager.secondary_tiers[0]
        self.said: list[str] = []
        """Outcomes of failed lookups, as reports would carry them."""
        if hasattr(self.tier, "_reports"):
            self.tier._reports = Said(self.said)
        self.region = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    @contextlib.contextmanager
    def locked(self) -> Iterator[Any]:
        with getattr(self.manager, "lock", None) or contextlib.nullcontext():
            yield self.manager

    def step(self, scheduled: Sequence[str] = ()) -> None:
        with self.locked() as manager:
            manager.on_schedule_end(ScheduleEndContext(scheduled, ()))

    @property
    def address(self) -> str:
        """Of our control channel; open after the first step."""
        return str(self.tier._exchange.link.address)

    def fill(self, keys: Sequence[OffloadKey], name: str = "fill", **params: Any) -> int:
        """Stores chunks as if the engine had computed them; how many there was room for."""
        request = self.request(name, keys, params)
        with self.locked() as manager:
            output = manager.prepare_store(list(keys), request)
            if output is None:
                manager.on_request_finished(request)
                return 0
            for key, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids.tolist(), strict=True):
                self.region[chunk][:] = np.frombuffer(content(key), np.uint8)
            if output.keys_to_store:
                manager.complete_store(output.keys_to_store, request)
            manager.on_request_finished(request)
            return len(output.keys_to_store)

    def request(self, name: str, keys: Sequence[OffloadKey], params: Mapping[str, Any]) -> ReqContext:
        """A new request whose prompt has these chunks."""
        request = ReqContext(req_id=name, kv_transfer_params=dict(params))
        for i, key in enumerate(keys):
            request.set_offload_key_position(key, (i + 1) * CHUNK_TOKENS)
        with self.locked() as manager:
            manager.on_new_request(request)
        return request

    def look(self, request: ReqContext, keys: Sequence[OffloadKey]) -> int | None:
        """As the scheduler looks for a prefix: hits up to the first miss, None while anything is in doubt."""
        hits, doubt = 0, False
        with self.locked() as manager:
            for key in keys:
                result = manager.lookup(key, request)
                if result is LookupResult.MISS:
                    break
                hits += result is LookupResult.HIT
                doubt |= result not in SETTLED
        return None if doubt else hits

    def prefix(
        self, request: ReqContext, keys: Sequence[OffloadKey], until: Callable[[], bool] | None = None
    ) -> int | None:
        """Steps until the prefix is known (or `until` says enough); then the request counts as scheduled."""
        stop_s = time.monotonic() + PATIENCE_S
        while (hits := self.look(request, keys)) is None:
            self.step()
            if until is not None and until():
                return None
            if time.monotonic() > stop_s:
                raise TimeoutError(f"{request.req_id} is in doubt for {PATIENCE_S} s")
            time.sleep(STEP_PAUSE_S)
        self.step([request.req_id])
        return hits

    def wrong(self, request: ReqContext, keys: Sequence[OffloadKey]) -> int:
        """Loads these chunks as the worker would; how many do not hold what their key says."""
        if not keys:
            return 0
        with self.locked() as manager:
            chunks = manager.prepare_load(list(keys), request).chunk_ids.tolist()
            wrong = sum(
                self.region[chunk].tobytes() != content(key) for key, chunk in zip(keys, chunks, strict=True)
            )
            manager.complete_load(list(keys), request)
        return wrong

    def finish(self, request: ReqContext) -> None:
        with self.locked() as manager:
            manager.on_request_finished(request)
        self.step()

    def pull(self, name: str, keys: Sequence[OffloadKey], params: Mapping[str, Any]) -> dict[str, Any]:
        """A whole request: what its prefix was, and whether the bytes are right."""
        began_s = time.monotonic()
        request = self.request(name, keys, params)
        hits = self.prefix(request, keys)
        seconds = time.monotonic() - began_s
        wrong = self.wrong(request, keys[:hits])
        self.finish(request)
        return {"hits": hits, "wrong": wrong, "seconds": seconds}

    def run_until(self, condition: Callable[[], bool]) -> bool:
        """Steps until then; False after PATIENCE_S."""
        stop_s = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > stop_s:
                return False
            self.step()
            time.sleep(STEP_PAUSE_S)
        return True

    def stats(self) -> dict[str, Any]:
        """Everything that must go back to where it was, and the counters since the last call."""
        with self.locked() as manager:
            counted = self.tier.get_stats()
        primary = manager.primary_tier
        return {
            "jobs": len(manager._jobs),
            "requests": len(manager._req_state),
            "writing": primary._num_write_pending_chunks,
            "free": primary._get_num_free_chunks(),
            "evictable": primary._num_evictable_cache_chunks,
            "held": sorted(self.spec.quarantine.held) if hasattr(self.spec, "quarantine") else [],
            "counters": {
                f"{name.removeprefix('vllm:pointsman_')}{list(labels) or ''}": value
                for name, series in (counted.data["data"] if counted is not None else {}).items()
                for labels, value in series.items()
            },
        }

    def reset(self) -> None:
        """As the engine's /reset_prefix_cache does."""
        with self.locked() as manager:
            manager.reset_cache()

    def close(self) -> None:
        self.region = None  # type: ignore[assignment]
        self.manager.shutdown()


def plan(
    name: str, *pulls: tuple[str, int, int], kind: str = "pointsman", within_s: float = 20, **more: Any
) -> dict[str, Any]:
    """Request parameters: (source, first chunk, chunk after the last) of each pull."""
    entries = [
        {
            "source": source,
            "kind": kind,
            "start_token": first * CHUNK_TOKENS,
            "end_token": end * CHUNK_TOKENS,
            "deadline_ms": int(within_s * 1000),
        }
        for source, first, end in pulls
    ]
    return {"pointsman": {"version": 1, "plan_id": name, "pulls": entries, **more}}


def _serve(pipe: Connection, options: dict[str, Any]) -> None:
    node = Node(**options)
    node.step()
    pipe.send(node.address if "PointsmanTier" in options["tier"]["type"] else "")
    while True:
        if not pipe.poll(STEP_PAUSE_S):
            node.step()
            continue
        try:
            name, arguments, named = pipe.recv()
        except EOFError:
            os._exit(0)
        if name == "close":
            node.close()
            pipe.send(None)
            os._exit(0)
        pipe.send(getattr(node, name)(*arguments, **named))


class Remote:
    """A Node in a process of its own. Attribute calls are its methods."""

    def __init__(self, chunks: int, tier: Mapping[str, Any], **options: Any) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self._engine_id = f"peers-{uuid.uuid4().hex[:12]}"
        options |= {"chunks": chunks, "tier": dict(tier), "engine_id": self._engine_id}
        self.process = CONTEXT.Process(target=_serve, args=(theirs, options), daemon=True)
        self.process.start()
        theirs.close()
        self.address = self._receive()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.pipe.send((name, arguments, named))
            return self._receive()

        return call

    def signal(self, number: int) -> None:
        send_signal(self.process.pid, number)

    def end(self) -> None:
        """Whatever state it is in."""
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
        self.process.join()
        self.pipe.close()
        (SHARED_MEMORY / f"vllm_offload_{self._engine_id}.mmap").unlink(missing_ok=True)

    def _receive(self) -> Any:
        if not self.pipe.poll(PATIENCE_S):
            raise TimeoutError("the other process does not answer")
        return self.pipe.recv()


CONTEXT = multiprocessing.get_context("forkserver")
