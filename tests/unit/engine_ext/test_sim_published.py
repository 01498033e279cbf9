# SPDX-License-Identifier: Apache-2.0
"""Events of the simulated worker over real ZMQ."""

from __future__ import annotations

import msgspec
import pytest
import zmq
import zmq.asyncio
from sim_client import PROMPT, replay, serving

from engine_ext.sim.events import EventEncoding, HashKind


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
