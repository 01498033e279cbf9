// SPDX-License-Identifier: Apache-2.0
// Fuzz target: batches of events from the network, one after the other, on an index that is checked after each.
//
// An input is one payload, or several with kSeparator between them (a byte that msgpack never uses, four times). They
// are applied to two ranks with a store, under narrow limits, so that what waits is dropped too.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "index.hpp"

using namespace pointsman;

namespace {

constexpr std::string_view kSeparator = "\xc1\xc1\xc1\xc1";

void require(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "broken: %s\n", what.c_str());
  std::abort();
}

void require_sound(const PrefixIndex& index) {
  const std::string problem = index.check();
  require(problem.empty(), problem);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  PrefixIndex index(HashKey{1, 2}, Limits{50, 50, 50});
  const SlotId ranks[] = {index.open("m", false), index.open("m", true)};
  const SlotId store = index.open("m", false);
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  std::uint64_t version = index.version();
  for (std::uint32_t turn = 0; !rest.empty(); ++turn) {
    const std::size_t end = rest.find(kSeparator);
    const std::string_view payload = rest.substr(0, end);
    rest = end == std::string_view::npos ? std::string_view{} : rest.substr(end + kSeparator.size());
    const std::size_t held = index.distinct_blocks();
    const ApplyCounts counts =
        index.apply(ranks, turn % 2, store, reinterpret_cast<const std::uint8_t*>(payload.data()), payload.size());
    require_sound(index);
    require(index.version() >= version, "the version went back");
    version = index.version();
    require(!counts.malformed_batch || index.distinct_blocks() == held, "a malformed batch changed something");
  }
  // What each slot lists is found again by its hashes.
  for (const SlotId slot : {ranks[0], ranks[1], store}) {
    for (const auto& [hash, tiers] : index.blocks(slot)) {
      std::vector<Run> runs;
      index.match({&hash, 1}, runs);
      bool found = false;
      for (const Run& run : runs) found = found || (run.slot == slot && run.start == 0 && run.end == 1);
      require(found == (tiers != 0), "a block that a slot lists is not matched");
    }
  }
  index.clear(ranks[0]);
  require_sound(index);
  for (const SlotId slot : {ranks[0], ranks[1], store}) index.retire(slot);
  while (!index.sweep(1024)) {
  }
  require(index.distinct_blocks() == 0, "blocks are left when all slots are gone");
  require_sound(index);
  return 0;
}
