# SPDX-License-Identifier: Apache-2.0
"""One HTTP call to one router, with a limit on its whole duration. Standard library only: the engine's venv has it."""

from __future__ import annotations

import contextlib
import http.client
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

_LEAST_S = 0.001


@dataclass(frozen=True, slots=True)
class Posted:
    """How a call ended."""

    status: int | None
    """None: no answer."""
    detail: str = ""


def post_json(url: str, body: bytes, token: str | None, timeout_s: float) -> Posted:
    """Never raises for what the network or the other side does. The answer's body is not read.

    Only the look-up of a host's name is not under the limit.
    """
    parts = urlsplit(url)
    ends_s = time.monotonic() + timeout_s
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    headers = {"content-type": "application/json", "connection": "close"}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    try:
        connection.connect()
        _limit(connection, ends_s)
        connection.request("POST", parts.path or "/", body, headers)
        _limit(connection, ends_s)
        with contextlib.closing(connection.getresponse()) as answer:
            return Posted(answer.status, answer.reason)
    except (OSError, http.client.HTTPException) as error:
        return Posted(None, f"{type(error).__name__}: {error}")
    finally:
        connection.close()


def _limit(connection: http.client.HTTPConnection, ends_s: float) -> None:
    connection.sock.settimeout(max(ends_s - time.monotonic(), _LEAST_S))
