# SPDX-License-Identifier: Apache-2.0
"""A request as the engine takes it, its ``kv_transfer_params`` as vLLM reads them, and its life in the engine."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine_ext.sim.agenda import Plan
from engine_ext.sim.hashing import ExtraKeys, extend_chain, extra_keys, token_array
from engine_ext.sim.text import OutputText

PLAN_KEY = "pointsman"
"""Of ``kv_transfer_params``, read where our extension runs (``engine_ext.vllm.plan``)."""


class Tier(enum.StrEnum):
    """Where cached tokens came from."""

    HBM = "hbm"
    RAM = "ram"
    PEER = "peer"
    STORAGE = "storage"


@dataclass(slots=True)
class Moved:
    """What one request moved and waited for; the engine adds to it, also after the request has ended."""

    ram_load_bytes: int = 0
    ram_store_bytes: int = 0
    peer_bytes: int = 0
    storage_read_bytes: int = 0
    storage_write_bytes: int = 0
    lookups: int = 0
    """Questions to a peer that were answered or given up."""
    lookup_s: float = 0.0
    """From the questions to their last answers."""
    promotions: int = 0
    promotion_s: float = 0.0
    """From the start of its loads from RAM to their ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest:
    """One sequence to run."""

    request_id: str
    token_ids: Sequence[int]
    max_tokens: int
    stop_after_tokens: int | None = None
    """The model stops by itself here, if that comes before ``max_tokens``."""
    extra_keys: tuple[str, ...] = ()
    """Keys of block 0 beside the adapter: the cache salt."""
    lora_name: str | None = None
    lora_id: int | None = None
    kv_transfer_params: Mapping[str, object] | None = None
    session_id: str | None = None
    block_hashes: Sequence[bytes] | None = None
    """``hashing.chain_hashes`` of the prompt, where the caller has it already."""
    moved: Moved | None = None
    """Added to by the engine, for a caller that wants to know."""


@dataclass(frozen=True, slots=True)
class PeerSource:
    """A peer a request may pull from."""

    kv_request_id: str
    host: str
    port: int
    start_token: int = 0
    end_token: int | None = None
    """Only blocks within ``[start, end)`` of the prompt; None: to its end."""
    deadline_s: float | None = None
    """After the request has come nothing is waited for any longer; None leaves it to the engine's own time-outs."""

    def has(self, start_token: int, end_token: int) -> bool:
        """Whether a block of those tokens is to come from there."""
        return self.start_token <= start_token and (self.end_token is None or end_token <= self.end_token)


@dataclass(frozen=True, slots=True)
class TransferParams:
    """What vLLM 0.32 makes of ``kv_transfer_params``: unknown keys and malformed values are ignored.

    Sources: ``tiering/p2p/manager.py`` (roles), ``offloading/scheduler.py`` (caps and tier filter).
    """

    source: PeerSource | None = None
    pulls: tuple[PeerSource, ...] = ()
    """Ranges that do not overlap, of our extension; instead of ``source``."""
    waits_for_prefill: bool = False
    """``remote_prefiller``: the source computes the blocks now, and is not asked which it has."""
    decoder_id: str | None = None
    """``remote_decoder``: the id under which a decoder will come for the blocks."""
    keeps_all_blocks: bool = False
    """``remote_decoder``: blocks already offloaded by others are offered to the store again."""
    kv_request_id: str | None = None
    max_load_tokens: int | None = None
    max_offload_tokens: int | None = None
    peer_allowed: bool = True
    storage_allowed: bool = True

    @property
    def sources(self) -> tuple[PeerSource, ...]:
        """By number."""
        return self.pulls if self.source is None else (self.source,)


def parse_transfer_params(params: Mapping[str, object] | None, *, extension: bool = False) -> TransferParams:
    """Read the keys the offloading connector and its P2P tier know, and, with ``extension``, those of ours."""
    if not params:
        return TransferParams()
    waits = params.get("remote_prefiller") is not None
    source = _source(params.get("remote_prefiller" if waits else "remote_kv_source"))
    decoder = params.get("remote_decoder")
    decoder_id = _text(decoder.get("kv_request_id")) if isinstance(decoder, Mapping) else None
    peer_allowed, storage_allowed = _allowed_tiers(params.get("kv_load_tiers"))
    return TransferParams(
        source=source,
        pulls=_pulls(params.get(PLAN_KEY)) if extension and source is None else (),
        waits_for_prefill=waits,
        decoder_id=decoder_id,
        keeps_all_blocks=isinstance(decoder, Mapping),
        kv_request_id=source.kv_request_id if source else decoder_id,
        max_load_tokens=_cap(params.get("max_load_tokens")),
        max_offload_tokens=_cap(params.get("max_offload_tokens")),
        peer_allowed=peer_allowed,
        storage_allowed=storage_allowed,
    )


def _pulls(plan: object) -> tuple[PeerSource, ...]:
    """The ranges of a plan; what is malformed is ignored, as an engine takes it for a miss."""
    pulls = plan.get("pulls") if isinstance(plan, Mapping) else None
    found = []
    for number, pull in enumerate(pulls if isinstance(pulls, list | tuple) else ()):
        if not isinstance(pull, Mapping):
            continue
        host, _, port = str(pull.get("source")).rpartition(":")
        start, end, deadline_ms = (pull.get(key) for key in ("start_token", "end_token", "deadline_ms"))
        if host and port.isdigit() and isinstance(start, int) and isinstance(end, int) and start < end:
            deadline_s = deadline_ms / 1000 if isinstance(deadline_ms, int) else None
            name = f"pull-{number}"
            found.append(PeerSource(name, host.strip("[]"), int(port), start, end, deadline_s))
    return tuple(found)


