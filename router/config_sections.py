# SPDX-License-Identifier: Apache-2.0
"""The sections of the configuration that are plain values: what each key means, its range and its default."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from router.config_types import Count, Port, Seconds


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the gateway listens."""

    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="Port to listen on; 0 takes a free one.")] = 8080
    processes: Annotated[
        int, Meta(ge=1, le=48, description="Processes that serve, of the gateway or of the endpoint picker.")
    ] = 1
    shared_dir: Annotated[
        str | None,
        Meta(
            description="Directory for what several processes share: sockets, index, load board. If absent, one is "
            "made in `$XDG_RUNTIME_DIR` or the directory for temporary files, and removed at the end."
        ),
    ] = None
    hung_after_s: Annotated[
        Seconds,
        Meta(
            description="A process of several that does not answer the supervisor for so long is killed and replaced."
        ),
    ] = 30.0


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
    snapshot: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="File that what workers hold is kept in, read at start and written now and then; none if absent."
        ),
    ] = None
    snapshot_interval_s: Annotated[Seconds, Meta(description="Time between two writes of it.")] = 60.0
    snapshot_max_bytes: Annotated[
        int, Meta(ge=1, le=2**40, description="Largest snapshot that is written, or taken from a peer.")
    ] = 4 * 2**30
    peers: Annotated[
        tuple[str, ...],
        Meta(
            description="Replicas whose snapshot is asked for at start, the first that answers: `http://HOST:PORT/admin/api` "
            "of a gateway, `http://HOST:PORT` of `pointsman indexer`."
        ),
    ] = ()
    max_blocks: Annotated[
        Annotated[int, Meta(ge=1024, le=2**30)] | None,
        Meta(
            description="Most blocks kept, one counted for each rank that holds it; those matched longest ago go first. "
            "If absent, as many as fit in half of the memory that this process may use (64 bytes each), and with several "
            "processes in three quarters of the room in `server.shared_dir`; 134217728 at most."
        ),
    ] = None
    offload_grace_s: Annotated[
        float,
        Meta(
            ge=0,
            le=1000,
            description="A block that left HBM of a worker that offloads is remembered for so long as on its way to RAM; "
            "plans do not count on it meanwhile.",
        ),
    ] = 2.0
    max_detached_blocks: Annotated[
        Count, Meta(description="Blocks kept, per rank, while their parent is unknown.")
    ] = 262_144
    max_unidentified_blocks: Annotated[
        Count, Meta(description="Offloaded blocks kept, per rank, while their GPU event is missing.")
    ] = 262_144
    replay_timeout_s: Annotated[Seconds, Meta(description="Limit for one replay of missed events.")] = 5.0
    approximate: Annotated[
        bool,
        Meta(
            description="Whether our own decisions stand in for the events of workers that publish none, or whose "
            "stream is broken or silent."
        ),
    ] = True
    approximate_ttl_s: Annotated[
        Seconds, Meta(description="Such a block counts for so long after the last request that used it.")
    ] = 300.0
    approximate_blocks: Annotated[
        Count, Meta(description="Blocks assumed per rank where `/metrics` does not tell `num_gpu_blocks`.")
    ] = 65_536


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
    allow_unfingerprinted_peers: Annotated[
        bool,
        Meta(
            description="Whether workers with our extension may pull from stock ones, whose protocol tells neither "
            "tenant nor revision."
        ),
    ] = False
    speculative_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="For how long blocks of a prompt that was sent to a worker count as held there before events "
            "tell of them, while its request is in flight; 0: not at all.",
        ),
    ] = 60.0
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
    report_token: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="Bearer token that only lets engine extensions report; `token` does too."),
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
