# SPDX-License-Identifier: Apache-2.0
"""``POST /query`` by one native call says what the general path says, or leaves the request to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import kv_batches as kv
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.hashing import HashKey
from indexer.identity import WorkerId, WorkerRank
from indexer.service.app import IndexerApp
from indexer.service.http import Answer, Request
from indexer.subscriber import RankEndpoints

KEY = HashKey(kv.KEY_BYTES)
CHAINS = ((1, 2, 3, 4, 5), (1, 2, 6, 7), (8, 9))
# Two streams of one instance may name the same rank; the last belongs to an adapter.
STREAMS = ((1, 0, None), (1, 1, None), (2, 0, None), (3, 0, "adapter"))
TOKENS = list(kv.prompt(CHAINS[0]))


@dataclass
class NoSubscriptions:
    """Registrations without sockets."""

    ranks: list[WorkerRank] = field(default_factory=list)

    def add(self, endpoints: Sequence[RankEndpoints]) -> None:
        self.ranks += [one.rank for one in endpoints]

    def remove(self, worker: WorkerId) -> None:
        """Nothing was opened."""


def started() -> tuple[IndexerApp, list[WorkerRank]]:
    app, subscriptions = IndexerApp(KEY), NoSubscriptions()
    app.registry._subscriptions = subscriptions
    for instance, rank, lora in STREAMS:
        register(app, instance_id=instance, dp_rank=rank, lora_name=lora)
    return app, subscriptions.ranks


def register(app: IndexerApp, **fields: Any) -> None:
    body = {"model_name": "m", "endpoint": "tcp://127.0.0.1:1", "block_size": kv.BLOCK, **fields}
    assert general(app, json.dumps(body).encode(), "/register").status == 201


def general(app: IndexerApp, body: bytes, path: str = "/query") -> Answer:
    answer = app.answer(Request("POST", path, body, keep_alive=True))
    assert isinstance(answer, Answer)
    return answer


def quick(app: IndexerApp, body: bytes, head: str = "POST /query HTTP/1.1\r\nHost: h\r\n") -> bytes | None:
    """The answer's body, its head being right; None where it is left to the general path."""
    shown = app.gate(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    if shown is None:
        return None
    assert isinstance(shown, bytes)
    answer, _, found = shown.partition(b"\r\n\r\n")
    assert answer.splitlines() == [
        b"HTTP/1.1 200 OK",
        b"content-type: application/json",
        b"content-length: %d" % len(found),
        b"connection: keep-alive",
    ]
    return found


@st.composite
def _events(draw: st.DrawFn) -> object:
    chain = draw(st.sampled_from(CHAINS))
    start = draw(st.integers(0, len(chain) - 1))
    return draw(
        st.sampled_from(
            [
                kv.stored(chain),
                kv.stored(chain),
                kv.stored(chain, lora_name="other", extra_keys=[["other"], *[None] * (len(chain) - 1)]),
                kv.stored(chain, extra_keys=[["salt"], *[None] * (len(chain) - 1)]),
                kv.placeholder(chain[start:], draw(st.sampled_from(["CPU", "STORAGE"]))),
                kv.removed(chain[start:], draw(st.sampled_from(["GPU", "CPU", "STORAGE"]))),
                kv.cleared(),
            ]
        )
    )


_steps = st.lists(
    st.tuples(
        st.integers(0, len(STREAMS) - 1), st.lists(_events(), min_size=1, max_size=3), st.integers(0, 2)
    ),
    min_size=1,
    max_size=8,
)


@st.composite
def _bodies(draw: st.DrawFn) -> bytes:
    chain = draw(st.sampled_from(CHAINS))
    optional: dict[str, Any] = {
        "lora_name": draw(st.sampled_from([None, "", "other", "adapter"])),
        "cache_salt": draw(st.sampled_from([None, "", "salt"])),
        draw(st.sampled_from(["tenant_id", "routing_group"])): draw(st.sampled_from([None, "default", "t"])),
    }
    fields = {"token_ids": list(kv.prompt(chain)), "model_name": draw(st.sampled_from(["m", "m", "m", "n"]))}
    fields |= {name: value for name, value in optional.items() if value is not None or draw(st.booleans())}
    order = draw(st.permutations(list(fields)))
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), ("\r\n,\t", " : ")]))
    return json.dumps({name: fields[name] for name in order}, separators=separators).encode()