def _source(role: object) -> PeerSource | None:
    if not isinstance(role, Mapping):
        return None
    name, host, port = (role.get(key) for key in ("kv_request_id", "remote_host", "remote_port"))
    if not (_text(name) and _text(host)):
        return None
    try:
        return PeerSource(str(name), str(host), int(str(port)))
    except ValueError:
        return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _cap(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _allowed_tiers(raw: object) -> tuple[bool, bool]:
    """(peer, storage). The P2P tier has no medium, so only an empty list keeps it out."""
    if not isinstance(raw, list):
        return True, True
    if not raw:
        return False, False
    media = [medium for entry in raw if (medium := _matcher_medium(entry)) is not None]
    if not media:
        return True, True
    return True, any(medium in ("", "STORAGE") for medium in media)


def _matcher_medium(entry: object) -> str | None:
    """Upper-case medium of one matcher, "" for any, None for an entry vLLM skips."""
    if not isinstance(entry, Mapping):
        return None
    medium, locality = entry.get("medium"), entry.get("locality")
    if locality is not None and str(locality).upper() not in ("LOCAL", "REMOTE"):
        return None
    if medium is None:
        return ""
    name = str(medium).upper()
    return name if name in ("CPU", "STORAGE") else None


class Status(enum.Enum):
    """Where a request is in the engine."""

    WAITING = "waiting"
    LOADING = "loading"  # blocks allocated, RAM to HBM under way
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Question:
    """What a source has yet to say something about."""

    keys: list[bytes]
    at_s: float
    timeout: Plan


@dataclass(slots=True, eq=False)
class Live:
    """A request inside the engine; every field belongs to the engine's core."""

    request: SimRequest
    params: TransferParams
    tokens: array[int]
    prompt_tokens: int
    hashes: list[bytes]
    root: bytes
    block_size_tokens: int
    text: OutputText
    moved: Moved
    status: Status = Status.WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose KV is computed; of a member of the decode set, at ``settled_step``."""
    cached_blocks: int = 0
    next_offload: int = 0
    preemptions: int = 0
    aborted: bool = False
    deferred: bool = False
    """Its lookup waits for a peer's answer, a write or a load; something else will wake it."""
    counted: bool = False
    """Its cached tokens have been reported."""
    cached_by_tier: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    came_from: dict[bytes, Tier] = field(default_factory=dict)
    """Tier outside RAM from which this request brought a block in."""
    answers: dict[bytes, bool] = field(default_factory=dict)
    questions: dict[int, Question] = field(default_factory=dict)
    """Open ones, by the number of the source."""
    pull_from_s: dict[int, float] = field(default_factory=dict)
    """Until when a source's link is busy with others."""
    submitted_s: float = 0.0
    held: list[bytes] = field(default_factory=list)
    """Blocks brought into RAM for it, kept there until it loads them."""
    order: int = 0
    """Place among the running requests: the oldest is scheduled first, the youngest preempted first."""
    decoding: bool = False
    """A member of the decode set, to which the next two belong."""
    settled_step: int = 0
    due_step: int = 0

    def __post_init__(self) -> None:
        self.grow_hashes()

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.tokens)

    @property
    def output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that needed no computation, as usage reports them."""
        return sum(self.cached_by_tier.values())

    def computed_blocks(self) -> list[bytes]:
        """The full blocks of its prompt that were not cached."""
        start, end = (n // self.block_size_tokens for n in (self.cached_tokens, self.prompt_tokens))
        return self.hashes[start:end]

    def keys_of(self, block_index: int) -> ExtraKeys | None:
        """Extra keys of one of its blocks."""
        return extra_keys(block_index, self.request.lora_name, self.request.extra_keys)

    def keys_between(self, start: int, end: int) -> tuple[ExtraKeys | None, ...]:
        """Extra keys of blocks ``start`` to ``end``, of which there is at least one."""
        return (self.keys_of(start), *[self.keys_of(start + 1)] * (end - start - 1))

    def block_tokens(self, start: int, end: int) -> array[int]:
        """Token ids of blocks ``start`` to ``end``."""
        return self.tokens[start * self.block_size_tokens : end * self.block_size_tokens]

    def source_of(self, block_index: int) -> int | None:
        """The number of the source that a block may come from."""
        if not self.params.pulls:
            return None if self.params.source is None else 0
        start = block_index * self.block_size_tokens
        for number, source in enumerate(self.params.pulls):
            if source.has(start, start + self.block_size_tokens):
                return number
        return None

    def grow_hashes(self) -> None:
        """Hash the blocks that became full since the last call."""
        if len(self.hashes) < len(self.tokens) // self.block_size_tokens:
            lora, salt = self.request.lora_name, self.request.extra_keys
            extend_chain(self.hashes, self.tokens, self.block_size_tokens, self.root, lora, salt)


def make_live(
    request: SimRequest,
    block_size_tokens: int,
    root: bytes,
    vocabulary: Sequence[int],
    *,
    extension: bool = False,
    now_s: float = 0.0,
) -> Live:
    """A request's state on arrival."""
    tokens = token_array(request.token_ids)[:]
    return Live(
        request=request,
        params=parse_transfer_params(request.kv_transfer_params, extension=extension),
        tokens=tokens,
        prompt_tokens=len(tokens),
        hashes=list(request.block_hashes or ()),
        root=root,
        block_size_tokens=block_size_tokens,
        text=OutputText(tokens, vocabulary),
        moved=Moved() if request.moved is None else request.moved,
        submitted_s=now_s,
    )
