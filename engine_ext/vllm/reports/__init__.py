# SPDX-License-Identifier: Apache-2.0
"""What became of each plan, told to the router: a sink for the tiers, one report per request, a sender in threads."""
