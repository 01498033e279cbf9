// SPDX-License-Identifier: Apache-2.0
// Processes that come, go and die with a load board: membership, what dead ones left open, and sums and lists made
// anew from the promises.
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <system_error>

#include "board.hpp"
#include "board_pool.hpp"

namespace pointsman {

using namespace board;

namespace {

// A process that cannot be looked at, and has not said that it lives for so long, has no promises any more; and its
// place in the table is given to another when there is no other left.
constexpr double kLeaseS = 30.0;
constexpr double kPlaceLeaseS = 600.0;

double clock_s() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

std::uint64_t bit(std::uint32_t process) { return std::uint64_t{1} << process; }

template <typename Visit>
void each_process(std::uint64_t active, Visit&& visit) {
  for (; active != 0; active &= active - 1) visit(static_cast<std::uint32_t>(__builtin_ctzll(active)));
}

}  // namespace

LoadBoard::LoadBoard() : memory_(sizeof(State)), state_(static_cast<State*>(memory_.data())) {
  make();
  self_ = ProcessId::self();
  join(clock_s());
}

LoadBoard::LoadBoard(const std::string& path)
    : memory_(path, sizeof(State)), state_(static_cast<State*>(memory_.data())), self_(ProcessId::self()) {
  if (std::atomic_ref(state_->version).load(std::memory_order_acquire) != State::kVersion || !anyone_lives()) make();
  {
    const Guard guard(*this);
    join(clock_s());
  }
  memory_.ready();
}

LoadBoard::~LoadBoard() {
  if (memory_.shared() && process_ != kNone && forks_ == fork_count()) leave(clock_s());
}

LoadBoard::Guard::Guard(const LoadBoard& board) : state(*board.state_) {
  if (state.mutex.lock()) board.repair();
}
LoadBoard::Guard::~Guard() { state.mutex.unlock(); }

void LoadBoard::make() {
  if (state_->version != 0) {
    commit(state_->version, std::uint64_t{0});
    std::memset(static_cast<void*>(state_), 0, sizeof(State));  // what it held before
  }
  state_->mutex.init();
  state_->worker_pool = state_->row_pool = state_->promise_pool = {0, kNone};
  commit(state_->version, State::kVersion);
}

bool LoadBoard::anyone_lives() const {
  bool found = false;
  each_process(state_->active, [&](std::uint32_t process) {
    found = found || life_of(state_->processes[process].id, self_) != Life::dead;
  });
  return found;
}

// A place in the table of processes.
void LoadBoard::join(double seen_s) {
  std::uint32_t place = kNone;
  if (~state_->active != 0) place = static_cast<std::uint32_t>(__builtin_ctzll(~state_->active));
  double longest_s = kPlaceLeaseS;
  each_process(place == kNone ? state_->active : 0, [&](std::uint32_t process) {
    const ProcessEntry& entry = state_->processes[process];
    const Life life = life_of(entry.id, self_);
    const double silent_s = life == Life::dead ? std::numeric_limits<double>::infinity() : seen_s - entry.seen_s;
    if (life == Life::alive || silent_s <= longest_s) return;
    place = process;
    longest_s = silent_s;
  });
  if (place == kNone) throw std::system_error(EUSERS, std::generic_category(), "processes of a load board");
  if ((state_->active & bit(place)) != 0) {
    end_all(place, seen_s);
    let_go(place);
  }
  state_->processes[place] = {self_, seen_s};
  for (std::uint32_t worker = 0; worker < state_->worker_pool.begun; ++worker) {
    state_->peaks[worker][place] = static_cast<std::uint32_t>(state_->workers[worker].in_flight);
  }
  commit(state_->active, state_->active | bit(place));
  process_ = place;
  forks_ = fork_count();
}

// After a fork the child is a process of its own, to which numbers mean what they meant to its parent.
void LoadBoard::be_member() {
  if (forks_ == fork_count()) return;
  const std::uint32_t parent = process_;
  self_ = ProcessId::self();
  join(clock_s());
  for (std::uint32_t worker = 0; worker < state_->worker_pool.begun; ++worker) {
    Worker& one = state_->workers[worker];
    if ((one.held_by & bit(parent)) != 0) one.held_by |= bit(process_);
  }
}

std::size_t LoadBoard::reap(double now_s) {
  std::uint64_t active = 0;
  std::array<ProcessEntry, kMostProcesses> entries;
  {
    const Guard guard(*this);
    be_member();
    state_->processes[process_].seen_s = now_s;
    active = state_->active & ~bit(process_);
    if (active == 0) return 0;
    entries = state_->processes;
  }
  std::uint64_t dead = 0, silent = 0;
  each_process(active, [&](std::uint32_t process) {
    const Life life = life_of(entries[process].id, self_);
    if (life == Life::dead) dead |= bit(process);
    if (life == Life::unknown && now_s - entries[process].seen_s > kLeaseS) silent |= bit(process);
  });
  if ((dead | silent) == 0) return 0;
  const Guard guard(*this);
  std::size_t ended = 0;
  each_process((dead | silent) & state_->active, [&](std::uint32_t process) {
    const ProcessEntry& now = state_->processes[process];
    if (now.id != entries[process].id || now.seen_s != entries[process].seen_s) return;
    ended += end_all(process, now_s);
    if ((dead & bit(process)) != 0) let_go(process);
  });
  return ended;
}

void LoadBoard::leave(double now_s) {
  const Guard guard(*this);
  if (process_ == kNone || forks_ != fork_count()) return;
  end_all(process_, now_s);
  let_go(process_);
  process_ = kNone;
}

std::size_t LoadBoard::end_all(std::uint32_t process, double now_s) {
  std::size_t ended = 0;
  for (std::uint32_t index = 0; index < state_->promise_pool.begun; ++index) {
    const Promise& promise = state_->promises[index];
    if (!promise.live || promise.owner != process) continue;
    end(index, now_s);
    ++ended;
  }
  return ended;
}

// The process is gone: nothing means anything to it.
void LoadBoard::let_go(std::uint32_t process) {
  for (std::uint32_t worker = 0; worker < state_->worker_pool.begun; ++worker) {
    state_->workers[worker].held_by &= ~bit(process);
    drop_if_unused(worker);
  }
  commit(state_->active, state_->active & ~bit(process));
}

void LoadBoard::repair() const {
  State& s = *state_;
  for (std::uint32_t i = 0; i < s.worker_pool.begun; ++i) {
    s.workers[i].in_flight = s.workers[i].pull_units = 0;
    s.workers[i].first_row = kNone;
  }
  for (std::uint32_t i = 0; i < s.row_pool.begun; ++i) {
    Row& row = s.rows[i];
    if (row.worker == kNone) continue;
    if (!s.workers[row.worker].used) {
      row.worker = kNone;
      continue;
    }
    row.prefill_s = 0;
    row.prefill_tokens = row.active_tokens = row.decodes = 0;
    row.oldest = row.newest = kNone;
    row.next = s.workers[row.worker].first_row;
    s.workers[row.worker].first_row = i;
  }
  std::vector<std::uint32_t> live;
  for (std::uint32_t i = 0; i < s.promise_pool.begun; ++i) {
    if (s.promises[i].live) live.push_back(i);
  }
  std::ranges::sort(live, {}, [&](std::uint32_t i) { return s.promises[i].order; });
  for (const std::uint32_t i : live) add(i);
  collect<&Worker::next_free>(s.worker_pool, s.workers, [](const Worker& one) { return !one.used; });
  collect<&Row::next>(s.row_pool, s.rows, [](const Row& one) { return one.worker == kNone; });
  collect<&Promise::newer>(s.promise_pool, s.promises, [](const Promise& one) { return !one.live; });
  for (std::uint32_t i = 0; i < s.worker_pool.begun; ++i) {
    if (!s.workers[i].used) continue;
    raise_peaks(i);
    drop_if_unused(i);
  }
  ++s.repairs;
}

std::uint64_t LoadBoard::overflows() const {
  const Guard guard(*this);
  return state_->overflows;
}

std::uint64_t LoadBoard::repairs() const {
  const Guard guard(*this);
  return state_->repairs;
}

void LoadBoard::hang() { static_cast<void>(state_->mutex.lock()); }

}  // namespace pointsman
