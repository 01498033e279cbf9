// SPDX-License-Identifier: Apache-2.0
// Memory that will be needed, asked for all at once by plain loads that do not depend on each other, so that their
// misses overlap. A prefetch instruction would be the usual way, but is dropped where the page has no entry in the TLB,
// which is the rule for tables of many megabytes in a virtual machine.
#pragma once

#include <cstdint>

namespace pointsman {

// Uses a sum of loaded values, so that the loads are not left out.
inline void keep_loads(std::uint64_t sum) { asm volatile("" : : "r"(sum)); }

}  // namespace pointsman
