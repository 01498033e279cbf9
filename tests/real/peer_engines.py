# SPDX-License-Identifier: Apache-2.0
"""Engines with our peer tier: plans for them, their counters, and pulls that are held up in the middle."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from eventually import eventually_now

from .asking import B, forget_hbm, offload
from .engine import MODEL_NAME, RealWorker
from .launch import P2P_PORT, PEER_PORT
from .prompts import token_ids

BLOCK_BYTES = 8192
"""Of the small model, in the host tier."""
LEASE_S = 8.0
TIER = {
    "type": "PointsmanTier",
    "module_path": "engine_ext.vllm.tier",
    "control": {"port": PEER_PORT, "lease_s": LEASE_S, "handshake_timeout_s": 30.0},
}
BOTH = TIER | {
    "allow_unfingerprinted_peers": True,
    "stock_lookup_s": 30.0,
    "p2p": {"host": "127.0.0.1", "port": P2P_PORT, "num_threads": 0},
}
TCP = (("UCX_TLS", "tcp,self"),)
"""Over shared memory a source takes no part in being read, so one that stands still could not hold a pull up."""
_TRIES = 20

wait_until = functools.partial(eventually_now, patience_s=60)


def pulls(
    *wanted: tuple[RealWorker, int, int], within_ms: int = 30_000, kind: str = "pointsman"
) -> dict[str, Any]:
    """Request parameters: (source, first block, block after the last) of each pull."""
    return {
        "pointsman": {
            "version": 1,
            "plan_id": uuid.uuid4().hex,
            "pulls": [
                {
                    "source": source.peer if kind == "pointsman" else source.p2p,
                    "kind": kind,
                    "start_token": first * B,
                    "end_token": end * B,
                    "deadline_ms": within_ms,
                }
                for source, first, end in wanted
            ],
        }
    }


def only_in_ram(worker: RealWorker, prompt: list[int]) -> str:
    """Computes the prompt there, leaves its blocks in RAM alone, and returns the cold text."""
    cold = offload(worker, prompt)
    forget_hbm(worker)
    return cold


def counter(worker: RealWorker, name: str, **labels: str) -> float:
    """The sum of a counter's samples that have these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value
        for sample, value in worker.metrics().items()
        if sample.startswith(f"vllm:pointsman_{name}") and all(one in sample for one in wanted)
    )


def wait_for(worker: RealWorker, at_least: float, name: str, **labels: str) -> None:
    deadline = time.monotonic() + 60
    while (seen := counter(worker, name, **labels)) < at_least:
        assert time.monotonic() < deadline, f"{worker.name}: {name} is {seen:g}, not {at_least:g}"
        time.sleep(0.05)


def cached_of(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def forget_all(worker: RealWorker) -> None:
    """HBM and RAM."""
    worker.post("/reset_prefix_cache?reset_external=true")


@contextlib.contextmanager
def paused(worker: RealWorker) -> Iterator[None]:
    worker.pause()
    try:
        yield
    finally:
        worker.resume()


class Asking:
    """A completion under way: read its answer, or leave it."""

    def __init__(self, worker: RealWorker, prompt: list[int], plan: dict[str, Any]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", worker.ports.http, timeout=120)
        body = {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            "kv_transfer_params": plan,
        }
        self._connection.request(
            "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
        )

    def answer(self) -> dict[str, Any]:
        with contextlib.closing(self._connection), self._connection.getresponse() as response:
            found: dict[str, Any] = json.load(response)
        return found

    def leave(self) -> None:
        """As a client that has gone: the engine aborts the request."""
        self._connection.close()


@contextlib.contextmanager
def pull_held_up(
    source: RealWorker, puller: RealWorker, blocks: int, *others: RealWorker
) -> Iterator[tuple[Asking, list[int], str]]:
    """A request whose blocks are being read from a source that stands still; its prompt and cold text.

    The source answers the question while the puller stands still, and the other way round, so that the read begins
    when nobody serves it. Others hold the prompt in RAM too. The source goes on at the end, if it still lives.
    """
    for _ in range(_TRIES):
        prompt = token_ids(blocks * B + 5)
        cold = only_in_ram(source, prompt)
        for other in others:
            only_in_ram(other, prompt)
        asking = _begin(source, puller, prompt, blocks)
        try:
            if asking is not None:
                yield asking, prompt, cold
                return
        finally:
            source.resume()
            puller.resume()
            if asking is not None:
                asking.leave()
    raise AssertionError(f"no pull was held up in {_TRIES} tries")


def _begin(source: RealWorker, puller: RealWorker, prompt: list[int], blocks: int) -> Asking | None:
    """None: a machine under load let something run out on the way; the request has ended by itself."""

    def settled() -> float:
        """Counts once per chunk that was looked up, then once per pull."""
        return counter(puller, "pulls_total") + counter(puller, "lookups_total")

    plans, ended = counter(puller, "plans_total", outcome="accepted"), settled()
    served = counter(source, "served_chunks_total", answer="leased")
    source.pause()
    asking = Asking(puller, prompt, pulls((source, 0, blocks)))
    wait_for(puller, plans + 1, "plans_total", outcome="accepted")
    puller.pause()
    source.resume()
    if not _soon(lambda: counter(source, "served_chunks_total", answer="leased") >= served + blocks):
        puller.resume()  # the question had not been sent
        asking.leave()
        wait_until(lambda: settled() >= ended + blocks, "the end of a request that was left")
        return None
    source.pause()
    puller.resume()
    wait_until(lambda: loading(puller) > 0 or settled() > ended + blocks, "the pull's begin")
    if settled() > ended + blocks:
        source.resume()
        asking.answer()
        return None
    return asking


def loading(worker: RealWorker) -> float:
    """Load jobs of its tiers that are open."""
    family = "vllm:kv_offload_tiering_active_promotion_jobs{"
    return sum(value for name, value in worker.metrics().items() if name.startswith(family))


def _soon(done: Callable[[], bool]) -> bool:
    """Whether it comes true before a lease could run out."""
    until_s = time.monotonic() + LEASE_S / 2
    while not done():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True
