# SPDX-License-Identifier: Apache-2.0
"""The `report_*` keys of `kv_connector_extra_config`. Reads the token's file and the environment, nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

TOKEN_VARIABLE = "POINTSMAN_REPORT_TOKEN"  # noqa: S105 - the name of a variable
REPORTS_PATH = "/admin/api/reports"
_PREFIX = "report_"
_MOST_URLS = 8


class ReportConfigError(ValueError):
    """A bad option: names the field, the value and what is accepted."""

    def __init__(self, field: str, value: object, accepted: str) -> None:
        self.field = field
        super().__init__(f"{field}: {value!r} is not accepted; accepted: {accepted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """Where reports go, and how much may wait."""

    urls: tuple[str, ...]
    """Base URLs of routers; each gets every report and keeps those of its own plans."""
    token: str | None = field(default=None, repr=False)
    interval_s: float = 0.5
    """Reports wait so long for others, at most."""
    timeout_s: float = 5.0
    """Of one call."""
    queue: int = 10_000
    """Reports that wait for one router; beyond, the oldest are lost and counted."""


_KNOWN = ("urls", "token", "token_file", "interval_s", "timeout_s", "queue")


def read_report_config(
    extra: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> ReportConfig | None:
    """None where `report_urls` is absent or empty.

    The token is `report_token`, the content of `report_token_file`, or that of `POINTSMAN_REPORT_TOKEN`, the first
    that is there.

    Raises:
        ReportConfigError: an unknown `report_` key, a value that is not accepted, a file that cannot be read.
    """
    given = {key.removeprefix(_PREFIX): extra[key] for key in extra if key.startswith(_PREFIX)}
    for name, value in given.items():
        if name not in _KNOWN:
            accepted = ", ".join(_PREFIX + one for one in _KNOWN)
            raise ReportConfigError(_PREFIX + name, value, f"one of the keys {accepted}")
    config = ReportConfig(
        urls=_urls(given.get("urls")),
        token=_token(given, os.environ if environ is None else environ),
        interval_s=_number("interval_s", given.get("interval_s", 0.5), 0.01, 60.0),
        timeout_s=_number("timeout_s", given.get("timeout_s", 5.0), 0.1, 120.0),
        queue=int(_number("queue", given.get("queue", 10_000), 1, 1_000_000, whole=True)),
    )
    return config if config.urls else None


def _urls(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    listed = value.split(",") if isinstance(value, str) else value
    accepted = f"up to {_MOST_URLS} base URLs of routers, such as http://10.0.0.1:8080"
    if not isinstance(listed, (list, tuple)) or len(listed) > _MOST_URLS:
        raise ReportConfigError("report_urls", value, accepted)
    found: dict[str, None] = {}
    for one in listed:
        if not isinstance(one, str):
            raise ReportConfigError("report_urls", value, accepted)
        if one.strip():
            found[_url(one.strip(), accepted)] = None
    return tuple(found)


def _url(text: str, accepted: str) -> str:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ReportConfigError("report_urls", text, accepted) from None
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
        raise ReportConfigError("report_urls", text, accepted)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ReportConfigError("report_urls", text, f"{accepted}, without user, query and fragment")
    return text.rstrip("/")


def _number(name: str, value: object, least: float, most: float, *, whole: bool = False) -> float:
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        kind = "a whole number" if whole else "a number"
        raise ReportConfigError(_PREFIX + name, value, f"{kind} from {least} to {most}")
    return value


def _token(given: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    token = given.get("token")
    if token is None and (file := given.get("token_file")) is not None:
        accepted = "the path of a file that can be read"
        try:
            token = Path(file).read_text().strip()
        except (OSError, TypeError, UnicodeDecodeError) as error:
            raise ReportConfigError("report_token_file", file, f"{accepted} ({error})") from None
    if token is None:
        token = environ.get(TOKEN_VARIABLE) or None
    if token is None:
        return None
    if not isinstance(token, str) or not token or not token.isascii() or not token.isprintable():
        # The value is a secret: it is not shown.
        raise ReportConfigError("report_token", "...", "a text of printable ASCII characters, not empty")
    return token
