// SPDX-License-Identifier: Apache-2.0
// Slots come and go, and what the holders of a request hash hold. Events: apply.cpp; questions: query.cpp, view.cpp.
#include "index.hpp"

#include <algorithm>

#include "atomics.hpp"

namespace pointsman {
namespace {

// So that the low bits of its end tell one demotion of a block from the next.
constexpr Tick kLongestGrace = 1 << 14;

}  // namespace

PrefixIndex::PrefixIndex(HashKey key, Limits limits, const std::string& path)
    : chain_(key),
      limits_(limits),
      segment_(path, limits.blocks, chain_.key_id()),
      header_(segment_.header()),
      view_(segment_.view()),
      nodes_(segment_.region(), header_, segment_.sizes().nodes),
      sets_(segment_.region(), header_, segment_.sizes().holdings),
      reader_(key) {}

SlotId PrefixIndex::open(std::string_view model, bool plain, std::string_view name, double grace_s) {
  const std::lock_guard lock(mutex_);
  auto slot = std::make_unique<Slot>();
  slot->model = model;
  slot->plain = plain;
  slot->grace = std::min(tick_of(grace_s + 1 / kTicksPerSecond), kLongestGrace);
  if (grace_s <= 0) slot->grace = 0;
  slots_.reserve(slots_.size() + 1);
  const SlotId id = segment_.open_slot(name);
  slots_.push_back(std::move(slot));
  return id;
}

void PrefixIndex::retire(SlotId id) {
  const std::lock_guard lock(mutex_);
  Slot* slot = find_slot(id);
  if (slot == nullptr || !slot->alive) return;
  segment_.retire_slot(id);
  slot->alive = false;
  slot->waiting = {};
  retired_.push_back(id);
  changed();
}

void PrefixIndex::suspect(SlotId id, bool on) {
  const std::lock_guard lock(mutex_);
  const Slot* slot = find_slot(id);
  if (slot != nullptr && slot->alive) store(segment_.record(id).flags, on ? kSuspect : 0U);
}

void PrefixIndex::publish() {
  const std::lock_guard lock(mutex_);
  segment_.publish();
}

void PrefixIndex::clear(SlotId id) {
  const std::lock_guard lock(mutex_);
  Slot* slot = find_slot(id);
  if (slot != nullptr && slot->alive) clear_locked(*slot, id);
}

// vLLM's clear comes from the GPU pool whether or not the connector is reset: HBM is empty, RAM is doubtful. Nothing
// refers to a cleared block again: the engine clears only when no request runs.
void PrefixIndex::clear_locked(Slot& slot, SlotId id) {
  slot.blocks.filter([&](Block& block) {
    count(slot, block, -1);
    const bool leaves = block.in_hbm() || block.demoting();
    if (block.demoting()) {
      block.end_demotion();
      move_holding(block.request_hash, id, kDemoting, -1);
    } else if (leaves) {
      block.hbm = 0;
      if (block.identified()) move_holding(block.request_hash, id, index_of(Tier::hbm), -1);
    }
    if (block.ram != 0 && !block.has(Block::kDoubtfulRam)) {
      block.set(Block::kDoubtfulRam, true);
      if (block.identified()) move_holding(block.request_hash, id, kDoubtfulRam, +1);
    }
    if (leaves && !block.held()) return false;
    count(slot, block, +1);
    return true;
  });
  slot.waiting.detached.clear();
  slot.waiting.by_parent.clear();
  slot.waiting.detached_blocks = 0;
  show_counts(id, slot);
  changed();
}

void PrefixIndex::count(Slot& slot, const Block& block, int step) {
  const auto by = static_cast<std::uint64_t>(static_cast<std::int64_t>(step));
  SlotCounts& totals = slot.totals;
  if (!block.identified()) {
    totals.unidentified += by;
    return;
  }
  if (block.in_hbm()) totals.blocks[index_of(Tier::hbm)] += by;
  if (block.ram != 0) totals.blocks[index_of(Tier::ram)] += by;
  if (block.has(Block::kStored)) totals.blocks[index_of(Tier::storage)] += by;
  if (block.has(Block::kDoubtfulRam)) totals.doubtful_ram += by;
  if (block.demoting()) {
    totals.demoting += by;
  } else if (!block.held()) {
    totals.remembered += by;
  }
}

void PrefixIndex::move_holding(std::uint64_t request_hash, SlotId id, std::size_t kind, int step, Tick until) {
  const std::uint64_t key = node_key(request_hash);
  const NodeTable::Place place = step > 0 ? nodes_.place(key) : nodes_.find(key);
  if (place.set == nullptr) return;
  const HolderSets::Id from = *place.set;
  const HolderSets::Id to =
      sets_.changed(from, {id, static_cast<std::uint16_t>(kind), static_cast<std::int16_t>(step), until});
  // A reader that has `from` may use it until it is released, and finds `to` from here on.
  nodes_.assign(place, to);
  if (mark_ != 0 && step > 0) place.touch(mark_);
  sets_.release(from);
  if (to == HolderSets::kNobody) nodes_.settle(place.shard);
}

void PrefixIndex::unpublish_all(SlotId id, const Block& block) {
  if (!block.identified()) return;
  if (block.has(Block::kDoubtfulRam)) move_holding(block.request_hash, id, kDoubtfulRam, -1);
  if (block.demoting()) move_holding(block.request_hash, id, kDemoting, -1);
  if (block.in_hbm()) move_holding(block.request_hash, id, index_of(Tier::hbm), -1);
  if (block.ram != 0) move_holding(block.request_hash, id, index_of(Tier::ram), -1);
  if (block.has(Block::kStored)) move_holding(block.request_hash, id, index_of(Tier::storage), -1);
}

void PrefixIndex::show_counts(SlotId id, Slot& slot) {
  total_blocks_ += slot.blocks.size() - slot.blocks_counted;
  slot.blocks_counted = slot.blocks.size();
  SlotRecord& record = segment_.record(id);
  const SlotCounts& totals = slot.totals;
  const std::array<std::uint64_t, 8> counts = {totals.blocks[0],    totals.blocks[1],
                                               totals.blocks[2],    totals.doubtful_ram,
                                               totals.unidentified, slot.waiting.detached_blocks,
                                               totals.remembered,   totals.demoting};
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (record.counts[i] != counts[i]) store(record.counts[i], counts[i]);
  }
  store(record.block_size, slot.block_size);
}

