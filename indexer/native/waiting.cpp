// SPDX-License-Identifier: Apache-2.0
// What waits for an event to come, bounded: stored events whose parent is unknown, blocks that none has named yet, and
// identities of blocks that nothing refers to any more.
#include <utility>

#include "index.hpp"

namespace pointsman {

void PrefixIndex::detach(const Target& target, const Event& event) {
  Waiting& waiting = target.slot.waiting;
  target.counts.detached += event.keys.size();
  waiting.detached.push_back({event.parent,
                              {event.keys.begin(), event.keys.end()},
                              {event.tokens.begin(), event.tokens.end()},
                              {event.extra_bytes.begin(), event.extra_bytes.end()},
                              {event.extra_ends.begin(), event.extra_ends.end()},
                              event.block_size});
  waiting.by_parent.emplace(event.parent, std::prev(waiting.detached.end()));
  waiting.detached_blocks += event.keys.size();
}

void PrefixIndex::bound_waiting(const Target& target) {
  Slot& slot = target.slot;
  while (slot.waiting.detached_blocks > limits_.detached_blocks) drop_oldest_detached(target);
  while (slot.waiting.unidentified_order.size() > limits_.unidentified_blocks) {
    const EngineKey key = slot.waiting.unidentified_order.front();
    slot.waiting.unidentified_order.pop_front();
    Block* block = slot.blocks.find(key);
    // Blocks that a GPU event has named, or is about to (HBM: detached), are not waiting here any more.
    if (block == nullptr || block->identified() || block->in_hbm()) continue;
    count(slot, *block, -1);
    slot.blocks.erase(block);
    ++target.counts.dropped_waiting;
  }
}

void PrefixIndex::drop_oldest_detached(const Target& target) {
  Waiting& waiting = target.slot.waiting;
  const auto oldest = waiting.detached.begin();
  for (auto [it, end] = waiting.by_parent.equal_range(oldest->parent); it != end; ++it) {
    if (it->second == oldest) {
      waiting.by_parent.erase(it);
      break;
    }
  }
  for (const EngineKey key : oldest->keys) {
    Block* block = target.slot.blocks.find(key);
    if (block == nullptr || block->identified()) continue;
    block->hbm = 0;
    if (block->held()) continue;
    count(target.slot, *block, -1);
    target.slot.blocks.erase(block);
  }
  target.counts.dropped_waiting += oldest->keys.size();
  waiting.detached_blocks -= oldest->keys.size();
  waiting.detached.erase(oldest);
}

// Identifies everything that waited for the blocks in `arrived`, and in turn for those.
void PrefixIndex::join_detached(const Target& target, Identified arrived) {
  Waiting& waiting = target.slot.waiting;
  while (!arrived.empty() && !waiting.detached.empty()) {
    const auto [key, hash] = arrived.back();
    arrived.pop_back();
    for (auto [it, end] = waiting.by_parent.equal_range(key); it != end;) {
      const Detached event = std::move(*it->second);
      waiting.detached.erase(it->second);
      it = waiting.by_parent.erase(it);
      waiting.detached_blocks -= event.keys.size();
      target.counts.joined += event.keys.size();
      hash_chain(hash, {event.keys, event.tokens, event.block_size, event.extra_bytes, event.extra_ends});
      for (std::size_t i = 0; i < event.keys.size(); ++i) {
        identify(target, event.keys[i], chain_hashes_[i]);
        arrived.emplace_back(event.keys[i], chain_hashes_[i]);
      }
    }
  }
}

void PrefixIndex::remember(Slot& slot, EngineKey key) {
  auto& order = slot.waiting.remembered_order;
  order.push_back(key);
  while (order.size() > limits_.remembered_blocks) {
    const EngineKey oldest = order.front();
    order.pop_front();
    Block* block = slot.blocks.find(oldest);
    if (block == nullptr || !block->identified() || block->held() || block->demoting()) continue;
    count(slot, *block, -1);
    slot.blocks.erase(block);
  }
}

}  // namespace pointsman
