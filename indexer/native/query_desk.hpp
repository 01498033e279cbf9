// SPDX-License-Identifier: Apache-2.0
// POST /query answered in one call: bytes of a request in, bytes of the answer out.
//
// The same answer, byte for byte, as the general path of `indexer/service` gives (`answer.py` says what it means); for
// whatever is not plain (plain_query.hpp), or may be refused, there is no answer here and the general path is asked.
//
//   groups_ : (model, tenant) -> Group   whose slots count, kept by `indexer/service/quick.py`, which knows its age
//
// For one thread at a time.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "index.hpp"
#include "plain_query.hpp"

namespace pointsman {

// Whose slot it is. Rows of a group are numbered by (registration, rank), so are its registrations and instances.
struct DeskPlace {
  SlotId slot;
  std::uint32_t instance;
  std::uint32_t registration;
  std::uint32_t row;
  bool is_store;
};

struct DeskGroup {
  std::uint32_t block_size = 0;
  std::vector<std::string> instances;       // as they are written, digits
  std::vector<std::uint32_t> row_ranks;     // rank by row
  std::vector<std::string> adapters;        // of registrations: prompts for these are in several namespaces
  std::unordered_map<SlotId, DeskPlace> places;
};

class QueryDesk {
 public:
  explicit QueryDesk(const PrefixIndex& index) : index_(index) {}

  void clear() { groups_.clear(); }
  void put(const std::string& model, const std::string& tenant, DeskGroup group);

  // The JSON of the answer to a body, valid until the next call; empty: ask the general path.
  // O(bytes + tokens + blocks + runs + rows where stores are).
  [[nodiscard]] std::string_view answer(std::string_view body);

  // The whole HTTP answer to what came over a connection; how many bytes the request has, where some are missing
  // (0: not known yet); or nothing: the general path.
  struct NotPlain {};
  using Answered = std::variant<NotPlain, std::size_t, std::string_view>;
  [[nodiscard]] Answered request(std::string_view received);

 private:
  struct Range {
    std::uint32_t begin = 0, end = 0;
  };
  // What one rank holds: its own runs, and those of its registration's store.
  struct Row {
    const DeskPlace* place;
    std::uint32_t rank;
    Range own, store;
  };
  struct Blocks {
    std::uint32_t hbm = 0, ram = 0, storage = 0, doubtful_ram = 0;
  };
  // What is said of one instance.
  struct Entry {
    std::uint32_t instance;
    std::uint64_t gpu = 0, cpu = 0, disk = 0;
    std::vector<std::pair<std::uint32_t, std::uint64_t>> ranks;  // tokens in HBM
    std::vector<std::pair<std::uint32_t, Blocks>> tiers;
  };

  const DeskGroup* group_of(const PlainQuery& query);
  void find_runs(const DeskGroup& group);
  void collect_rows(const DeskGroup& group);
  [[nodiscard]] std::uint32_t reach(const Row& row, Tier tier, std::uint32_t from) const;
  [[nodiscard]] Blocks blocks(const Row& row) const;
  void collect_entries(const DeskGroup& group);
  void write(const DeskGroup& group, std::uint64_t version);

  const PrefixIndex& index_;
  std::unordered_map<std::string, DeskGroup> groups_;
  // Kept between calls for their memory.
  std::string name_;
  PlainQuery query_;
  std::vector<std::uint64_t> hashes_;
  std::vector<Run> runs_;
  std::vector<Row> rows_;
  std::vector<Entry> entries_;
  std::vector<std::size_t> scored_;  // entries in the order in which a rank with HBM was found
  std::string json_;
  std::string http_;
};

}  // namespace pointsman
