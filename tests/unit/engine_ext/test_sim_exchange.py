# SPDX-License-Identifier: Apache-2.0
"""Simulated workers that pull from one another."""

from __future__ import annotations

import asyncio

from sim_client import PROMPT, serving

from engine_ext.sim.config import SimConfig


async def test_a_worker_pulls_from_another_what_only_that_one_holds() -> None:
    async with serving() as holder, serving() as puller:
        cold = await holder.complete()
        host, port = holder.running.p2p.split(":")
        peer = {"kv_request_id": "one", "remote_host": host, "remote_port": int(port)}
        warm = await puller.complete(kv_transfer_params={"remote_kv_source": peer})
        assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
        full = len(PROMPT) // 16 * 16
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == full
        assert (await puller.json("GET", "/sim/state"))["cached_by_source"]["p2p"] == full
        assert (await holder.json("GET", "/sim/state"))["pulls_served"] == 1


async def test_a_decode_worker_waits_for_the_prefill_of_another_whichever_is_asked_first() -> None:
    async with serving(profile="default") as prefiller, serving(profile="default") as decoder:
        host, port = prefiller.running.p2p.split(":")
        texts = set()
        for name in ("decode first", "prefill first"):
            prompt = f"{name}: {PROMPT}"
            peer = {"kv_request_id": name, "remote_host": host, "remote_port": int(port)}
            if name == "decode first":
                decode = asyncio.create_task(
                    decoder.complete(prompt, kv_transfer_params={"remote_prefiller": peer})
                )
                async with asyncio.timeout(20):
                    while not prefiller.running.worker.open_questions:  # noqa: ASYNC110 - no event for it
                        await asyncio.sleep(0.005)
            await prefiller.complete(
                prompt, max_tokens=1, kv_transfer_params={"remote_decoder": {"kv_request_id": name}}
            )
            if name == "prefill first":
                decode = asyncio.create_task(
                    decoder.complete(prompt, kv_transfer_params={"remote_prefiller": peer})
                )
            answer = await decode
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) // 16 * 16
            whole = await prefiller.complete(prompt)
            assert answer["choices"][0]["text"] == whole["choices"][0]["text"]
            texts.add(answer["choices"][0]["text"])
        assert len(texts) == 2
        assert prefiller.running.worker.open_questions == 0
        cached = (await decoder.json("GET", "/sim/state"))["cached_by_source"]
        assert cached["p2p"] > 0


async def test_a_prefill_that_never_comes_costs_the_timeout() -> None:
    async with serving() as prefiller, serving() as decoder:
        host, port = prefiller.running.p2p.split(":")
        peer = {"kv_request_id": "none", "remote_host": host, "remote_port": int(port)}
        started = asyncio.get_running_loop().time()
        answer = await decoder.complete(kv_transfer_params={"remote_prefiller": peer})
        assert asyncio.get_running_loop().time() - started >= decoder.running.engine.profile.peer_timeout_s
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_peers_of_another_hash_seed_exchange_nothing() -> None:
    other = SimConfig(hbm_blocks=256, ram_blocks=256, hash_seed="other")
    async with serving() as holder, serving(engine=other) as puller:
        await holder.complete()
        host, port = holder.running.p2p.split(":")
        peer = {"kv_request_id": "one", "remote_host": host, "remote_port": int(port)}
        warm = await puller.complete(kv_transfer_params={"remote_kv_source": peer})
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_dead_or_own_address_as_source_is_recomputed_after_the_timeout() -> None:
    async with serving() as client:
        own = client.running.p2p.split(":")
        for name, port in (("dead", 1), ("own", int(own[1]))):
            peer = {"kv_request_id": name, "remote_host": "127.0.0.1", "remote_port": port}
            started = asyncio.get_running_loop().time()
            answer = await client.complete(f"{name} {PROMPT}", kv_transfer_params={"remote_kv_source": peer})
            assert asyncio.get_running_loop().time() - started >= client.running.engine.profile.peer_timeout_s
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
