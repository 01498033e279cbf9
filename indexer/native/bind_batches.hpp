// SPDX-License-Identifier: Apache-2.0
// What bindings.cpp adds for streams of batches: a method of PrefixIndex, and functions of the module.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "index.hpp"

namespace pointsman {

// The sum of what the batches did, and how many were malformed as a whole. Releases the GIL.
std::pair<ApplyCounts, std::uint64_t> apply_payloads(PrefixIndex& index, const std::vector<SlotId>& ranks,
                                                     std::uint32_t default_rank, SlotId store,
                                                     const std::vector<nanobind::bytes>& payloads,
                                                     double now_s);

void bind_batches(nanobind::module_& m);

}  // namespace pointsman
