// SPDX-License-Identifier: Apache-2.0
// Pages before they are written to: one call for many instead of a fault for each.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace pointsman {

// The whole pages that [from, from + bytes) touches. Where the system cannot (before Linux 5.14), or has no memory left,
// the first write of each page asks again.
inline void populate(void* from, std::size_t bytes) {
#ifdef MADV_POPULATE_WRITE
  constexpr std::uintptr_t kPage = 4096;
  const auto start = reinterpret_cast<std::uintptr_t>(from) & ~(kPage - 1);
  const auto end = (reinterpret_cast<std::uintptr_t>(from) + bytes + kPage - 1) & ~(kPage - 1);
  ::madvise(reinterpret_cast<void*>(start), end - start, MADV_POPULATE_WRITE);
#else
  static_cast<void>(from), static_cast<void>(bytes);
#endif
}

}  // namespace pointsman
