# SPDX-License-Identifier: Apache-2.0
"""The API server over ``kubernetes_asyncio``: its credentials, TLS and token renewal; bodies are decoded elsewhere.

The library is an extra (``pip install 'pointsman[kubernetes]'``). Its generated models are not used: a list of a
thousand pods is decoded in milliseconds by types that hold what counts here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp

from router.config_discovery import KubernetesConfig
from router.errors import ConfigError
from router.fleet.discovery.watching import ApiError

_log = logging.getLogger(__name__)

_READ_S = 30.0
_CONNECT_S = 5.0
_OUR_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_MAX_ERROR_BYTES = 4096
_OUTSIDE = "the path of a kubeconfig, since we run in no pod of a cluster"


def check_usable(config: KubernetesConfig) -> None:
    """What can be known before the service starts: whether the extra is there, and whose credentials there are.

    Raises:
        ConfigError: it is not, or there are none.
    """
    if find_spec("kubernetes_asyncio") is None:
        accepted = "a section only where the extra is installed: pip install 'pointsman[kubernetes]'"
        raise ConfigError("fleet.kubernetes", "(section)", accepted)
    where = config.kubeconfig
    if where is not None and not Path(where).is_file():
        raise ConfigError("fleet.kubernetes.kubeconfig", where, "the path of a kubeconfig")
    if where is None and not os.environ.get("KUBERNETES_SERVICE_HOST"):
        raise ConfigError("fleet.kubernetes.kubeconfig", None, _OUTSIDE)


class KubernetesApi:
    """Lists and watches; a :class:`~router.fleet.discovery.informer.ListWatch`. One event loop opens, uses and closes it."""

    def __init__(
        self, client: Any, namespace: str, renew: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """``renew`` is awaited after a 401: tokens of a kubeconfig's helper programs expire."""
        self._client = client
        self._renew = renew
        self.namespace = namespace

    async def close(self) -> None:
        await self._client.close()

    async def read(self, path: str, query: Mapping[str, str]) -> bytes:
        answer = await self._get(path, query, aiohttp.ClientTimeout(total=_READ_S, sock_connect=_CONNECT_S))
        async with answer:
            await self._check(answer)
            return await answer.read()

    @asynccontextmanager
    async def watch(
        self, path: str, query: Mapping[str, str], limit_s: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        limits = aiohttp.ClientTimeout(total=limit_s, sock_connect=_CONNECT_S)
        answer = await self._get(path, query, limits)
        async with answer:
            await self._check(answer)
            yield answer.content.iter_any()

    async def _get(
        self, path: str, query: Mapping[str, str], limits: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        answer: aiohttp.ClientResponse = await self._client.call_api(
            path,
            "GET",
            query_params=list(query.items()),
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=limits,
        )
        return answer

    async def _check(self, answer: aiohttp.ClientResponse) -> None:
        if answer.status == 200:
            return
        text = (await answer.content.read(_MAX_ERROR_BYTES)).decode("utf-8", "replace")
        if answer.status == 401 and self._renew is not None:
            await self._renew()
        raise ApiError(answer.status, text or answer.reason or "")


async def open_api(config: KubernetesConfig) -> KubernetesApi:
    """Credentials of a kubeconfig, or of our own pod.

    Raises:
        ConfigError: there are none, or they cannot be read.
    """
    # The extra may be absent; importing it takes half a second.
    client, credentials = (
        import_module("kubernetes_asyncio.client"),
        import_module("kubernetes_asyncio.config"),
    )
    settings = client.Configuration()

    async def load() -> str | None:
        if config.kubeconfig is None:
            credentials.load_incluster_config(client_configuration=settings)
            return _our_namespace()
        loader = await credentials.load_kube_config(
            config.kubeconfig, config.context, settings, persist_config=False
        )
        found: str | None = loader.current_context["context"].get("namespace")
        return found

    async def renew() -> None:
        try:
            await load()
        except failures as error:
            _log.warning("credentials could not be renewed: %s", error)

    failures = (credentials.ConfigException, OSError, KeyError, TypeError, ValueError)
    try:
        namespace = await load()
    except failures as error:
        where = config.kubeconfig
        what = _OUTSIDE if where is None else "a kubeconfig with a cluster and a user"
        raise ConfigError("fleet.kubernetes.kubeconfig", where, f"{what} ({error})") from error
    return KubernetesApi(client.ApiClient(settings), config.namespace or namespace or "default", renew)


def _our_namespace() -> str | None:
    try:
        return _OUR_NAMESPACE.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
