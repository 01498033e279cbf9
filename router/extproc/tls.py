# SPDX-License-Identifier: Apache-2.0
"""Certificates of the gRPC port, read again when their files change: issuers such as cert-manager replace them."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from router.config_epp import EppTlsConfig
from router.errors import ConfigError

_log = logging.getLogger(__name__)


class Certificates:
    """The files as they were last read."""

    def __init__(self, cert_file: str, key_file: str, client_ca_file: str | None) -> None:
        """Read them.

        Raises:
            OSError: they cannot be read, or are no certificates.
        """
        self._files = (cert_file, key_file, client_ca_file)
        self._stamps = self._look()
        self.context = self._read()
        """For new connections. It looks for itself whether the files have changed, at each handshake."""

    def _read(self) -> ssl.SSLContext:
        cert_file, key_file, client_ca_file = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        context.load_cert_chain(cert_file, key_file)
        if client_ca_file is not None:
            context.load_verify_locations(client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        context.sni_callback = self._handshake
        return context

    def _handshake(self, connection: ssl.SSLObject, _name: str, _context: ssl.SSLContext) -> None:
        """Called by OpenSSL for each handshake, with a name or without."""
        try:
            stamps = self._look()
            if stamps != self._stamps:
                self.context, self._stamps = self._read(), stamps
        except OSError as error:
            _log.warning("certificates cannot be read again, the old ones stay in use: %s", error)
        connection.context = self.context

    def _look(self) -> list[tuple[int, int, int]]:
        found = [Path(name).stat() for name in self._files if name is not None]
        return [(one.st_mtime_ns, one.st_size, one.st_ino) for one in found]


def server_tls(tls: EppTlsConfig) -> ssl.SSLContext | None:
    """What a gRPC port listens with; None for plain text.

    Raises:
        ConfigError: one file of the pair is missing or cannot be read.
    """
    if tls.cert_file is None and tls.key_file is None and tls.client_ca_file is None:
        return None
    if tls.cert_file is None or tls.key_file is None:
        missing = "cert_file" if tls.cert_file is None else "key_file"
        raise ConfigError(f"epp.tls.{missing}", None, "a file, as cert_file and key_file go together")
    try:
        return Certificates(tls.cert_file, tls.key_file, tls.client_ca_file).context
    except OSError as error:
        raise ConfigError(
            "epp.tls", error.filename or tls.cert_file, f"readable files ({error.strerror})"
        ) from error
