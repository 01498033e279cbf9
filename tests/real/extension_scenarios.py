# SPDX-License-Identifier: Apache-2.0
"""Runs in the engine's venv: spec, manager and worker of the extension without an engine.

python extension_scenarios.py ROOT NAME ...     one JSON line: {name: what came out}; all of them without a name

Nothing is written below ROOT.
"""

from __future__ import annotations

import json
import sys

import extension_adapters as of_adapters
import extension_manager as of_manager
import extension_worker as of_worker

SCENARIOS = {
    "direct": of_worker.direct,
    "canonical": of_worker.canonical,
    "streams": of_worker.streams,
    "pinning": of_worker.pinning,
    "manager": of_manager.manager,
    "reporting": of_manager.reporting,
    "adapters": of_adapters.adapters,
    "cached": of_adapters.cached,
    "broken": of_manager.broken,
    "refusals": of_manager.refusals,
    "unknown": of_manager.unknown,
    "hints": of_manager.hints,  # imports the policy, which `unknown` looks for
}

if __name__ == "__main__":
    print(json.dumps({name: SCENARIOS[name]() for name in sys.argv[2:] or SCENARIOS}))
