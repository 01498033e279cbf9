# SPDX-License-Identifier: Apache-2.0
"""KV events to "who holds which block on which tier"."""

try:
    from indexer import _core as _core
except ImportError as error:
    # A checkout in the current directory hides the installed package, and has no compiled core.
    raise ImportError(
        f"the native core of {__name__!r} is not beside {__file__}; install the project (pip install .) and, "
        "where this file lies in a checkout, run the command `pointsman` or `python -P -m router`"
    ) from error
