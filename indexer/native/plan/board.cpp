// SPDX-License-Identifier: Apache-2.0
// Mirrors router/plan/load.py, operation by operation: a property test drives both.
#include "board.hpp"

#include <algorithm>
#include <stdexcept>

#include "board_pool.hpp"

namespace pointsman {

using namespace board;

namespace {

constexpr double kSampleMaxAgeS = 5.0;
constexpr double kMeanWeight = 0.05;

}  // namespace

std::uint32_t LoadBoard::hold_worker(std::string_view name) {
  if (name.size() > kMostNameBytes) throw std::length_error("a worker's name has 510 bytes at most");
  const Guard guard(*this);
  be_member();
  const std::uint32_t known = find_name(name);
  if (known != kNone) return known;
  const std::uint32_t number = take<&Worker::next_free>(state_->worker_pool, state_->workers);
  if (number == kNone) throw std::length_error("the load board has no place for another worker");
  state_->names[number].bytes = static_cast<std::uint16_t>(name.size());
  std::copy(name.begin(), name.end(), state_->names[number].text.begin());
  state_->peaks[number] = {};
  Worker& worker = state_->workers[number];
  worker = {};
  worker.first_row = kNone;
  worker.held_by = std::uint64_t{1} << process_;
  commit(worker.used, true);
  return number;
}

std::optional<std::uint32_t> LoadBoard::find_worker(std::string_view name) {
  const Guard guard(*this);
  be_member();
  const std::uint32_t known = find_name(name);
  return known == kNone ? std::nullopt : std::optional(known);
}

// Holds it too.
std::uint32_t LoadBoard::find_name(std::string_view name) const {
  for (std::uint32_t number = 0; number < state_->worker_pool.begun; ++number) {
    const Name& known = state_->names[number];
    if (!state_->workers[number].used || std::string_view(known.text.data(), known.bytes) != name) continue;
    state_->workers[number].held_by |= std::uint64_t{1} << process_;
    return number;
  }
  return kNone;
}

bool LoadBoard::drop_worker(std::uint32_t worker) {
  const Guard guard(*this);
  be_member();
  Worker& one = state_->workers[worker];
  if (!one.used || one.in_flight != 0 || one.pull_units != 0) return false;
  one.held_by &= ~(std::uint64_t{1} << process_);
  drop_if_unused(worker);
  return true;
}

void LoadBoard::drop_if_unused(std::uint32_t worker) const {
  Worker& one = state_->workers[worker];
  if (!one.used || one.held_by != 0 || one.in_flight != 0 || one.pull_units != 0) return;
  std::uint32_t row = one.first_row;
  one.first_row = kNone;
  while (row != kNone) {
    const std::uint32_t next = state_->rows[row].next;
    commit(state_->rows[row].worker, kNone);
    put<&Row::next>(state_->row_pool, state_->rows, row);
    row = next;
  }
  disconnect(worker);
  commit(one.used, false);
  put<&Worker::next_free>(state_->worker_pool, state_->workers, worker);
}

std::string LoadBoard::name(std::uint32_t worker) const {
  const Guard guard(*this);
  const Name& name = state_->names[worker];
  return {name.text.data(), name.bytes};
}

std::uint32_t LoadBoard::row(std::uint32_t worker, std::uint32_t rank) {
  const Guard guard(*this);
  const std::uint32_t number = row_locked(worker, rank);
  if (number == kNone) throw std::length_error("the load board has no place for another rank");
  return number;
}

std::uint32_t LoadBoard::row_locked(std::uint32_t worker, std::uint32_t rank) {
  Worker& one = state_->workers[worker];
  for (std::uint32_t number = one.first_row; number != kNone; number = state_->rows[number].next) {
    if (state_->rows[number].rank == rank) return number;
  }
  // One that was never taken must not look like a row of worker 0.
  if (state_->row_pool.free == kNone && state_->row_pool.begun < kMostRows) {
    commit(state_->rows[state_->row_pool.begun].worker, kNone);
  }
  const std::uint32_t number = take<&Row::next>(state_->row_pool, state_->rows);
  if (number == kNone) return kNone;
  Row& row = state_->rows[number];
  row = {};
  row.rank = rank;
  row.oldest = row.newest = kNone;
  row.next = one.first_row;
  commit(row.worker, worker);
  one.first_row = number;
  return number;
}

std::uint64_t LoadBoard::promise(const Promised& request, double now_s) {
  const Guard guard(*this);
  be_member();
  const std::uint32_t row_number = row_locked(request.worker, request.rank);
  const std::uint32_t index =
      row_number == kNone ? kNone : take<&Promise::newer>(state_->promise_pool, state_->promises);
  if (index == kNone) {
    ++state_->overflows;
    return 0;
  }
  Promise& promise = state_->promises[index];
  promise = {.prefill_s = request.prefill_s,
             .due_s = now_s + request.ttft_s,
             .prompt_tokens = request.prompt_tokens,
             .missing_tokens = request.missing_tokens,
             .order = ++state_->order,
             .row = row_number,
             .sources = request.sources,
             .older = kNone,
             .newer = kNone,
             .generation = promise.generation + 1,
             .owner = process_,
             .observable = request.observable,
             .prefilling = true,
             .live = false};
  Row& row = state_->rows[row_number];
  if (row.oldest == kNone) row.progress_since_s = now_s;
  add(index);
  state_->mean_prefill_s += kMeanWeight * (request.prefill_s - state_->mean_prefill_s);
  Worker& worker = state_->workers[request.worker];
  worker.leaving = false;
  raise_peaks(request.worker);
  for (const std::uint32_t source : request.sources.all()) {
    state_->sessions[source][request.worker / 64] |= std::uint64_t{1} << request.worker % 64;
  }
  commit(promise.live, true);
  return std::uint64_t{promise.generation} << 32 | index;
}

// Counts a promise where it is counted: at its rank, its worker and the links that it crosses.
void LoadBoard::add(std::uint32_t index) const {
  Promise& promise = state_->promises[index];
  Row& row = state_->rows[promise.row];
  Worker& worker = state_->workers[row.worker];
  ++worker.in_flight;
  row.active_tokens += promise.prompt_tokens;
  if (!promise.prefilling) {
    ++row.decodes;
    return;
  }
  promise.older = row.newest;
  promise.newer = kNone;
  (row.oldest == kNone ? row.oldest : state_->promises[row.newest].newer) = index;
  row.newest = index;
  row.prefill_s += promise.prefill_s;
  row.prefill_tokens += promise.missing_tokens;
  for (const std::uint32_t source : promise.sources.all()) {
    state_->workers[source].pull_units += promise.sources.units();
    worker.pull_units += promise.sources.units();
  }
}

void LoadBoard::raise_peaks(std::uint32_t worker) const {
  auto& peaks = state_->peaks[worker];
  const auto in_flight = static_cast<std::uint32_t>(state_->workers[worker].in_flight);
  for (std::uint64_t left = state_->active; left != 0; left &= left - 1) {
    std::uint32_t& peak = peaks[static_cast<std::size_t>(__builtin_ctzll(left))];
    peak = std::max(peak, in_flight);
  }
}

void LoadBoard::first_token(std::uint64_t ticket, double now_s) {
  const Guard guard(*this);
  const std::uint32_t index = find_promise(ticket);
  if (index == kNone || !state_->promises[index].prefilling) return;
  end_prefill(index, now_s);
  ++state_->rows[state_->promises[index].row].decodes;
}

void LoadBoard::release(std::uint64_t ticket, double now_s) {
  const Guard guard(*this);
  const std::uint32_t index = find_promise(ticket);
  if (index != kNone) end(index, now_s);
}

void LoadBoard::end(std::uint32_t index, double now_s) {
  Promise& promise = state_->promises[index];
  commit(promise.live, false);
  Row& row = state_->rows[promise.row];
  Worker& worker = state_->workers[row.worker];
  --worker.in_flight;
  row.active_tokens -= promise.prompt_tokens;
  if (promise.prefilling) {
    end_prefill(index, now_s);
  } else {
    --row.decodes;
  }
  if (worker.leaving && worker.in_flight == 0) clear_rows(row.worker);
  put<&Promise::newer>(state_->promise_pool, state_->promises, index);
}

void LoadBoard::end_prefill(std::uint32_t index, double now_s) {
  Promise& promise = state_->promises[index];
  commit(promise.prefilling, false);
  Row& row = state_->rows[promise.row];
  (promise.older == kNone ? row.oldest : state_->promises[promise.older].newer) = promise.newer;
  (promise.newer == kNone ? row.newest : state_->promises[promise.newer].older) = promise.older;
  row.prefill_s = row.oldest != kNone ? row.prefill_s - promise.prefill_s : 0.0;
  row.prefill_tokens -= promise.missing_tokens;
  row.progress_since_s = now_s;
  row.prefilled_s += promise.prefill_s;
  for (const std::uint32_t source : promise.sources.all()) {
    state_->workers[source].pull_units -= promise.sources.units();
    state_->workers[row.worker].pull_units -= promise.sources.units();
  }
}

void LoadBoard::sampled(std::uint32_t worker, std::int64_t running, std::int64_t waiting, double now_s) {
  const Guard guard(*this);
  be_member();
  Worker& one = state_->workers[worker];
  std::uint32_t& peak = state_->peaks[worker][process_];
  commit(one.has_sample, false);
  one.sampled_running = running;
  one.sampled_waiting = waiting;
  one.sampled_in_flight = peak;
  one.sampled_at_s = now_s;
  one.leaving = false;
  commit(one.has_sample, true);
  peak = static_cast<std::uint32_t>(one.in_flight);
}

void LoadBoard::forget(std::uint32_t worker) {
  const Guard guard(*this);
  Worker& one = state_->workers[worker];
  one.has_sample = false;
  state_->peaks[worker] = {};
  disconnect(worker);
  if (one.in_flight != 0) {
    one.leaving = true;
  } else {
    clear_rows(worker);
  }
}

// Rows without requests have nothing but their history.
void LoadBoard::clear_rows(std::uint32_t worker) const {
  Worker& one = state_->workers[worker];
  one.leaving = false;
  for (std::uint32_t row = one.first_row; row != kNone; row = state_->rows[row].next) {
    state_->rows[row].prefilled_s = 0;
  }
}

void LoadBoard::disconnect(std::uint32_t worker) const {
  for (std::uint32_t source = 0; source < state_->worker_pool.begun; ++source) {
    state_->sessions[source][worker / 64] &= ~(std::uint64_t{1} << worker % 64);
  }
  state_->sessions[worker] = {};
}

std::vector<std::uint32_t> LoadBoard::sessions(std::uint32_t destination) const {
  const Reading reading(*this);
  std::vector<std::uint32_t> sources;
  for (std::uint32_t source = 0; source < state_->worker_pool.begun; ++source) {
    if (reading.connected(source, destination)) sources.push_back(source);
  }
  return sources;
}

double LoadBoard::Reading::queue_s(std::uint32_t row_number, double now_s) const {
  const Row& row = state_.rows[row_number];
  double own_s = 0;
  if (row.oldest != kNone) {
    const Promise& head = state_.promises[row.oldest];
    double progress_s = std::max(now_s - row.progress_since_s, 0.0);
    if (head.observable) {
      const double due_s = std::max(head.due_s - row.progress_since_s, head.prefill_s);
      progress_s = std::min(progress_s, due_s);
    }
    own_s = std::max(row.prefill_s - progress_s, 0.0);
  }
  const auto waiting = static_cast<double>(others(state_.workers[row.worker], now_s).waiting);
  return own_s + waiting * state_.mean_prefill_s;
}

std::int64_t LoadBoard::Reading::decodes(std::uint32_t row_number, double now_s) const {
  const Row& row = state_.rows[row_number];
  return row.decodes + others(state_.workers[row.worker], now_s).running;
}

LoadBoard::RankLoad LoadBoard::Reading::rank(std::uint32_t row_number, double now_s) const {
  const Row& row = state_.rows[row_number];
  return {queue_s(row_number, now_s), decodes(row_number, now_s), pulls(row.worker), in_flight(row.worker),
          row.prefill_tokens,         row.active_tokens};
}

LoadBoard::Others LoadBoard::others(const Worker& worker, double now_s) {
  if (!worker.has_sample || now_s - worker.sampled_at_s > kSampleMaxAgeS) return {};
  const std::int64_t foreign =
      std::max<std::int64_t>(worker.sampled_running + worker.sampled_waiting - worker.sampled_in_flight, 0);
  const std::int64_t waiting = std::min(worker.sampled_waiting, foreign);
  return {foreign - waiting, waiting};
}

std::uint32_t LoadBoard::find_promise(std::uint64_t ticket) const {
  const std::uint64_t index = ticket & 0xffffffff;
  if (index >= state_->promise_pool.begun) return kNone;
  const Promise& promise = state_->promises[index];
  return promise.live && promise.generation == ticket >> 32 ? static_cast<std::uint32_t>(index) : kNone;
}

}  // namespace pointsman
