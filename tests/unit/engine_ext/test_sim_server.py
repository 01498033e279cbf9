# SPDX-License-Identifier: Apache-2.0
"""The worker as a process on loopback: real HTTP, real ZMQ, in this event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from engine_ext.sim.config import SimConfig
from engine_ext.sim.events import EventEncoding, HashKind
from engine_ext.sim.publisher import END_OF_REPLAY
from engine_ext.sim.running import RunningSimWorker, SimWorkerOptions, running_sim_worker

PROMPT = "a prompt that fills a few blocks of sixteen bytes, and then a little more"


@dataclass
class Client:
    """A worker and an HTTP session on it."""

    running: RunningSimWorker
    session: aiohttp.ClientSession
    extra: dict[str, object] = field(default_factory=dict)

    async def call(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        async with self.session.request(method, self.running.url + path, data=data) as response:
            return response.status, await response.text()

    async def json(self, method: str, path: str, body: object = None) -> dict:
        status, text = await self.call(method, path, body)
        assert status == 200, text
        return json.loads(text)

    async def complete(self, prompt: object = PROMPT, **more: object) -> dict:
        return await self.json("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 4, **more})

    async def faults(self, **order: object) -> dict:
        return await self.json("POST", "/sim/faults", order)


@contextlib.asynccontextmanager
async def serving(**options: object) -> AsyncIterator[Client]:
    defaults = {"profile": "fast", "p2p_port": 0, "engine": SimConfig(hbm_blocks=256, ram_blocks=256)}
    async with (
        running_sim_worker(SimWorkerOptions(**{**defaults, **options})) as running,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
    ):
        yield Client(running, session)


def parse_events(text: str) -> list[object]:
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]


async def replay(client: Client, start: int) -> list[tuple[int, bytes]]:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(client.running.replay)
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        batches: list[tuple[int, bytes]] = []
        while True:
            async with asyncio.timeout(20):
                empty, _topic, seq, payload = await dealer.recv_multipart()
            assert empty == b""
            if seq == END_OF_REPLAY:
                return batches
            batches.append((int.from_bytes(seq, "big"), payload))


async def test_whole_and_streamed_answers_say_the_same_and_report_usage() -> None:
    async with serving() as client:
        whole = await client.complete()
        body = {"prompt": PROMPT, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
        status, text = await client.call("POST", "/v1/completions", body)
        chunks = parse_events(text)
        assert status == 200
        assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == whole["choices"][0]["text"]
        assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None, None, None, "length"]
        assert chunks[-1]["choices"] == []
        length = len(PROMPT)
        assert chunks[-1]["usage"] == {
            "prompt_tokens": length,
            "completion_tokens": 4,
            "total_tokens": length + 4,
            "prompt_tokens_details": {"cached_tokens": (length - 1) // 16 * 16},
        }
        assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert whole["object"] == chunks[0]["object"] == "text_completion"


async def test_a_chat_is_what_tokenize_says_and_its_second_turn_hits() -> None:
    async with serving() as client:
        messages = [{"role": "user", "content": "tell me something of a certain length"}]
        tokens = (await client.json("POST", "/tokenize", {"messages": messages}))["tokens"]
        first = await client.json("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 40})
        assert first["usage"]["prompt_tokens"] == len(tokens)
        answer = first["choices"][0]["message"]
        turn = [
            *messages,
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": "more"},
        ]
        body = {"messages": turn, "stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
        chunks = parse_events((await client.call("POST", "/v1/chat/completions", body))[1])
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chunks[0]["object"] == "chat.completion.chunk"
        cached = chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (len(tokens) + 39) // 16 * 16
        assert (await client.json("POST", "/tokenize", {"prompt": "ab"}))["tokens"] == [97, 98]


async def test_every_form_of_prompt_is_taken() -> None:
    async with serving() as client:
        by_text = await client.complete("ab cd")
        by_ids = await client.complete(list(b"ab cd"))
        assert by_text["choices"][0]["text"] == by_ids["choices"][0]["text"]
        both = await client.complete(["ab cd", "ef"])
        lists = await client.complete([list(b"ab cd"), list(b"ef")])
        assert [c["text"] for c in both["choices"]] == [c["text"] for c in lists["choices"]]
        assert [c["index"] for c in both["choices"]] == [0, 1]
        assert both["usage"]["prompt_tokens"] == 7
        status, text = await client.call(
            "POST", "/v1/completions", {"prompt": ["ab cd", "ef"], "max_tokens": 4, "stream": True}
        )
        streamed = ["", ""]
        for chunk in parse_events(text):
            streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert status == 200
        assert streamed == [c["text"] for c in both["choices"]]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[1]", 400),
        ({}, 400),
        ({"prompt": 1}, 400),
        ({"prompt": []}, 400),
        ({"prompt": ["a", 1]}, 400),
        ({"prompt": [-1]}, 400),
        ({"prompt": "a", "max_tokens": "x"}, 400),
        ({"prompt": "a", "max_tokens": 0}, 400),
        ({"prompt": "a", "stream": "yes"}, 400),
        ({"prompt": "a", "cache_salt": ""}, 400),
        ({"prompt": "a", "kv_transfer_params": []}, 400),
        ({"prompt": "x" * 5000}, 400),
        ({"prompt": "a", "model": "other"}, 404),
        ({"prompt": ["a", "b"], "kv_transfer_params": {"remote_decoder": {"kv_request_id": "k"}}}, 500),
    ],
)
async def test_bad_requests_get_vllms_status_and_error_shape(body: object, status: int) -> None:
    async with serving() as client:
        got, text = await client.call("POST", "/v1/completions", body)
        assert got == status
        error = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == status
        assert (await client.complete("a"))["usage"]["prompt_tokens"] == 1


async def test_models_list_the_adapters_under_their_base_and_keep_their_blocks_apart() -> None:
    async with serving(model="base", loras=("a1",)) as client:
        base, adapter = (await client.json("GET", "/v1/models"))["data"]
        assert (base["id"], base["root"], base["parent"]) == ("base", "base", None)
        assert base["max_model_len"] == 255 * 16
        assert (adapter["id"], adapter["parent"]) == ("a1", "base")
        await client.complete(model="base")
        assert (await client.complete(model="a1"))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await client.complete(model="a1"))["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_metrics_carry_vllms_names() -> None:
    async with serving() as client:
        await client.complete()
        await client.complete()
        status, text = await client.call("GET", "/metrics")
        assert status == 200
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        labels = 'engine="0",model_name="sim-model"'
        length = len(PROMPT)
        hit = (length - 1) // 16 * 16
        for name, value in (
            (f"vllm:num_requests_running{{{labels}}}", 0),
            (f"vllm:num_requests_waiting{{{labels}}}", 0),
            (f"vllm:prefix_cache_queries_total{{{labels}}}", 2 * length),
            (f"vllm:prefix_cache_hits_total{{{labels}}}", hit),
            (f'vllm:prompt_tokens_cached_by_source_total{{{labels},source="device"}}', hit),
            (f'vllm:engine_sleep_state{{{labels},sleep_state="awake"}}', 1),
        ):
            assert float(samples[name]) == value
        assert any('block_size="16",num_gpu_blocks="256"' in name for name in samples)
        assert float(samples["process_start_time_seconds"]) > 1e9


async def test_live_events_and_replay_carry_the_same_bytes() -> None:
    async with serving(topic="kv@me") as client:
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as sub:
            sub.linger = 0
            sub.subscribe(b"kv@")
            sub.connect(client.running.events)
            live: list[tuple[int, bytes]] = []
            number = 0
            while not live:  # the first messages may precede the subscription
                await client.complete(f"{number} {PROMPT}")
                number += 1
                while await sub.poll(200):
                    topic, seq, payload = await sub.recv_multipart()
                    assert topic == b"kv@me"
                    live.append((int.from_bytes(seq, "big"), payload))
        kept = await replay(client, 0)
        assert [seq for seq, _ in kept] == list(range(len(kept)))
        assert live == kept[live[0][0] :][: len(live)]
        assert await replay(client, 3) == kept[3:]


@pytest.mark.parametrize("encoding", list(EventEncoding))
@pytest.mark.parametrize("kind", list(HashKind))
async def test_the_state_equals_what_the_events_say(encoding: EventEncoding, kind: HashKind) -> None:
    async with serving(event_encoding=encoding, hash_kind=kind) as client:
        for number in range(3):
            await client.complete(f"{number} {PROMPT}", cache_salt=f"s{number}")
        state = await client.json("GET", "/sim/state")
        stored = {}
        for _, payload in await replay(client, 0):
            for event in msgspec.msgpack.decode(payload)[1]:
                fields = list(event.values()) if isinstance(event, dict) else event
                hashes, parent, tokens, size, medium, extra = (*fields[1:5], fields[6], fields[8:9])
                if medium != "GPU":
                    continue
                for place, name in enumerate(hashes):
                    keys = extra[0][place]
                    stored[name] = (parent, tokens[place * size : (place + 1) * size], keys)
                    parent = name
        published = {row["block_hash"]: row["published_hash"] for row in state["blocks"]}
        truth = {}
        for row in state["blocks"]:
            name = bytes.fromhex(row["published_hash"]) if kind is HashKind.BYTES else row["published_hash"]
            parent = row["parent"] and published[row["parent"]]
            parent = bytes.fromhex(parent) if parent and kind is HashKind.BYTES else parent
            truth[name] = (parent, row["token_ids"], row["extra_keys"])
        assert truth == stored
        assert len(truth) >= 3 * (len(PROMPT) // 16)


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
