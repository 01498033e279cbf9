// SPDX-License-Identifier: Apache-2.0
// What the events of a batch do to a slot: counting, identity, and what waits for it.
#include <algorithm>
#include <mutex>

#include "index.hpp"

namespace pointsman {
namespace {

constexpr std::size_t kSweepSteps = 512;  // positions of retired maps swept per batch

std::span<const std::uint8_t> extra_of(std::span<const std::uint8_t> bytes, std::span<const std::uint32_t> ends,
                                       std::size_t block) {
  if (ends.empty()) return {};
  const std::size_t start = block == 0 ? 0 : ends[block - 1];
  return bytes.subspan(start, ends[block] - start);
}

}  // namespace

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

}  // namespace pointsman
