# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker with a real Envoy and real vLLM: affinity, pulls, streams, and the list to fall back to."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from .engine import RealWorker
from .launch import BLOCK_SIZE_TOKENS, MODEL_NAME
from .picker_front import PickerFront, picker_front
from .prompts import token_ids
from .routed import Pair, by_name, settled
from .test_disaggregated import was_split


def name_of(worker: RealWorker) -> str:
    return f"127.0.0.1:{worker.ports.http}"


def unchunked(raw: bytes) -> bytes:
    """The body of an HTTP/1.1 answer that came in chunks."""
    _, _, rest = raw.partition(b"\r\n\r\n")
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size, 16)
        if count == 0:
            return body
        body, rest = body + rest[:count], rest[count + 2 :]


async def test_a_prefix_goes_back_to_the_worker_that_holds_it(real_p2p_pair: Pair, tmp_path: Path) -> None:
    shared = token_ids(6 * BLOCK_SIZE_TOKENS)
    async with picker_front(real_p2p_pair, tmp_path) as one:
        await one.keep_off({one.door.name})
        _, first = await one.complete([*shared, *token_ids(7)])
        await settled(one, by_name(real_p2p_pair, first["worker"]), shared)
        for _ in range(3):
            answer, again = await one.complete([*shared, *token_ids(9)])
            assert again["worker"] == first["worker"]
            usage = answer["usage"]["prompt_tokens_details"]
            assert usage["cached_tokens"] == len(shared)
            assert again["observed"]["cached_tokens"] == again["predicted_cached_tokens"] == len(shared)
        await one.quiet()
        assert first["observed"]["cached_tokens"] == 0


async def hold_at_the_first(one: PickerFront, pair: Pair, prompt: list[int]) -> str:
    """The first worker computes the prompt; from then on only the second takes requests, by its door or without."""
    await one.keep_off({name_of(pair[1]), one.door.name})
    answer, record = await one.complete(prompt)
    assert (record["worker"], record["observed"]["cached_tokens"]) == (name_of(pair[0]), 0)
    await settled(one, pair[0], prompt)
    await one.keep_off({name_of(pair[0])})
    text: str = answer["choices"][0]["text"]
    return text


async def test_one_worker_prefills_for_another_without_a_sidecar(real_p2p_pair: Pair, tmp_path: Path) -> None:
    prefill, decode = real_p2p_pair
    prompt = token_ids(9 * BLOCK_SIZE_TOKENS + 1)
    async with picker_front(real_p2p_pair, tmp_path, roles=("prefill", "decode")) as one:
        board, now_s = one.app.brain.board, asyncio.get_running_loop().time()
        busy = [board.promise(name_of(decode), 0, 0.0, 0.0, now_s) for _ in range(50)]
        for ticket in busy:  # answers that seem to run there
            board.first_token(ticket, now_s)
        before = decode.tokens_by_source().get("p2p", 0.0)
        answer, record = await one.complete(prompt, temperature=0)
        leg = was_split(record, prefill, decode)
        assert leg["path_blocks"] == {"recompute": 10}
        assert record["path_blocks"] == {"peer": 9, "recompute": 1}
        await asyncio.to_thread(decode.wait_for_source, "p2p", before + 9 * BLOCK_SIZE_TOKENS)
        for ticket in busy:
            board.release(ticket, now_s)
        await one.quiet()
    said = await asyncio.to_thread(
        prefill.post,
        "/v1/completions",
        {"model": MODEL_NAME, "prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": True},
    )
    assert answer["choices"][0]["text"] == said["choices"][0]["text"]


def assert_pulled(record: dict[str, Any], source: RealWorker, blocks: int) -> None:
    assert record["source"] == name_of(source)
    assert record["path_blocks"]["peer"] == blocks
    remote = record["transfer_params"]["remote_kv_source"]
    assert f"{remote['remote_host']}:{remote['remote_port']}" == source.p2p
    cached = record["observed"]["cached_tokens"]
    assert cached == record["predicted_cached_tokens"] == blocks * BLOCK_SIZE_TOKENS


async def test_the_engine_carries_out_the_pull_that_was_planned(real_p2p_pair: Pair, tmp_path: Path) -> None:
    source, puller = real_p2p_pair
    prompt = token_ids(9 * BLOCK_SIZE_TOKENS + 3)
    async with picker_front(real_p2p_pair, tmp_path) as one:
        cold = await hold_at_the_first(one, real_p2p_pair, prompt)
        await one.keep_off({name_of(source), one.door.name})
        before = puller.tokens_by_source().get("p2p", 0.0)
        answer, record = await one.complete(prompt)
        assert record["worker"] == name_of(puller)
        assert_pulled(record, source, 9)
        await asyncio.to_thread(puller.wait_for_source, "p2p", before + 9 * BLOCK_SIZE_TOKENS)
        assert answer["choices"][0]["text"] == cold
        await one.quiet()


async def test_the_next_in_the_list_carries_out_the_pull_when_the_first_refuses(
    real_p2p_pair: Pair, tmp_path: Path
) -> None:
    source, puller = real_p2p_pair
    prompt = token_ids(9 * BLOCK_SIZE_TOKENS + 3)
    async with picker_front(real_p2p_pair, tmp_path) as one:
        cold = await hold_at_the_first(one, real_p2p_pair, prompt)
        # Known work at the other address, so that it is the second of the two.
        now_s = asyncio.get_running_loop().time()
        busy = one.app.brain.board.promise(name_of(puller), 0, 20.0, 20.0, now_s + 1e6)
        await one.door.shut()
        before = puller.tokens_by_source().get("p2p", 0.0)
        answer, record = await one.complete(prompt)
        one.app.brain.board.release(busy, now_s)
        assert (record["attempt"], record["worker"]) == (2, name_of(puller))
        [refused] = record["earlier_attempts"]
        assert (refused["worker"], refused["observed"]["outcome"]) == (one.door.name, "worker_error")
        assert_pulled(record, source, 9)
        await asyncio.to_thread(puller.wait_for_source, "p2p", before + 9 * BLOCK_SIZE_TOKENS)
        assert answer["choices"][0]["text"] == cold
        await one.quiet()


async def test_a_stream_of_events_is_the_worker_s_to_the_last_byte(
    real_p2p_pair: Pair, tmp_path: Path
) -> None:
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": " ".join(f"w{n}" for n in token_ids(80))}],
        "max_tokens": 24,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with picker_front(real_p2p_pair, tmp_path) as one:
        await one.keep_off({name_of(worker) for worker in real_p2p_pair})
        async with one.session.post(f"{one.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            got = await response.read()
            record = await one.get(f"/admin/api/decisions/{response.headers['x-request-id']}")
        assert got.endswith(b"data: [DONE]\n\n")
        [sent] = [raw for raw in one.door.sent if b"text/event-stream" in raw.partition(b"\r\n\r\n")[0]]
        assert got == unchunked(bytes(sent))
        events = [json.loads(line[6:]) for line in got.splitlines() if line.startswith(b"data: {")]
        assert record["observed"]["completion_tokens"] == events[-1]["usage"]["completion_tokens"] == 24
        assert record["observed"]["ttft_s"] > 0
        assert record["worker"] == one.door.name
        await one.quiet()
