# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: Hypothesis measures no time here, since a loaded machine is not a failure."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
