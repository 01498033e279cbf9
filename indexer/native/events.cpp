// SPDX-License-Identifier: Apache-2.0
#include "events.hpp"

#include <algorithm>
#include <array>

namespace pointsman {
namespace {

constexpr std::uint64_t kUnsigned = 0, kNegative = 1, kBytes = 2;
constexpr std::uint32_t kMaxGroup = 0xffff;
constexpr int kMaxExtraDepth = 4;

enum Field : int {
  kBlockHashes,
  kParent,
  kTokens,
  kBlockSize,
  kLoraId,
  kMedium,
  kLoraName,
  kExtraKeys,
  kGroup,
  kSpecKind,
  kIgnored,
};

// Positions after the tag in the array form; a longer event carries fields we do not use.
constexpr std::array kStoredFields = {kBlockHashes, kParent,    kTokens, kBlockSize, kLoraId,
                                      kMedium,      kLoraName,  kExtraKeys, kGroup,  kSpecKind};
constexpr std::array kRemovedFields = {kBlockHashes, kMedium, kGroup};

struct NamedField {
  std::string_view name;
  Field field;
};
constexpr std::array kNames = {
    NamedField{"block_hashes", kBlockHashes}, NamedField{"parent_block_hash", kParent},
    NamedField{"token_ids", kTokens},         NamedField{"block_size", kBlockSize},
    NamedField{"lora_id", kLoraId},           NamedField{"medium", kMedium},
    NamedField{"lora_name", kLoraName},       NamedField{"extra_keys", kExtraKeys},
    NamedField{"group_idx", kGroup},          NamedField{"kv_cache_spec_kind", kSpecKind},
};

Field field_named(std::string_view name) {
  const auto* it = std::find_if(kNames.begin(), kNames.end(), [&](const NamedField& f) { return f.name == name; });
  return it == kNames.end() ? kIgnored : it->field;
}

EventKind kind_named(std::string_view tag) {
  if (tag == "BlockStored") return EventKind::stored;
  if (tag == "BlockRemoved") return EventKind::removed;
  if (tag == "AllBlocksCleared") return EventKind::cleared;
  return EventKind::unknown;
}

// Same spellings as indexer/identity.py.
std::optional<Tier> tier_named(std::string_view medium) {
  std::array<char, 16> lower{};
  if (medium.size() > lower.size()) return std::nullopt;
  std::transform(medium.begin(), medium.end(), lower.begin(),
                 [](char c) { return static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c); });
  const std::string_view name(lower.data(), medium.size());
  if (name == "gpu" || name == "hbm") return Tier::hbm;
  if (name == "cpu" || name == "cpu_pinned" || name == "host") return Tier::ram;
  if (name == "storage" || name == "disk" || name == "fs" || name == "obj") return Tier::storage;
  return std::nullopt;
}

void append_length(std::vector<std::uint8_t>& out, std::size_t size) {
  for (int shift = 0; shift < 32; shift += 8) out.push_back(static_cast<std::uint8_t>(size >> shift));
}

void append_tagged(std::vector<std::uint8_t>& out, char tag, std::string_view bytes) {
  out.push_back(static_cast<std::uint8_t>(tag));
  append_length(out, bytes.size());
  out.insert(out.end(), bytes.begin(), bytes.end());
}

bool has_duplicate(std::vector<EngineKey> keys) {
  std::sort(keys.begin(), keys.end(),
            [](const EngineKey& a, const EngineKey& b) { return a.hi != b.hi ? a.hi < b.hi : a.lo < b.lo; });
  return std::adjacent_find(keys.begin(), keys.end()) != keys.end();
}

}  // namespace

void Event::reset() {
  kind = EventKind::unknown;
  tier.reset();
  hashes.clear();
  parent.reset();
  tokens.clear();
  block_size = 0;
  lora = {};
  lora_id = 0;
  full_attention = true;
  extra_bytes.clear();
  extra_ends.clear();
}

void append_extra_text(std::vector<std::uint8_t>& out, std::string_view text) { append_tagged(out, 's', text); }

BatchReader::BatchReader(HashKey key, const std::uint8_t* data, std::size_t size) : key_(key) {
  ok_ = read_header(MsgpackReader(data, size));
}

