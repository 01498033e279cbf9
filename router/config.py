# SPDX-License-Identifier: Apache-2.0
"""The configuration: one YAML file, an environment variable for every key, a default for everything.

Four steps, each a function: :func:`decode` (YAML and environment to plain values), :func:`default`
(fills every key that was left out), :func:`validate` (types, ranges, cross-field rules) and
:func:`build` (plain values to frozen structs); :func:`load` is the four in a row. Nothing is repaired
silently: whatever is wrong ends in one :class:`~router.errors.ConfigError` that carries the dotted
path of the field, the value and what is accepted.

A key ``section.key`` is also ``POINTSMAN_SECTION__KEY`` in the environment, its value a YAML scalar or
a flow collection (``POINTSMAN_FLEET__WORKERS='[{url: "http://10.0.0.1:8000"}]'``). Variables without a
double underscore are not settings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import Struct

from router.config_addresses import check_http_url
from router.config_discovery import check_kubernetes
from router.config_epp import EppConfig
from router.config_fleet import FleetConfig, WorkerEntry, check_worker, with_id
from router.config_schema import annotation_at, config_error, plain_types
from router.config_sections import (
    AdminConfig,
    CostsConfig,
    DecisionsConfig,
    GatewayConfig,
    IndexConfig,
    PlanConfig,
    ServerConfig,
    TokensConfig,
)
from router.config_tenants import AdmissionConfig, TenantsConfig, check_tenants, read_keys
from router.config_yaml import check_keys, load_yaml
from router.errors import ConfigError

ENV_PREFIX = "POINTSMAN_"


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole configuration."""

    server: ServerConfig = ServerConfig()
    fleet: FleetConfig = FleetConfig()
    index: IndexConfig = IndexConfig()
    tokens: TokensConfig = TokensConfig()
    costs: CostsConfig = CostsConfig()
    plan: PlanConfig = PlanConfig()
    gateway: GatewayConfig = GatewayConfig()
    admin: AdminConfig = AdminConfig()
    decisions: DecisionsConfig = DecisionsConfig()
    tenants: TenantsConfig = TenantsConfig()
    admission: AdmissionConfig = AdmissionConfig()
    epp: EppConfig = EppConfig()


def load(
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
    workers: Sequence[WorkerEntry] = (),
) -> Config:
    """Read, complete, check and build the configuration.

    ``overrides`` maps dotted keys to values (command-line options); ``workers`` replace the configured
    ones when there are any. Precedence, weakest first: defaults, file, environment, arguments.

    Raises:
        ConfigError: the file cannot be read or a value is not accepted.
    """
    environ = os.environ if environ is None else environ
    values = decode(_read(path), environ)
    for key, value in (overrides or {}).items():
        _set(values, key.split("."), value)
    if workers:
        _set(values, ["fleet", "workers"], [msgspec.to_builtins(worker) for worker in workers])
    values = default(values, environ)
    validate(values)
    return build(values)


def decode(text: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """The YAML document with the environment laid over it, as plain values.

    Raises:
        ConfigError: not YAML, not a mapping, or an environment variable that is no setting.
    """
    try:
        document = load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError("(file)", str(error).replace("\n", " "), "a YAML document") from error
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise ConfigError("(file)", document, "a mapping of sections")
    check_keys(document, "")
    values: dict[str, Any] = document
    for name, raw in sorted(environ.items()):
        if name.startswith(ENV_PREFIX) and "__" in name:
            path = name[len(ENV_PREFIX) :].lower().split("__")
            _set(values, path, _env_value(name, path, raw))
    return values


def default(values: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """A copy of ``values`` in which every key is present; what is there is kept, right or wrong."""
    complete = dict(values)
    for section in msgspec.structs.fields(Config):
        given = complete.get(section.name, {})
        if isinstance(given, dict):
            filled = msgspec.to_builtins(section.default)
            complete[section.name] = {**filled, **given}
    index = complete["index"]
    if isinstance(index, dict) and index.get("hash_key_file") is None:
        index["hash_key_file"] = str(_state_directory(environ) / "hash.key")
    costs = complete["costs"]
    if isinstance(costs, dict) and isinstance(index, dict) and costs.get("state_file") is None:
        costs["state_file"] = str(Path(str(index["hash_key_file"])).parent / "calibration.json")
    fleet = complete["fleet"]
    if isinstance(fleet, dict) and isinstance(fleet.get("workers"), (list, tuple)):
        fleet["workers"] = [with_id(worker) for worker in fleet["workers"]]
    if isinstance(complete["tenants"], dict):
        read_keys(complete["tenants"], environ)
    return complete


def validate(values: Mapping[str, Any]) -> None:
    """Check types, ranges and the rules between fields.

    Raises:
        ConfigError: names the first field that is not accepted.
    """
    config = build(values)
    seen: dict[str, int] = {}
    for position, worker in enumerate(config.fleet.workers):
        path = f"fleet.workers[{position}]"
        check_worker(worker, path)
        name = worker.id or ""
        if name in seen:
            raise ConfigError(f"{path}.id", name, f"a name not used by fleet.workers[{seen[name]}]")
        seen[name] = position
    if config.fleet.backoff_max_s < config.fleet.backoff_min_s:
        raise ConfigError(
            "fleet.backoff_max_s", config.fleet.backoff_max_s, f"at least {config.fleet.backoff_min_s}"
        )
    for position, peer in enumerate(config.index.peers):
        check_http_url(f"index.peers[{position}]", peer)
    check_kubernetes(config.fleet.kubernetes)
    check_tenants(config.tenants)
    models: set[str] = set()
    for position, local in enumerate(config.tokens.local):
        if local.model in models:
            raise ConfigError(f"tokens.local[{position}].model", local.model, "each model once")
        models.add(local.model)


def build(values: Mapping[str, Any]) -> Config:
    """The frozen configuration of complete values.

    Raises:
        ConfigError: a type or a range does not fit, or a key is unknown.
    """
    try:
        return msgspec.convert(dict(values), Config)
    except msgspec.ValidationError as error:
        raise config_error(error, Config, values) from error


def _read(path: str | os.PathLike[str] | None) -> str:
    if path is None:
        return ""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("-c", str(path), f"a readable YAML file ({error})") from error


def _set(values: dict[str, Any], path: Sequence[str], value: object) -> None:
    node = values
    for key in path[:-1]:
        child = node.get(key)
        if child is None:
            child = node[key] = {}
        if not isinstance(child, dict):
            raise ConfigError(".".join(path), value, f"{key} is not a mapping")
        node = child
    node[path[-1]] = value


def _env_value(name: str, path: Sequence[str], raw: str) -> object:
    """A string where only text fits (a token of digits stays text), else what YAML makes of it."""
    annotation = annotation_at(Config, path)
    if annotation is None:
        raise ConfigError(".".join(path), raw, f"{name} is not a setting")
    try:
        value = load_yaml(raw)
    except yaml.YAMLError as error:
        hidden = path[0] == "tenants" or path[-1] == "token"
        raise ConfigError(
            ".".join(path), "(not shown)" if hidden else raw, f"a YAML value in {name}"
        ) from error
    takes_text = str in plain_types(annotation)
    return raw if takes_text and value is not None and not isinstance(value, str) else value


def _state_directory(environ: Mapping[str, str]) -> Path:
    """XDG base directory specification: ``$XDG_STATE_HOME``, or ``~/.local/state``."""
    base = environ.get("XDG_STATE_HOME", "")
    if base.startswith("/"):
        return Path(base) / "pointsman"
    home = environ.get("HOME")
    return (Path(home) if home else Path.home()) / ".local" / "state" / "pointsman"
