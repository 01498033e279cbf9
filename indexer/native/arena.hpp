// SPDX-License-Identifier: Apache-2.0
// Pieces of one range of a region, in units of 64 bytes. What it knows is the writer's alone: readers get offsets.
//
// Best fit over free runs that grow together; large free runs give their pages back. O(log free runs).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "mapping.hpp"

namespace pointsman {

class Arena {
 public:
  using Unit = std::uint32_t;  // position in the region / kUnitBytes
  static constexpr std::size_t kUnitBytes = 64;

  // `offset` and `bytes` are whole pages.
  Arena(const Mapping& region, std::size_t offset, std::size_t bytes);

  // Throws std::bad_alloc when the range or the file system is full.
  Unit allocate(std::size_t units);
  void free(Unit at, std::size_t units);
  // Makes sure that the next `bytes` can be had without asking the system; throws as above.
  void prepare(std::size_t bytes);
  [[nodiscard]] std::size_t used_bytes() const { return used_ * kUnitBytes; }

 private:
  void insert(Unit start, Unit size);
  void erase(std::map<Unit, Unit>::iterator run);
  void commit(std::size_t end);

  const Mapping& region_;
  std::size_t begin_, limit_;  // units
  std::size_t end_;            // first unit never used
  std::size_t committed_;      // units
  std::size_t used_ = 0;
  std::map<Unit, Unit> runs_;               // start -> size
  std::set<std::pair<Unit, Unit>> by_size_;  // (size, start)
};

}  // namespace pointsman
