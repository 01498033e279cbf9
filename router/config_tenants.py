# SPDX-License-Identifier: Apache-2.0
"""The sections ``tenants`` and ``admission``: who may ask, and what happens when everything is busy.

Keys may stand in the file or in environment variables that the file names. No message ever shows one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from router.errors import ConfigError

ANONYMOUS_NAME = "anonymous"
MIN_PRIORITY, MAX_PRIORITY = -100, 100
_HIDDEN = "(not shown)"
_Seconds = Annotated[float, Meta(gt=0, le=86400)]
_Key = Annotated[str, Meta(min_length=8, max_length=512)]


class TenantEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One tenant of ``tenants.entries``."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9._\-]{1,64}$",
            description="Name in records and metrics; `anonymous` (which has no keys) is who comes without one.",
        ),
    ]
    api_keys: Annotated[
        tuple[_Key, ...], Meta(description="Keys, as `Authorization: Bearer KEY` or `x-api-key: KEY`.")
    ] = ()
    api_key_env: Annotated[
        tuple[str, ...], Meta(description="Names of environment variables that hold further keys.")
    ] = ()
    weight: Annotated[
        float, Meta(gt=0, le=10**6, description="Its share when requests wait, relative to the others.")
    ] = 1.0
    priority: Annotated[
        int,
        Meta(
            ge=MIN_PRIORITY,
            le=MAX_PRIORITY,
            description="Priority of its requests (higher goes first), and the most a request may ask for.",
        ),
    ] = 0
    max_in_flight: Annotated[
        Annotated[int, Meta(ge=1, le=10**6)] | None,
        Meta(description="Its requests at workers at once; more wait."),
    ] = None
    shared_prefix: Annotated[
        bool,
        Meta(description="Share cached prefixes with everybody who does: no salt of its own is added."),
    ] = False

    def __repr__(self) -> str:
        return f"TenantEntry(name={self.name!r})"  # a key must not get into a log by way of a repr


class TenantsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Who may ask."""

    require: Annotated[bool, Meta(description="Answer 401 to requests without a known key.")] = False
    entries: Annotated[tuple[TenantEntry, ...], Meta(description="The tenants.")] = ()


class AdmissionConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """When requests wait at the router, and when they are refused."""

    max_queue_s: Annotated[
        _Seconds, Meta(description="Requests wait while every worker has more predicted prefill time ahead.")
    ] = 10.0
    max_in_flight_per_worker: Annotated[
        Annotated[int, Meta(ge=1, le=10**6)] | None,
        Meta(description="Our requests at a worker at once; requests wait when every worker has as many."),
    ] = None
    max_waiting: Annotated[
        int, Meta(ge=0, le=10**6, description="Requests that wait at once; beyond, one is answered 429.")
    ] = 1000
    max_wait_s: Annotated[_Seconds, Meta(description="Longest wait; then 429.")] = 30.0
    shed_on_slo: Annotated[
        bool, Meta(description="Answer 429 at once when the time to first token asked for cannot be met.")
    ] = False


def read_keys(tenants: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Add the keys from the environment to ``api_keys`` of the plain values; wrong types are left as they are.

    Raises:
        ConfigError: a named variable is not set.
    """
    entries = tenants.get("entries")
    if not isinstance(entries, (list, tuple)):
        return
    tenants["entries"] = [_with_keys(entry, at, environ) for at, entry in enumerate(entries)]


def _with_keys(entry: object, position: int, environ: Mapping[str, str]) -> object:
    names = entry.get("api_key_env") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(names, (list, tuple)):
        return entry
    keys = entry.get("api_keys", [])
    if not isinstance(keys, (list, tuple)):
        return entry
    found = list(keys)
    for at, name in enumerate(names):
        value = environ.get(name) if isinstance(name, str) else None
        if not value:
            field = f"tenants.entries[{position}].api_key_env[{at}]"
            raise ConfigError(field, name, "the name of an environment variable that is set")
        found.append(value)
    return {**entry, "api_keys": found}


def check_tenants(tenants: TenantsConfig) -> None:
    """The rules between fields.

    Raises:
        ConfigError: names the first field that is not accepted.
    """
    names: set[str] = set()
    keys: set[str] = set()
    for position, entry in enumerate(tenants.entries):
        path = f"tenants.entries[{position}]"
        if entry.name in names:
            raise ConfigError(f"{path}.name", entry.name, "each name once")
        names.add(entry.name)
        if entry.name == ANONYMOUS_NAME and entry.api_keys:
            raise ConfigError(f"{path}.api_keys", _HIDDEN, f"no key for {ANONYMOUS_NAME}")
        if entry.name != ANONYMOUS_NAME and not entry.api_keys:
            raise ConfigError(f"{path}.api_keys", (), "at least one key, here or by api_key_env")
        for at, key in enumerate(entry.api_keys):
            if key in keys:
                raise ConfigError(f"{path}.api_keys[{at}]", _HIDDEN, "each key once")
            if not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(f"{path}.api_keys[{at}]", _HIDDEN, "printable ASCII without spaces")
            keys.add(key)
    if tenants.require and not keys:
        raise ConfigError("tenants.require", True, "false, or tenants with keys")


def shown(path: list[str | int], value: object) -> object:
    """The value as a message may show it: what is, or may contain, a key is left out."""
    if not path:
        return value
    secret = any(part in ("api_keys", "token") for part in path)
    return _HIDDEN if secret or (path[0] == "tenants" and isinstance(value, (dict, list, tuple))) else value
