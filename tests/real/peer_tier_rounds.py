# SPDX-License-Identifier: Apache-2.0
"""Scenarios of the peer tier. Reads their names from standard input, one a line; answers each with a line of JSON.

One process for all of them: importing vLLM takes seconds. test_peer_tier.py says what must come out.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.forkserver import ensure_running
from typing import Any

from peer_tier_node import CONTEXT, OURS, Node, Remote, keys_of, plan

CONTROL = {"port": 0, "lease_s": 2.0}
TIER = {**OURS, "control": CONTROL, "transfer": {"part_bytes": 65536, "depth": 1}}
"""One chunk at a time, so that what is to strike in the middle of a pull has a middle to strike."""
CHUNKS = 96
PRELOADED = ["nixl", "vllm.utils.hashing", "engine_ext.vllm.spec", "engine_ext.vllm.tier"]
"""What the fork server imports once for all sources; it finds only what is on PYTHONPATH."""


@contextlib.contextmanager
def nodes(
    *, sources: int = 1, chunks: int = CHUNKS, tier: dict[str, Any] | None = None, **options: Any
) -> Iterator[list[Any]]:
    """A destination in this process and sources in others; all end with the scenario."""
    remotes: list[Remote] = []
    node = None
    try:
        remotes.extend(Remote(chunks, tier or TIER) for _ in range(sources))
        node = Node(chunks, tier or TIER, **options)
        node.step()
        yield [node, *remotes]
    finally:
        if node is not None:
            node.close()
        for remote in remotes:
            remote.end()


def one_source() -> dict[str, Any]:
    """Forty chunks that only the source has; then again, now local; then keys nobody has."""
    with nodes() as (node, source):
        keys = keys_of(1, 40)
        source.fill(keys)
        first = node.pull("first", keys, plan("p1", (source.address, 0, 40)))
        again = node.pull("again", keys, plan("p2", (source.address, 0, 40)))
        unknown = node.pull("unknown", keys_of(2, 8), plan("p3", (source.address, 0, 8)))
        node.run_until(lambda: source.stats()["jobs"] == 0)
        return {
            "first": first,
            "again": again,
            "unknown": unknown,
            "here": node.stats(),
            "there": source.stats(),
        }


def two_sources() -> dict[str, Any]:
    """A prefix whose halves lie at two sources, and a third of which neither has anything."""
    with nodes(sources=2) as (node, left, right):
        keys = keys_of(3, 30)
        left.fill(keys[:10])
        right.fill(keys[10:20])
        pulls = [(left.address, 0, 10), (right.address, 10, 20), (left.address, 20, 30)]
        whole = node.pull("split", keys, plan("p1", *pulls))
        gap = keys_of(4, 20)
        left.fill([*gap[:4], *gap[6:10]])
        right.fill(gap[10:])
        broken = node.pull("gap", gap, plan("p2", (left.address, 0, 10), (right.address, 10, 20)))
        return {
            "whole": whole,
            "broken": broken,
            "here": node.stats(),
            "there": [left.stats(), right.stats()],
        }


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def in_tree() -> dict[str, Any]:
    """vLLM's own P2P tier at the other end: as a source of a plan, as a source that is named, and as a consumer."""
    stock_port, our_port = free_port(), free_port()
    stock = Remote(
        CHUNKS, {"type": "p2p", "host": "127.0.0.1", "port": stock_port, "num_threads": 0}, stock=True
    )
    both = {
        **TIER,
        "allow_unfingerprinted_peers": True,
        "p2p": {"host": "127.0.0.1", "port": our_port, "num_threads": 0},
        "linger_s": 0.5,
    }
    ours, node = Remote(CHUNKS, TIER), Node(CHUNKS, both)
    try:
        node.step()
        keys = keys_of(5, 20)
        stock.fill(keys[:12])
        ours.fill(keys[12:])
        address = f"127.0.0.1:{stock_port}"
        pulls = plan("p1", (address, 0, 12), kind="p2p")
        pulls["pointsman"]["pulls"] += plan("", (ours.address, 12, 20))["pointsman"]["pulls"]
        planned = node.pull("planned", keys, pulls)

        def named(port: int, name: str) -> dict[str, Any]:
            where = {"kv_request_id": name, "remote_host": "127.0.0.1", "remote_port": port}
            return {"remote_kv_source": where}

        more = keys_of(6, 10)
        stock.fill(more)
        as_consumer = node.pull("named", more, named(stock_port, "n1"))
        mine = keys_of(7, 10)
        node.fill(mine)
        as_source = stock_pulls(node, stock, mine, named(our_port, "n2"))
        refusing = ours.pull("refused", keys_of(8, 4), plan("p2", (address, 0, 4), kind="p2p"))
        refusing_named = ours.pull("refused2", keys_of(8, 4), named(stock_port, "n3"))
        settled = node.run_until(lambda: not node.stats()["jobs"])
        return {
            "planned": planned,
            "as_consumer": as_consumer,
            "as_source": as_source,
            "refusing": [refusing, refusing_named],
            "settled": settled,
            "here": node.stats(),
            "there": ours.stats(),
        }
    finally:
        node.close()
        stock.end()
        ours.end()