// A batch is taken whole or not at all: one that is cut short says nothing certain about where it was cut.
// The rank stands behind the events, so this pass over them also finds it.
bool BatchReader::read_header(MsgpackReader reader) {
  std::uint32_t fields = 0;
  if (!reader.array(fields) || fields < 2 || !reader.skip()) return false;
  MsgpackReader events = reader;
  if (!events.array(events_left_) || !reader.skip()) return false;
  for (std::uint32_t field = 2; field < fields; ++field) {
    const std::uint8_t* start = reader.position();
    std::uint64_t rank = 0;
    if (field == 2 && reader.unsigned_integer(rank) && rank <= 0xffff) rank_ = static_cast<std::uint32_t>(rank);
    reader.rewind(start);
    if (!reader.skip()) return false;
  }
  reader_ = events;
  return reader.at_end();
}

BatchReader::Next BatchReader::next(Event& event) {
  if (events_left_ == 0) return Next::done;
  --events_left_;
  const std::uint8_t* start = reader_.position();
  event.reset();
  if (read_event(event)) return Next::event;
  reader_.rewind(start);
  reader_.skip();  // cannot fail: the header pass went over it
  return Next::malformed;
}

bool BatchReader::read_event(Event& event) {
  group_ = 0;
  saw_hashes_ = false;
  // A null medium, or none, is the GPU: engines before the offloading tiers publish nothing else.
  event.tier = Tier::hbm;
  const bool read = reader_.next_is_map() ? read_map_event(event) : read_array_event(event);
  return read && finish(event);
}

bool BatchReader::read_map_event(Event& event) {
  std::uint32_t pairs = 0;
  if (!reader_.map(pairs)) return false;
  bool tagged = false;
  for (std::uint32_t i = 0; i < pairs; ++i) {
    std::string_view name;
    if (!reader_.string(name)) return false;
    if (name == "type") {
      std::string_view tag;
      if (!reader_.string(tag)) return false;
      event.kind = kind_named(tag);
      tagged = true;
    } else if (!read_field(event, field_named(name))) {
      return false;
    }
  }
  return tagged;
}

bool BatchReader::read_array_event(Event& event) {
  std::uint32_t count = 0;
  std::string_view tag;
  if (!reader_.array(count) || count == 0 || !reader_.string(tag)) return false;
  event.kind = kind_named(tag);
  for (std::uint32_t i = 0; i + 1 < count; ++i) {
    int field = kIgnored;
    if (event.kind == EventKind::stored && i < kStoredFields.size()) field = kStoredFields[i];
    if (event.kind == EventKind::removed && i < kRemovedFields.size()) field = kRemovedFields[i];
    if (!read_field(event, field)) return false;
  }
  return true;
}

bool BatchReader::read_field(Event& event, int field) {
  std::uint64_t number = 0;
  switch (field) {
    case kBlockHashes:
      return read_hashes(event);
    case kTokens:
      return read_tokens(event);
    case kExtraKeys:
      return reader_.nil() || read_extra_keys(event);
    case kMedium:
      return read_medium(event);
    case kParent: {
      if (reader_.nil()) return true;
      EngineKey parent;
      if (!read_hash(parent)) return false;
      event.parent = parent;
      return true;
    }
    case kBlockSize:
      if (!reader_.unsigned_integer(number) || number > 0xffffffff) return false;
      event.block_size = static_cast<std::uint32_t>(number);
      return true;
    case kLoraId: {
      if (reader_.nil()) return true;
      bool negative = false;
      return reader_.integer(event.lora_id, negative);
    }
    case kLoraName:
      return reader_.nil() || reader_.string(event.lora);
    case kGroup:
      if (reader_.nil()) return true;
      if (!reader_.unsigned_integer(number) || number > kMaxGroup) return false;
      group_ = static_cast<std::uint32_t>(number);
      return true;
    case kSpecKind: {
      if (reader_.nil()) return true;
      std::string_view kind;
      if (!reader_.string(kind)) return false;
      event.full_attention = kind == "full_attention" || kind == "mla_attention" || kind == "sink_full_attention";
      return true;
    }
    default:
      return reader_.skip();
  }
}

bool BatchReader::read_hash(EngineKey& out) {
  if (reader_.next_is_binary()) {
    std::string_view bytes;
    if (!reader_.binary(bytes) || bytes.empty()) return false;
    SipHash lo(key_), hi(key_);
    lo.add("lo", 2);
    hi.add("hi", 2);
    lo.add(bytes.data(), bytes.size());
    hi.add(bytes.data(), bytes.size());
    out = {lo.finish(), kBytes << 62 | (hi.finish() >> 18)};
    return true;
  }
  bool negative = false;
  if (!reader_.integer(out.lo, negative)) return false;
  out.hi = (negative ? kNegative : kUnsigned) << 62;
  return true;
}

