# SPDX-License-Identifier: Apache-2.0
"""Recorded and generated traces, to be replayed in virtual time."""
