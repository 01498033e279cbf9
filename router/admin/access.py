# SPDX-License-Identifier: Apache-2.0
"""Who may call the admin API: who has a token or, where none is set, who is on this host."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address

from fastapi import Request

from router.errors import RequestError


class UnauthorizedError(RequestError):
    """No bearer token, or a wrong one."""

    status = HTTPStatus.UNAUTHORIZED


@dataclass(frozen=True, slots=True)
class Access:
    """A FastAPI dependency."""

    tokens: tuple[tuple[str, str], ...]
    """(name of the setting, token); each of them opens."""

    @classmethod
    def of(cls, **tokens: str | None) -> Access:
        """By name of the setting below ``admin``; None where it is not set."""
        return cls(tuple((f"admin.{name}", token) for name, token in tokens.items() if token is not None))

    async def __call__(self, request: Request) -> None:
        """Let a call through.

        Raises:
            UnauthorizedError: it has no token that opens.
        """
        if not self.tokens:
            if not _is_loopback(request.client.host if request.client else ""):
                raise UnauthorizedError("without admin.token this API answers on loopback only")
            return
        given = request.headers.get("authorization", "").encode()
        # Every token is compared, so that the time tells nothing.
        fits = [hmac.compare_digest(given, b"Bearer " + token.encode()) for _, token in self.tokens]
        if not any(fits):
            names = " or ".join(name for name, _ in self.tokens)
            raise UnauthorizedError(f"this API needs the bearer token of {names}")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
