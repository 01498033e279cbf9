// SPDX-License-Identifier: Apache-2.0
// Questions to the index, and its own check. Many may run at once.
#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <mutex>
#include <type_traits>

#include "index.hpp"

namespace pointsman {

namespace {

constexpr std::size_t kPrefetched = 8;  // look-ups on their way from memory at a time

// Runs that are open while a prompt is walked, by small number of the slot and kind.
class OpenRuns {
 public:
  OpenRuns(const std::vector<std::int32_t>& dense, std::int32_t count, std::vector<Run>& runs)
      : dense_(dense), starts_(std::make_unique_for_overwrite<std::uint32_t[]>(static_cast<std::size_t>(count) * kKinds)),
        runs_(runs) {}

  // From block `at` on, `slot` holds it as `now` says instead of as `before`.
  void change(SlotId slot, unsigned before, unsigned now, std::uint32_t at) {
    const std::int32_t dense = dense_[slot];
    if (dense < 0) return;
    std::uint32_t* starts = &starts_[static_cast<std::size_t>(dense) * kKinds];
    for (unsigned moved = before ^ now; moved != 0; moved &= moved - 1) {
      const auto kind = static_cast<unsigned>(std::countr_zero(moved));
      if ((now >> kind & 1) != 0) {
        starts[kind] = at;
        continue;
      }
      const bool doubtful = kind == kDoubtfulRam;
      const auto tier = static_cast<std::uint8_t>(doubtful ? index_of(Tier::ram) : kind);
      runs_.push_back({slot, tier, doubtful, starts[kind], at});
    }
  }

  // The same for all slots of two sets. O(both).
  void change(std::span<const Holding> before, std::span<const Holding> now, std::uint32_t at) {
    auto old = before.begin();
    auto fresh = now.begin();
    while (old != before.end() && fresh != now.end()) {
      if (*old == *fresh) {
        // Mostly long stretches are equal.
        const auto left = std::min(before.end() - old, now.end() - fresh);
        const std::ptrdiff_t equal = left < kStretch || !same(&*old, &*fresh) ? 1 : kStretch;
        old += equal, fresh += equal;
      } else if (old->slot == fresh->slot) {
        change(old->slot, old->kinds(), fresh->kinds(), at);
        ++old, ++fresh;
      } else if (old->slot < fresh->slot) {
        change(old->slot, old->kinds(), 0, at);
        ++old;
      } else {
        change(fresh->slot, 0, fresh->kinds(), at);
        ++fresh;
      }
    }
    for (; old != before.end(); ++old) change(old->slot, old->kinds(), 0, at);
    for (; fresh != now.end(); ++fresh) change(fresh->slot, 0, fresh->kinds(), at);
  }

 private:
  static constexpr std::ptrdiff_t kStretch = 16;
  static bool same(const Holding* a, const Holding* b) {
    static_assert(std::has_unique_object_representations_v<Holding>);
    return std::memcmp(a, b, kStretch * sizeof(Holding)) == 0;
  }

