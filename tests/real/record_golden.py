# SPDX-License-Identifier: Apache-2.0
"""Records event streams of real workers: `POINTSMAN_REAL=DIR python -m tests.real.record_golden OUT` (repository root).

Each stream becomes NAME.jsonl.gz, one published message a line, {"topic", "seq", "payload": base64 of the frame},
and NAME.requests.jsonl.gz, the requests that caused it in order, {"prompt": token ids, "salt", "cached_tokens"}.
"""

from __future__ import annotations

import base64
import gzip
import json
import random
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .engine import RealWorker
from .events import Message, replay, stored, wait_for_events
from .launch import BLOCK_SIZE_TOKENS, MODEL_NAME, P2P, Offload, WorkerConfig, real_home
from .prompts import FIRST_PLAIN_TOKEN, VOCABULARY
from .stage import Stage, stage

B = BLOCK_SIZE_TOKENS
SMALL_POOL = 40
"""GPU blocks of workers whose evictions are to be recorded."""
CHUNK_BYTES = 2 * 8192
"""Two blocks of the small model, as the host tier rounds them."""


class Recorder:
    """Sends requests to one worker and keeps them for the record."""

    def __init__(self, worker: RealWorker, seed: int) -> None:
        self.worker = worker
        self.requests: list[dict[str, Any]] = []
        self._rng = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(FIRST_PLAIN_TOKEN, VOCABULARY) for _ in range(count)]

    def send(
        self, prompt: list[int], max_tokens: int = 1, salt: str | None = None, **params: Any
    ) -> list[int]:
        """The generated token ids."""
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        body |= {"ignore_eos": True, "return_token_ids": True}
        body |= {"cache_salt": salt} if salt else {}
        body |= {"kv_transfer_params": params} if params else {}
        answer = self.worker.post("/v1/completions", body)
        details = answer["usage"]["prompt_tokens_details"]
        self.requests.append({"prompt": prompt, "salt": salt, "cached_tokens": details["cached_tokens"]})
        return list(answer["choices"][0]["token_ids"])

    def save(self, out: Path, name: str, medium: str = "GPU") -> None:
        """Waits until a last request's blocks were announced in `medium`, so that the stream is complete."""
        last = self.tokens(2 * B)
        self.send(last)

        def complete(events: list[dict[str, Any]]) -> bool:
            return any(e["token_ids"][:B] == last[:B] for e in stored(events, "GPU")) and (
                medium == "GPU" or stored(events[-3:], medium) != []
            )

        wait_for_events(self.worker.replay, 0, complete)
        write_rows(out, name, replay(self.worker.replay), self.requests)


def write_rows(out: Path, name: str, messages: list[Message], requests: list[dict[str, Any]]) -> None:
    """The two files of a stream."""
    rows = [
        {"topic": m.topic, "seq": m.seq, "payload": base64.b64encode(m.payload).decode()} for m in messages
    ]
    _write(out / f"{name}.jsonl.gz", rows)
    _write(out / f"{name}.requests.jsonl.gz", requests)
    print(f"{name}: {len(rows)} messages, {len(requests)} requests")


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def _mixed(recorder: Recorder) -> None:
    """Salts, shared prefixes, block boundaries, decoding, a reset and, in a small pool, evictions."""
    shared = recorder.tokens(3 * B)
    for salt in (None, "tenant-a", "tenant-b", "tenant-a"):
        recorder.send(shared + recorder.tokens(B + 5), salt=salt)
    for beside in (-1, 0, 1):
        prompt = recorder.tokens(2 * B + beside)
        recorder.send(prompt)
        recorder.send(prompt)
    turn = recorder.tokens(B + 10)
    turn += recorder.send(turn, max_tokens=2 * B) + recorder.tokens(7)
    recorder.send(turn, max_tokens=B)
    for _ in range(8):
        recorder.send(recorder.tokens(6 * B))
    recorder.send(shared + recorder.tokens(3))
    recorder.worker.post("/reset_prefix_cache")
    recorder.send(shared + recorder.tokens(3))


def plain(one: Stage, out: Path) -> None:
    small = WorkerConfig(gpu_blocks=SMALL_POOL, max_model_len_tokens=1024)
    as_bytes = WorkerConfig(gpu_blocks=SMALL_POOL, max_model_len_tokens=1024, byte_hashes=True)
    for worker, name in zip(one.get(small, as_bytes), ("salted_int_hash", "salted_bytes_hash"), strict=True):
        recorder = Recorder(worker, seed=1)
        _mixed(recorder)
        recorder.save(out, name)


def offloaded(one: Stage, out: Path) -> None:
    """A host tier of 24 chunks, so that it evicts too; its events once as placeholders, once described."""
    configs = [
        WorkerConfig(
            offload=Offload(24 * CHUNK_BYTES, self_describing=described, p2p=False, blocks_per_chunk=2),
            gpu_blocks=SMALL_POOL,
            max_model_len_tokens=1024,
        )
        for described in (False, True)
    ]
    for worker, name in zip(one.get(*configs), ("chunked_placeholder", "chunked_described"), strict=True):
        recorder = Recorder(worker, seed=2)
        _mixed(recorder)
        recorder.save(out, name, medium="CPU")


def pulled(one: Stage, out: Path) -> None:
    """The stream of a worker that pulls from a peer. The source's own stream is recorded beside it."""
    source, puller = (Recorder(worker, seed=3) for worker in one.get(P2P, P2P))
    assert source.worker.p2p is not None
    host, port = source.worker.p2p.split(":")
    for tokens in (3 * B - 1, 3 * B, 3 * B + 1, 10 * B + 5):
        prompt = source.tokens(tokens)
        source.send(prompt, salt="tenant-a")
        where = {"kv_request_id": uuid.uuid4().hex, "remote_host": host, "remote_port": int(port)}
        puller.send(prompt, salt="tenant-a", remote_kv_source=where)
        puller.send(prompt + puller.tokens(9), salt="tenant-a")
    source.save(out, "p2p_source", medium="CPU")
    puller.save(out, "p2p_puller", medium="CPU")


def main(out: Path) -> None:
    home = real_home()
    if home is None:
        raise SystemExit("POINTSMAN_REAL does not name a directory that tests/real/setup.sh filled")
    out.mkdir(parents=True, exist_ok=True)
    streams: list[Callable[[Stage, Path], None]] = [plain, offloaded, pulled]
    with stage(home) as one:
        for record in streams:
            record(one, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
