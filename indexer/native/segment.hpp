// SPDX-License-Identifier: Apache-2.0
// The region of layout.hpp as a whole: how large its parts are, and the small ones that grow at their ends.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "layout.hpp"
#include "mapping.hpp"
#include "view.hpp"

namespace pointsman {

// Sizes of the parts, from the number of (slot, block) pairs that the index may hold.
struct SegmentSizes {
  explicit SegmentSizes(std::size_t blocks);
  [[nodiscard]] std::size_t bytes() const { return holdings_at + holdings; }

  std::size_t max_slots, max_records, max_shards, max_sets, nodes, holdings;
  std::size_t slots_at, records_at, shards_at, sets_at, nodes_at, holdings_at;
};

// Of the writer.
class Segment {
 public:
  // In private memory where the path is empty; else a file that nobody sees before publish().
  Segment(const std::string& path, std::size_t blocks, std::uint64_t key_id);

  [[nodiscard]] const Mapping& region() const { return region_; }
  [[nodiscard]] Header& header() const { return *region_.at<Header>(0); }
  [[nodiscard]] const SegmentSizes& sizes() const { return sizes_; }
  [[nodiscard]] IndexView view() const { return {region_.data(), region_.data() + sizes_.nodes_at}; }

  // Puts the file in its place and tells the readers of the one that was there before.
  void publish();

  // A record for the next slot. Throws std::length_error when there are no more slots, or records.
  SlotId open_slot(std::string_view name);
  void retire_slot(SlotId slot);
  [[nodiscard]] SlotRecord& record(SlotId slot) const;
  // Backs everything that one batch may write at the ends of the small parts; throws std::bad_alloc.
  void prepare(std::size_t shards, std::size_t sets);
 private:
  // The first pages of a part, as far as it was used.
  struct Backed {
    std::size_t offset = 0;
    std::size_t bytes = 0;
  };
  void back(Backed& part, std::size_t bytes);

  std::string path_;
  SegmentSizes sizes_;
  Mapping region_;
  Backed slots_, records_, shards_, sets_;
  std::vector<std::uint32_t> free_records_;
};

}  // namespace pointsman