  const std::vector<std::int32_t>& dense_;
  std::unique_ptr<std::uint32_t[]> starts_;
  std::vector<Run>& runs_;
};

}  // namespace

void PrefixIndex::match(std::span<const std::uint64_t> hashes, std::vector<Run>& runs) const {
  const std::shared_lock lock(mutex_);
  OpenRuns open(dense_, dense_count_, runs);
  HolderSets::Id last = HolderSets::kNobody;
  for (std::size_t i = 0; i < std::min(kPrefetched, hashes.size()); ++i) holders_.prefetch(hashes[i]);
  std::uint32_t block = 0;
  for (; block < hashes.size(); ++block) {
    if (block + kPrefetched < hashes.size()) holders_.prefetch(hashes[block + kPrefetched]);
    const HolderSets::Id* set = holders_.find(hashes[block]);
    if (set == nullptr) break;
    if (*set == last) continue;
    open.change(sets_.holdings(last), sets_.holdings(*set), block);
    last = *set;
  }
  open.change(sets_.holdings(last), {}, block);
}

SlotCounts PrefixIndex::counts(SlotId id) const {
  const std::shared_lock lock(mutex_);
  SlotCounts result;
  const Slot* slot = find_slot(id);
  if (slot == nullptr || !slot->alive) return result;
  slot->blocks.for_each([&](const EngineKey&, const Block& block) {
    if (!block.identified) {
      ++result.unidentified;
      return;
    }
    for (std::size_t tier = 0; tier < kTiers; ++tier) result.blocks[tier] += block.references[tier] != 0;
    result.doubtful_ram += block.doubtful_ram;
    result.remembered += !block.held();
  });
  result.detached = slot->detached_blocks;
  result.block_size = slot->block_size;
  return result;
}

std::vector<std::pair<std::uint64_t, std::uint8_t>> PrefixIndex::blocks(SlotId id) const {
  const std::shared_lock lock(mutex_);
  std::vector<std::pair<std::uint64_t, std::uint8_t>> result;
  const Slot* slot = find_slot(id);
  if (slot == nullptr || !slot->alive) return result;
  slot->blocks.for_each([&](const EngineKey&, const Block& block) {
    if (!block.identified || !block.held()) return;
    std::uint8_t tiers = block.doubtful_ram ? 8 : 0;
    for (std::size_t tier = 0; tier < kTiers; ++tier) {
      if (block.references[tier] != 0) tiers = static_cast<std::uint8_t>(tiers | 1U << tier);
    }
    result.emplace_back(block.request_hash, tiers);
  });
  return result;
}

std::uint64_t PrefixIndex::version() const {
  const std::shared_lock lock(mutex_);
  return version_;
}

std::size_t PrefixIndex::distinct_blocks() const {
  const std::shared_lock lock(mutex_);
  return holders_.size();
}

std::size_t PrefixIndex::memory_bytes() const {
  const std::shared_lock lock(mutex_);
  std::size_t total = holders_.memory_bytes() + sets_.memory_bytes();
  for (const auto& slot : slots_) {
    if (slot) total += slot->blocks.memory_bytes() + sizeof(Slot);
  }
  return total;
}

std::string PrefixIndex::check() const {
  const std::shared_lock lock(mutex_);
  std::string problem;
  std::size_t expected = 0, found = 0;
  for (SlotId id = 0; id < slots_.size(); ++id) {
    const Slot* slot = find_slot(id);
    if (slot == nullptr || !slot->alive) continue;
    std::size_t waiting = 0;
    for (const Detached& event : slot->detached) waiting += event.hashes.size();
    if (waiting != slot->detached_blocks || slot->waiting.size() != slot->detached.size()) {
      problem = "detached events of slot " + std::to_string(id) + " are miscounted";
    }
    slot->blocks.for_each([&](const EngineKey&, const Block& block) {
      if (!block.identified && !block.held()) problem = "a block without identity and references is kept";
      if (block.doubtful_ram && block.references[index_of(Tier::ram)] == 0) problem = "doubt about RAM that is not held";
      if (!block.identified) return;
      for (std::size_t tier = 0; tier < kTiers; ++tier) {
        if (block.references[tier] == 0) continue;
        ++expected;
        const HolderSets::Id* set = holders_.find(block.request_hash);
        const bool listed = set != nullptr && std::ranges::any_of(sets_.holdings(*set), [&](const Holding& holding) {
                              return holding.slot == id && holding.counts[tier] != 0;
                            });
        if (!listed) problem = "a held block of slot " + std::to_string(id) + " is not listed";
      }
    });
  }
  std::vector<std::uint32_t> named(sets_.ids());
  holders_.for_each([&](std::uint64_t, HolderSets::Id set) {
    ++named[set];
    for (const Holding& holding : sets_.holdings(set)) {
      if (holding.empty()) problem = "an empty holding is kept";
      if (dense_[holding.slot] < 0) continue;
      for (std::size_t tier = 0; tier < kTiers; ++tier) found += holding.counts[tier];
    }
  });
  if (named[HolderSets::kNobody] != 0) problem = "a block without holders is kept";
  if (!sets_.consistent(named)) problem = "a set of holders is miscounted, unsorted or kept twice";
  if (problem.empty() && found != expected) {
    problem = "holders list " + std::to_string(found) + " blocks where the slots hold " + std::to_string(expected);
  }
  return problem;
}

}  // namespace pointsman
