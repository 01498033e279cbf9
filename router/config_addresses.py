# SPDX-License-Identifier: Apache-2.0
"""Checks of the addresses a configuration may hold: HTTP URLs, ZMQ endpoints, ``host:port`` of peers.

Every address is one to connect to, so wildcards (``*``, ``0.0.0.0``, ``[::]``) are refused: they say
where to bind.
"""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from router.errors import ConfigError

_WILDCARDS = frozenset({"*", "0.0.0.0", "::"})


def worker_id_of_url(url: str) -> str:
    """``host:port`` of a URL, the default name of a worker; the URL itself when it is no URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return url
    if not parts.hostname:
        return url
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    port = port if port is not None else (443 if parts.scheme == "https" else 80)
    prefix = parts.path.rstrip("/")
    return f"{host}:{port}{prefix}"


def check_http_url(field: str, url: str) -> None:
    """Accept ``http(s)://host[:port][/prefix]``.

    Raises:
        ConfigError: anything else, including credentials, a query or a fragment.
    """
    accepted = "http://host:port or https://host:port"
    parts = _split(field, url, accepted)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.hostname in _WILDCARDS:
        raise ConfigError(field, url, accepted)
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(field, url, f"{accepted}, without credentials, query or fragment")


def check_endpoint(field: str, endpoint: str) -> None:
    """Accept a ZMQ endpoint to connect to: ``tcp://host:port`` or ``ipc://path``.

    Raises:
        ConfigError: anything else.
    """
    accepted = "tcp://host:port (the host to connect to, not a wildcard) or ipc://path"
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return
    parts = _split(field, endpoint, accepted)
    good = parts.scheme == "tcp" and parts.hostname and parts.hostname not in _WILDCARDS and parts.port
    if not good or parts.path or parts.query:
        raise ConfigError(field, endpoint, accepted)


def check_peer_address(field: str, address: str) -> None:
    """Accept ``host:port`` as peers of the worker can reach it.

    Raises:
        ConfigError: anything else.
    """
    accepted = "host:port that the other workers can reach (not a wildcard)"
    split_host_port(address, field, accepted)


def split_host_port(address: str, field: str = "address", accepted: str = "host:port") -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``; wildcards are refused.

    Raises:
        ConfigError: no such pair.
    """
    parts = _split(field, f"//{address}", accepted, shown=address)
    if not parts.hostname or not parts.port or parts.hostname in _WILDCARDS or parts.path or parts.username:
        raise ConfigError(field, address, accepted)
    return parts.hostname, parts.port


def _split(field: str, text: str, accepted: str, shown: str | None = None) -> SplitResult:
    if any(character.isspace() for character in text):
        raise ConfigError(field, shown or text, accepted)
    try:
        parts = urlsplit(text)
        _ = parts.port  # parsed on access: raises for a port out of range
    except ValueError as error:
        raise ConfigError(field, shown or text, accepted) from error
    return parts
