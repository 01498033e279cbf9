# SPDX-License-Identifier: Apache-2.0
"""Adapters that are replaced: the hashes of vLLM's requests, and what the manager stores of them.

Played by extension_scenarios.py in the engine's venv.
"""

from __future__ import annotations

import contextlib
import inspect
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from offloading import EXTRA, offloading_config
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_offload.base import ReqContext, make_offload_key

from engine_ext.vllm.adapters import hooks
from engine_ext.vllm.spec import PointsmanOffloadingSpec


class Requests:
    """Requests of one adapter, as vLLM hashes them, and their stores."""

    def __init__(self, manager: Any, folder: Path, lock: AbstractContextManager[Any]) -> None:
        self._manager = manager
        self._lock = lock
        self._adapter = LoRARequest("tuned", 1, str(folder))
        self._kept: list[Any] = []
        self._keys = 0

    def load(self, *, in_place: bool = False) -> None:
        """As the API server has it loaded; the workers are left out."""
        core = SimpleNamespace(model_executor=SimpleNamespace(add_lora=lambda _: True))
        adapter = LoRARequest("tuned", 1, self._adapter.lora_path, load_inplace=in_place)
        EngineCore.add_lora(core, adapter)

    def hashed(self, name: str) -> tuple[ReqContext, list[Any]]:
        request = SimpleNamespace(request_id=name, lora_request=self._adapter)
        self._kept.append(request)
        keys = kv_cache_utils._gen_lora_extra_hash_keys(request)
        assert keys == kv_cache_utils._gen_lora_extra_hash_keys(request)
        return self.begun(name), keys

    def begun(self, name: str) -> ReqContext:
        context = ReqContext(name)
        with self._lock:
            self._manager.on_new_request(context)
        return context

    def stored(self, context: ReqContext) -> int:
        """How many of two new chunks the manager takes."""
        keys = [make_offload_key(bytes([self._keys + i]) * 32, 0) for i in range(2)]
        self._keys += 2
        with self._lock:
            output = self._manager.prepare_store(keys, context)
            self._manager.complete_store(output.keys_to_store, context) if output.keys_to_store else None
        return len(output.keys_to_store)

    def given_up(self) -> int:
        """How many keys the events since the last call say were removed."""
        with self._lock:
            return sum(len(event.keys) for event in self._manager.take_events() if event.removed)


def adapters() -> dict[str, Any]:
    """A request before a reload, one between the write and the reload, one after it, and one without an adapter."""
    annotation = _adapter_type()
    spec = PointsmanOffloadingSpec(offloading_config(EXTRA | {"cpu_bytes_to_use": 64 * 4096}))
    one = spec.get_manager()
    hook = kv_cache_utils._gen_lora_extra_hash_keys
    lock = one.lock if spec.traits.manager_has_lock else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as root:
        weights = Path(root, "adapter_model.safetensors")
        weights.write_bytes(b"old")
        requests = Requests(one, Path(root), lock)
        requests.load()
        early, early_keys = requests.hashed("early")
        stored = [requests.stored(early)]
        weights.write_bytes(b"newer")
        between, between_keys = requests.hashed("between")
        stored += [requests.stored(early), requests.stored(between)]
        before = requests.given_up()
        requests.load(in_place=True)
        given_up = [before, requests.given_up()]
        late, late_keys = requests.hashed("late")
        stored += [requests.stored(early), requests.stored(between), requests.stored(late)]
        stored.append(requests.stored(requests.begun("plain")))
        requests.load(in_place=True)
        given_up.append(requests.given_up())
    one.shutdown()
    return {
        "stored": stored,
        "given_up": given_up,
        "words": len({keys[0][3] for keys in (early_keys, between_keys, late_keys)}),
        "stock": early_keys[0][:2],
        "told": kv_cache_utils.to_event_extra_keys([tuple(early_keys)]),
        "plain": hook(SimpleNamespace(lora_request=None)),
        "once": hooks.watch_adapters() is hook.revisions,
        "decoded": _adapter_type() is annotation is LoRARequest,
        "refused": _refused(hook),
    }


def cached() -> dict[str, Any]:
    """What a block pool says while an adapter is replaced under its name: blocks of the old weights, of the new ones, of
    a request of the old weights that runs on, and of the base model.
    """
    PointsmanOffloadingSpec(
        offloading_config(EXTRA | {"cpu_bytes_to_use": 64 * 4096})
    ).get_manager().shutdown()
    pool = BlockPool(9, enable_caching=True, hash_block_size=4, enable_kv_cache_events=True)
    core = SimpleNamespace(
        model_executor=SimpleNamespace(add_lora=lambda _: True),
        scheduler=SimpleNamespace(kv_cache_manager=SimpleNamespace(block_pool=pool)),
    )
    told: list[list[str]] = []

    def store(name: str, adapter: LoRARequest | None, start: int = 0) -> None:
        blocks = pool.get_new_blocks(2)
        request = running.setdefault(
            name,
            SimpleNamespace(
                request_id=name,
                lora_request=adapter,
                block_hashes=[f"{name} {i}".encode().ljust(32) for i in range(4)],
                all_token_ids=list(range(16)),
                mm_features=[],
                cache_salt=None,
                prompt_embeds=None,
                session_id=None,
            ),
        )
        kv_cache_utils._gen_lora_extra_hash_keys(request)  # as its hashes are computed
        pool.cache_full_blocks(request, [*[pool.null_block] * start, *blocks], start, start + 2, 4, 0)

    def load(*, in_place: bool) -> None:
        EngineCore.add_lora(core, LoRARequest("cached", 2, root, load_inplace=in_place))

    def tell() -> None:
        told.append([f"{type(one).__name__} {len(one.block_hashes)}" for one in pool.take_events()])

    running: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        weights = Path(root, "adapter_model.safetensors")
        weights.write_bytes(b"old")
        load(in_place=False)
        store("early", LoRARequest("cached", 2, root))
        store("base", None)
        tell()
        weights.write_bytes(b"newer")
        load(in_place=True)
        tell()
        store("early", LoRARequest("cached", 2, root), start=2)
        tell()
        store("late", LoRARequest("cached", 2, root))
        load(in_place=False)
        load(in_place=True)
        tell()
    return {"told": told, "cached": len(pool.cached_block_hash_to_block)}


def _adapter_type() -> Any:
    """By which vLLM decodes what the API server sends."""
    return inspect.signature(EngineCore.add_lora).parameters["lora_request"].annotation


def _refused(hook: Any) -> list[str]:
    """What a start says where vLLM hashes adapters in another way."""
    said = []
    for other in (None, lambda request: [("lora", "name")], list):
        kv_cache_utils._gen_lora_extra_hash_keys = other
        try:
            hooks.watch_adapters()
        except hooks.AdapterHookMissing:
            said.append("refused")
    kv_cache_utils._gen_lora_extra_hash_keys = hook
    return said
