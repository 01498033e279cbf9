// SPDX-License-Identifier: Apache-2.0
// Mirrors router/plan/load.py, operation by operation: a property test drives both.
#include "board.hpp"

#include <algorithm>

namespace pointsman {
namespace {

constexpr double kSampleMaxAgeS = 5.0;
constexpr double kMeanWeight = 0.05;

}  // namespace

std::uint32_t LoadBoard::add_worker() {
  const std::lock_guard lock(mutex_);
  std::uint32_t worker = static_cast<std::uint32_t>(workers_.size());
  if (free_workers_.empty()) {
    workers_.emplace_back();
    if (workers_.size() > stride_ * 64) widen_sessions(workers_.size());
  } else {
    worker = free_workers_.back();
    free_workers_.pop_back();
    workers_[worker] = {};
  }
  workers_[worker].used = true;
  return worker;
}

bool LoadBoard::drop_worker(std::uint32_t worker) {
  const std::lock_guard lock(mutex_);
  Worker& one = workers_[worker];
  if (!one.used || one.in_flight != 0 || one.pull_units != 0) return false;
  for (std::uint32_t row = 0; row < rows_.size(); ++row) {
    if (rows_[row].worker != worker) continue;
    rows_[row] = {};
    free_rows_.push_back(row);
  }
  std::vector<std::uint64_t> keys;
  row_of_.for_each([&](std::uint64_t key, std::uint32_t) {
    if (key >> 32 == worker) keys.push_back(key);
  });
  for (const std::uint64_t key : keys) row_of_.erase(key);
  disconnect(worker);
  one.used = false;
  free_workers_.push_back(worker);
  return true;
}

std::uint32_t LoadBoard::row(std::uint32_t worker, std::uint32_t rank) {
  const std::lock_guard lock(mutex_);
  return row_locked(worker, rank);
}

std::uint32_t LoadBoard::row_locked(std::uint32_t worker, std::uint32_t rank) {
  const std::uint64_t key = std::uint64_t{worker} << 32 | rank;
  const std::uint32_t* found = row_of_.find(key);
  if (found != nullptr) return *found;
  std::uint32_t row = static_cast<std::uint32_t>(rows_.size());
  if (free_rows_.empty()) {
    rows_.emplace_back();
  } else {
    row = free_rows_.back();
    free_rows_.pop_back();
  }
  rows_[row].worker = worker;
  row_of_[key] = row;
  return row;
}

std::uint64_t LoadBoard::promise(const Promised& request, double now_s) {
  const std::lock_guard lock(mutex_);
  std::uint32_t index = static_cast<std::uint32_t>(promises_.size());
  if (free_promises_.empty()) {
    promises_.emplace_back();
  } else {
    index = free_promises_.back();
    free_promises_.pop_back();
  }
  const std::uint32_t row_number = row_locked(request.worker, request.rank);
  Row& row = rows_[row_number];
  Promise& promise = promises_[index];
  const std::uint32_t generation = promise.generation + 1;
  promise = {.prefill_s = request.prefill_s,
             .due_s = now_s + request.ttft_s,
             .prompt_tokens = request.prompt_tokens,
             .missing_tokens = request.missing_tokens,
             .row = row_number,
             .sources = request.sources,
             .older = row.newest,
             .generation = generation,
             .observable = request.observable,
             .prefilling = true,
             .live = true};
  if (row.oldest == kNone) {
    row.progress_since_s = now_s;
    row.oldest = index;
  } else {
    promises_[row.newest].newer = index;
  }
  row.newest = index;
  row.prefill_s += request.prefill_s;
  row.prefill_tokens += request.missing_tokens;
  row.active_tokens += request.prompt_tokens;
  mean_prefill_s_ += kMeanWeight * (request.prefill_s - mean_prefill_s_);
  Worker& worker = workers_[request.worker];
  worker.leaving = false;
  ++worker.in_flight;
  worker.peak = std::max(worker.peak, worker.in_flight);
  for (const std::uint32_t source : request.sources.all()) {
    workers_[source].pull_units += request.sources.units();
    worker.pull_units += request.sources.units();
    sessions_[source * stride_ + request.worker / 64] |= std::uint64_t{1} << request.worker % 64;
  }
  return std::uint64_t{generation} << 32 | index;
}

void LoadBoard::first_token(std::uint64_t ticket, double now_s) {
  const std::lock_guard lock(mutex_);
  const std::uint32_t index = find_promise(ticket);
  if (index == kNone || !promises_[index].prefilling) return;
  end_prefill(index, now_s);
  ++rows_[promises_[index].row].decodes;
}

void LoadBoard::release(std::uint64_t ticket, double now_s) {
  const std::lock_guard lock(mutex_);
  const std::uint32_t index = find_promise(ticket);
  if (index == kNone) return;
  Promise& promise = promises_[index];
  Row& row = rows_[promise.row];
  Worker& worker = workers_[row.worker];
  --worker.in_flight;
  row.active_tokens -= promise.prompt_tokens;
  if (promise.prefilling) {
    end_prefill(index, now_s);
  } else {
    --row.decodes;
  }
  if (worker.leaving && worker.in_flight == 0) clear_rows(row.worker);
  promise.live = false;
  free_promises_.push_back(index);
}

void LoadBoard::sampled(std::uint32_t worker, std::int64_t running, std::int64_t waiting, double now_s) {
  const std::lock_guard lock(mutex_);
  Worker& one = workers_[worker];
  one.sampled_running = running;
  one.sampled_waiting = waiting;
  one.sampled_in_flight = one.peak;
  one.sampled_at_s = now_s;
  one.has_sample = true;
  one.leaving = false;
  one.peak = one.in_flight;
}

void LoadBoard::forget(std::uint32_t worker) {
  const std::lock_guard lock(mutex_);
  Worker& one = workers_[worker];
  one.has_sample = false;
  one.peak = 0;
  disconnect(worker);
  if (one.in_flight != 0) {
    one.leaving = true;
  } else {
    clear_rows(worker);
  }
}

// Rows without requests have nothing but their history.
void LoadBoard::clear_rows(std::uint32_t worker) {
  workers_[worker].leaving = false;
  for (Row& row : rows_) {
    if (row.worker == worker) row.prefilled_s = 0;
  }
}

std::vector<std::uint32_t> LoadBoard::sessions(std::uint32_t destination) const {
  const Reading reading(*this);
  std::vector<std::uint32_t> sources;
  for (std::uint32_t source = 0; source < workers_.size(); ++source) {
    if (reading.connected(source, destination)) sources.push_back(source);
  }
  return sources;
}

double LoadBoard::Reading::queue_s(std::uint32_t row_number, double now_s) const {
  const Row& row = board_.rows_[row_number];
  double own_s = 0;
  if (row.oldest != kNone) {
    const Promise& head = board_.promises_[row.oldest];
    double progress_s = std::max(now_s - row.progress_since_s, 0.0);
    if (head.observable) {
      const double due_s = std::max(head.due_s - row.progress_since_s, head.prefill_s);
      progress_s = std::min(progress_s, due_s);
    }
    own_s = std::max(row.prefill_s - progress_s, 0.0);
  }
  const auto waiting = static_cast<double>(board_.others(board_.workers_[row.worker], now_s).waiting);
  return own_s + waiting * board_.mean_prefill_s_;
}

std::int64_t LoadBoard::Reading::decodes(std::uint32_t row_number, double now_s) const {
  const Row& row = board_.rows_[row_number];
  return row.decodes + board_.others(board_.workers_[row.worker], now_s).running;
}

LoadBoard::Others LoadBoard::others(const Worker& worker, double now_s) const {
  if (!worker.has_sample || now_s - worker.sampled_at_s > kSampleMaxAgeS) return {};
  const std::int64_t foreign =
      std::max<std::int64_t>(worker.sampled_running + worker.sampled_waiting - worker.sampled_in_flight, 0);
  const std::int64_t waiting = std::min(worker.sampled_waiting, foreign);
  return {foreign - waiting, waiting};
}

std::uint32_t LoadBoard::find_promise(std::uint64_t ticket) const {
  const std::uint64_t index = ticket & 0xffffffff;
  if (index >= promises_.size()) return kNone;
  const Promise& promise = promises_[index];
  return promise.live && promise.generation == ticket >> 32 ? static_cast<std::uint32_t>(index) : kNone;
}

void LoadBoard::end_prefill(std::uint32_t index, double now_s) {
  Promise& promise = promises_[index];
  Row& row = rows_[promise.row];
  promise.prefilling = false;
  (promise.older == kNone ? row.oldest : promises_[promise.older].newer) = promise.newer;
  (promise.newer == kNone ? row.newest : promises_[promise.newer].older) = promise.older;
  row.prefill_s = row.oldest != kNone ? row.prefill_s - promise.prefill_s : 0.0;
  row.prefill_tokens -= promise.missing_tokens;
  row.progress_since_s = now_s;
  row.prefilled_s += promise.prefill_s;
  for (const std::uint32_t source : promise.sources.all()) {
    workers_[source].pull_units -= promise.sources.units();
    workers_[row.worker].pull_units -= promise.sources.units();
  }
}

void LoadBoard::disconnect(std::uint32_t worker) {
  for (std::size_t source = 0; source < workers_.size(); ++source) {
    std::uint64_t* bits = &sessions_[source * stride_];
    if (source == worker) {
      std::fill_n(bits, stride_, 0);
    } else {
      bits[worker / 64] &= ~(std::uint64_t{1} << worker % 64);
    }
  }
}

void LoadBoard::widen_sessions(std::size_t workers) {
  const std::size_t capacity = std::max<std::size_t>(workers * 2, 64);
  const std::size_t stride = (capacity + 63) / 64;
  std::vector<std::uint64_t> wider(stride * 64 * stride);
  for (std::size_t source = 0; source < stride_ * 64; ++source) {
    std::copy_n(&sessions_[source * stride_], stride_, &wider[source * stride]);
  }
  sessions_ = std::move(wider);
  stride_ = stride;
}

}  // namespace pointsman
