// SPDX-License-Identifier: Apache-2.0
// What the events of a batch do to a slot: counting and identity. What waits: waiting.cpp; demoting blocks: graces.cpp.
#include <algorithm>
#include <limits>
#include <tuple>

#include "index.hpp"

namespace pointsman {
namespace {

constexpr std::size_t kSweepSteps = 512;  // cells of retired slots swept per batch

std::span<const std::uint8_t> extra_of(std::span<const std::uint8_t> bytes, std::span<const std::uint32_t> ends,
                                       std::size_t block) {
  if (ends.empty()) return {};
  const std::size_t start = block == 0 ? 0 : ends[block - 1];
  return bytes.subspan(start, ends[block] - start);
}

template <typename Count>
void add_reference(Count& references) {
  if (references != std::numeric_limits<Count>::max()) ++references;  // stays there rather than wrap
}

}  // namespace

ApplyCounts PrefixIndex::apply(std::span<const SlotId> ranks, std::uint32_t default_rank, SlotId store,
                               const std::uint8_t* data, std::size_t size, double now_s) {
  const std::lock_guard lock(mutex_);
  ApplyCounts counts;
  const Tick now = tick_of(now_s);
  expire(now);
  sweep_locked(kSweepSteps);
  counts.malformed_batch = !reader_.read(data, size);
  if (counts.malformed_batch) return counts;
  const std::uint32_t batch_rank = reader_.rank().value_or(default_rank);
  const std::uint32_t rank = batch_rank < ranks.size() ? batch_rank : default_rank;
  if (rank >= ranks.size()) return counts;
  Slot* slot = find_slot(ranks[rank]);
  if (slot == nullptr || !slot->alive) return counts;
  if (segment_.region().shared()) {
    // A block takes two bytes of a payload at least.
    nodes_.prepare(size / 2);
    sets_.prepare(size / 2);
    segment_.prepare(header_.shard_count + size / 256 + 2, sets_.ids() + size / 2);
  }
  const Target target{*slot, ranks[rank], store, counts, now};
  for (const Event& event : reader_.events()) apply_event(target, event);
  show_counts(target.id, *slot);
  if (Slot* storage = find_slot(store); storage != nullptr && storage->alive) show_counts(store, *storage);
  counts.evicted = evict();
  next_age(counts.stored);
  changed();
  return counts;
}

void PrefixIndex::apply_event(const Target& target, const Event& event) {
  switch (event.kind) {
    case EventKind::stored:
      return apply_stored(target, event);
    case EventKind::removed:
      return apply_removed(target, event);
    case EventKind::cleared:
      clear_locked(target.slot, target.id);
      ++target.counts.clears;
      return;
    case EventKind::unknown:
      ++target.counts.unknown_events;
      return;
    case EventKind::malformed:
      ++target.counts.malformed_events;
      return;
  }
}

void PrefixIndex::apply_stored(const Target& target, const Event& event) {
  if (!event.tier) {
    ++target.counts.unknown_medium_events;
    return;
  }
  Slot& slot = target.slot;
  const Tier tier = *event.tier;
  const std::size_t blocks = event.keys.size();
  const bool by_content = !event.tokens.empty() && (tier == Tier::hbm || slot.plain);
  const std::uint64_t span_tokens = std::uint64_t{event.block_size} * blocks;
  if (!event.full_attention || (by_content && event.block_size != 0 && event.tokens.size() > span_tokens)) {
    ++target.counts.sparse_events;
    return;
  }
  if (by_content && (event.block_size == 0 || event.tokens.size() < span_tokens)) {
    ++target.counts.malformed_events;
    return;
  }
  target.counts.stored += blocks;
  slot.blocks.touch(event.keys);
  if (!by_content) {
    for (const EngineKey key : event.keys) reference(target, key, tier, true);
    bound_waiting(target);
    return;
  }
  slot.block_size = event.block_size;
  const Block* parent = event.parent != 0 ? slot.blocks.find(event.parent) : nullptr;
  if (event.parent != 0 && (parent == nullptr || !parent->identified())) {
    for (const EngineKey key : event.keys) reference(target, key, tier, false);
    detach(target, event);
  } else {
    const std::uint64_t parent_hash = event.parent != 0 ? parent->request_hash : root_of(slot, event);
    store_chain(target, parent_hash,
                {event.keys, event.tokens, event.block_size, event.extra_bytes, event.extra_ends}, tier);
  }
  bound_waiting(target);
}

void PrefixIndex::hash_chain(std::uint64_t parent, const Chained& blocks) {
  chain_hashes_.resize(blocks.keys.size());
  for (std::size_t i = 0; i < blocks.keys.size(); ++i) {
    parent = chain_.next(parent, blocks.tokens.subspan(i * blocks.block_size, blocks.block_size),
                         extra_of(blocks.extra_bytes, blocks.extra_ends, i));
    chain_hashes_[i] = parent;
  }
  nodes_.touch(chain_hashes_);
}

void PrefixIndex::store_chain(const Target& target, std::uint64_t parent, const Chained& blocks, Tier tier) {
  Slot& slot = target.slot;
  hash_chain(parent, blocks);
  // All before any is identified: that may end what is remembered of another.
  if (tier != Tier::hbm) {
    for (const EngineKey key : blocks.keys) reference(target, key, tier, false);
  }
  for (std::size_t i = 0; i < blocks.keys.size(); ++i) {
    const std::uint64_t hash = chain_hashes_[i];
    Block* block = nullptr;
    bool fresh = false;
    if (tier == Tier::hbm) std::tie(block, fresh) = slot.blocks.insert(blocks.keys[i]);
    if (fresh) {
      block->request_hash = hash;
      block->hbm = 1;
      block->flags = Block::kIdentified;
      ++slot.totals.blocks[index_of(Tier::hbm)];
      move_holding(hash, target.id, index_of(Tier::hbm), +1);
    } else {
      if (tier == Tier::hbm) reference(target, blocks.keys[i], tier, false);
      identify(target, blocks.keys[i], hash);
    }
  }
  if (slot.waiting.detached.empty()) return;
  Identified arrived;
  for (std::size_t i = 0; i < blocks.keys.size(); ++i) arrived.emplace_back(blocks.keys[i], chain_hashes_[i]);
  join_detached(target, std::move(arrived));
}

void PrefixIndex::apply_removed(const Target& target, const Event& event) {
  if (!event.tier) {
    ++target.counts.unknown_medium_events;
    return;
  }
  Slot& slot = target.slot;
  slot.blocks.touch(event.keys);
  for (const EngineKey key : event.keys) {
    if (*event.tier == Tier::storage) {
      remove_from_store(target, key);
      continue;
    }
    const bool hbm = *event.tier == Tier::hbm;
    Block* block = slot.blocks.find(key);
    if (block == nullptr || (hbm ? !block->in_hbm() : block->ram == 0)) {
      ++target.counts.unknown_removals;
      continue;
    }
    ++target.counts.removed;
    if (hbm && block->hbm == 1 && block->identified() && block->ram == 0 && slot.grace != 0) {
      demote(target, *block);
      continue;
    }
    count(slot, *block, -1);
    const bool last = hbm ? --block->hbm == 0 : --block->ram == 0;
    const bool doubt_ends = last && !hbm && block->has(Block::kDoubtfulRam);
    if (doubt_ends) block->set(Block::kDoubtfulRam, false);
    count(slot, *block, +1);
    if (!last) continue;
    if (block->identified()) {
      if (doubt_ends) move_holding(block->request_hash, target.id, kDoubtfulRam, -1);
      move_holding(block->request_hash, target.id, index_of(*event.tier), -1);
    }
    if (block->held()) continue;
    if (block->identified()) {
      remember(slot, key);
    } else {
      count(slot, *block, -1);
      slot.blocks.erase(block);
    }
  }
}

void PrefixIndex::remove_from_store(const Target& target, EngineKey key) {
  Slot* store = find_slot(target.store);
  if (store != nullptr && !store->alive) store = nullptr;
  Block* stored = store == nullptr ? nullptr : store->blocks.find(key);
  if (stored != nullptr) {
    move_holding(stored->request_hash, target.store, index_of(Tier::storage), -1);
    count(*store, *stored, -1);
    store->blocks.erase(stored);
    ++target.counts.removed;
    return;
  }
  Block* waiting = target.slot.blocks.find(key);
  if (waiting == nullptr || !waiting->has(Block::kStored)) {
    ++target.counts.unknown_removals;
    return;
  }
  ++target.counts.removed;
  count(target.slot, *waiting, -1);
  waiting->set(Block::kStored, false);
  if (waiting->held() || waiting->identified()) {
    count(target.slot, *waiting, +1);
  } else {
    target.slot.blocks.erase(waiting);
  }
}

void PrefixIndex::identify(const Target& target, EngineKey key, std::uint64_t request_hash) {
  Slot& slot = target.slot;
  Block* block = slot.blocks.find(key);
  if (block == nullptr) return;  // removed while it waited
  if (block->identified() && block->request_hash == request_hash) return;
  count(slot, *block, -1);
  if (block->identified()) {
    ++target.counts.conflicts;
    unpublish_all(target.id, *block);
  }
  const bool demoted = block->demoting();
  if (demoted) block->end_demotion();
  const bool stored = block->has(Block::kStored);
  block->set(Block::kStored, false);
  block->set(Block::kIdentified, true);
  block->request_hash = request_hash;
  count(slot, *block, +1);
  if (block->in_hbm()) move_holding(request_hash, target.id, index_of(Tier::hbm), +1);
  if (block->ram != 0) move_holding(request_hash, target.id, index_of(Tier::ram), +1);
  if (block->has(Block::kDoubtfulRam)) move_holding(request_hash, target.id, kDoubtfulRam, +1);
  if (stored) store_reference(target.store, key, request_hash);
  if ((stored || demoted) && !block->held()) remember(slot, key);
}

void PrefixIndex::reference(const Target& target, EngineKey key, Tier tier, bool waits) {
  Slot& slot = target.slot;
  if (tier == Tier::storage) {
    const Block* known = slot.blocks.find(key);
    if (known != nullptr && known->identified()) {
      store_reference(target.store, key, known->request_hash);
      return;
    }
  }
  const auto [block, fresh] = slot.blocks.insert(key);
  if (!fresh) count(slot, *block, -1);
  if (waits && !block->held() && !block->identified()) {
    slot.waiting.unidentified_order.push_back(key);
    ++target.counts.unidentified;
  }
  const bool demoted = block->demoting() && tier != Tier::storage;
  if (demoted) block->end_demotion();
  bool first = false, doubt_ends = false;
  switch (tier) {
    case Tier::hbm:
      first = block->hbm == 0;
      add_reference(block->hbm);
      break;
    case Tier::ram:
      first = block->ram == 0;
      add_reference(block->ram);
      doubt_ends = block->has(Block::kDoubtfulRam);
      block->set(Block::kDoubtfulRam, false);
      break;
    case Tier::storage:
      block->set(Block::kStored, true);  // without identity: it waits here
      break;
  }
  count(slot, *block, +1);
  if (!block->identified()) return;
  if (first) move_holding(block->request_hash, target.id, index_of(tier), +1);
  if (doubt_ends) move_holding(block->request_hash, target.id, kDoubtfulRam, -1);
  if (demoted) move_holding(block->request_hash, target.id, kDemoting, -1);
}

void PrefixIndex::store_reference(SlotId id, EngineKey key, std::uint64_t request_hash) {
  Slot* store = find_slot(id);
  if (store == nullptr || !store->alive) return;
  const auto [block, fresh] = store->blocks.insert(key);
  if (!fresh && block->request_hash == request_hash) return;
  if (!fresh) move_holding(block->request_hash, id, index_of(Tier::storage), -1);
  if (fresh) {
    block->flags = Block::kIdentified | Block::kStored;
    count(*store, *block, +1);
  }
  block->request_hash = request_hash;
  move_holding(request_hash, id, index_of(Tier::storage), +1);
}

std::uint64_t PrefixIndex::root_of(Slot& slot, const Event& event) const {
  std::string adapter(event.lora);
  // Old engines publish only a number; a request names the adapter, so these blocks match nothing: never the base.
  if (adapter.empty() && event.lora_id != 0) adapter = "#" + std::to_string(event.lora_id);
  const auto [it, fresh] = slot.roots.try_emplace(std::move(adapter));
  if (fresh) it->second = chain_.root(slot.model, it->first);
  return it->second;
}

}  // namespace pointsman