bool BatchReader::read_hashes(Event& event) {
  std::uint32_t count = 0;
  if (!reader_.array(count) || count > reader_.left()) return false;
  event.hashes.resize(count);
  saw_hashes_ = true;
  return std::all_of(event.hashes.begin(), event.hashes.end(), [this](EngineKey& hash) { return read_hash(hash); });
}

bool BatchReader::read_tokens(Event& event) {
  std::uint32_t count = 0;
  if (!reader_.array(count) || count > reader_.left()) return false;
  event.tokens.resize(count);
  for (std::uint32_t& token : event.tokens) {
    std::uint64_t value = 0;
    if (!reader_.unsigned_integer(value) || value > 0xffffffff) return false;
    token = static_cast<std::uint32_t>(value);
  }
  return true;
}

bool BatchReader::read_extra_keys(Event& event) {
  std::uint32_t blocks = 0;
  if (!reader_.array(blocks) || blocks > reader_.left()) return false;
  event.extra_ends.reserve(blocks);
  for (std::uint32_t i = 0; i < blocks; ++i) {
    if (!reader_.nil()) {
      std::uint32_t keys = 0;
      if (!reader_.array(keys) || keys > reader_.left()) return false;
      for (std::uint32_t k = 0; k < keys; ++k) {
        if (!read_extra_key(event.extra_bytes, 0)) return false;
      }
    }
    event.extra_ends.push_back(static_cast<std::uint32_t>(event.extra_bytes.size()));
  }
  return true;
}

bool BatchReader::read_extra_key(std::vector<std::uint8_t>& out, int depth) {
  std::string_view bytes;
  if (reader_.nil()) {
    out.push_back('n');
    return true;
  }
  if (reader_.next_is_string()) {
    if (!reader_.string(bytes)) return false;
    append_tagged(out, 's', bytes);
    return true;
  }
  if (reader_.next_is_binary()) {
    if (!reader_.binary(bytes)) return false;
    append_tagged(out, 'b', bytes);
    return true;
  }
  if (reader_.next_is_integer()) {
    std::uint64_t bits = 0;
    bool negative = false;
    if (!reader_.integer(bits, negative)) return false;
    append_tagged(out, negative ? 'm' : 'i', {reinterpret_cast<const char*>(&bits), sizeof bits});
    return true;
  }
  std::uint32_t count = 0;
  if (depth == kMaxExtraDepth || !reader_.array(count) || count > reader_.left()) return false;
  out.push_back('l');
  append_length(out, count);
  for (std::uint32_t i = 0; i < count; ++i) {
    if (!read_extra_key(out, depth + 1)) return false;
  }
  return true;
}

bool BatchReader::read_medium(Event& event) {
  if (reader_.nil()) return true;
  std::string_view medium;
  if (!reader_.string(medium)) return false;
  event.tier = tier_named(medium);
  return true;
}

// Checks what only the whole event can tell, and puts the group into every key.
bool BatchReader::finish(Event& event) {
  if (event.kind == EventKind::unknown || event.kind == EventKind::cleared) return true;
  if (!saw_hashes_) return false;
  const std::uint64_t group = std::uint64_t{group_} << 46;
  for (EngineKey& hash : event.hashes) hash.hi |= group;
  if (has_duplicate(event.hashes)) return false;
  if (event.kind == EventKind::removed) return true;
  if (event.parent) {
    event.parent->hi |= group;
    if (std::find(event.hashes.begin(), event.hashes.end(), *event.parent) != event.hashes.end()) return false;
  }
  if (!event.extra_ends.empty() && event.extra_ends.size() != event.hashes.size()) return false;
  // The adapter is part of the namespace; as the first extra key of a block it would count twice.
  if (!event.lora.empty() && !event.extra_bytes.empty()) {
    std::vector<std::uint8_t> name;
    append_extra_text(name, event.lora);
    std::uint32_t removed = 0, start = 0;
    for (std::uint32_t& end : event.extra_ends) {
      const std::uint32_t next_start = end;
      start -= removed;
      end -= removed;
      if (end - start >= name.size() && std::equal(name.begin(), name.end(), event.extra_bytes.begin() + start)) {
        const auto size = static_cast<std::uint32_t>(name.size());
        event.extra_bytes.erase(event.extra_bytes.begin() + start, event.extra_bytes.begin() + start + size);
        end -= size;
        removed += size;
      }
      start = next_start;
    }
  }
  return true;
}

}  // namespace pointsman
