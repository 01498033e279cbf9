# SPDX-License-Identifier: Apache-2.0
"""A NIXL pull engine: one-sided reads of block lists from a peer's host memory. See README.md beside this file."""
