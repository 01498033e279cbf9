# SPDX-License-Identifier: Apache-2.0
"""A worker as configured, and as last seen. Values only: the poller writes them, everyone else reads."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Role(enum.Enum):
    """Phases a worker takes."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Transfer(enum.StrEnum):
    """How the blocks of a prefill reach the worker that decodes."""

    P2P = "p2p"  # vLLM's P2P tier: both legs at once
    NIXL = "nixl"  # NixlConnector: the prefill leg first


class Health(enum.Enum):
    """Whether a worker may be given requests."""

    UNKNOWN = "unknown"  # not asked yet
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"  # does not answer /health
    BACKOFF = "backoff"  # answers /health, but failed requests; waits for a probe
    DRAINING = "draining"  # an operator took it out
    NOT_READY = "not_ready"  # whoever runs it says that it takes no requests


class Parity(enum.Enum):
    """Whether our token ids equal the engine's, by the probe made when a worker joins."""

    UNKNOWN = "unknown"
    EQUAL = "equal"
    DIFFERENT = "different"  # the local tokenizer is not used for this model
    REMOTE = "remote"  # no local tokenizer: the worker's own /tokenize is used


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One ``--worker`` or one entry of ``fleet.workers``."""

    id: str
    """``host:port`` of the URL unless named."""
    url: str
    events: str | None = None
    replay: str | None = None
    p2p: str | None = None
    """``host:port`` of the control channel of vLLM's P2P tier (port of rank 0)."""
    ranks: int = 1
    role: Role = Role.BOTH
    transfer: Transfer | None = None
    """How it hands over or takes over the blocks of a prefill; None where it cannot."""
    chunk_blocks: int = 1
    """Blocks per offloading chunk (``blocks_per_chunk``): lower tiers load whole chunks."""
    block_size_tokens: int | None = None
    """Only needed when neither events nor /metrics tell it."""
    fingerprint: str | None = None
    """What else must be equal for blocks to be exchanged: weights revision, layout, tensor parallelism."""
    ranks_given: bool = True
    """False: ``ranks`` is a guess until the worker's ``/kv_event_sources`` tells it."""
    extension: str | None = None
    """``host:port`` of the control channel of our engine extension (port of rank 0); None: stock vLLM."""
    offloads_given: bool | None = None
    """What was said of ``offloads``; None: nothing."""

    @property
    def offloads(self) -> bool:
        """Whether its engine offloads blocks to RAM."""
        return self.serves_peers if self.offloads_given is None else self.offloads_given

    @property
    def serves_peers(self) -> bool:
        """Whether others can pull from it, by whatever protocol."""
        return self.p2p is not None or self.extension is not None


def reads_p2p(spec: WorkerSpec, allow_unfingerprinted_peers: bool) -> bool:
    """Whether a worker may pull through vLLM's P2P protocol.

    Our extension speaks it too, but its sources tell neither tenant nor revision of the weights.
    """
    return spec.p2p is not None if spec.extension is None else allow_unfingerprinted_peers


def rank_address(address: str | None, dp_rank: int) -> tuple[str, int]:
    """Host (without brackets) and port of a rank, of the ``host:port`` of rank 0; ("", 0) of none."""
    if address is None:
        return "", 0
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port) + dp_rank


def address_text(host: str, port: int) -> str:
    """``host:port``, an IPv6 address in brackets; empty for port 0."""
    if not port:
        return ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(slots=True)
class ModelInfo:
    """One row of a worker's ``/v1/models``: an alias, a base model or an adapter."""

    name: str
    base: str
    """Name of the base model whose tokenizer and template count."""
    lora: str | None = None
    root: str | None = None
    max_model_len: int | None = None


@dataclass(slots=True)
class WorkerStatus:
    """What polling says of a worker; ages are in seconds of the monotonic clock."""

    spec: WorkerSpec
    health: Health = Health.UNKNOWN
    answering: bool = False
    """It answers polls; a draining worker that does still serves its peers."""
    parity: Parity = Parity.UNKNOWN
    models: dict[str, ModelInfo] = field(default_factory=dict)
    block_size_tokens: int | None = None
    """From ``vllm:cache_config_info``."""
    cache_dtype: str | None = None
    """The same; ``auto`` means that of the model."""
    hbm_blocks: int | None = None
    """Usable blocks of a rank, from the same."""
    kv_bytes_per_token: float | None = None
    """As its loads from below HBM show; None until there were some."""
    running: int = 0
    """``vllm:num_requests_running``."""
    waiting: int = 0
    """``vllm:num_requests_waiting``."""
    kv_cache_usage: float = 0.0
    """``vllm:kv_cache_usage_perc``, 0 to 1."""
    process_start_time_s: float | None = None
    """``process_start_time_seconds`` where the engine exports it."""
    asleep: bool = False
    """``vllm:engine_sleep_state`` says so."""
    sampled_at_s: float | None = None
    consecutive_failures: int = 0
    retry_at_s: float = 0.0
    last_error: str | None = None

    @property
    def kv_capacity_tokens(self) -> int:
        """Of the HBM of a rank; 0 where it is not known."""
        return (self.hbm_blocks or 0) * (self.block_size_tokens or 0)
