# SPDX-License-Identifier: Apache-2.0
"""Block movement between host memory and the GPU. Importing it imports neither torch nor Triton.

Public: `mover` (PageMover, DescriptorCopy), `plan`, `moves`, `paged`, `layouts`, `runs`, `dispatch`, `driver`,
`reference`, `errors`. README.md is the architecture page.
"""