def in_tree_frozen() -> dict[str, Any]:
    """An in-tree source that stops answering: a plan ends at its deadline, a stock request at `stock_lookup_s`."""
    port = free_port()
    stock = Remote(CHUNKS, {"type": "p2p", "host": "127.0.0.1", "port": port, "num_threads": 0}, stock=True)
    both = {
        **TIER,
        "allow_unfingerprinted_peers": True,
        "p2p": {"host": "127.0.0.1", "port": free_port(), "num_threads": 0},
        "linger_s": 0.2,
        "stock_lookup_s": 0.5,
    }
    node = Node(CHUNKS, both)
    try:
        node.step()
        keys = keys_of(13, 12)
        stock.fill(keys)
        address = f"127.0.0.1:{port}"
        warm = node.pull("warm", keys[:4], plan("w", (address, 0, 4), kind="p2p"))
        stock.signal(signal.SIGSTOP)
        planned = node.pull("planned", keys[4:], plan("p", (address, 0, 8), kind="p2p", within_s=0.4))
        where = {"kv_request_id": "named", "remote_host": "127.0.0.1", "remote_port": port}
        named = node.pull("named", keys[4:], {"remote_kv_source": where})
        stock.signal(signal.SIGCONT)
        settled = node.run_until(lambda: not node.stats()["jobs"] and not node.stats()["held"])
        return {"warm": warm, "planned": planned, "named": named, "settled": settled, "end": start_of(node)}
    finally:
        node.close()  # first: vLLM's P2P tier does not close while it has something to say to a peer that is gone
        stock.end()


def stock_pulls(node: Node, stock: Remote, keys: list[Any], params: dict[str, Any]) -> Any:
    """The other process pulls while this one is stepped."""
    stock.pipe.send(("pull", ("stock", keys, params), {}))
    node.run_until(lambda: stock.pipe.poll(0))
    return stock.pipe.recv()


MISMATCHES: dict[str, dict[str, Any]] = {
    "weights_revision": {"tier": {**TIER, "weights_revision": "other"}},
    "tenant": {"tier": {**TIER, "tenant": "blue"}},
    "layout": {"blocks_per_chunk": 2},
    "block_length": {"chunk_bytes": 128 << 10},
    "hash_seed": {"hash_algorithm": "sha256"},
    "tp_map": {"replicated_layout": True},
    "dtype": {"dtype": "fp8"},
    "model": {"model": "another"},
}


def mismatches() -> dict[str, Any]:
    """A source that differs in one thing each time: what the reader's miss is called, and that nothing moved."""
    found = {}
    keys = keys_of(9, 4)
    node = Node(CHUNKS, TIER)
    try:
        node.step()
        for name, options in MISMATCHES.items():
            source = Remote(CHUNKS, **({"tier": TIER} | options))
            try:
                pulled = node.pull(name, keys, plan(name, (source.address, 0, 4)))
                found[name] = [
                    pulled["hits"],
                    node.said[-1],
                    node.stats()["counters"].get("lookups['refused']"),
                ]
            finally:
                source.end()
    finally:
        node.close()
    return found


