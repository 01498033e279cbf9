# SPDX-License-Identifier: Apache-2.0
"""Looks for faults in a recorded event stream."""
