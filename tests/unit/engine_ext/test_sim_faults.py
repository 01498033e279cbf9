# SPDX-License-Identifier: Apache-2.0
"""Faults that a simulated worker can be told to have."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import msgspec
import pytest
from sim_client import PROMPT, Client, parse_events, replay, serving

from engine_ext.sim.config import SimConfig


async def test_a_client_that_leaves_ends_its_request() -> None:
    async with serving(profile="default") as client:
        body = json.dumps({"prompt": PROMPT, "max_tokens": 3000, "stream": True}).encode()
        async with client.session.post(client.running.url + "/v1/completions", data=body) as response:
            await response.content.readany()
            assert client.running.engine.metrics().running == 1
            response.close()
        async with asyncio.timeout(20):
            while client.running.engine.metrics().running:  # noqa: ASYNC110 - the engine has no event for it
                await asyncio.sleep(0.005)
        assert client.running.engine.metrics().counters.aborted_requests == 1


async def test_restart_forgets_everything_and_counts_from_zero_at_the_same_addresses() -> None:
    async with serving() as client:
        await client.complete()
        await client.complete("something else of more than sixteen bytes")
        before = await client.json("GET", "/sim/state")
        await client.faults(restart=True)
        after = await client.json("GET", "/sim/state")
        assert before["next_seq"] > 0
        assert (after["next_seq"], after["blocks"], after["incarnation"]) == (0, [], 1)
        assert after["started_at_s"] > before["started_at_s"]
        assert await replay(client, 0) == []
        assert (await client.complete())["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await replay(client, 0))[0][0] == 0


async def test_dropped_batches_take_numbers_and_stay_in_the_replay_buffer_unless_told_otherwise() -> None:
    async with serving(p2p_port=None, engine=SimConfig(hbm_blocks=256)) as client:
        await client.faults(drop_batches=1)
        await client.complete(f"1 {PROMPT}", max_tokens=1)
        await client.faults(drop_batches=1, lose_replay=True)
        await client.complete(f"2 {PROMPT}", max_tokens=1)
        await client.complete(f"3 {PROMPT}", max_tokens=1)
        assert [seq for seq, _ in await replay(client, 0)] == [0, 2]
        assert client.running.worker.publisher.published == 1
        await client.faults(clear=True, silence=True)
        await client.complete(f"4 {PROMPT}", max_tokens=1)
        assert (await client.json("GET", "/sim/state"))["next_seq"] == 3


async def test_rubbish_takes_numbers_and_changes_nothing_the_worker_holds() -> None:
    async with serving() as client:
        before = await client.json("GET", "/sim/state")
        assert (await client.faults(rubbish=30))["rubbish"] == 0
        batches = await replay(client, before["next_seq"])
        assert len(batches) == 30
        broken = 0
        for _, payload in batches:
            try:
                msgspec.msgpack.decode(payload)
            except msgspec.DecodeError:
                broken += 1
        assert 0 < broken < 30
        assert (await client.json("GET", "/sim/state"))["blocks"] == before["blocks"]


async def test_inference_answers_500_when_told_to_and_health_goes_on() -> None:
    async with serving() as client:
        await client.faults(error500=True)
        assert (await client.call("POST", "/v1/completions", {"prompt": "a"}))[0] == 500
        assert (await client.call("GET", "/health"))[0] == 200
        await client.faults(clear=True)
        assert (await client.complete("a"))["usage"]["prompt_tokens"] == 1


async def test_a_stalled_worker_takes_requests_and_answers_none() -> None:
    async with serving() as client:
        await client.faults(stall=True)
        for path in ("/health", "/metrics"):
            with pytest.raises(asyncio.TimeoutError):
                async with asyncio.timeout(0.1):
                    await client.call("GET", path)
        await client.faults(stall=False)
        assert (await client.call("GET", "/health"))[0] == 200


async def test_frozen_metrics_stand_still() -> None:
    async with serving() as client:
        _, before = await client.call("GET", "/metrics")
        await client.faults(frozen_metrics=True)
        await client.complete()
        assert (await client.call("GET", "/metrics"))[1] == before
        await client.faults(clear=True)
        assert (await client.call("GET", "/metrics"))[1] != before


async def read_until_broken(client: Client, body: bytes) -> tuple[bytes, bool]:
    text = b""
    try:
        async with client.session.post(client.running.url + "/v1/completions", data=body) as response:
            async for chunk in response.content.iter_any():
                text += chunk
    except aiohttp.ClientError:
        return text, True
    return text, False


@pytest.mark.parametrize("kind", ["eof", "reset"])
async def test_a_stream_breaks_off_after_the_tokens_it_was_given(kind: str) -> None:
    async with serving() as client:
        await client.faults(close_stream_after=2, close_kind=kind)
        body = json.dumps({"prompt": PROMPT, "max_tokens": 8, "stream": True}).encode()
        text, broken = await read_until_broken(client, body)
        assert broken
        assert b"[DONE]" not in text
        if kind == "eof":
            assert text.count(b"data: ") == 2
        assert (await client.complete("a"))["usage"]["prompt_tokens"] == 1


async def test_an_error_event_ends_a_stream_as_vllm_ends_it() -> None:
    async with serving() as client:
        await client.faults(error_event=1)
        _, text = await client.call(
            "POST", "/v1/completions", {"prompt": "a", "max_tokens": 4, "stream": True}
        )
        chunks = parse_events(text)
        assert len(chunks) == 2
        assert chunks[1]["error"]["code"] == 500


async def test_what_arrived_can_be_read_back_byte_for_byte() -> None:
    import base64

    async with serving() as client:
        body = b'{"prompt":"a" , "x":12345678901234567890123,"x":1.0e2, "y":"\\ud800","max_tokens":1}'
        assert (await client.call("POST", "/v1/completions", body))[0] == 200
        last = await client.json("GET", "/sim/last-request")
        assert base64.b64decode(last["body_base64"]) == body
        assert last["path"] == "/v1/completions"


async def test_sleep_reset_and_event_sources_answer_as_vllm_does() -> None:
    async with serving() as client:
        await client.complete()
        assert (await client.call("POST", "/reset_prefix_cache"))[0] == 200
        # vLLM's reset clears HBM and leaves the connector alone.
        full = len(PROMPT) // 16 * 16
        assert (await client.complete())["usage"]["prompt_tokens_details"]["cached_tokens"] == full
        assert (await client.call("POST", "/sleep?level=1"))[0] == 200
        assert (await client.json("GET", "/is_sleeping")) == {"is_sleeping": True}
        assert (await client.call("POST", "/wake_up"))[0] == 200
        assert (await client.complete())["usage"]["prompt_tokens"] == len(PROMPT)
        sources = await client.json("GET", "/kv_event_sources")
        assert sources["0"]["endpoint"].endswith(client.running.events.rsplit(":", 1)[1])
        assert (await client.call("GET", "/nothing"))[0] == 404
        assert (await client.call("GET", "/v1/completions"))[0] == 405
        embedded = await client.json("POST", "/v1/embeddings", {"input": ["a", "b"]})
        assert len(embedded["data"]) == 2