def start_of(*all_nodes: Any) -> list[tuple[int, int, int]]:
    """What must be as before when everything is over: open jobs, open requests, chunks that can be had."""
    found = []
    for node in all_nodes:
        stats = node.stats()
        found.append((stats["jobs"], stats["requests"], stats["free"] + stats["evictable"]))
    return found


def killed(rounds: int = 3) -> dict[str, Any]:
    """The source is killed before the lookup, between lookup and transfer, and while a transfer runs.

    What came is right; the request ends within its deadline; the chunks come back; a successor at the same address
    serves. Over TCP, so that a transfer takes long enough to be hit.
    """
    results = []
    port = free_port()
    at = {**TIER, "control": {**CONTROL, "port": port}}
    node = Node(CHUNKS, TIER)
    try:
        node.step()
        for i in range(rounds):
            source = Remote(CHUNKS, at)
            keys = keys_of(100 + i, 40)
            source.fill(keys)
            params = plan(f"k{i}", (source.address, 0, 40), within_s=3)
            if i % 3 == 0:
                source.end()
            request = node.request(f"killed{i}", keys, params)
            began_s = time.monotonic()

            def struck(i: int = i, source: Remote = source) -> bool:
                """Kills it at the chosen moment."""
                reader = node.tier._exchange.reader
                at_lookup, at_pull = bool(reader._asked), bool(reader._parts)
                if (i % 3 == 1 and at_lookup) or (i % 3 == 2 and at_pull):
                    source.end()
                return False

            hits = node.prefix(request, keys, struck)
            seconds = time.monotonic() - began_s
            wrong = node.wrong(request, keys[: hits or 0])
            node.finish(request)
            source.end()
            results.append([i % 3, hits, wrong, seconds])
        successor = Remote(CHUNKS, at)
        keys = keys_of(99, 20)
        successor.fill(keys)
        again = node.pull("successor", keys, plan("s", (successor.address, 0, 20)))
        successor.end()
        settled = node.run_until(lambda: node.tier._exchange.link.idle() and not node.stats()["held"])
        return {"rounds": results, "again": again, "settled": settled, "end": start_of(node)}
    finally:
        node.close()


def frozen(rounds: int = 1) -> dict[str, Any]:
    """A source that stops answering: the request ends at its deadline, and after the thaw the source serves again.

    Every second time it stands still for longer than its leases last.
    """
    with nodes() as (node, source):
        results = []
        for i in range(rounds):
            keys = keys_of(1000 + i, 20)
            source.fill(keys)
            warm = node.pull(f"warm{i}", keys[:4], plan(f"w{i}", (source.address, 0, 4)))
            source.signal(signal.SIGSTOP)
            over_s = time.monotonic() + (CONTROL["lease_s"] + 0.5) * (i % 2)
            stopped = node.pull(f"stopped{i}", keys[4:], plan(f"f{i}", (source.address, 0, 16), within_s=0.4))
            node.run_until(lambda over_s=over_s: time.monotonic() >= over_s)
            source.signal(signal.SIGCONT)
            node.run_until(lambda: not source.stats()["jobs"])
            thawed = node.pull(f"thawed{i}", keys[4:], plan(f"t{i}", (source.address, 0, 16)))
            results.append({"warm": warm, "stopped": stopped, "thawed": thawed})
        settled = node.run_until(lambda: not source.stats()["jobs"] and not node.stats()["jobs"])
        return {**results[0], "rounds": results, "settled": settled, "end": start_of(node, source)}


