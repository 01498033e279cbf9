# SPDX-License-Identifier: Apache-2.0
"""The peer tier: a plan's pulls carried out, and blocks of ours served. Pure, but for host, intree, stats and tier."""