@settings(max_examples=150, deadline=None)
@given(_steps, st.lists(_bodies(), min_size=1, max_size=6))
def test_both_paths_give_the_same_bytes(
    steps: list[tuple[int, list[object], int]], bodies: list[bytes]
) -> None:
    app, ranks = started()
    for seq, (stream, events, named) in enumerate(steps):
        app.holders.apply(ranks[stream], seq, kv.batch(*events, rank=named))
    for body in bodies:
        answer, found = general(app, body), quick(app, body)
        asked = json.loads(body)
        refused, several = answer.status != 200, asked.get("lora_name") == "adapter"
        assert (found is None) == (refused or several)
        assert found is None or found == answer.body


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.sampled_from([",", ", ", " , "]))
def test_tokens_of_any_length_are_read(tokens: list[int], comma: str) -> None:
    app, ranks = started()
    app.holders.apply(
        ranks[0], 0, kv.batch(kv.stored(range(len(tokens) // kv.BLOCK), tokens[: len(tokens) // 4 * 4]))
    )
    body = b'{"model_name":"m","token_ids":[%s]}' % comma.join(map(str, tokens)).encode()
    assert quick(app, body) == general(app, body).body


UNUSUAL = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b'{"token_ids":[1]}',
    b'{"model_name":"m"}',
    b'{"model_name":"m","token_ids":null}',
    b'{"model_name":null,"token_ids":[1]}',
    b'{"model_name":"","token_ids":[1]}',
    b'{"model_name":"m","tenant_id":"","token_ids":[1]}',
    b'{"model_name":"m","token_ids":[1],}',
    b'{"model_name":"m","token_ids":[1]}x',
    b'{"model_name":"m","token_ids":[1]',
    b'{"model_name":"m","token_ids":[1,]}',
    b'{"model_name":"m","token_ids":[,1]}',
    b'{"model_name":"m","token_ids":[1 2]}',
    b'{"model_name":"m","token_ids":[01]}',
    b'{"model_name":"m","token_ids":[-1]}',
    b'{"model_name":"m","token_ids":[1.0]}',
    b'{"model_name":"m","token_ids":[1e3]}',
    b'{"model_name":"m","token_ids":[4294967296]}',
    b'{"model_name":"m","token_ids":[00000000000000000001]}',
    b'{"model_name":"m","token_ids":["1"]}',
    b'{"model_name":"m","token_ids":[1],"token_ids":[1]}',
    b'{"model_name":"m","token_ids":[1],"unknown":1}',
    b'{"model_name":"m","token_ids":[1],"tenant_id":"a","routing_group":"b"}',
    b'{"model_name":"\\u006d","token_ids":[1]}',
    '{"model_name":"\u00fc","token_ids":[1]}'.encode(),
    b'{"model_name":"m\x01","token_ids":[1]}',
    b'{"model_name":"m,"token_ids":[1]}',
]


@pytest.mark.parametrize("body", UNUSUAL)
def test_unusual_bodies_are_left_to_the_general_path(body: bytes) -> None:
    app, _ = started()
    assert quick(app, body) is None


@pytest.mark.parametrize(
    "head",
    [
        "POST /query?a=b HTTP/1.1\r\n",
        "POST /query HTTP/1.0\r\n",
        "POST /query_by_hash HTTP/1.1\r\n",
        "GET /query HTTP/1.1\r\n",
        "POST /query HTTP/1.1\r\nConnection: close\r\n",
        "POST /query HTTP/1.1\r\nExpect: 100-continue\r\n",
        "POST /query HTTP/1.1\r\nTransfer-Encoding: chunked\r\n",
        "POST /query HTTP/1.1\r\nContent-Length: 1\r\n",
        "POST /query HTTP/1.1\r\nHost : h\r\n",
        "POST /query HTTP/1.1\r\n folded\r\n",
        "POST /query HTTP/1.1\r\nHost: h\nA: b\r\n",
        "POST /query HTTP/1.1\r\nA: \x00\r\n",
        "POST /query HTTP/1.1\r\nA: " + "b" * 9000 + "\r\n",
    ],
)
def test_unusual_heads_are_left_to_the_general_path(head: str) -> None:
    app, _ = started()
    body = json.dumps({"model_name": "m", "token_ids": TOKENS}).encode()
    assert quick(app, body) is not None
    assert quick(app, body, head) is None


def test_what_is_missing_of_a_request_is_told() -> None:
    app, _ = started()
    body = json.dumps({"model_name": "m", "token_ids": TOKENS}).encode()
    head = f"POST /query HTTP/1.1\r\nConnection: keep-alive\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    whole = head + body
    for size in range(1, len(whole)):
        assert app.gate(whole[:size]) == (0 if size < len(head) else len(whole))
    assert isinstance(app.gate(whole), bytes)
    assert app.gate(whole + b"P") is None


def test_slots_of_a_new_incarnation_and_of_suspects_are_seen_at_once() -> None:
    app, ranks = started()
    body = json.dumps({"model_name": "m", "token_ids": TOKENS}).encode()

    def both() -> Any:
        found = quick(app, body)
        assert found is not None
        assert found == general(app, body).body
        return json.loads(found)["scores"]

    app.holders.apply(ranks[2], 0, kv.batch(kv.stored(CHAINS[0])))
    assert both() == {"2": {"0": 20}}
    app.holders.suspect(ranks[2], "may be another")
    assert both() == {}
    app.holders.suspect(ranks[2], None)
    app.holders.new_incarnation(ranks[2].worker, "restarted")
    assert both() == {}
    app.holders.apply(ranks[2], 0, kv.batch(kv.stored(CHAINS[0][:2])))
    assert both() == {"2": {"0": 8}}
    unregister = {"model_name": "m", "instance_id": 2}
    assert general(app, json.dumps(unregister).encode(), "/unregister").status == 200
    assert both() == {}
    register(app, instance_id=2)
    assert both() == {}


def test_group_that_ends_is_unknown_to_both_paths() -> None:
    app, _ = started()
    body = json.dumps({"model_name": "m", "token_ids": TOKENS}).encode()
    for instance in {instance for instance, _, _ in STREAMS}:
        general(app, json.dumps({"model_name": "m", "instance_id": instance}).encode(), "/unregister")
    assert quick(app, body) is None
    assert general(app, body).status == 404
