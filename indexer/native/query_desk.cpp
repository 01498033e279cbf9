// SPDX-License-Identifier: Apache-2.0
#include "query_desk.hpp"

#include <algorithm>
#include <charconv>
#include <tuple>

namespace pointsman {
namespace {

constexpr std::string_view kDefaultTenant = "default";

std::string group_name(std::string_view model, std::string_view tenant) {
  std::string name(model);
  name += '\0';
  name += tenant;
  return name;
}

template <typename Number>
void append_number(std::string& out, Number value) {
  char digits[20];
  const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
  out.append(digits, end);
}

}  // namespace

void QueryDesk::put(const std::string& model, const std::string& tenant, DeskGroup group) {
  groups_.insert_or_assign(group_name(model, tenant), std::move(group));
}

QueryDesk::Answered QueryDesk::request(std::string_view received) {
  PlainHead head{};
  switch (read_plain_head(received, head)) {
    case HeadState::other:
      return NotPlain{};
    case HeadState::unfinished:
      return std::size_t{0};
    case HeadState::whole:
      break;
  }
  const std::size_t whole = head.head_bytes + head.body_bytes;
  if (received.size() < whole) return whole;
  if (received.size() > whole) return NotPlain{};  // another request behind it
  const std::string_view json = answer(received.substr(head.head_bytes));
  if (json.empty()) return NotPlain{};
  http_ = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ";
  append_number(http_, json.size());
  http_ += "\r\nconnection: keep-alive\r\n\r\n";
  http_ += json;
  return std::string_view(http_);
}

std::string_view QueryDesk::answer(std::string_view body) {
  if (!read_plain_query(body, query_)) return {};
  const DeskGroup* group = group_of(query_);
  if (group == nullptr) return {};
  const std::uint64_t version = index_.version();  // what follows is at least as new
  find_runs(*group);
  collect_rows(*group);
  collect_entries(*group);
  write(*group, version);
  return json_;
}

const DeskGroup* QueryDesk::group_of(const PlainQuery& query) {
  name_.assign(query.model);
  name_ += '\0';
  name_ += query.tenant.empty() ? kDefaultTenant : query.tenant;
  const auto found = groups_.find(name_);
  if (found == groups_.end()) return nullptr;
  const DeskGroup& group = found->second;
  const bool several = !query.lora.empty() && std::ranges::find(group.adapters, query.lora) != group.adapters.end();
  return several ? nullptr : &group;
}

void QueryDesk::find_runs(const DeskGroup& group) {
  std::vector<std::uint8_t> extra;
  if (!query_.salt.empty()) append_extra_text(extra, query_.salt);
  hashes_.clear();
  runs_.clear();
  const HashChain& chain = index_.chain();
  chain.blocks(chain.root(query_.model, query_.lora), query_.tokens, group.block_size, extra, hashes_);
  index_.match(hashes_, runs_);
  std::ranges::sort(runs_, {}, [](const Run& run) { return std::tuple(run.slot, run.tier, run.start); });
}

// Rows of ranks in the order of their slots, then those of ranks whose store alone holds something.
void QueryDesk::collect_rows(const DeskGroup& group) {
  rows_.clear();
  const auto each_slot = [&](bool stores, auto use) {
    for (std::uint32_t begin = 0, end = 0; begin < runs_.size(); begin = end) {
      while (end < runs_.size() && runs_[end].slot == runs_[begin].slot) ++end;
      const auto place = group.places.find(runs_[begin].slot);
      if (place != group.places.end() && place->second.is_store == stores) use(place->second, Range{begin, end});
    }
  };
  each_slot(false, [&](const DeskPlace& place, Range runs) {
    rows_.push_back({&place, group.row_ranks[place.row], runs, {}});
  });
  each_slot(true, [&](const DeskPlace& place, Range runs) {
    const bool known = std::ranges::any_of(rows_, [&](const Row& row) { return row.place->row == place.row; });
    if (!known) rows_.push_back({&place, group.row_ranks[place.row], {}, {}});
    for (Row& row : rows_) {
      if (row.place->registration == place.registration) row.store = runs;
    }
  });
}

// Where the run that covers block `from` ends; `from` where none does.
std::uint32_t QueryDesk::reach(const Row& row, Tier tier, std::uint32_t from) const {
  const auto wanted = static_cast<std::uint8_t>(tier);
  for (const Range& range : {row.own, row.store}) {
    for (std::uint32_t i = range.begin; i < range.end; ++i) {
      const Run& run = runs_[i];
      if (run.tier == wanted && !run.doubtful && !run.demoting && run.start <= from && from < run.end) return run.end;
    }
  }
  return from;
}

QueryDesk::Blocks QueryDesk::blocks(const Row& row) const {
  Blocks count;
  for (const Range& range : {row.own, row.store}) {
    for (std::uint32_t i = range.begin; i < range.end; ++i) {
      const Run& run = runs_[i];
      const std::uint32_t length = run.end - run.start;
      if (run.doubtful || run.demoting) {
        count.doubtful_ram += length;
      } else if (run.tier == static_cast<std::uint8_t>(Tier::hbm)) {
        count.hbm += length;
      } else if (run.tier == static_cast<std::uint8_t>(Tier::ram)) {
        count.ram += length;
      } else {
        count.storage += length;
      }
    }
  }
  return count;
}

void QueryDesk::collect_entries(const DeskGroup& group) {
  entries_.clear();
  scored_.clear();
  std::vector<std::uint32_t> numbers(group.instances.size(), 0);  // of an instance's entry, from 1
  for (const Row& row : rows_) {
    const std::uint32_t hbm = reach(row, Tier::hbm, 0);
    const std::uint32_t ram = reach(row, Tier::ram, hbm);
    const std::uint32_t storage = reach(row, Tier::storage, ram);
    if (storage == 0) continue;
    std::uint32_t& number = numbers[row.place->instance];
    if (number == 0) {
      entries_.push_back({.instance = row.place->instance, .ranks = {}, .tiers = {}});
      number = static_cast<std::uint32_t>(entries_.size());
    }
    Entry& entry = entries_[number - 1];
    const auto tokens = [&](std::uint32_t count) { return std::uint64_t{count} * group.block_size; };
    entry.gpu = std::max(entry.gpu, tokens(hbm));
    entry.cpu = std::max(entry.cpu, tokens(ram));
    entry.disk = std::max(entry.disk, tokens(storage));
    const auto of_rank = [&](auto& list) { return std::ranges::find(list, row.rank, [](auto& one) { return one.first; }); };
    const auto known = of_rank(entry.tiers);
    if (known == entry.tiers.end()) {
      entry.tiers.emplace_back(row.rank, blocks(row));
    } else {
      known->second = blocks(row);
    }
    if (hbm == 0) continue;
    if (entry.ranks.empty()) scored_.push_back(number - 1);
    const auto scored = of_rank(entry.ranks);
    if (scored == entry.ranks.end()) {
      entry.ranks.emplace_back(row.rank, tokens(hbm));
    } else {
      scored->second = std::max(scored->second, tokens(hbm));
    }
  }
}

void QueryDesk::write(const DeskGroup& group, std::uint64_t version) {
  std::string& out = json_;
  const auto number = [&](std::string_view before, auto value) {
    out += before;
    append_number(out, value);
  };
  const auto ranks = [&](const Entry& entry) {
    out += '{';
    std::string_view before = "\"";
    for (const auto& [rank, tokens] : entry.ranks) {
      number(before, rank);
      number("\":", tokens);
      before = ",\"";
    }
    out += '}';
  };
  const auto name = [&](std::string_view before, const Entry& entry) {
    out += before;
    out += group.instances[entry.instance];
    out += "\":";
  };
  out = "{\"scores\":{";
  for (std::size_t i = 0; i < scored_.size(); ++i) {
    name(i == 0 ? "\"" : ",\"", entries_[scored_[i]]);
    ranks(entries_[scored_[i]]);
  }
  out += "},\"frequencies\":[],\"instances\":{";
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    name(i == 0 ? "\"" : ",\"", entry);
    number("{\"longest_matched\":", entry.disk);
    number(",\"gpu\":", entry.gpu);
    out += ",\"dp\":";
    ranks(entry);
    number(",\"cpu\":", entry.cpu);
    number(",\"disk\":", entry.disk);
    out += ",\"tiers\":{";
    std::string_view before = "\"";
    for (const auto& [rank, held] : entry.tiers) {
      number(before, rank);
      number("\":{\"hbm\":", held.hbm);
      number(",\"ram\":", held.ram);
      number(",\"storage\":", held.storage);
      number(",\"doubtful_ram\":", held.doubtful_ram);
      out += '}';
      before = ",\"";
    }
    out += "}}";
  }
  number("},\"index_version\":", version);
  out += '}';
}

}  // namespace pointsman
