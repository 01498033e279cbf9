# SPDX-License-Identifier: Apache-2.0
"""Lets several vLLM processes share two cores: replaces three busy waits by short sleeps, nothing else.

Put this directory on PYTHONPATH of the engine's processes. The waits are

1. NIXL starts its progress thread with a delay of zero, which spins one core per agent;
2. vLLM's shared-memory broadcast yields in a loop for a second after every message;
3. with a connector that always reports pending work (the P2P tier) the engine core steps without pause.

On a machine with a core for each of them they are harmless. On two cores they starve one another, and
peer-to-peer tests stall for seconds at random.
"""

import importlib.abc
import importlib.machinery
import sys
import time

NIXL_POLL_US = 1000
BROADCAST_SLEEP_S = 20e-6
EMPTY_STEP_SLEEP_S = 1e-3


def _slow_nixl_progress(module):
    bindings = module.nixlBind
    native_agent = bindings.nixlAgent

    class Agent(native_agent):
        def __init__(self, name, config):
            config.pthrDelay = NIXL_POLL_US
            super().__init__(name, config)

    class Bindings:
        nixlAgent = Agent  # noqa: N815 - the binding's own name

        def __getattr__(self, name):
            return getattr(bindings, name)

    module.nixlBind = Bindings()


def _sleep_in_broadcast(module):
    module.sched_yield = lambda: time.sleep(BROADCAST_SLEEP_S)


def _sleep_after_empty_step(module):
    core = module.EngineCoreProc
    step = core._process_engine_step

    def paced_step(self):
        executed = step(self)
        if not executed:
            time.sleep(EMPTY_STEP_SLEEP_S)
        return executed

    core._process_engine_step = paced_step


PATCHES = {
    "nixl_cu12._api": _slow_nixl_progress,
    "nixl_cu13._api": _slow_nixl_progress,
    "vllm.distributed.device_communicators.shm_broadcast": _sleep_in_broadcast,
    "vllm.v1.engine.core": _sleep_after_empty_step,
}


class _PatchingFinder(importlib.abc.MetaPathFinder):
    """Applies a patch right after its module has been executed, in every process that imports it."""

    def find_spec(self, fullname, path, target=None):
        patch = PATCHES.get(fullname)
        if patch is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_and_patch(module):
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_and_patch
        return spec


sys.meta_path.insert(0, _PatchingFinder())
