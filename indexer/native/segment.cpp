// SPDX-License-Identifier: Apache-2.0
#include "segment.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "atomics.hpp"

namespace pointsman {
namespace {

constexpr std::size_t kBackedStep = 64 * 1024;
// Offsets are counted in 64 bytes and 32 bits.
constexpr std::size_t kLargestArena = std::size_t{100} << 30;

std::size_t arena_bytes(std::size_t bytes) {
  return std::min(whole_pages(bytes + (std::size_t{64} << 20)), kLargestArena);
}

}  // namespace

// A full table takes 13 to 18 bytes a block, and as much again while all shards grow; a set of one holding takes 128.
SegmentSizes::SegmentSizes(std::size_t blocks)
    : max_slots(std::size_t{1} << 24),
      max_records(1 << 16),
      max_shards(std::bit_ceil(blocks / 256 + 16)),
      max_sets(blocks + 4096),
      nodes(arena_bytes(blocks * 48)),
      holdings(arena_bytes(blocks * 136)),
      slots_at(whole_pages(sizeof(Header))),
      records_at(slots_at + whole_pages(max_slots * sizeof(std::uint32_t))),
      shards_at(records_at + whole_pages(max_records * sizeof(SlotRecord))),
      sets_at(shards_at + whole_pages(max_shards * sizeof(std::uint64_t))),
      nodes_at(sets_at + whole_pages(max_sets * sizeof(SetHeader))),
      holdings_at(nodes_at + nodes) {}

Segment::Segment(const std::string& path, std::size_t blocks, std::uint64_t key_id)
    : path_(path),
      sizes_(blocks),
      region_(path.empty() ? Mapping::anonymous(sizes_.bytes()) : Mapping::create(path, sizes_.bytes())),
      slots_{sizes_.slots_at},
      records_{sizes_.records_at},
      shards_{sizes_.shards_at},
      sets_{sizes_.sets_at} {
  region_.commit(0, kPageBytes);
  prepare(1, 1);
  Header& head = header();
  head.magic = Header::kMagic;
  head.layout = Header::kLayout;
  head.bytes = sizes_.bytes();
  head.key_id = key_id;
  head.slots = sizes_.slots_at;
  head.records = sizes_.records_at;
  head.shards = sizes_.shards_at;
  head.sets = sizes_.sets_at;
  head.nodes = sizes_.nodes_at;
  head.holdings = sizes_.holdings_at;
  head.max_slots = sizes_.max_slots;
  head.max_records = sizes_.max_records;
  head.max_shards = sizes_.max_shards;
  head.max_sets = sizes_.max_sets;
}

void Segment::publish() {
  if (path_.empty()) return;
  Mapping before;
  try {
    before = Mapping::attach(path_, Mapping::Access::read_write);
  } catch (const std::system_error&) {
    // Nobody was there.
  }
  region_.publish();
  if (before.size() >= sizeof(Header) && before.at<Header>(0)->magic == Header::kMagic) {
    store(before.at<Header>(0)->superseded, 1U);
  }
}

SlotId Segment::open_slot(std::string_view name) {
  Header& head = header();
  const SlotId slot = head.slot_count;
  if (slot == sizes_.max_slots) throw std::length_error("the index has no numbers left for new holders");
  std::uint32_t place = head.record_count;
  if (!free_records_.empty()) {
    place = free_records_.back();
  } else if (place == sizes_.max_records) {
    throw std::length_error("the index has no place left for another holder");
  }
  back(slots_, (std::size_t{slot} + 1) * sizeof(std::uint32_t));
  back(records_, (std::size_t{place} + 1) * sizeof(SlotRecord));
  if (!free_records_.empty()) free_records_.pop_back();
  SlotRecord& one = region_.at<SlotRecord>(sizes_.records_at)[place];
  if (one.version % 2 == 0) store(one.version, one.version + 1);
  store(one.slot, slot);
  store(one.flags, 0U);
  store(one.block_size, 0U);
  for (std::uint64_t& count : one.counts) store(count, std::uint64_t{0});
  std::array<std::uint64_t, SlotRecord::kNameWords> words{};
  const std::size_t bytes = std::min(name.size(), sizeof words);
  if (bytes != 0) std::memcpy(words.data(), name.data(), bytes);
  for (std::size_t i = 0; i < words.size(); ++i) store(one.name[i], words[i]);
  store(one.name_bytes, std::uint64_t{bytes});
  store(one.version, one.version + 1);
  store(region_.at<std::uint32_t>(sizes_.slots_at)[slot], place);
  if (place == head.record_count) store(head.record_count, place + 1);
  store(head.slot_count, slot + 1);
  return slot;
}

void Segment::retire_slot(SlotId slot) {
  std::uint32_t& place = region_.at<std::uint32_t>(sizes_.slots_at)[slot];
  free_records_.push_back(place);
  store(place, kNobodyHere);
}

SlotRecord& Segment::record(SlotId slot) const {
  return region_.at<SlotRecord>(sizes_.records_at)[region_.at<std::uint32_t>(sizes_.slots_at)[slot]];
}

void Segment::prepare(std::size_t shards, std::size_t sets) {
  back(shards_, std::min(shards, sizes_.max_shards) * sizeof(std::uint64_t));
  back(sets_, std::min(sets, sizes_.max_sets) * sizeof(SetHeader));
}

void Segment::back(Backed& part, std::size_t bytes) {
  if (bytes <= part.bytes) return;
  const std::size_t wanted = (bytes + kBackedStep - 1) / kBackedStep * kBackedStep;
  region_.commit(part.offset + part.bytes, wanted - part.bytes);
  part.bytes = wanted;
}

}  // namespace pointsman
