// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace pointsman {

// Finalizer of MurmurHash3: bits are mixed before some of them are taken.
inline std::uint64_t mix64(std::uint64_t x) noexcept {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  return x ^ (x >> 33);
}

}  // namespace pointsman
