# SPDX-License-Identifier: Apache-2.0
"""Certificates of the gRPC port, read again when their files change: issuers such as cert-manager replace them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc

from router.config_epp import EppTlsConfig
from router.errors import ConfigError

_log = logging.getLogger(__name__)


class _Files:
    """The files as they were last read."""

    def __init__(self, tls: EppTlsConfig) -> None:
        self._paths = [Path(name) for name in (tls.key_file, tls.cert_file, tls.client_ca_file) if name]
        self._stamps: list[tuple[int, int, int]] = []

    def read(self) -> Any:
        self._stamps = self._look()
        key, chain, *authorities = [path.read_bytes() for path in self._paths]
        return grpc.ssl_server_certificate_configuration(
            [(key, chain)], root_certificates=authorities[0] if authorities else None
        )

    def read_changed(self) -> Any:
        """New certificates, or None where they are the same, or cannot be read now. Called for each handshake."""
        try:
            return self.read() if self._look() != self._stamps else None
        except OSError as error:
            _log.warning("certificates cannot be read again, the old ones stay in use: %s", error)
            return None

    def _look(self) -> list[tuple[int, int, int]]:
        found = [path.stat() for path in self._paths]
        return [(one.st_mtime_ns, one.st_size, one.st_ino) for one in found]


def server_credentials(tls: EppTlsConfig) -> Any | None:
    """Credentials for a gRPC port; None for plain text.

    Raises:
        ConfigError: one file of the pair is missing or cannot be read.
    """
    if tls.cert_file is None and tls.key_file is None and tls.client_ca_file is None:
        return None
    for name in ("cert_file", "key_file"):
        if getattr(tls, name) is None:
            raise ConfigError(f"epp.tls.{name}", None, "a file, as cert_file and key_file go together")
    files = _Files(tls)
    try:
        first = files.read()
    except OSError as error:
        raise ConfigError("epp.tls", error.filename, f"readable files ({error.strerror})") from error
    return grpc.dynamic_ssl_server_credentials(
        first, files.read_changed, require_client_authentication=tls.client_ca_file is not None
    )
