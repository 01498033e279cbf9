# SPDX-License-Identifier: Apache-2.0
"""Seeds of the fuzz targets: recorded payloads of vLLM, and questions in the forms that clients send.

python tests/fuzz/seeds.py FOLDER     writes FOLDER/batch/ and FOLDER/query/
"""

from __future__ import annotations

import base64
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path

RECORDINGS = Path(__file__).parents[1] / "golden" / "kv_events"
SEPARATOR = b"\xc1" * 4
MOST_BYTES = 16_384
PER_RECORDING = 12


def payloads(path: Path) -> Iterator[bytes]:
    """Of one recording, in order."""
    with gzip.open(path, "rt") as lines:
        for line in lines:
            payload = json.loads(line).get("payload")
            if isinstance(payload, str):
                yield base64.b64decode(payload)


def batches() -> Iterator[bytes]:
    """Single payloads, and stretches of a recording as one input."""
    for path in sorted(RECORDINGS.rglob("*.jsonl.gz")):
        if path.name.endswith(".requests.jsonl.gz"):
            continue
        found = list(payloads(path))
        step = max(1, len(found) // PER_RECORDING)
        for at in range(0, len(found), step):
            yield found[at]
            yield SEPARATOR.join(found[at : at + 6])


def queries() -> Iterator[bytes]:
    """Bodies alone and behind a head."""
    tokens = [*range(40), 2**32 - 1, 99_999_999, 9_999_999, 0]
    bodies = [
        {"token_ids": tokens, "model_name": "m"},
        {"model_name": "m", "token_ids": []},
        {
            "model_name": "m",
            "tenant_id": "default",
            "lora_name": "a",
            "cache_salt": "s",
            "token_ids": tokens[:9],
        },
        {"model_name": "m", "routing_group": None, "lora_name": None, "cache_salt": "", "token_ids": [1]},
        {"model_name": "m", "lora_name": "adapter", "token_ids": [1, 2]},
    ]
    for body in bodies:
        for separators in ((",", ":"), (", ", ": "), (" ,\n", "\t:\r\n")):
            data = json.dumps(body, separators=separators).encode()
            yield data
            for headers in (
                "",
                "Host: 127.0.0.1\r\nContent-Type: application/json\r\nconnection: keep-alive\r\n",
            ):
                yield f"POST /query HTTP/1.1\r\n{headers}Content-Length: {len(data)}\r\n\r\n".encode() + data


def main() -> None:
    folder = Path(sys.argv[1])
    for name, found in (("batch", batches()), ("query", queries())):
        into = folder / name
        into.mkdir(parents=True, exist_ok=True)
        written = 0
        for data in found:
            if len(data) <= MOST_BYTES:
                (into / f"{written:04}").write_bytes(data)
                written += 1
        print(f"{written} seeds for {name}")


if __name__ == "__main__":
    main()
