// SPDX-License-Identifier: Apache-2.0
// Slots come and go, and what the holders of a request hash hold. Events: apply.cpp; questions: query.cpp.
#include "index.hpp"

#include <algorithm>
#include <mutex>

namespace pointsman {
std::uint64_t HashChain::root(std::string_view model, std::string_view lora) const {
  SipHash hash(key_);
  hash.add("namespace", 9);
  hash.add_u64(model.size());
  hash.add(model.data(), model.size());
  hash.add_u64(lora.size());
  hash.add(lora.data(), lora.size());
  return hash.finish();
}

std::uint64_t HashChain::next(std::uint64_t parent, std::span<const std::uint32_t> tokens,
                              std::span<const std::uint8_t> extra) const {
  SipHash hash(key_);
  hash.add_u64(parent);
  hash.add_u64(tokens.size());
  hash.add(tokens.data(), tokens.size_bytes());
  hash.add(extra.data(), extra.size());
  return hash.finish();
}

void HashChain::blocks(std::uint64_t root, std::span<const std::uint32_t> tokens, std::size_t block_size,
                       std::span<const std::uint8_t> first_extra, std::vector<std::uint64_t>& hashes) const {
  std::uint64_t parent = root;
  std::span<const std::uint8_t> extra = first_extra;
  for (; tokens.size() >= block_size; tokens = tokens.subspan(block_size)) {
    parent = next(parent, tokens.first(block_size), extra);
    hashes.push_back(parent);
    extra = {};
  }
}

SlotId PrefixIndex::open(std::string_view model, bool plain) {
  const std::unique_lock lock(mutex_);
  auto slot = std::make_unique<Slot>();
  slot->model = model;
  slot->plain = plain;
  std::int32_t dense = dense_count_;
  if (free_dense_.empty()) {
    ++dense_count_;
  } else {
    dense = free_dense_.back();
    free_dense_.pop_back();
  }
  slots_.push_back(std::move(slot));
  dense_.push_back(dense);
  return static_cast<SlotId>(slots_.size() - 1);
}

void PrefixIndex::retire(SlotId id) {
  const std::unique_lock lock(mutex_);
  Slot* slot = find_slot(id);
  if (slot == nullptr || !slot->alive) return;
  slot->alive = false;
  free_dense_.push_back(dense_[id]);
  dense_[id] = -1;
  retired_.push_back(id);
  ++version_;
}

bool PrefixIndex::alive(SlotId id) const {
  const std::shared_lock lock(mutex_);
  const Slot* slot = find_slot(id);
  return slot != nullptr && slot->alive;
}

void PrefixIndex::clear(SlotId id) {
  const std::unique_lock lock(mutex_);
  Slot* slot = find_slot(id);
  if (slot != nullptr && slot->alive) clear_locked(*slot, id);
}

// vLLM's clear comes from the GPU pool whether or not the connector is reset: HBM is empty, RAM is doubtful.
void PrefixIndex::clear_locked(Slot& slot, SlotId id) {
  std::vector<EngineKey> released;
  slot.blocks.for_each([&](const EngineKey& key, Block& block) {
    if (block.references[index_of(Tier::hbm)] != 0) {
      block.references[index_of(Tier::hbm)] = 0;
      if (block.identified) publish(block.request_hash, id, Tier::hbm, -1);
      if (!block.held()) released.push_back(key);
    }
    if (block.references[index_of(Tier::ram)] != 0 && !block.doubtful_ram) {
      block.doubtful_ram = true;
      if (block.identified) publish_doubt(block.request_hash, id, +1);
    }
  });
  // Nothing refers to a cleared block again: the engine clears only when no request runs.
  for (const EngineKey& key : released) slot.blocks.erase(key);
  slot.detached.clear();
  slot.waiting.clear();
  slot.detached_blocks = 0;
  ++version_;
}

void PrefixIndex::publish(std::uint64_t request_hash, SlotId id, Tier tier, int step) {
  ++version_;
  HolderSets::Id& set = holders_[request_hash];
  set = sets_.move(set, id, index_of(tier), step);
  if (set == HolderSets::kNobody) holders_.erase(request_hash);
}

void PrefixIndex::publish_doubt(std::uint64_t request_hash, SlotId id, int step) {
  HolderSets::Id* set = holders_.find(request_hash);
  if (set != nullptr) *set = sets_.move(*set, id, kDoubtfulRam, step);
}

void PrefixIndex::unpublish_all(SlotId id, Block& block) {
  if (!block.identified) return;
  if (block.doubtful_ram) publish_doubt(block.request_hash, id, -1);
  for (std::size_t tier = 0; tier < kTiers; ++tier) {
    if (block.references[tier] != 0) publish(block.request_hash, id, static_cast<Tier>(tier), -1);
  }
}

bool PrefixIndex::sweep(std::size_t steps) {
  const std::unique_lock lock(mutex_);
  return sweep_locked(steps);
}

bool PrefixIndex::sweep_locked(std::size_t steps) {
  while (!retired_.empty() && steps > 0) {
    const SlotId id = retired_.front();
    Slot& slot = *slots_[id];
    const std::size_t from = slot.sweep_position;
    slot.sweep_position = slot.blocks.visit_range(
        from, steps, [&](const EngineKey&, Block& block) { unpublish_all(id, block); });
    steps -= std::min(steps, std::max<std::size_t>(1, slot.sweep_position - from));
    if (slot.sweep_position < slot.blocks.slots()) continue;
    slots_[id].reset();
    retired_.pop_front();
  }
  return retired_.empty();
}

PrefixIndex::Slot* PrefixIndex::find_slot(SlotId id) { return id < slots_.size() ? slots_[id].get() : nullptr; }

const PrefixIndex::Slot* PrefixIndex::find_slot(SlotId id) const {
  return id < slots_.size() ? slots_[id].get() : nullptr;
}

}  // namespace pointsman
