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
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta, Struct

from router.config_addresses import check_endpoint, check_http_url, check_peer_address, worker_id_of_url
from router.config_schema import annotation_at, config_error, plain_types
from router.config_tenants import AdmissionConfig, TenantsConfig, check_tenants, read_keys
from router.config_yaml import check_keys, load_yaml
from router.errors import ConfigError

ENV_PREFIX = "POINTSMAN_"

Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Count = Annotated[int, Meta(ge=1, le=2**40)]


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the gateway listens."""

    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="Port to listen on; 0 takes a free one.")] = 8080


class WorkerEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One worker of ``fleet.workers``, or one ``--worker`` argument."""

    url: Annotated[str, Meta(description="Base URL of the worker's HTTP server.")]
    id: Annotated[str | None, Meta(description="Name of the worker; `host:port` of the URL if absent.")] = (
        None
    )
    events: Annotated[str | None, Meta(description="ZMQ endpoint of its KV events (rank 0).")] = None
    replay: Annotated[str | None, Meta(description="ZMQ endpoint of its event replay (rank 0).")] = None
    p2p: Annotated[
        str | None, Meta(description="`host:port` of its P2P control channel (rank 0), as peers reach it.")
    ] = None
    ranks: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="Data-parallel ranks; from `/kv_event_sources` if absent."),
    ] = None
    role: Annotated[Literal["both", "prefill", "decode"], Meta(description="Phases it takes.")] = "both"
    transfer: Annotated[
        Literal["p2p", "nixl"] | None,
        Meta(
            description="How blocks go from a prefill to a decode worker: vLLM's P2P tier (the default with "
            "`p2p`) or NixlConnector."
        ),
    ] = None
    chunk_blocks: Annotated[
        int, Meta(ge=1, le=65536, description="Blocks per offloading chunk (`blocks_per_chunk`).")
    ] = 1
    fingerprint: Annotated[
        str | None,
        Meta(description="What else must be equal for blocks to be exchanged: weights revision, layout, TP."),
    ] = None
    block_size_tokens: Annotated[
        Annotated[int, Meta(ge=8, le=65536)] | None,
        Meta(description="Tokens per KV block; needed only if neither events nor `/metrics` tell it."),
    ] = None


class FleetConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The workers and how they are watched."""

    workers: Annotated[tuple[WorkerEntry, ...], Meta(description="The workers.")] = ()
    poll_interval_s: Annotated[Seconds, Meta(description="Pause between two polls of a worker.")] = 1.0
    poll_timeout_s: Annotated[Seconds, Meta(description="Limit for one polled answer.")] = 2.0
    failure_threshold: Annotated[
        int, Meta(ge=1, le=1000, description="Failures in a row (requests, or unanswered polls) that count.")
    ] = 3
    backoff_min_s: Annotated[Seconds, Meta(description="First pause of a failing worker; doubles.")] = 1.0
    backoff_max_s: Annotated[Seconds, Meta(description="Longest pause of a failing worker.")] = 30.0


class IndexConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The block index."""

    hash_key_file: Annotated[
        str | None,
        Meta(
            description="File of the key of request block hashes, made at first start; "
            "`$XDG_STATE_HOME/pointsman/hash.key` if absent."
        ),
    ] = None
    backend: Annotated[Literal["native", "reference"], Meta(description="Implementation.")] = "native"
    max_detached_blocks: Annotated[
        Count, Meta(description="Blocks kept, per rank, while their parent is unknown.")
    ] = 262_144
    max_unidentified_blocks: Annotated[
        Count, Meta(description="Offloaded blocks kept, per rank, while their GPU event is missing.")
    ] = 262_144
    replay_timeout_s: Annotated[Seconds, Meta(description="Limit for one replay of missed events.")] = 5.0


class LocalTokenizer(Struct, frozen=True, forbid_unknown_fields=True):
    """A tokenizer on this host, for one model."""

    model: Annotated[str, Meta(min_length=1, description="Name of the base model or an alias of it.")]
    path: Annotated[
        str, Meta(min_length=1, description="Directory with `tokenizer.json` and `tokenizer_config.json`.")
    ]
    chat_template: Annotated[
        str | None, Meta(description="Jinja file used instead of the tokenizer's own template.")
    ] = None


class TokensConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How prompts become token ids."""

    local: Annotated[tuple[LocalTokenizer, ...], Meta(description="Tokenizers on this host.")] = ()
    probe: Annotated[
        bool, Meta(description="Compare the local tokenizer with each worker's `/tokenize` when it joins.")
    ] = True
    worker_timeout_s: Annotated[Seconds, Meta(description="Limit for a worker's `/tokenize`.")] = 5.0


class CostsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of the cost model."""

    profile: Annotated[str, Meta(min_length=1, description="Name of the profile of constants.")] = "default"
    overrides: Annotated[
        dict[str, float], Meta(description="Constants that replace those of the profile.")
    ] = {}
    calibrate: Annotated[
        bool, Meta(description="Whether constants are learnt from answers; the profile is where they start.")
    ] = True
    keep: Annotated[bool, Meta(description="Whether what was learnt is kept over restarts.")] = True
    state_file: Annotated[
        str | None,
        Meta(
            description="File of what was learnt, written every 30 s; `calibration.json` beside the hash key "
            "if absent."
        ),
    ] = None
    model_config: Annotated[
        str | None,
        Meta(
            description="Directory of the model, or its `config.json`: KV bytes per token are taken from it "
            "instead of the profile."
        ),
    ] = None
    kv_dtype: Annotated[
        str | None,
        Meta(description="The engines' `--kv-cache-dtype`, for `model_config`; that of the model if absent."),
    ] = None


class PlanConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How a worker and a plan are chosen."""

    policy: Annotated[
        Literal["kv_aware", "round_robin", "least_load"], Meta(description="How a worker is chosen.")
    ] = "kv_aware"
    backend: Annotated[Literal["native", "reference"], Meta(description="Implementation.")] = "native"
    gpu_seconds_weight: Annotated[
        float, Meta(ge=0, le=1000, description="Weight of the GPU seconds that a plan burns (lambda).")
    ] = 0.1
    pull_deadline_s: Annotated[Seconds, Meta(description="A pull that would take longer is not planned.")] = (
        5.0
    )
    use_peers: Annotated[bool, Meta(description="Whether plans may pull blocks from peers.")] = True
    min_pull_tokens: Annotated[
        int, Meta(ge=0, le=2**31, description="Fewer tokens than this are never pulled from a peer.")
    ] = 0
    offload: Annotated[
        Literal["all", "shared"],
        Meta(
            description="Blocks that workers may offload: all, or none behind the shared beginning of prompts whose "
            "tails nobody reads again (learnt)."
        ),
    ] = "all"
    explore: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of the predicted costs that trials of uncertain loads may lose; 0 for none.",
        ),
    ] = 0.003
    slo_ttft_s: Annotated[
        Seconds | None,
        Meta(description="Time to first token wanted where a request has no `x-slo-ttft-ms`."),
    ] = None
    slo_tpot_s: Annotated[
        Seconds | None,
        Meta(description="Time per output token wanted where a request has no `x-slo-tpot-ms`."),
    ] = None


class GatewayConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The OpenAI-compatible proxy."""

    max_body_bytes: Annotated[
        int, Meta(ge=1024, le=2**40, description="Largest request body that is taken.")
    ] = 64 * 2**20
    connect_timeout_s: Annotated[Seconds, Meta(description="Limit for connecting to a worker.")] = 5.0
    idle_timeout_s: Annotated[Seconds, Meta(description="Longest silence of a worker within an answer.")] = (
        600.0
    )
    retries: Annotated[
        int, Meta(ge=0, le=100, description="Further workers tried when one fails before its first byte.")
    ] = 2
    trust_transfer_params: Annotated[
        bool,
        Meta(description="Take `kv_transfer_params` from clients (they can point a worker at any host)."),
    ] = False


class AdminConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The admin API and page."""

    enabled: Annotated[bool, Meta(description="Whether it is served.")] = True
    token: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="Bearer token; none is asked for if absent."),
    ] = None


class DecisionLogConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The log of decisions and outcomes on disk."""

    path: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="File that each decision and its outcome are appended to, as JSON lines; off if absent."
        ),
    ] = None
    max_bytes: Annotated[
        int, Meta(ge=2**20, le=2**50, description="Size at which the file is renamed to `path.n`.")
    ] = 256 * 2**20
    keep: Annotated[int, Meta(ge=0, le=10**6, description="Renamed files that stay, the newest.")] = 8
    fsync: Annotated[
        Literal["never", "interval", "always"],
        Meta(description="When lines are forced to the disk: never, once a second, after every write."),
    ] = "interval"


class DecisionsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Decision records."""

    capacity: Annotated[int, Meta(ge=1, le=10**8, description="Records kept in memory.")] = 10_000
    log: DecisionLogConfig = DecisionLogConfig()


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
        fleet["workers"] = [_with_id(worker) for worker in fleet["workers"]]
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
        _check_worker(worker, path)
        name = worker.id or ""
        if name in seen:
            raise ConfigError(f"{path}.id", name, f"a name not used by fleet.workers[{seen[name]}]")
        seen[name] = position
    if config.fleet.backoff_max_s < config.fleet.backoff_min_s:
        raise ConfigError(
            "fleet.backoff_max_s", config.fleet.backoff_max_s, f"at least {config.fleet.backoff_min_s}"
        )
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


def parse_worker_argument(argument: str) -> WorkerEntry:
    """The worker of ``URL[,events=tcp://H:P][,replay=...][,p2p=H:P][,ranks=N][,role=...][,transfer=...][,chunk=N][,id=NAME]``.

    Raises:
        ConfigError: the field is ``--worker.<sub-field>``.
    """
    names = {"chunk": "chunk_blocks", "block_size": "block_size_tokens"}
    url, *options = argument.split(",")
    values: dict[str, Any] = {"url": url.strip()}
    for option in options:
        key, equals, raw = option.strip().partition("=")
        name = names.get(key, key)
        if not equals or name == "url" or name not in WorkerEntry.__struct_fields__:
            accepted = "events, replay, p2p, ranks, role, transfer, chunk, block_size, fingerprint or id, each as key=value"
            raise ConfigError("--worker", option, accepted)
        if name in values:
            raise ConfigError(f"--worker.{key}", raw, "each option once")
        numeric = name in {"ranks", "chunk_blocks", "block_size_tokens"} and re.fullmatch(r"-?\d+", raw)
        values[name] = int(raw) if numeric else raw
    try:
        worker = msgspec.convert(_with_id(values), WorkerEntry)
    except msgspec.ValidationError as error:
        raise config_error(error, WorkerEntry, values, "--worker") from error
    _check_worker(worker, "--worker")
    return worker


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


def _with_id(worker: object) -> object:
    if isinstance(worker, dict) and worker.get("id") is None and isinstance(worker.get("url"), str):
        return {**worker, "id": worker_id_of_url(worker["url"])}
    return worker


def _check_worker(worker: WorkerEntry, path: str) -> None:
    check_http_url(f"{path}.url", worker.url)
    if worker.id is not None and not re.fullmatch(r"[A-Za-z0-9._:\-\[\]/]{1,200}", worker.id):
        raise ConfigError(f"{path}.id", worker.id, "1 to 200 of the characters A-Z a-z 0-9 . _ : - / [ ]")
    for name, endpoint in (("events", worker.events), ("replay", worker.replay)):
        if endpoint is not None:
            check_endpoint(f"{path}.{name}", endpoint)
    if worker.p2p is not None:
        check_peer_address(f"{path}.p2p", worker.p2p)
    elif worker.transfer == "p2p":
        raise ConfigError(f"{path}.transfer", "p2p", "p2p only with an address in p2p")


def _state_directory(environ: Mapping[str, str]) -> Path:
    """XDG base directory specification: ``$XDG_STATE_HOME``, or ``~/.local/state``."""
    base = environ.get("XDG_STATE_HOME", "")
    if base.startswith("/"):
        return Path(base) / "pointsman"
    home = environ.get("HOME")
    return (Path(home) if home else Path.home()) / ".local" / "state" / "pointsman"
