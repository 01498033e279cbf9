// SPDX-License-Identifier: Apache-2.0
// Blocks on their way from HBM to RAM: demoting from the removal on, until the store to RAM or the end of the grace.
#include "index.hpp"

namespace pointsman {

void PrefixIndex::demote(const Target& target, Block& block) {
  Slot& slot = target.slot;
  const Tick until = target.now + slot.grace;
  count(slot, block, -1);
  block.hbm = static_cast<std::uint16_t>(until);
  block.set(Block::kDemoting, true);
  count(slot, block, +1);
  // In this order, so that no reader finds it nowhere.
  move_holding(block.request_hash, target.id, kDemoting, +1, until);
  move_holding(block.request_hash, target.id, index_of(Tier::hbm), -1);
  graces_[until].emplace_back(target.id, EngineKey{block.key});
  next_end_.store(graces_.begin()->first, std::memory_order_relaxed);
}

void PrefixIndex::expire(Tick now) {
  while (!graces_.empty() && graces_.begin()->first <= now) {
    const auto [until, ended] = *graces_.begin();
    graces_.erase(graces_.begin());
    for (const auto& [id, key] : ended) {
      Slot* slot = find_slot(id);
      if (slot == nullptr || !slot->alive) continue;
      Block* block = slot->blocks.find(key);
      if (block == nullptr || !block->demoting() || block->hbm != static_cast<std::uint16_t>(until)) continue;
      count(*slot, *block, -1);
      block->end_demotion();
      count(*slot, *block, +1);
      move_holding(block->request_hash, id, kDemoting, -1);
      remember(*slot, key);
      show_counts(id, *slot);
    }
    changed();
  }
  next_end_.store(graces_.empty() ? kNever : graces_.begin()->first, std::memory_order_relaxed);
}

}  // namespace pointsman
