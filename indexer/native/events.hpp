// SPDX-License-Identifier: Apache-2.0
// vLLM KV event batches (vllm/distributed/kv_events.py, 0.9 to 0.33) read from msgpack into flat scratch memory.
//
//   batch  = [ts, [event, ...], data_parallel_rank?]          (array; trailing fields may be missing or extra)
//   event  = {"type": "BlockStored", "block_hashes": ..., }   (map; since the change that tagged events)
//          | ["BlockStored", block_hashes, parent, ...]       (array by position; before it)
//
// A batch that is not whole msgpack is refused whole. Within a batch an event is read whole or refused whole:
// nothing of a malformed event reaches the index, and the reader goes on with the next one.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "msgpack.hpp"
#include "siphash.hpp"

namespace pointsman {

enum class Tier : std::uint8_t { hbm = 0, ram = 1, storage = 2 };
inline constexpr std::size_t kTiers = 3;

// An engine block hash with its cache group. Integers keep all 64 bits and their sign; byte strings of any
// length become a 110-bit keyed digest, so the two kinds cannot meet.
//
//   lo: the integer, or 64 bits of the digest
//   hi: kind (2 bits) | group (16 bits) | 46 bits of the digest (0 for integers)
struct EngineKey {
  std::uint64_t lo = 0;
  std::uint64_t hi = 0;
  friend bool operator==(const EngineKey&, const EngineKey&) = default;
};

enum class EventKind : std::uint8_t { stored, removed, cleared, unknown };

struct Event {
  EventKind kind = EventKind::unknown;
  std::optional<Tier> tier;  // empty: a medium we do not know
  std::vector<EngineKey> hashes;
  std::optional<EngineKey> parent;
  std::vector<std::uint32_t> tokens;
  std::uint32_t block_size = 0;
  std::string_view lora;   // adapter name; "#id" never appears here
  std::uint64_t lora_id = 0;  // of engines that publish no name; 0: none
  bool full_attention = true;  // the group's kind is one whose prefix cache is a plain prefix
  // Canonical bytes of each block's extra keys, LoRA name left out: extra_bytes[extra_ends[i-1], extra_ends[i]).
  // Empty extra_ends: the event carries none.
  std::vector<std::uint8_t> extra_bytes;
  std::vector<std::uint32_t> extra_ends;

  void reset();
};

// Appends the canonical form of one extra key, the same for events and for requests.
// tag 's' text, 'b' bytes, 'i' integer, 'l' list (with its count), 'n' nil; lengths are 32-bit little-endian.
void append_extra_text(std::vector<std::uint8_t>& out, std::string_view text);

class BatchReader {
 public:
  BatchReader(HashKey key, const std::uint8_t* data, std::size_t size);

  // False when the payload is not a whole batch.
  [[nodiscard]] bool ok() const { return ok_; }
  // The batch's own rank, where it has one.
  [[nodiscard]] std::optional<std::uint32_t> rank() const { return rank_; }

  enum class Next { event, malformed, done };
  // Reads the next event into `event`. `malformed`: dropped, go on.
  Next next(Event& event);

 private:
  bool read_header(MsgpackReader reader);
  bool read_event(Event& event);
  bool read_map_event(Event& event);
  bool read_array_event(Event& event);
  bool read_field(Event& event, int field);
  bool read_hash(EngineKey& out);
  bool read_hashes(Event& event);
  bool read_tokens(Event& event);
  bool read_extra_keys(Event& event);
  bool read_extra_key(std::vector<std::uint8_t>& out, int depth);
  bool read_medium(Event& event);
  bool finish(Event& event);

  HashKey key_;
  MsgpackReader reader_;
  std::uint32_t events_left_ = 0;
  std::optional<std::uint32_t> rank_;
  std::uint32_t group_ = 0;
  bool saw_hashes_ = false;
  bool ok_ = false;
};

}  // namespace pointsman
