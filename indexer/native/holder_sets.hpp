// SPDX-License-Identifier: Apache-2.0
// Who holds a block, as one of few shared values.
//
// Neighbouring blocks of a prompt are mostly held by the same slots on the same tiers, so each distinct set of
// holdings is kept once, counted, and a block only names it (4 bytes). A set never changes: a block whose holders
// change is given another one, found through a memo of recent changes (O(1) where blocks of one event follow each
// other) or by its content (O(holders)). Equal names mean equal sets, which is what makes a match fast.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "events.hpp"

namespace pointsman {

using SlotId = std::uint32_t;
inline constexpr SlotId kNoSlot = 0xffffffff;

constexpr std::size_t index_of(Tier tier) { return static_cast<std::size_t>(tier); }

// What a match tells apart: the tiers, and doubtful RAM beside them.
inline constexpr std::size_t kKinds = kTiers + 1;
inline constexpr std::size_t kDoubtfulRam = kTiers;

struct Holding {
  SlotId slot = kNoSlot;
  // Identified blocks with references, per tier: two groups of one block do not hide each other. The last count is of
  // those in RAM that are in doubt.
  std::array<std::uint16_t, kKinds> counts{};

  [[nodiscard]] bool empty() const { return (counts[0] | counts[1] | counts[2]) == 0; }
  // Bit per kind. RAM is doubtful when all of it is.
  [[nodiscard]] std::uint8_t kinds() const {
    const bool ram = counts[index_of(Tier::ram)] != 0;
    const bool doubtful = ram && counts[kDoubtfulRam] >= counts[index_of(Tier::ram)];
    return static_cast<std::uint8_t>((counts[0] != 0 ? 1U : 0U) | (ram && !doubtful ? 2U : 0U) |
                                     (counts[2] != 0 ? 4U : 0U) | (doubtful ? 8U : 0U));
  }
  friend bool operator==(const Holding&, const Holding&) = default;
};

class HolderSets {
 public:
  using Id = std::uint32_t;
  static constexpr Id kNobody = 0;

  HolderSets();

  // In the order of the slots.
  [[nodiscard]] std::span<const Holding> holdings(Id id) const {
    const Set& set = sets_[id];
    return {set.holdings.get(), set.size};
  }
  // The set that `from` becomes when one count of `slot` moves by `step` (+1 or -1), for the block that named
  // `from`: its reference moves along.
  Id move(Id from, SlotId slot, std::size_t kind, int step);
  [[nodiscard]] std::size_t size() const { return sets_.size() - free_.size() - 1; }
  [[nodiscard]] std::size_t memory_bytes() const;
  // Whether `references[id]` blocks name each set, and each is kept once. O(sets).
  [[nodiscard]] bool consistent(std::span<const std::uint32_t> references) const;
  [[nodiscard]] std::size_t ids() const { return sets_.size(); }

 private:
  struct Set {
    std::unique_ptr<Holding[]> holdings;
    std::uint32_t size = 0;
    std::uint32_t blocks = 0;      // that name it; 0: free
    std::uint32_t generation = 0;  // of the id, so that the memo notices when it is given out again
    std::uint64_t signature = 0;
  };
  struct Memo {
    Id from = 0, to = 0;
    std::uint32_t from_generation = 0, to_generation = 0;
    SlotId slot = kNoSlot;
    std::uint32_t change = 0;
  };
  static constexpr std::size_t kMemos = 2048;

  Id find_or_add(std::vector<Holding>& content);
  void release(Id id);
  [[nodiscard]] bool known(Id id, std::uint32_t generation) const {
    return id == kNobody || (sets_[id].generation == generation && sets_[id].blocks != 0);
  }

  std::vector<Set> sets_;
  std::vector<Id> free_;
  std::unordered_multimap<std::uint64_t, Id> by_signature_;
  std::vector<Memo> memos_;
  std::vector<Holding> scratch_;
  std::size_t holding_bytes_ = 0;
};

}  // namespace pointsman
