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
#include <span>
#include <string_view>
#include <vector>

#include "msgpack.hpp"
#include "siphash.hpp"

namespace pointsman {

enum class Tier : std::uint8_t { hbm = 0, ram = 1, storage = 2 };
inline constexpr std::size_t kTiers = 3;

// What an engine calls a block, with its cache group: a keyed 64-bit fingerprint of the name's kind (integer or byte
// string), its bits and the group. It is compared only within one slot: among a million blocks of one worker, two
// names have the same fingerprint with a probability of 3e-8. Never 0.
using EngineKey = std::uint64_t;

enum class EventKind : std::uint8_t { stored, removed, cleared, unknown, malformed };

// What lies in spans and views is the batch's, or the payload's.
struct Event {
  EventKind kind = EventKind::unknown;
  std::optional<Tier> tier;  // empty: a medium we do not know
  std::span<const EngineKey> keys;
  EngineKey parent = 0;  // 0: none
  std::span<const std::uint32_t> tokens;
  std::uint32_t block_size = 0;
  std::string_view lora;      // adapter name; "#id" never appears here
  std::uint64_t lora_id = 0;  // of engines that publish no name; 0: none
  bool full_attention = true;  // the group's kind is one whose prefix cache is a plain prefix
  // Canonical bytes of each block's extra keys, LoRA name left out: extra_bytes[extra_ends[i-1], extra_ends[i]).
  // Empty extra_ends: the event carries none.
  std::span<const std::uint8_t> extra_bytes;
  std::span<const std::uint32_t> extra_ends;
};

// Appends the canonical form of one extra key, the same for events and for requests.
// tag 's' text, 'b' bytes, 'i' integer, 'l' list (with its count), 'n' nil; lengths are 32-bit little-endian.
void append_extra_text(std::vector<std::uint8_t>& out, std::string_view text);

// Reads one batch after another, into the same memory.
class BatchReader {
 public:
  explicit BatchReader(HashKey key);

  // False when the payload is not a whole batch. Valid until the next call, and as long as the payload.
  [[nodiscard]] bool read(const std::uint8_t* data, std::size_t size);
  // The batch's own rank, where it has one.
  [[nodiscard]] std::optional<std::uint32_t> rank() const { return rank_; }
  [[nodiscard]] std::span<const Event> events() const { return events_; }

 private:
  bool read_event(Event& event);
  bool read_map_event(Event& event);
  bool read_array_event(Event& event);
  bool read_field(Event& event, int field);
  bool read_name(EngineKey& out);
  bool read_names();
  bool read_tokens();
  bool read_extra_keys();
  bool read_extra_key(int depth);
  bool read_medium(Event& event);
  bool finish(Event& event);
  void leave_out_adapter(std::string_view lora);
  bool has_duplicate(std::span<const EngineKey> keys);
  void place_spans();
  void forget_large();

  // Where an event's parts begin in the vectors below; the next one's are where they end.
  struct Starts {
    std::size_t keys, tokens, extra_bytes, extra_ends;
  };
  [[nodiscard]] Starts here() const { return {keys_.size(), tokens_.size(), extra_bytes_.size(), extra_ends_.size()}; }
  void cut(const Starts& at);

  HashKey integer_key_, bytes_key_;
  MsgpackReader reader_;
  std::optional<std::uint32_t> rank_;
  std::vector<Event> events_;
  std::vector<Starts> starts_;
  std::vector<EngineKey> keys_;
  std::vector<std::uint32_t> tokens_;
  std::vector<std::uint8_t> extra_bytes_;
  std::vector<std::uint32_t> extra_ends_;
  std::vector<std::uint32_t> seen_;  // of has_duplicate
  // Of the event being read.
  Starts start_{};
  std::uint32_t group_ = 0;
  bool saw_names_ = false, saw_parent_ = false;
};

}  // namespace pointsman
