// SPDX-License-Identifier: Apache-2.0
// A slot as bytes and back: for snapshots and for other replicas. Blocks without what waits for them (detached events).
//
//   record, 20 bytes, little-endian:  u64 key | u64 request hash | u16 references in HBM | u8 in RAM | u8 flags
//     flags: 1 identified, 2 doubtful RAM, 4 in storage
//
// A block that is on its way from HBM to RAM is written as one that only its identity is known of. Keys are digests
// made with the deployment's key, so records mean nothing under another one.
#include <bit>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <unordered_set>

#include "index.hpp"

namespace pointsman {
namespace {

static_assert(std::endian::native == std::endian::little, "records are written as they lie in memory");
static_assert(sizeof(Block) == PrefixIndex::kRecordBytes);

bool possible(const Block& block) {
  constexpr std::uint8_t kKnown = Block::kIdentified | Block::kDoubtfulRam | Block::kStored;
  if (block.key == 0 || (block.flags & ~kKnown) != 0) return false;
  if (!block.identified() && (!block.held() || block.request_hash != 0)) return false;
  return block.ram != 0 || !block.has(Block::kDoubtfulRam);
}

}  // namespace

std::vector<std::uint8_t> PrefixIndex::export_slot(SlotId id) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint8_t> bytes;
  const Slot* slot = find_slot(id);
  if (slot == nullptr || !slot->alive) return bytes;
  bytes.reserve(slot->blocks.size() * kRecordBytes);
  slot->blocks.for_each([&](const Block& block) {
    Block record = block;
    if (record.has(Block::kDemoting)) {
      record.hbm = 0;
      record.set(Block::kDemoting, false);
    }
    if (!possible(record)) return;
    const auto* start = reinterpret_cast<const std::uint8_t*>(&record);
    bytes.insert(bytes.end(), start, start + kRecordBytes);
  });
  return bytes;
}

std::size_t PrefixIndex::import_slot(SlotId id, std::span<const std::uint8_t> bytes, std::uint32_t block_size) {
  if (bytes.size() % kRecordBytes != 0) throw std::invalid_argument("records of a slot have 20 bytes each");
  std::vector<Block> records(bytes.size() / kRecordBytes);
  if (!records.empty()) std::memcpy(static_cast<void*>(records.data()), bytes.data(), bytes.size());
  // Checked before anything is published: nothing of a bad export may show.
  std::unordered_set<EngineKey> keys;
  keys.reserve(records.size());
  for (std::size_t i = 0; i < records.size(); ++i) {
    if (!possible(records[i]) || !keys.insert(EngineKey{records[i].key}).second) {
      throw std::invalid_argument("record " + std::to_string(i) + " is none that a slot could have");
    }
  }
  const std::lock_guard lock(mutex_);
  Slot* slot = find_slot(id);
  if (slot == nullptr || !slot->alive || slot->blocks.size() != 0) {
    throw std::invalid_argument("records go into a live slot that holds nothing");
  }
  slot->block_size = block_size;
  for (const Block& record : records) {
    *slot->blocks.insert(EngineKey{record.key}).first = record;
    count(*slot, record, +1);
    if (!record.identified()) {
      slot->waiting.unidentified_order.push_back(EngineKey{record.key});
      continue;
    }
    const std::uint64_t hash = record.request_hash;
    if (record.in_hbm()) move_holding(hash, id, index_of(Tier::hbm), +1);
    if (record.ram != 0) move_holding(hash, id, index_of(Tier::ram), +1);
    if (record.has(Block::kStored)) move_holding(hash, id, index_of(Tier::storage), +1);
    if (record.has(Block::kDoubtfulRam)) move_holding(hash, id, kDoubtfulRam, +1);
    if (!record.held()) remember(*slot, EngineKey{record.key});
  }
  ApplyCounts counts;
  bound_waiting({*slot, id, kNoSlot, counts});
  show_counts(id, *slot);
  changed();
  return slot->blocks.size();
}

}  // namespace pointsman
