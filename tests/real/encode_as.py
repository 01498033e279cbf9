# SPDX-License-Identifier: Apache-2.0
"""Encodes a recorded stream with the event classes of another vLLM version: run by the engine's Python,
`encode_as.py STREAM.jsonl.gz KV_EVENTS.py` prints one message a line.

KV_EVENTS.py is that version's `vllm/distributed/kv_events.py`. A field that its classes do not have is left out, as
that version would not have published it.
"""

from __future__ import annotations

import base64
import gzip
import importlib.util
import json
import sys
from types import ModuleType
from typing import Any

import msgspec


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("old_kv_events", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its classes look each other up there
    spec.loader.exec_module(module)
    return module


def event_as(module: ModuleType, event: dict[str, Any]) -> Any:
    kind = getattr(module, event["type"])
    fields = {name: event[name] for name in kind.__struct_fields__ if name in event}
    return kind(**fields)


def main(stream: str, source: str) -> None:
    module = load(source)
    encode = msgspec.msgpack.Encoder().encode
    with gzip.open(stream) as file:
        for line in file:
            row = json.loads(line)
            ts, events, rank = msgspec.msgpack.decode(base64.b64decode(row["payload"]))
            batch = module.KVEventBatch(
                ts=ts, events=[event_as(module, event) for event in events], data_parallel_rank=rank
            )
            row["payload"] = base64.b64encode(encode(batch)).decode()
            print(json.dumps({"topic": row["topic"], "seq": row["seq"], "payload": row["payload"]}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
