// SPDX-License-Identifier: Apache-2.0
#include "index.hpp"

#include <algorithm>
#include <limits>
#include <mutex>
#include <tuple>

namespace pointsman {
namespace {

constexpr std::size_t kSweepSteps = 512;  // positions of retired maps swept per batch
constexpr std::uint16_t kMaxReferences = std::numeric_limits<std::uint16_t>::max();

constexpr std::size_t index_of(Tier tier) { return static_cast<std::size_t>(tier); }

void change_count(std::uint16_t& count, int change) {
  if (change > 0 && count < kMaxReferences) ++count;
  if (change < 0 && count > 0) --count;
}

std::span<const std::uint8_t> extra_of(std::span<const std::uint8_t> bytes, std::span<const std::uint32_t> ends,
                                       std::size_t block) {
  if (ends.empty()) return {};
  const std::size_t start = block == 0 ? 0 : ends[block - 1];
  return bytes.subspan(start, ends[block] - start);
}

}  // namespace

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

ApplyCounts PrefixIndex::apply(std::span<const SlotId> ranks, std::uint32_t default_rank, SlotId store,
                               const std::uint8_t* data, std::size_t size) {
  const std::unique_lock lock(mutex_);
  ApplyCounts counts;
  sweep_locked(kSweepSteps);
  BatchReader reader(key_, data, size);
  counts.malformed_batch = !reader.ok();
  const std::uint32_t batch_rank = reader.rank().value_or(default_rank);
  const std::uint32_t rank = batch_rank < ranks.size() ? batch_rank : default_rank;
  if (!reader.ok() || rank >= ranks.size()) return counts;
  Slot* slot = find_slot(ranks[rank]);
  if (slot == nullptr || !slot->alive) return counts;
  const Target target{*slot, ranks[rank], store, counts};
  for (;;) {
    switch (reader.next(scratch_)) {
      case BatchReader::Next::done:
        return counts;
      case BatchReader::Next::malformed:
        ++counts.malformed_events;
        continue;
      case BatchReader::Next::event:
        break;
    }
    switch (scratch_.kind) {
      case EventKind::stored:
        apply_stored(target, scratch_);
        break;
      case EventKind::removed:
        apply_removed(target, scratch_);
        break;
      case EventKind::cleared:
        clear_locked(*slot, target.id);
        ++counts.clears;
        break;
      case EventKind::unknown:
        ++counts.unknown_events;
        break;
    }
  }
}

void PrefixIndex::apply_stored(const Target& target, const Event& event) {
  if (!event.tier) {
    ++target.counts.unknown_medium_events;
    return;
  }
  const Tier tier = *event.tier;
  const std::size_t blocks = event.hashes.size();
  const bool by_content = !event.tokens.empty() && (tier == Tier::hbm || target.slot.plain);
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
  const bool waits = !by_content;
  for (const EngineKey& key : event.hashes) reference(target, key, tier, waits);
  if (by_content) {
    target.slot.block_size = event.block_size;
    const Block* parent = event.parent ? target.slot.blocks.find(*event.parent) : nullptr;
    if (event.parent && (parent == nullptr || !parent->identified)) {
      detach(target, event);
    } else {
      const std::uint64_t parent_hash = event.parent ? parent->request_hash : root_of(target.slot, event);
      join_detached(target, chain_blocks(target, parent_hash, event.hashes, event.tokens, event.block_size,
                                         event.extra_bytes, event.extra_ends));
    }
  }
  bound_waiting(target);
}

void PrefixIndex::apply_removed(const Target& target, const Event& event) {
  if (!event.tier) {
    ++target.counts.unknown_medium_events;
    return;
  }
  const std::size_t tier = index_of(*event.tier);
  for (const EngineKey& key : event.hashes) {
    if (*event.tier == Tier::storage) {
      remove_from_store(target, key);
      continue;
    }
    Block* block = target.slot.blocks.find(key);
    if (block == nullptr || block->references[tier] == 0) {
      ++target.counts.unknown_removals;
      continue;
    }
    ++target.counts.removed;
    if (--block->references[tier] != 0) continue;
    if (block->identified) publish(block->request_hash, target.id, *event.tier, -1);
    if (*event.tier == Tier::ram && block->doubtful_ram) {
      block->doubtful_ram = false;
      if (block->identified) publish_doubt(block->request_hash, target.id, -1);
    }
    if (block->held()) continue;
    if (block->identified) {
      remember(target.slot, key);
    } else {
      target.slot.blocks.erase(key);
    }
  }
}

void PrefixIndex::remove_from_store(const Target& target, const EngineKey& key) {
  Slot* store = find_slot(target.store);
  Block* stored = store == nullptr ? nullptr : store->blocks.find(key);
  Block* waiting = target.slot.blocks.find(key);
  const std::size_t tier = index_of(Tier::storage);
  if (stored != nullptr) {
    publish(stored->request_hash, target.store, Tier::storage, -1);
    store->blocks.erase(key);
    ++target.counts.removed;
  } else if (waiting != nullptr && waiting->references[tier] != 0) {
    waiting->references[tier] = 0;
    ++target.counts.removed;
    if (!waiting->held() && !waiting->identified) target.slot.blocks.erase(key);
  } else {
    ++target.counts.unknown_removals;
  }
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

PrefixIndex::Identified PrefixIndex::chain_blocks(const Target& target, std::uint64_t parent,
                                                  std::span<const EngineKey> keys,
                                                  std::span<const std::uint32_t> tokens, std::uint32_t block_size,
                                                  std::span<const std::uint8_t> extra_bytes,
                                                  std::span<const std::uint32_t> extra_ends) {
  Identified arrived;
  if (!target.slot.detached.empty()) arrived.reserve(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    parent = chain_.next(parent, tokens.subspan(i * block_size, block_size), extra_of(extra_bytes, extra_ends, i));
    identify(target, keys[i], parent);
    if (!target.slot.detached.empty()) arrived.emplace_back(keys[i], parent);
  }
  return arrived;
}

void PrefixIndex::identify(const Target& target, const EngineKey& key, std::uint64_t request_hash) {
  Block* block = target.slot.blocks.find(key);
  if (block == nullptr) return;  // removed while it waited
  if (block->identified && block->request_hash == request_hash) return;
  if (block->identified) {
    ++target.counts.conflicts;
    unpublish_all(target.id, *block);
  }
  block->identified = true;
  block->request_hash = request_hash;
  for (const Tier tier : {Tier::hbm, Tier::ram}) {
    if (block->references[index_of(tier)] != 0) publish(request_hash, target.id, tier, +1);
  }
  if (block->doubtful_ram) publish_doubt(request_hash, target.id, +1);
  std::uint16_t& storage = block->references[index_of(Tier::storage)];
  if (storage != 0) {
    storage = 0;
    store_reference(target.store, key, request_hash);
    if (!block->held()) remember(target.slot, key);
  }
}

// Identifies everything that waited for the blocks in `arrived`, and in turn for those.
void PrefixIndex::join_detached(const Target& target, Identified arrived) {
  Slot& slot = target.slot;
  while (!arrived.empty() && !slot.detached.empty()) {
    const auto [key, hash] = arrived.back();
    arrived.pop_back();
    for (auto [it, end] = slot.waiting.equal_range(HashEngineKey{}(key)); it != end;) {
      if (it->second->parent != key) {
        ++it;
        continue;
      }
      const Detached event = std::move(*it->second);
      slot.detached.erase(it->second);
      it = slot.waiting.erase(it);
      slot.detached_blocks -= event.hashes.size();
      target.counts.joined += event.hashes.size();
      const Identified more = chain_blocks(target, hash, event.hashes, event.tokens, event.block_size,
                                           event.extra_bytes, event.extra_ends);
      arrived.insert(arrived.end(), more.begin(), more.end());
    }
  }
}

void PrefixIndex::reference(const Target& target, const EngineKey& key, Tier tier, bool waits) {
  Slot& slot = target.slot;
  if (tier == Tier::storage) {
    const Block* known = slot.blocks.find(key);
    if (known != nullptr && known->identified) {
      store_reference(target.store, key, known->request_hash);
      return;
    }
  }
  Block& block = slot.blocks[key];
  if (waits && !block.held() && !block.identified) {
    slot.unidentified_order.push_back(key);
    ++target.counts.unidentified;
  }
  std::uint16_t& references = block.references[index_of(tier)];
  const bool first = references == 0;
  if (references < kMaxReferences && (first || tier != Tier::storage)) ++references;
  if (tier == Tier::ram && block.doubtful_ram) {
    block.doubtful_ram = false;
    if (block.identified) publish_doubt(block.request_hash, target.id, -1);
  }
  if (first && block.identified) publish(block.request_hash, target.id, tier, +1);
}

void PrefixIndex::store_reference(SlotId id, const EngineKey& key, std::uint64_t request_hash) {
  Slot* store = find_slot(id);
  if (store == nullptr || !store->alive) return;
  Block& block = store->blocks[key];
  if (block.identified && block.request_hash == request_hash) return;
  if (block.identified) publish(block.request_hash, id, Tier::storage, -1);
  block.identified = true;
  block.request_hash = request_hash;
  block.references[index_of(Tier::storage)] = 1;
  publish(request_hash, id, Tier::storage, +1);
}

void PrefixIndex::detach(const Target& target, const Event& event) {
  Slot& slot = target.slot;
  target.counts.detached += event.hashes.size();
  slot.detached.push_back({*event.parent, event.hashes, event.tokens, event.extra_bytes, event.extra_ends,
                           event.block_size});
  slot.waiting.emplace(HashEngineKey{}(*event.parent), std::prev(slot.detached.end()));
  slot.detached_blocks += event.hashes.size();
}

void PrefixIndex::bound_waiting(const Target& target) {
  Slot& slot = target.slot;
  while (slot.detached_blocks > limits_.detached_blocks) drop_oldest_detached(target);
  while (slot.unidentified_order.size() > limits_.unidentified_blocks) {
    const EngineKey key = slot.unidentified_order.front();
    slot.unidentified_order.pop_front();
    const Block* block = slot.blocks.find(key);
    // Blocks that a GPU event has named, or is about to (HBM: detached), are not waiting here any more.
    if (block == nullptr || block->identified || block->references[index_of(Tier::hbm)] != 0) continue;
    slot.blocks.erase(key);
    ++target.counts.dropped_waiting;
  }
}

void PrefixIndex::drop_oldest_detached(const Target& target) {
  Slot& slot = target.slot;
  const auto oldest = slot.detached.begin();
  for (auto [it, end] = slot.waiting.equal_range(HashEngineKey{}(oldest->parent)); it != end; ++it) {
    if (it->second == oldest) {
      slot.waiting.erase(it);
      break;
    }
  }
  for (const EngineKey& key : oldest->hashes) {
    Block* block = slot.blocks.find(key);
    if (block == nullptr || block->identified) continue;
    block->references[index_of(Tier::hbm)] = 0;
    if (!block->held()) slot.blocks.erase(key);
  }
  target.counts.dropped_waiting += oldest->hashes.size();
  slot.detached_blocks -= oldest->hashes.size();
  slot.detached.erase(oldest);
}

void PrefixIndex::remember(Slot& slot, const EngineKey& key) {
  slot.remembered_order.push_back(key);
  while (slot.remembered_order.size() > limits_.remembered_blocks) {
    const EngineKey oldest = slot.remembered_order.front();
    slot.remembered_order.pop_front();
    const Block* block = slot.blocks.find(oldest);
    if (block != nullptr && block->identified && !block->held()) slot.blocks.erase(oldest);
  }
}

std::uint64_t PrefixIndex::root_of(Slot& slot, const Event& event) const {
  std::string adapter(event.lora);
  // Old engines publish only a number; a request names the adapter, so these blocks match nothing: never the base.
  if (adapter.empty() && event.lora_id != 0) adapter = "#" + std::to_string(event.lora_id);
  const auto [it, fresh] = slot.roots.try_emplace(std::move(adapter));
  if (fresh) it->second = chain_.root(slot.model, it->first);
  return it->second;
}

void PrefixIndex::publish(std::uint64_t request_hash, SlotId id, Tier tier, int change) {
  ++version_;
  std::vector<Holding>& list = holders_[request_hash];
  auto it = std::find_if(list.begin(), list.end(), [id](const Holding& holding) { return holding.slot == id; });
  if (it == list.end()) {
    list.push_back({.slot = id});
    it = std::prev(list.end());
  }
  change_count(it->blocks[index_of(tier)], change);
  if (!it->empty()) return;
  *it = list.back();
  list.pop_back();
  if (list.empty()) holders_.erase(request_hash);
}

void PrefixIndex::publish_doubt(std::uint64_t request_hash, SlotId id, int change) {
  std::vector<Holding>* list = holders_.find(request_hash);
  if (list == nullptr) return;
  const auto it = std::find_if(list->begin(), list->end(), [id](const Holding& holding) { return holding.slot == id; });
  if (it != list->end()) change_count(it->doubtful_ram, change);
}

void PrefixIndex::unpublish_all(SlotId id, Block& block) {
  if (!block.identified) return;
  if (block.doubtful_ram) publish_doubt(block.request_hash, id, -1);
  for (std::size_t tier = 0; tier < kTiers; ++tier) {
    if (block.references[tier] != 0) publish(block.request_hash, id, static_cast<Tier>(tier), -1);
  }
}

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

PrefixIndex::Slot* PrefixIndex::find_slot(SlotId id) { return id < slots_.size() ? slots_[id].get() : nullptr; }

const PrefixIndex::Slot* PrefixIndex::find_slot(SlotId id) const {
  return id < slots_.size() ? slots_[id].get() : nullptr;
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
