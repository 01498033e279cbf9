# SPDX-License-Identifier: Apache-2.0
"""``pointsman what-if``: a decision log decided again under other constants, settings or policies."""
