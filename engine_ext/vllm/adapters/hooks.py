# SPDX-License-Identifier: Apache-2.0
"""Puts the revision of a request's adapter into vLLM's block hashes, in the scheduler's process.

vLLM has no hook for that. Three of its names are replaced while the process runs, and nothing of it on disk:

* `vllm.v1.core.kv_cache_utils._gen_lora_extra_hash_keys(request)` gives `[("lora", name, path)]`, which goes into every
  block's hash; ours adds the word of `revisions.py`. Events show the second field alone, so they stay as they are.
* `vllm.v1.engine.core.EngineCore.add_lora(lora_request)` loads an adapter; ours says so to `AdapterRevisions`, and
  takes the blocks of the former weights out of the prefix cache (`hbm.py`, which wraps one name more).

All were read in 0.32 and 0.33, and are tried before they are replaced.
"""

from __future__ import annotations

import functools
import time
import uuid
from types import SimpleNamespace
from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine.core import EngineCore

from .files import FolderFiles
from .hbm import forget_former, note_cached_blocks
from .revisions import Adapter, AdapterRevisions

_ATTRIBUTE = "_pointsman_adapter"


class AdapterHookMissing(RuntimeError):
    """Adapters are hashed or loaded in another way by this vLLM."""


class RevisedKeys:
    """Stands for `_gen_lora_extra_hash_keys`. One stamp per request, taken when its first block is hashed."""

    def __init__(self, stock: Any, revisions: AdapterRevisions) -> None:
        self.stock = stock
        self.revisions = revisions

    def __call__(self, request: Any) -> list[tuple[str, ...]]:
        keys: list[tuple[str, ...]] = self.stock(request)
        if not keys:
            return keys
        stamp = getattr(request, _ATTRIBUTE, None)
        if stamp is None:
            stamp = self.revisions.stamp(request.request_id, _adapter(request.lora_request))
            setattr(request, _ATTRIBUTE, stamp)
        return [(*key, stamp.word) for key in keys]


def watch_adapters() -> AdapterRevisions:
    """The revisions of this process; the names are replaced at the first call.

    Raises:
        AdapterHookMissing: one of them is not there, or not what it was in the versions that are supported.
    """
    stock = getattr(kv_cache_utils, "_gen_lora_extra_hash_keys", None)
    if isinstance(stock, RevisedKeys):
        return stock.revisions
    _try_out(stock)
    revisions = AdapterRevisions(FolderFiles(), lambda: uuid.uuid4().hex, time.monotonic)
    add_lora = EngineCore.add_lora

    @functools.wraps(add_lora)  # vLLM decodes the arguments by the annotations
    def add_and_tell(self: EngineCore, lora_request: Any) -> Any:
        adapter, in_place = _adapter(lora_request), bool(lora_request.load_inplace)
        before = revisions.before_load(adapter.path)
        result = add_lora(self, lora_request)
        now = revisions.loaded(adapter, before, in_place=in_place)
        # Only an engine's own scheduler has blocks.
        if (manager := getattr(getattr(self, "scheduler", None), "kv_cache_manager", None)) is not None:
            forget_former(manager.block_pool, now)
        return result

    note_cached_blocks(lambda request: getattr(request, _ATTRIBUTE, None))
    EngineCore.add_lora = add_and_tell
    kv_cache_utils._gen_lora_extra_hash_keys = RevisedKeys(stock, revisions)  # noqa: SLF001 - see above
    return revisions


def _adapter(lora_request: Any) -> Adapter:
    return Adapter(lora_request.lora_int_id, lora_request.lora_name, lora_request.lora_path)


def _try_out(stock: Any) -> None:
    adapter = SimpleNamespace(lora_name="name", lora_int_id=1, lora_path="path")
    try:
        says = [stock(SimpleNamespace(lora_request=one)) for one in (adapter, None)]
    except Exception as error:
        raise AdapterHookMissing(f"vLLM's hash keys of an adapter cannot be asked for: {error!r}") from error
    if says != [[("lora", "name", "path")], []]:
        raise AdapterHookMissing(f"vLLM's hash keys of an adapter are {says}")
    for owner, name in (
        (EngineCore, "add_lora"),
        (BlockPool, "cache_full_blocks"),
        (BlockPool, "evict_blocks"),
    ):
        if not callable(getattr(owner, name, None)):
            raise AdapterHookMissing(f"{owner.__name__}.{name} is not there")
