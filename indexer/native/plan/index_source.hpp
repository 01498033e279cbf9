// SPDX-License-Identifier: Apache-2.0
// Where a planner looks up who holds what: the index of this process, or one that another process writes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "../index.hpp"
#include "../reader.hpp"

namespace pointsman::plan {

class IndexSource {
 public:
  virtual ~IndexSource() = default;
  [[nodiscard]] virtual std::uint64_t version() const = 0;
  [[nodiscard]] virtual const HashChain& chain() const = 0;
  // Appends runs of blocks, see IndexView::match.
  virtual void match(std::span<const std::uint64_t> hashes, std::vector<Run>& runs, double now_s) const = 0;
};

class OwnIndex final : public IndexSource {
 public:
  explicit OwnIndex(const PrefixIndex& index) : index_(index) {}
  [[nodiscard]] std::uint64_t version() const override { return index_.version(); }
  [[nodiscard]] const HashChain& chain() const override { return index_.chain(); }
  void match(std::span<const std::uint64_t> hashes, std::vector<Run>& runs, double) const override {
    index_.match(hashes, runs);
  }

 private:
  const PrefixIndex& index_;
};

// A planner's slots are those of the file that was open when it was made: of another one nothing is found.
class ReadIndex final : public IndexSource {
 public:
  explicit ReadIndex(IndexReader& reader) : reader_(reader), generation_(reader.generation()) {}
  [[nodiscard]] std::uint64_t version() const override { return reader_.version(); }
  [[nodiscard]] const HashChain& chain() const override { return reader_.chain(); }
  void match(std::span<const std::uint64_t> hashes, std::vector<Run>& runs, double now_s) const override {
    if (reader_.match(hashes, runs, now_s) != generation_) runs.clear();
  }

 private:
  IndexReader& reader_;
  std::uint64_t generation_;
};

}  // namespace pointsman::plan