void PrefixIndex::changed() {
  store(header_.blocks, std::uint64_t{total_blocks_});
  store(header_.distinct, std::uint64_t{nodes_.size()});
  store(header_.version, header_.version + 1);
}

void PrefixIndex::match(std::span<const std::uint64_t> hashes, std::vector<Run>& runs, double now_s) {
  const Tick now = tick_of(now_s);
  if (now >= next_end_.load(std::memory_order_relaxed)) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock.owns_lock()) expire(now);
  }
  view_.match(hashes, runs, now);
}

bool PrefixIndex::sweep(std::size_t steps, double now_s) {
  const std::lock_guard lock(mutex_);
  expire(tick_of(now_s));
  return sweep_locked(steps);
}

bool PrefixIndex::sweep_locked(std::size_t steps) {
  while (!retired_.empty() && steps > 0) {
    const SlotId id = retired_.front();
    Slot& slot = *slots_[id];
    const std::size_t from = slot.sweep_position;
    const std::size_t to = std::min(from + steps, slot.blocks.cells());
    for (std::size_t i = from; i < to; ++i) {
      const Block& block = slot.blocks.cell(i);
      if (block.key != 0) unpublish_all(id, block);
    }
    slot.sweep_position = to;
    steps -= std::min(steps, std::max<std::size_t>(1, to - from));
    if (to < slot.blocks.cells()) continue;
    total_blocks_ -= slot.blocks_counted;
    slots_[id].reset();
    retired_.pop_front();
  }
  store(header_.distinct, std::uint64_t{nodes_.size()});
  return retired_.empty();
}

}  // namespace pointsman
