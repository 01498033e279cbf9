# SPDX-License-Identifier: Apache-2.0
"""Adapters that are reloaded under the same name."""
