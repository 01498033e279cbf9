// SPDX-License-Identifier: Apache-2.0
// The load board: what is promised to each rank of each worker and not yet seen done.
//
// The same as the reference in router/plan/load.py, whose docstrings say what each number means; equal inputs give
// equal floating-point results. Workers and ranks are small numbers. The board lies in private memory or in a file
// that the processes of a node map (board_state.hpp): then each process has an object of its own on it, and names of
// workers have the same numbers in all. Every promise belongs to a process; what a dead one left open, the others
// end (`reap`). Times are those of one clock for all: CLOCK_MONOTONIC.
//
// Operations are O(ranks of a worker) but for: a name that is new to a process O(workers); forget, and numbers that
// become free, O(workers); reaping a dead process and repairing what it had under its lock O(all).
// Locked inside, by a lock that its owner's death gives free; `Reading` holds it for many reads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "board_memory.hpp"
#include "board_state.hpp"

namespace pointsman {

class LoadBoard {
 public:
  struct Promised {
    std::uint32_t worker;
    std::uint32_t rank;
    double prefill_s;
    double ttft_s;
    PulledFrom sources;
    bool observable = true;
    std::int64_t prompt_tokens = 0;
    std::int64_t missing_tokens = 0;
  };

  // In private memory.
  LoadBoard();
  // In a file, made if it is not there, made anew if no living process has it. Throws std::system_error: no such
  // place, no room, or too many processes.
  explicit LoadBoard(const std::string& path);
  LoadBoard(const LoadBoard&) = delete;
  ~LoadBoard();

  // The number of a worker, which stays its own until `drop_worker`. Throws std::length_error: no place for another
  // worker, or the name is too long.
  std::uint32_t hold_worker(std::string_view name);
  // The same of one that has a number, empty of others.
  [[nodiscard]] std::optional<std::uint32_t> find_worker(std::string_view name);
  // This process needs the number no longer. False, and nothing done, while a request or a pull of it is under way.
  bool drop_worker(std::uint32_t worker);
  [[nodiscard]] std::string name(std::uint32_t worker) const;
  // The row of a rank, made if there is none; stays valid until the worker is dropped. Throws std::length_error.
  std::uint32_t row(std::uint32_t worker, std::uint32_t rank);

  // Ticket 0, of no request: there is no place for another.
  std::uint64_t promise(const Promised& request, double now_s);
  void first_token(std::uint64_t ticket, double now_s);
  void release(std::uint64_t ticket, double now_s);
  void sampled(std::uint32_t worker, std::int64_t running, std::int64_t waiting, double now_s);
  void forget(std::uint32_t worker);
  [[nodiscard]] std::vector<std::uint32_t> sessions(std::uint32_t destination) const;

  // This process lives. Ends the promises of those that do not, and returns how many these were.
  std::size_t reap(double now_s);
  // Ends all promises of this process.
  void leave(double now_s);

  // Promises that were not counted, and times that a lock was taken from a dead process.
  [[nodiscard]] std::uint64_t overflows() const;
  [[nodiscard]] std::uint64_t repairs() const;
  // Whether sums and lists agree with the promises; for tests. O(all).
  [[nodiscard]] bool consistent() const;
  // Takes the lock and keeps it; for tests of what happens then.
  void hang();

  // All that a decision asks of a rank and its worker.
  struct RankLoad {
    double queue_s = 0;
    std::int64_t decodes = 0;
    double pulls = 0;
    std::int64_t in_flight = 0;
    std::int64_t prefill_tokens = 0;
    std::int64_t active_tokens = 0;
  };

  // Numbers of one instant. Hold one no longer than it takes to copy them: all processes wait.
  class Reading {
   public:
    explicit Reading(const LoadBoard& board) : state_(*board.state_), guard_(board) {}
    [[nodiscard]] double queue_s(std::uint32_t row, double now_s) const;
    [[nodiscard]] std::int64_t decodes(std::uint32_t row, double now_s) const;
    [[nodiscard]] double prefilled_s(std::uint32_t row) const { return state_.rows[row].prefilled_s; }
    [[nodiscard]] std::int64_t prefill_tokens(std::uint32_t row) const { return state_.rows[row].prefill_tokens; }
    [[nodiscard]] std::int64_t active_tokens(std::uint32_t row) const { return state_.rows[row].active_tokens; }
    [[nodiscard]] double pulls(std::uint32_t worker) const {
      return static_cast<double>(state_.workers[worker].pull_units) / kPull;
    }
    [[nodiscard]] std::int64_t in_flight(std::uint32_t worker) const { return state_.workers[worker].in_flight; }
    [[nodiscard]] RankLoad rank(std::uint32_t row, double now_s) const;
    [[nodiscard]] bool connected(std::uint32_t source, std::uint32_t destination) const {
      return board::has(state_.sessions[source], destination);
    }
    // Who has a session with the source.
    [[nodiscard]] const board::WorkerSet& sessions(std::uint32_t source) const { return state_.sessions[source]; }

   private:
    friend class LoadBoard;
    struct Guard {
      explicit Guard(const LoadBoard& board);
      Guard(const Guard&) = delete;
      ~Guard();
      board::State& state;
    };
    const board::State& state_;
    Guard guard_;
  };

 private:
  using Guard = Reading::Guard;
  struct Others {
    std::int64_t running = 0;
    std::int64_t waiting = 0;
  };

  // With the lock held
  void make();
  void join(double seen_s);
  void be_member();
  void repair() const;
  [[nodiscard]] std::uint32_t find_name(std::string_view name) const;
  std::uint32_t row_locked(std::uint32_t worker, std::uint32_t rank);
  [[nodiscard]] std::uint32_t find_promise(std::uint64_t ticket) const;
  void add(std::uint32_t index) const;
  void end_prefill(std::uint32_t index, double now_s);
  void end(std::uint32_t index, double now_s);
  std::size_t end_all(std::uint32_t process, double now_s);
  void let_go(std::uint32_t process);
  void drop_if_unused(std::uint32_t worker) const;
  void clear_rows(std::uint32_t worker) const;
  void disconnect(std::uint32_t worker) const;
  void raise_peaks(std::uint32_t worker) const;
  [[nodiscard]] bool anyone_lives() const;

  // Requests at the worker that are not ours, by its newest sample while that is fresh.
  [[nodiscard]] static Others others(const board::Worker& worker, double now_s);

  BoardMemory memory_;
  board::State* state_;
  ProcessId self_;
  std::uint32_t process_ = kNone;  // our place in the table
  std::uint64_t forks_ = 0;        // when we took it
};

}  // namespace pointsman
