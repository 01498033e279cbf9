# SPDX-License-Identifier: Apache-2.0
"""What workers hold, kept over restarts and handed to other replicas: with the place in each event stream."""
