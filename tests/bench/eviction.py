# SPDX-License-Identifier: Apache-2.0
"""Recomputed seconds of recorded traffic under vLLM's eviction policies and ours, in one host tier.

    VENV/bin/python tests/bench/eviction.py TRACES [--cells NAME]... [--share 4 --share 10] [--slope 3.2e-5]

Run with the engine's interpreter and the repository on PYTHONPATH: vLLM's own CPUOffloadingManager holds the chunks
(512 tokens each), once with each policy, and is called as vLLM's scheduler does: lookup from the beginning up to the
first miss, load of the hits, store of the rest in steps of 8,192 tokens, end of request. Requests come one after
another, at their recorded times. Capacity is a share of all distinct chunks of the trace.

A prompt's tokens behind its hits are computed, each for a + b * (tokens before it) seconds. Those that an earlier
request had computed already are recomputed: their seconds are what a policy can save, and what the table shows.
"Clairvoyant" gives up what is read again last of all; it bounds hits, and seconds nearly so. Ours runs twice: without
hints, and with those a router could send at that moment (`Router` below), which never tell the future.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from engine_ext.vllm.eviction.core import EvictionCore
from engine_ext.vllm.policy import PointsmanPolicy
from router.plan.tails import TailReuse
from router.replay.sessions import load_sessions
from router.replay.traces import TraceRequest, load_trace

CHUNK_TOKENS = 512
STEP_CHUNKS = 16
SECONDS_PER_TOKEN = 6.25e-5
FOREVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Prompt:
    at_s: float
    tokens: int
    chunks: tuple[int, ...]
    """Numbers; equal for equal chunks behind equal prefixes."""


@dataclass(slots=True)
class Outcome:
    recomputed_s: float = 0.0
    computed_s: float = 0.0
    hits: int = 0
    wanted: int = 0
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    per_token_s: float
    per_token_and_context_s: float

    def seconds(self, begin: int, end: int) -> float:
        """Of the tokens from begin to end, behind those before."""
        tokens = max(end - begin, 0)
        return self.per_token_s * tokens + self.per_token_and_context_s * tokens * (begin + tokens / 2)


def cells(folder: Path) -> Iterator[tuple[str, Callable[[], list[TraceRequest]]]]:
    """Every trace that is there. Sessions begin at random, at three rates: few, many, and all at once."""
    for name in ("conversation", "synthetic", "toolagent"):
        path = folder / f"mooncake_fast25_{name}_trace.jsonl.gz"
        if path.exists():
            yield name, lambda path=path: load_trace(path)  # type: ignore[misc]
    path = folder / "kv-cache-tester_raw_subset.jsonl.gz"
    if path.exists():
        for rate in (0.005, 0.02, 0.1):
            yield f"agentic {rate}/s", lambda rate=rate: load_sessions(path, rate, 1, None, 60.0)  # type: ignore[misc]
    path = folder / "kv-cache-tester_all710_runlength.jsonl.gz"
    if path.exists():
        yield "agentic, 710 sessions", lambda: load_sessions(path, 0.02, 1, 4_000, 60.0)


def in_chunks(requests: Sequence[TraceRequest]) -> tuple[list[Prompt], int]:
    """Prompts in full chunks, and the number of different ones."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    prompts = []
    for request in requests:
        blocks = CHUNK_TOKENS // request.block_size_tokens
        chunks: list[int] = []
        parent = -1
        for first in range(0, request.full_blocks - blocks + 1, blocks):
            identity = (parent, request.block_ids[first : first + blocks])
            parent = numbers.setdefault(identity, len(numbers))
            chunks.append(parent)
        prompts.append(Prompt(request.arrival_s, request.input_tokens, tuple(chunks)))
    return prompts, len(numbers)


