# SPDX-License-Identifier: Apache-2.0
"""Event publishers for ``indexer.py``: a fleet of vLLM workers that tell what they cached, as fast as they can.

    python tests/bench/index_service_fleet.py '{"workers": 8, "prompts": 2000, ...}' LANES

Each worker has one socket per lane, so that an indexer on one lane hears nothing of what is sent to another. Reads
commands from stdin and answers each with one JSON line. ``wait LANE`` returns once every worker has a subscriber there
(its XPUB socket saw the subscription), ``send LANE`` publishes everything from sequence 0 on, ``leave LANE`` returns once
nobody subscribes any more. Messages are built once, so every indexer gets the same bytes.

Format: ``[topic, seq, payload]`` of ``vllm/distributed/kv_events.py``, one event a batch, as map or as array.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import msgspec
import zmq

VOCABULARY = 128_000


@dataclass(frozen=True)
class Workload:
    """Every worker caches ``prompts`` prompts, which all begin with the same ``shared_blocks``."""

    workers: int
    prompts: int
    blocks: int
    shared_blocks: int
    block_size: int
    encoding: str
    byte_hashes: bool
    seed: int = 7

    def prompt(self, worker: int, number: int) -> list[int]:
        """Token ids of one prompt."""
        shared = tokens(Random(self.seed), self.shared_blocks * self.block_size)
        own = Random(f"{self.seed}/{worker}/{number}")
        return shared + tokens(own, (self.blocks - self.shared_blocks) * self.block_size)

    @property
    def stored_blocks(self) -> int:
        """Blocks that events tell of: the shared ones once per worker."""
        own = self.prompts * (self.blocks - self.shared_blocks)
        return self.workers * (self.shared_blocks + own)


def tokens(random: Random, count: int) -> list[int]:
    return [value % VOCABULARY for value in array("I", random.randbytes(4 * count))]


def batches(workload: Workload) -> Iterator[tuple[int, int, bytes]]:
    """(worker, sequence, payload) of everything, workers taking turns."""
    encode = msgspec.msgpack.Encoder().encode
    for number in range(workload.prompts):
        for worker in range(workload.workers):
            event = stored(workload, workload.prompt(worker, number), skip_shared=number > 0)
            tagged = event if workload.encoding == "map" else list(event.values())
            yield worker, number, encode([time.time(), [tagged], 0])


def stored(workload: Workload, ids: list[int], *, skip_shared: bool) -> dict[str, object]:
    size = workload.block_size
    hashes: list[int | bytes] = []
    digest = b""
    for start in range(0, len(ids), size):
        digest = hashlib.sha256(digest + array("I", ids[start : start + size]).tobytes()).digest()
        hashes.append(digest if workload.byte_hashes else int.from_bytes(digest[:8], "big"))
    first = workload.shared_blocks if skip_shared else 0
    return {
        "type": "BlockStored",
        "block_hashes": hashes[first:],
        "parent_block_hash": hashes[first - 1] if first else None,
        "token_ids": ids[first * size :],
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


class Fleet:
    """The publishers."""

    def __init__(self, workload: Workload, lanes: int) -> None:
        self._context = zmq.Context()
        self._lanes = [[self._open() for _ in range(workload.workers)] for _ in range(lanes)]
        self._subscribed = [[0] * workload.workers for _ in range(lanes)]
        self._messages = [
            (worker, [b"", struct.pack(">q", seq), payload]) for worker, seq, payload in batches(workload)
        ]

    def addresses(self) -> list[list[str]]:
        """By lane and worker."""
        return [[socket.get_string(zmq.LAST_ENDPOINT) for socket in lane] for lane in self._lanes]

    def payload_bytes(self) -> int:
        return sum(len(frames[2]) for _, frames in self._messages)

    def wait(self, lane: int, wanted: int) -> None:
        """Until every worker has this many subscribers."""
        counts = self._subscribed[lane]
        while any(count != wanted for count in counts):
            for worker, socket in enumerate(self._lanes[lane]):
                while socket.poll(1):
                    counts[worker] += 1 if socket.recv()[:1] == b"\x01" else -1

    def send(self, lane: int) -> float:
        """Publish everything; returns when it began, by the clock of ``time.time``."""
        sockets = self._lanes[lane]
        started_s = time.time()
        for worker, frames in self._messages:
            sockets[worker].send_multipart(frames, copy=False)
        return started_s

    def close(self) -> None:
        self._context.destroy(0)

    def _open(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.XPUB)
        socket.set(zmq.SNDHWM, 0)
        socket.bind("tcp://127.0.0.1:0")
        return socket


def main() -> None:
    fleet = Fleet(Workload(**json.loads(sys.argv[1])), int(sys.argv[2]))
    tell({"addresses": fleet.addresses(), "payload_bytes": fleet.payload_bytes()})
    for line in sys.stdin:
        command, _, lane = line.strip().partition(" ")
        match command:
            case "wait":
                fleet.wait(int(lane), 1)
                tell({})
            case "send":
                started_s = fleet.send(int(lane))
                tell({"started_s": started_s, "sent_s": time.time() - started_s})
            case "leave":
                fleet.wait(int(lane), 0)
                tell({})
    fleet.close()


def tell(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
