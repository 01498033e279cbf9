# SPDX-License-Identifier: Apache-2.0
"""Several processes that serve as one: ``pointsman serve --processes N`` and ``pointsman epp --processes N``."""