class Book:
    """Adds up what the hits of a run leave to compute."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._seen: set[int] = set()
        self.outcome = Outcome()

    def enter(self, prompt: Prompt, hits: int) -> None:
        known = 0
        for chunk in prompt.chunks:
            if chunk not in self._seen:
                break
            known += 1
        self._seen.update(prompt.chunks)
        most = (prompt.tokens - 1) // CHUNK_TOKENS  # the last token is always computed
        hits, known = min(hits, most), min(known, most)
        one = self.outcome
        one.recomputed_s += self._costs.seconds(hits * CHUNK_TOKENS, known * CHUNK_TOKENS)
        one.computed_s += self._costs.seconds(hits * CHUNK_TOKENS, prompt.tokens)
        one.hits += hits
        one.wanted += len(prompt.chunks)


class Router:
    """What our router says of a request when it sends it (router/plan/worth.py), of one worker and no peers."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._tails = TailReuse()
        self._random = Random(0)

    def hints(self, prompt: Prompt) -> dict[str, Any]:
        evict: dict[str, Any] = {
            "rebuild_s": self._costs.seconds(0, prompt.tokens),
            "pinned_tokens": self._tails.shared_by_all(None) or 0,
        }
        private = self._tails.shared_tokens(None, self._random)
        if private is not None:
            evict["private_from_token"] = private
        return {"pointsman": {"version": 1, "plan_id": "bench", "evict": evict}}

    def served(self, hits: int) -> None:
        """So many chunks of it were held."""
        self._tails.note(None, hits * CHUNK_TOKENS)


def run(
    prompts: Sequence[Prompt], capacity: int, costs: Costs, policy: str, router: Router | None = None
) -> Outcome:
    now_s = 0.0
    own = policy == "PointsmanPolicy"
    manager = CPUOffloadingManager(
        num_chunks=capacity,
        cache_policy=policy,
        cache_policy_module_path="engine_ext.vllm.policy" if own else None,
    )
    if isinstance(manager._policy, PointsmanPolicy):
        manager._policy.clock = lambda: now_s
    book, began_s = Book(costs), time.process_time()
    names: dict[int, OffloadKey] = {}
    for number, prompt in enumerate(prompts):
        now_s = prompt.at_s
        for chunk in prompt.chunks:
            if chunk not in names:
                names[chunk] = make_offload_key(chunk.to_bytes(32, "big"), 0)
        keys = [names[chunk] for chunk in prompt.chunks]
        context = ReqContext(str(number), None if router is None else router.hints(prompt))
        for place, key in enumerate(keys, start=1):
            context.set_offload_key_position(key, place * CHUNK_TOKENS)
        hits = _serve(manager, keys, context)
        book.enter(prompt, hits)
        if router is not None:
            router.served(hits)
    book.outcome.took_s = time.process_time() - began_s
    return book.outcome


def _serve(manager: CPUOffloadingManager, keys: list[OffloadKey], context: ReqContext) -> int:
    """One request; how many chunks it found."""
    manager.on_new_request(context)
    hits = 0
    for key in keys:
        if manager.lookup(key, context) is not LookupResult.HIT:
            break
        hits += 1
    if hits:
        manager.prepare_load(keys[:hits], context)
        manager.complete_load(keys[:hits], context)
    for first in range(hits, len(keys), STEP_CHUNKS):
        stored = manager.prepare_store(keys[first : first + STEP_CHUNKS], context)
        if stored is not None and stored.keys_to_store:
            manager.complete_store(stored.keys_to_store, context)
    manager.on_request_finished(context)
    return hits


def clairvoyant(prompts: Sequence[Prompt], capacity: int, costs: Costs) -> Outcome:
    """Gives up what is read again last, deepest first; what is never read again is not kept at all."""
    following: dict[int, int] = {}
    next_reads: list[list[int]] = []
    for number in range(len(prompts) - 1, -1, -1):
        next_reads.append([following.get(chunk, FOREVER) for chunk in prompts[number].chunks])
        following.update(dict.fromkeys(prompts[number].chunks, number))
    next_reads.reverse()
    book, held = Book(costs), dict[int, tuple[int, int, int]]()
    heap: list[tuple[int, int, int]] = []
    for prompt, reads in zip(prompts, next_reads, strict=True):
        hits = next((i for i, chunk in enumerate(prompt.chunks) if chunk not in held), len(prompt.chunks))
        book.enter(prompt, hits)
        for depth, (chunk, read) in enumerate(zip(prompt.chunks, reads, strict=True)):
            held.pop(chunk, None)
            if read != FOREVER:
                held[chunk] = entry = (-read, -depth, chunk)
                heapq.heappush(heap, entry)
        while len(held) > capacity:
            entry = heapq.heappop(heap)
            if held.get(entry[2]) == entry:
                del held[entry[2]]
    return book.outcome