def aborted(rounds: int = 6) -> dict[str, Any]:
    """A request is aborted while it pulls, and another wants the same chunks at once, in a host tier that is full."""
    with nodes(chunks=48) as (node, source):
        results = []
        for i in range(rounds):
            keys = keys_of(200 + i, 20)
            source.fill(keys)
            node.fill(keys_of(300 + i, 28), f"filler{i}")
            params = plan(f"a{i}", (source.address, 0, 20))
            request = node.request(f"aborted{i}", keys, params)
            reader = node.tier._exchange.reader
            node.prefix(request, keys, lambda reader=reader: bool(reader._parts))
            node.finish(request)
            again = node.pull(f"again{i}", keys, plan(f"b{i}", (source.address, 0, 20)))
            results.append([again["hits"], again["wrong"]])
        settled = node.run_until(
            lambda: (
                node.tier._exchange.link.idle() and not node.stats()["held"] and not source.stats()["jobs"]
            )
        )
        return {"rounds": results, "settled": settled, "end": start_of(node, source)}


def reset() -> dict[str, Any]:
    """A reset of the source while a peer holds a lease waits for it; one of the reader aborts its pull."""
    with nodes() as (node, source):
        keys = keys_of(11, 20)
        source.fill(keys)
        request = node.request("held", keys, plan("h", (source.address, 0, 20)))
        node.run_until(
            lambda: node.look(request, keys) is not None or bool(node.tier._exchange.reader._parts)
        )
        with node.locked() as manager:
            manager.reset_cache()
        node.finish(request)
        after = node.stats()
        source.reset()
        node.fill(keys_of(12, CHUNKS - len(after["held"])))
        emptied = node.pull("emptied", keys, plan("e", (source.address, 0, 20)))
        return {"after": after, "emptied": emptied, "there": start_of(source)}


def pool() -> dict[str, Any]:
    """The primary tier under quarantine: chunks of failed stores that are held are handed out to nobody."""
    node = Node(16, TIER)
    try:
        quarantine, manager = node.spec.quarantine, node.manager
        request = node.request("one", [], {})
        taken = manager.prepare_store(keys_of(1, 10), request)
        held = taken.store_spec.chunk_ids.tolist()[:4]
        quarantine.hold(held)
        manager.primary_tier.complete_store(taken.keys_to_store, request, False)
        free_while_held = manager.primary_tier._get_num_free_chunks()
        fits = manager.primary_tier.prepare_store(keys_of(2, 12), request)
        ids = fits.store_spec.chunk_ids.tolist()
        too_many = manager.primary_tier.prepare_store(keys_of(3, 1), request) is None
        manager.primary_tier.complete_store(fits.keys_to_store, request, True)
        manager.primary_tier.reset_cache()
        after_reset = manager.primary_tier._get_num_free_chunks()
        second = manager.primary_tier.prepare_store(keys_of(4, 12), request).store_spec.chunk_ids.tolist()
        quarantine.release(held)
        last = manager.primary_tier.prepare_store(keys_of(5, 4), request).store_spec.chunk_ids.tolist()
        return {
            "free_while_held": free_while_held,
            "overlap": sorted(set(held) & set(ids)) + sorted(set(held) & set(second)),
            "distinct": [len(set(ids)), len(set(second) | set(last))],
            "too_many": too_many,
            "after_reset": after_reset,
            "back": sorted(last) == sorted(held),
        }
    finally:
        node.close()


def wrong_spec() -> dict[str, Any]:
    """Under vLLM's own spec the tier does not start."""
    try:
        Node(16, TIER, stock=True)
    except ValueError as error:
        return {"refused": str(error)}
    return {"refused": None}


SCENARIOS = {
    f.__name__: f
    for f in (
        one_source,
        two_sources,
        in_tree,
        in_tree_frozen,
        mismatches,
        killed,
        frozen,
        aborted,
        reset,
        pool,
        wrong_spec,
    )
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # UCX and vLLM write to standard output
    CONTEXT.set_forkserver_preload(PRELOADED)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ensure_running()
    import nixl  # noqa: F401 - paid for once

    for line in sys.stdin:
        name, *numbers = line.split()
        try:
            result = SCENARIOS[name](*map(int, numbers))
        except Exception:
            result = {"error": traceback.format_exc()}
        print(json.dumps(result), file=answers, flush=True)
    os._exit(0)  # the libraries' own farewells take seconds


if __name__ == "__main__":
    main()
