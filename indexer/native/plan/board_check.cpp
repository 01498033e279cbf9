// SPDX-License-Identifier: Apache-2.0
// Whether the sums and lists of a load board are those of its promises.
#include <algorithm>
#include <cmath>

#include "board.hpp"

namespace pointsman {

using namespace board;

namespace {

struct OfRank {
  std::int64_t active_tokens = 0, decodes = 0, prefill_tokens = 0;
  double prefill_s = 0;

  [[nodiscard]] bool is(const Row& row) const {
    return active_tokens == row.active_tokens && decodes == row.decodes && prefill_tokens == row.prefill_tokens &&
           std::abs(prefill_s - row.prefill_s) < 1e-6;
  }
};

struct OfWorker {
  std::int64_t in_flight = 0, pull_units = 0;

  [[nodiscard]] bool is(const Worker& one) const {
    return in_flight == one.in_flight && pull_units == one.pull_units;
  }
};

// Whether the list of a rank is sound, has only its own promises, and each that is due to be listed once.
bool listed_well(const State& s, std::uint32_t row, std::vector<std::uint32_t>& due) {
  std::uint32_t older = kNone;
  for (std::uint32_t i = s.rows[row].oldest; i != kNone; older = i, i = s.promises[i].newer) {
    if (s.promises[i].row != row || s.promises[i].older != older || due[i] == 0) return false;
    --due[i];
  }
  return s.rows[row].newest == older;
}

}  // namespace

bool LoadBoard::consistent() const {
  const Guard guard(*this);
  const State& s = *state_;
  std::vector<OfRank> rows(s.row_pool.begun);
  std::vector<OfWorker> workers(s.worker_pool.begun);
  std::vector<std::uint32_t> due(s.promise_pool.begun);
  for (std::uint32_t i = 0; i < s.promise_pool.begun; ++i) {
    const Promise& one = s.promises[i];
    if (!one.live) continue;
    const std::uint32_t worker = s.rows[one.row].worker;
    if (worker == kNone || !s.workers[worker].used) return false;
    ++workers[worker].in_flight;
    rows[one.row].active_tokens += one.prompt_tokens;
    rows[one.row].decodes += one.prefilling ? 0 : 1;
    if (!one.prefilling) continue;
    due[i] = 1;
    rows[one.row].prefill_tokens += one.missing_tokens;
    rows[one.row].prefill_s += one.prefill_s;
    for (const std::uint32_t source : one.sources.all()) {
      workers[source].pull_units += one.sources.units();
      workers[worker].pull_units += one.sources.units();
    }
  }
  for (std::uint32_t i = 0; i < s.row_pool.begun; ++i) {
    if (s.rows[i].worker != kNone && !(rows[i].is(s.rows[i]) && listed_well(s, i, due))) return false;
  }
  for (std::uint32_t i = 0; i < s.worker_pool.begun; ++i) {
    if (s.workers[i].used && !workers[i].is(s.workers[i])) return false;
  }
  return std::ranges::count(due, 1u) == 0;
}

}  // namespace pointsman