def operations(capacity: int, clock: Callable[[], float] = time.process_time) -> str:
    """Microseconds per chunk in a full tier of our policy, over prompts of 1 to 64 chunks."""
    core: EvictionCore[int] = EvictionCore(capacity)
    random = Random(1)
    spent = dict.fromkeys(("read", "evict", "insert", "pin and release"), 0.0)
    worst_s, chunks, number = 0.0, 0, 0
    while chunks < 3 * capacity:
        number += 1
        chain = [((number, place), CHUNK_TOKENS * (place + 1)) for place in range(random.randrange(1, 65))]
        full = chunks >= 2 * capacity
        times = [clock()]
        core.visit(chain, number / 10)
        times.append(clock())
        if (needed := core.held + len(chain) - capacity) > 0:
            core.evict(needed)
        times.append(clock())
        for key, _ in chain:
            core.insert(key, 1, evictable=True)
        times.append(clock())
        for key, _ in chain:
            core.mark_non_evictable(key)
        for key, _ in chain:
            core.mark_evictable(key)
        times.append(clock())
        chunks += len(chain)
        if full:
            for name, (before, after) in zip(spent, pairwise(times), strict=True):
                spent[name] += after - before
            worst_s = max(worst_s, times[2] - times[0])
    each = ", ".join(f"{name} {1e6 * seconds / capacity:.1f}" for name, seconds in spent.items())
    return (
        f"{capacity:,} chunks: {each} us per chunk; longest read and evict of a prompt {1e3 * worst_s:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, help="directory of recorded traces")
    parser.add_argument("--cells", action="append", help="only traffic whose name begins so")
    parser.add_argument("--share", type=int, action="append", help="capacity: one part in so many")
    parser.add_argument(
        "--slope", type=float, default=3.2e-5, help="attention: cost of a token before, per token"
    )
    parser.add_argument("--operations", action="store_true", help="cost of the operations instead")
    options = parser.parse_args()
    if options.operations:
        print("\n".join(operations(capacity) for capacity in (1_000, 10_000, 100_000)))
        return
    costs = Costs(SECONDS_PER_TOKEN, SECONDS_PER_TOKEN * options.slope)
    print(
        "| traffic | tier | LRU s | ARC s | ours s | with hints s | clairvoyant s | ours to the better | us per chunk: LRU, ARC, ours |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, load in cells(options.traces):
        if options.cells and not name.startswith(tuple(options.cells)):
            continue
        prompts, distinct = in_chunks(load())
        for share in options.share or (4, 10):
            capacity = distinct // share
            lru, arc, ours = (run(prompts, capacity, costs, one) for one in ("lru", "arc", "PointsmanPolicy"))
            hinted = run(prompts, capacity, costs, "PointsmanPolicy", Router(costs))
            bound = clairvoyant(prompts, capacity, costs)
            better = min(lru.recomputed_s, arc.recomputed_s)
            change = [f"{one.recomputed_s / better - 1:+.1%}" if better else "0" for one in (ours, hinted)]
            took = " ".join(f"{1e6 * one.took_s / one.wanted:.0f}" for one in (lru, arc, ours))
            seconds = " | ".join(f"{one.recomputed_s:,.1f}" for one in (lru, arc, ours, hinted, bound))
            print(
                f"| {name} | 1/{share}: {capacity:,} | {seconds} | {', '.join(change)} | {took} |", flush=True
            )


if __name__ == "__main__":
    main()
