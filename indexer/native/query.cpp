// SPDX-License-Identifier: Apache-2.0
// Questions to the index, and its own check. Many may run at once.
#include <algorithm>
#include <mutex>
#include <tuple>

#include "index.hpp"

namespace pointsman {

std::vector<Run> PrefixIndex::match(std::span<const std::uint64_t> hashes) const {
  const std::shared_lock lock(mutex_);
  constexpr std::size_t kKinds = kTiers + 1;  // doubtful RAM is a run of its own
  std::vector<Run> runs;
  std::vector<std::int32_t> open(static_cast<std::size_t>(dense_count_) * kKinds, -1);
  const auto extend = [&](SlotId slot, std::int32_t dense, std::uint8_t tier, bool doubtful, std::uint32_t block) {
    std::int32_t& last = open[static_cast<std::size_t>(dense) * kKinds + (doubtful ? kTiers : tier)];
    if (last >= 0 && runs[static_cast<std::size_t>(last)].end == block) {
      ++runs[static_cast<std::size_t>(last)].end;
      return;
    }
    last = static_cast<std::int32_t>(runs.size());
    runs.push_back({slot, tier, doubtful, block, block + 1});
  };
  for (std::uint32_t block = 0; block < hashes.size(); ++block) {
    const std::vector<Holding>* list = holders_.find(hashes[block]);
    if (list == nullptr) break;
    for (const Holding& holding : *list) {
      const std::int32_t dense = dense_[holding.slot];
      if (dense < 0) continue;
      for (std::uint8_t tier = 0; tier < kTiers; ++tier) {
        if (holding.blocks[tier] == 0) continue;
        const bool doubtful = tier == index_of(Tier::ram) && holding.doubtful_ram >= holding.blocks[tier];
        extend(holding.slot, dense, tier, doubtful, block);
      }
    }
  }
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) {
    return std::tie(a.slot, a.tier, a.start) < std::tie(b.slot, b.tier, b.start);
  });
  return runs;
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
  std::size_t total = holders_.memory_bytes();
  holders_.for_each([&](std::uint64_t, const std::vector<Holding>& list) { total += list.capacity() * sizeof(Holding); });
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
        const std::vector<Holding>* list = holders_.find(block.request_hash);
        const bool listed = list != nullptr && std::any_of(list->begin(), list->end(), [&](const Holding& holding) {
                              return holding.slot == id && holding.blocks[tier] != 0;
                            });
        if (!listed) problem = "a held block of slot " + std::to_string(id) + " is not listed";
      }
    });
  }
  holders_.for_each([&](std::uint64_t, const std::vector<Holding>& list) {
    if (list.empty()) problem = "an empty list of holders is kept";
    for (const Holding& holding : list) {
      if (holding.empty()) problem = "an empty holding is kept";
      if (dense_[holding.slot] < 0) continue;
      for (std::size_t tier = 0; tier < kTiers; ++tier) found += holding.blocks[tier];
    }
  });
  if (problem.empty() && found != expected) {
    problem = "holders list " + std::to_string(found) + " blocks where the slots hold " + std::to_string(expected);
  }
  return problem;
}

}  // namespace pointsman
