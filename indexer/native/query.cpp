// SPDX-License-Identifier: Apache-2.0
// Questions to the writer's side of the index, and its own check.
#include <algorithm>

#include "atomics.hpp"
#include "index.hpp"

namespace pointsman {
namespace {

constexpr std::array kCounted = {std::size_t{0}, std::size_t{1}, std::size_t{2}, kDemoting};

}  // namespace

SlotCounts PrefixIndex::counts(SlotId id) const {
  const std::lock_guard lock(mutex_);
  const Slot* slot = find_slot(id);
  if (slot == nullptr || !slot->alive) return {};
  SlotCounts result = slot->totals;
  result.detached = slot->waiting.detached_blocks;
  result.block_size = slot->block_size;
  return result;
}

std::vector<std::pair<std::uint64_t, std::uint8_t>> PrefixIndex::blocks(SlotId id) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<std::uint64_t, std::uint8_t>> result;
  const Slot* slot = find_slot(id);
  if (slot == nullptr || !slot->alive) return result;
  slot->blocks.for_each([&](const Block& block) {
    if (!block.identified() || !(block.held() || block.demoting())) return;
    const unsigned tiers = (block.in_hbm() ? 1U : 0U) | (block.ram != 0 ? 2U : 0U) |
                           (block.has(Block::kStored) ? 4U : 0U) | (block.has(Block::kDoubtfulRam) ? 8U : 0U) |
                           (block.demoting() ? 16U : 0U);
    result.emplace_back(std::uint64_t{block.request_hash}, static_cast<std::uint8_t>(tiers));
  });
  return result;
}

std::uint64_t PrefixIndex::version() const { return load(header_.version); }

std::size_t PrefixIndex::distinct_blocks() const { return load(header_.distinct); }

std::size_t PrefixIndex::memory_bytes() const {
  const std::lock_guard lock(mutex_);
  std::size_t total = nodes_.memory_bytes() + sets_.memory_bytes() + slots_.size() * sizeof(std::uint32_t) +
                      header_.record_count * sizeof(SlotRecord);
  for (const auto& slot : slots_) {
    if (slot) total += slot->blocks.memory_bytes() + sizeof(Slot);
  }
  return total;
}

std::string PrefixIndex::check() const {
  const std::lock_guard lock(mutex_);
  std::string problem = nodes_.check();
  std::size_t expected = 0, found = 0;
  for (SlotId id = 0; id < slots_.size(); ++id) {
    Slot* slot = find_slot(id);
    if (slot != nullptr && slot->alive) check_slot(id, *slot, expected, problem);
  }
  std::vector<std::uint32_t> named(sets_.ids());
  nodes_.for_each([&](std::uint64_t, HolderSets::Id set) {
    ++named[set];
    for (const Holding& holding : sets_.holdings(set)) {
      if (holding.empty()) problem = "an empty holding is kept";
      if (!view_.alive(holding.slot)) continue;
      for (const std::size_t kind : kCounted) found += holding.counts[kind];
    }
  });
  if (!sets_.consistent(named)) problem = "a set of holders is miscounted, unsorted or kept twice";
  if (problem.empty() && found != expected) {
    problem = "holders list " + std::to_string(found) + " blocks where the slots hold " + std::to_string(expected);
  }
  if (nodes_.size() != header_.distinct) problem = "readers are told another number of blocks";
  return problem;
}

void PrefixIndex::check_slot(SlotId id, Slot& slot, std::size_t& expected, std::string& problem) const {
  std::size_t waiting = 0;
  for (const Detached& event : slot.waiting.detached) waiting += event.keys.size();
  if (waiting != slot.waiting.detached_blocks || slot.waiting.by_parent.size() != slot.waiting.detached.size()) {
    problem = "detached events of slot " + std::to_string(id) + " are miscounted";
  }
  if (!slot.blocks.consistent()) problem = "the blocks of slot " + std::to_string(id) + " are out of order";
  Slot again;
  slot.blocks.for_each([&](const Block& block) {
    count(again, block, +1);
    if (!block.identified() && (!block.held() || block.demoting())) problem = "a block without identity and references is kept";
    if (block.has(Block::kDoubtfulRam) && block.ram == 0) problem = "doubt about RAM that is not held";
    if (!block.identified()) return;
    const std::array<bool, kKinds> kinds = {block.in_hbm(), block.ram != 0, block.has(Block::kStored), false,
                                            block.demoting()};
    const HolderSets::Id* set = nodes_.find(node_key(block.request_hash)).set;
    for (const std::size_t kind : kCounted) {
      if (!kinds[kind]) continue;
      ++expected;
      const bool listed = set != nullptr && std::ranges::any_of(sets_.holdings(*set), [&](const Holding& holding) {
                            return holding.slot == id && holding.counts[kind] != 0;
                          });
      if (!listed) problem = "a held block of slot " + std::to_string(id) + " is not listed";
    }
  });
  const SlotCounts &is = slot.totals, &should = again.totals;
  if (is.blocks != should.blocks || is.doubtful_ram != should.doubtful_ram || is.unidentified != should.unidentified ||
      is.remembered != should.remembered || is.demoting != should.demoting) {
    problem = "the totals of slot " + std::to_string(id) + " are wrong";
  }
}

}  // namespace pointsman
