# SPDX-License-Identifier: Apache-2.0
"""CURVE on the control channel: keys from a file, and which clients may connect (ZAP, RFC 27)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from engine_ext.transfer.errors import TransferConfigError

from .config import ControlConfig


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """All keys as Z85."""

    secret: bytes
    public: bytes
    server: bytes
    servers: dict[str, bytes]
    clients: frozenset[bytes]

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Before it is bound."""
        socket.curve_server = True
        socket.curve_secretkey = self.secret
        socket.curve_publickey = self.public

    def ask(self, socket: zmq.Socket[bytes], address: str) -> None:
        """Before it is connected."""
        socket.curve_secretkey = self.secret
        socket.curve_publickey = self.public
        socket.curve_serverkey = self.servers.get(address, self.server)

    def admit(self, request: list[bytes]) -> list[bytes]:
        """The answer to a ZAP request: 200 for a known client key, 400 for any other."""
        version, request_id, _domain, _address, _identity, mechanism, *credentials = request
        known = mechanism == b"CURVE" and len(credentials) == 1 and z85.encode(credentials[0]) in self.clients
        status = (b"200", b"OK") if known else (b"400", b"unknown key")
        return [version, request_id, *status, b"", b""]


def load_keys(config: ControlConfig) -> CurveKeys | None:
    """None where the channel is not encrypted.

    Raises:
        TransferConfigError: the file cannot be read or holds no key, or this libzmq has no CURVE.
    """
    name = config.curve_secret_key_file
    if not name:
        return None
    if not zmq.has("curve"):
        raise TransferConfigError("curve_secret_key_file", name, "nothing: this libzmq has no CURVE")
    try:
        secret = Path(name).read_bytes().strip()
        public = zmq.curve_public(secret)
    except (OSError, ValueError, zmq.ZMQError) as error:
        accepted = f"a file with a secret key of 40 characters in Z85 ({type(error).__name__})"
        raise TransferConfigError("curve_secret_key_file", name, accepted) from error
    return CurveKeys(
        secret=secret,
        public=public,
        server=config.curve_server_key.encode() or public,
        servers={address: key.encode() for address, key in config.curve_server_keys.items()},
        clients=frozenset(key.encode() for key in config.curve_clients),
    )
