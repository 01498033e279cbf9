// SPDX-License-Identifier: Apache-2.0
#include "events.hpp"

#include <algorithm>
#include <array>
#include <bit>


namespace pointsman {
namespace {

constexpr std::uint8_t kUnsigned = 0, kNegative = 1;
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

}  // namespace

void append_extra_text(std::vector<std::uint8_t>& out, std::string_view text) { append_tagged(out, 's', text); }

BatchReader::BatchReader(HashKey key)
    : integer_key_{key.k0 ^ 0x696e746567657273ULL, key.k1}, bytes_key_{key.k0 ^ 0x6279746573747269ULL, key.k1} {}

// A batch is taken whole or not at all: one that is cut short says nothing certain about where it was cut. So all
// of it is read before anything of it is used.
bool BatchReader::read(const std::uint8_t* data, std::size_t size) {
  reader_ = MsgpackReader(data, size);
  rank_.reset();
  forget_large();
  events_.clear();
  starts_.clear();
  cut({});
  std::uint32_t fields = 0, events = 0;
  if (!reader_.array(fields) || fields < 2 || !reader_.skip() || !reader_.array(events)) return false;
  for (; events != 0; --events) {
    if (reader_.at_end()) return false;
    const std::uint8_t* start = reader_.position();
    Event& event = events_.emplace_back();
    start_ = starts_.emplace_back(here());
    if (read_event(event)) continue;
    cut(start_);
    event = {};
    event.kind = EventKind::malformed;
    reader_.rewind(start);
    if (!reader_.skip()) return false;
  }
  for (std::uint32_t field = 2; field < fields; ++field) {
    const std::uint8_t* start = reader_.position();
    std::uint64_t rank = 0;
    if (field == 2 && reader_.unsigned_integer(rank) && rank <= 0xffff) rank_ = static_cast<std::uint32_t>(rank);
    reader_.rewind(start);
    if (!reader_.skip()) return false;
  }
  if (!reader_.at_end()) return false;
  place_spans();
  return true;
}

void BatchReader::cut(const Starts& at) {
  keys_.resize(at.keys);
  tokens_.resize(at.tokens);
  extra_bytes_.resize(at.extra_bytes);
  extra_ends_.resize(at.extra_ends);
}

// The vectors have stopped growing.
void BatchReader::place_spans() {
  starts_.push_back(here());
  for (std::size_t i = 0; i < events_.size(); ++i) {
    const Starts& from = starts_[i];
    const Starts& to = starts_[i + 1];
    events_[i].keys = std::span(keys_).subspan(from.keys, to.keys - from.keys);
    events_[i].tokens = std::span(tokens_).subspan(from.tokens, to.tokens - from.tokens);
    events_[i].extra_bytes = std::span(extra_bytes_).subspan(from.extra_bytes, to.extra_bytes - from.extra_bytes);
    events_[i].extra_ends = std::span(extra_ends_).subspan(from.extra_ends, to.extra_ends - from.extra_ends);
  }
}

// One enormous batch does not decide how much memory is kept for all that follow.
void BatchReader::forget_large() {
  constexpr std::size_t kKept = 1 << 20;
  if (events_.capacity() + keys_.capacity() + tokens_.capacity() + extra_bytes_.capacity() > kKept) {
    events_ = {};
    starts_ = {};
    keys_ = {};
    tokens_ = {};
    extra_bytes_ = {};
    extra_ends_ = {};
    seen_ = {};
  }
}

bool BatchReader::read_event(Event& event) {
  group_ = 0;
  saw_names_ = saw_parent_ = false;
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
      return read_names();
    case kTokens:
      return read_tokens();
    case kExtraKeys:
      return reader_.nil() || read_extra_keys();
    case kMedium:
      return read_medium(event);
    case kParent: {
      if (reader_.nil()) return true;
      saw_parent_ = read_name(event.parent);
      return saw_parent_;
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

bool BatchReader::read_name(EngineKey& out) {
  if (reader_.next_is_binary()) {
    std::string_view bytes;
    if (!reader_.binary(bytes) || bytes.empty()) return false;
    ShortSipHash hash(bytes_key_);
    hash.add(bytes.data(), bytes.size());
    out = hash.finish();
    return true;
  }
  bool negative = false;
  std::uint64_t bits = 0;
  if (!reader_.integer(bits, negative)) return false;
  ShortSipHash hash(integer_key_);
  hash.add_u64(bits);
  const std::uint8_t kind = negative ? kNegative : kUnsigned;
  hash.add(&kind, 1);
  out = hash.finish();
  return true;
}

// A field that comes twice counts as it comes last.
bool BatchReader::read_names() {
  std::uint32_t count = 0;
  if (!reader_.array(count) || count > reader_.left()) return false;
  keys_.resize(start_.keys + count);
  saw_names_ = true;
  return std::all_of(keys_.begin() + static_cast<std::ptrdiff_t>(start_.keys), keys_.end(),
                     [this](EngineKey& key) { return read_name(key); });
}

bool BatchReader::read_tokens() {
  std::uint32_t count = 0;
  if (!reader_.array(count) || count > reader_.left()) return false;
  tokens_.resize(start_.tokens + count);
  return reader_.unsigned_words(tokens_.data() + start_.tokens, count);
}

bool BatchReader::read_extra_keys() {
  std::uint32_t blocks = 0;
  if (!reader_.array(blocks) || blocks > reader_.left()) return false;
  extra_bytes_.resize(start_.extra_bytes);
  extra_ends_.resize(start_.extra_ends);
  for (std::uint32_t i = 0; i < blocks; ++i) {
    if (!reader_.nil()) {
      std::uint32_t keys = 0;
      if (!reader_.array(keys) || keys > reader_.left()) return false;
      for (std::uint32_t k = 0; k < keys; ++k) {
        if (!read_extra_key(0)) return false;
      }
    }
    extra_ends_.push_back(static_cast<std::uint32_t>(extra_bytes_.size() - start_.extra_bytes));
  }
  return true;
}

bool BatchReader::read_extra_key(int depth) {
  std::string_view bytes;
  if (reader_.nil()) {
    extra_bytes_.push_back('n');
    return true;
  }
  if (reader_.next_is_string()) {
    if (!reader_.string(bytes)) return false;
    append_tagged(extra_bytes_, 's', bytes);
    return true;
  }
  if (reader_.next_is_binary()) {
    if (!reader_.binary(bytes)) return false;
    append_tagged(extra_bytes_, 'b', bytes);
    return true;
  }
  if (reader_.next_is_integer()) {
    std::uint64_t bits = 0;
    bool negative = false;
    if (!reader_.integer(bits, negative)) return false;
    append_tagged(extra_bytes_, negative ? 'm' : 'i', {reinterpret_cast<const char*>(&bits), sizeof bits});
    return true;
  }
  std::uint32_t count = 0;
  if (depth == kMaxExtraDepth || !reader_.array(count) || count > reader_.left()) return false;
  extra_bytes_.push_back('l');
  append_length(extra_bytes_, count);
  for (std::uint32_t i = 0; i < count; ++i) {
    if (!read_extra_key(depth + 1)) return false;
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
  if (event.kind == EventKind::unknown || event.kind == EventKind::cleared) {
    cut(start_);
    return true;
  }
  if (!saw_names_) return false;
  const std::uint64_t group = group_ * 0x9e3779b97f4a7c15ULL;
  const std::span keys = std::span(keys_).subspan(start_.keys);
  for (EngineKey& key : keys) {
    key ^= group;
    if (key == 0) key = 1;
  }
  if (has_duplicate(keys)) return false;
  if (event.kind == EventKind::removed) return true;
  if (saw_parent_) {
    event.parent ^= group;
    if (event.parent == 0) event.parent = 1;
    if (std::find(keys.begin(), keys.end(), event.parent) != keys.end()) return false;
  } else {
    event.parent = 0;
  }
  if (extra_ends_.size() > start_.extra_ends && extra_ends_.size() - start_.extra_ends != keys.size()) return false;
  if (!event.lora.empty()) leave_out_adapter(event.lora);
  return true;
}

// The adapter is part of the namespace; as the first extra key of a block it would count twice.
void BatchReader::leave_out_adapter(std::string_view lora) {
  if (extra_bytes_.size() == start_.extra_bytes) return;
  std::vector<std::uint8_t> name;
  append_extra_text(name, lora);
  const auto size = static_cast<std::uint32_t>(name.size());
  std::uint32_t removed = 0, start = 0;
  for (std::uint32_t& end : std::span(extra_ends_).subspan(start_.extra_ends)) {
    const std::uint32_t next_start = end;
    start -= removed;
    end -= removed;
    const auto first = extra_bytes_.begin() + static_cast<std::ptrdiff_t>(start_.extra_bytes + start);
    if (end - start >= size && std::equal(name.begin(), name.end(), first)) {
      extra_bytes_.erase(first, first + size);
      end -= size;
      removed += size;
    }
    start = next_start;
  }
}

// By a table that is at most half full.
bool BatchReader::has_duplicate(std::span<const EngineKey> keys) {
  if (keys.size() < 2) return false;
  const std::size_t mask = std::bit_ceil(keys.size() * 2) - 1;
  seen_.assign(mask + 1, 0);  // number of the key, from 1
  for (std::size_t i = 0; i < keys.size(); ++i) {
    std::size_t at = keys[i] & mask;
    for (; seen_[at] != 0; at = (at + 1) & mask) {
      if (keys[seen_[at] - 1] == keys[i]) return true;
    }
    seen_[at] = static_cast<std::uint32_t>(i + 1);
  }
  return false;
}

}  // namespace pointsman
