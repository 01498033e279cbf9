# SPDX-License-Identifier: Apache-2.0
"""Block movement on the GPU. Empty in this version."""
