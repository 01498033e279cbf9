// SPDX-License-Identifier: Apache-2.0
// Questions to an index's region, from the process that writes it or from any other: no locks, see layout.hpp.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "layout.hpp"
#include "mapping.hpp"

namespace pointsman {

// Blocks [start, end) of a query, all held by `slot` on `tier`. Doubtful: RAM of a rank that cleared its cache.
// Demoting: gone from HBM, expected in RAM.
struct Run {
  SlotId slot;
  std::uint8_t tier;
  bool doubtful;
  bool demoting;
  std::uint32_t start;
  std::uint32_t end;
};

struct SlotCounts {
  std::array<std::uint64_t, kTiers> blocks{};  // identified, with references, per tier
  std::uint64_t doubtful_ram = 0;
  std::uint64_t unidentified = 0;
  std::uint64_t detached = 0;
  std::uint64_t remembered = 0;
  std::uint64_t demoting = 0;
  std::uint32_t block_size = 0;  // of the newest stored event; 0: none yet
};

struct SlotEntry {
  SlotId slot = kNoSlot;
  std::string name;
  bool suspect = false;
  SlotCounts counts;
};

inline Tick tick_of(double seconds) { return seconds <= 0 ? 0 : static_cast<Tick>(seconds * kTicksPerSecond); }

class OpenRuns;

class IndexView {
 public:
  // `nodes`: that part of the region where this process may write its marks; else null.
  IndexView(const std::byte* region, std::byte* nodes)
      : region_(region), header_(*reinterpret_cast<const Header*>(region)), nodes_(nodes) {}

  // Appends the runs of every slot alive, up to the first block that nobody holds; those of one slot and kind in
  // order. O(blocks + clusters and changed clusters where holders change from one block to the next).
  void match(std::span<const std::uint64_t> hashes, std::vector<Run>& runs, Tick now) const;

  [[nodiscard]] bool alive(SlotId slot) const;
  // Empty where the slot is retired.
  [[nodiscard]] std::optional<SlotEntry> slot(SlotId slot) const;
  [[nodiscard]] std::vector<SlotEntry> slots() const;
  [[nodiscard]] const Header& header() const { return header_; }

 private:
  friend class OpenRuns;

  template <typename T>
  [[nodiscard]] const T* at(std::uint64_t offset) const {
    return reinterpret_cast<const T*>(region_ + offset);
  }
  [[nodiscard]] std::uint32_t place_of(SlotId slot) const;
  [[nodiscard]] std::optional<SlotEntry> read_record(std::uint32_t place) const;
  // The set that a block names, 0 if nobody holds it; leaves `mark` there if it is not 0.
  [[nodiscard]] std::uint32_t find(std::uint64_t hash, std::uint32_t mark = 0) const;
  void prefetch(std::uint64_t hash) const;
  void touch(const Group& group, std::size_t place, std::uint32_t mark) const;
  // Reads what the set of a block has that is not in `open`. The set and its version; 0: nobody holds the block any more.
  std::pair<std::uint32_t, std::uint32_t> read_set(std::uint64_t hash, std::uint32_t set, OpenRuns& open) const;

  const std::byte* region_;
  const Header& header_;
  std::byte* nodes_;
};

// Request hashes as the table keeps them: 0 stands for an empty place there.
constexpr std::uint64_t node_key(std::uint64_t request_hash) {
  return request_hash == 0 ? 0x5bd1e9955bd1e995ULL : request_hash;
}

}  // namespace pointsman
