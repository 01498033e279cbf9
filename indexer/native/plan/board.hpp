// SPDX-License-Identifier: Apache-2.0
// The load board: what is promised to each rank of each worker and not yet seen done.
//
// The same as the reference in router/plan/load.py, whose docstrings say what each number means; equal inputs give
// equal floating-point results. Workers and ranks are small numbers that the caller maps to names. Everything is in
// plain arrays linked by indices, so that the whole can move to a shared mapping.
//
//   workers_[w]    requests in flight, pulls, the newest sample of the worker's metrics
//   rows_[r]       one rank: queued seconds and tokens, decodes, the list of its prefilling promises, oldest first
//   promises_[p]   one request; ticket = generation << 32 | p, so a ticket is valid once
//   sessions_      a bit for each (source, destination) that has a session
//
// All operations are O(1) but for forget and adding workers. Locked inside; `Reading` holds the lock for many reads.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "../flat_map.hpp"

namespace pointsman {

inline constexpr std::uint32_t kNone = 0xffffffff;
inline constexpr std::size_t kMostSources = 3;  // of one request
inline constexpr std::int64_t kPull = 6;        // units of a whole pull, so that shares of it are whole numbers too

// Workers that a request pulls from.
struct PulledFrom {
  std::array<std::uint32_t, kMostSources> workers{};
  std::uint32_t count = 0;

  [[nodiscard]] std::span<const std::uint32_t> all() const { return std::span(workers).first(count); }
  // What each counts for on the links that it crosses.
  [[nodiscard]] std::int64_t units() const { return count == 0 ? 0 : kPull / static_cast<std::int64_t>(count); }
};

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

  std::uint32_t add_worker();
  // False, and nothing done, while a request or a pull of the worker is under way.
  bool drop_worker(std::uint32_t worker);
  // The row of a rank, made if there is none; stays valid until the worker is dropped.
  std::uint32_t row(std::uint32_t worker, std::uint32_t rank);

  std::uint64_t promise(const Promised& request, double now_s);
  void first_token(std::uint64_t ticket, double now_s);
  void release(std::uint64_t ticket, double now_s);
  void sampled(std::uint32_t worker, std::int64_t running, std::int64_t waiting, double now_s);
  void forget(std::uint32_t worker);
  [[nodiscard]] std::vector<std::uint32_t> sessions(std::uint32_t destination) const;

  // Numbers of one instant. Hold one no longer than a decision takes.
  class Reading {
   public:
    explicit Reading(const LoadBoard& board) : board_(board), lock_(board.mutex_) {}
    [[nodiscard]] double queue_s(std::uint32_t row, double now_s) const;
    [[nodiscard]] std::int64_t decodes(std::uint32_t row, double now_s) const;
    [[nodiscard]] double prefilled_s(std::uint32_t row) const { return board_.rows_[row].prefilled_s; }
    [[nodiscard]] std::int64_t prefill_tokens(std::uint32_t row) const { return board_.rows_[row].prefill_tokens; }
    [[nodiscard]] std::int64_t active_tokens(std::uint32_t row) const { return board_.rows_[row].active_tokens; }
    [[nodiscard]] double pulls(std::uint32_t worker) const {
      return static_cast<double>(board_.workers_[worker].pull_units) / kPull;
    }
    [[nodiscard]] std::int64_t in_flight(std::uint32_t worker) const { return board_.workers_[worker].in_flight; }
    [[nodiscard]] bool connected(std::uint32_t source, std::uint32_t destination) const {
      return (board_.sessions_[source * board_.stride_ + destination / 64] >> destination % 64 & 1) != 0;
    }

   private:
    const LoadBoard& board_;
    std::lock_guard<std::mutex> lock_;
  };

 private:
  struct Worker {
    std::int64_t in_flight = 0;
    std::int64_t peak = 0;  // of in_flight since the newest sample
    std::int64_t pull_units = 0;
    std::int64_t sampled_running = 0;
    std::int64_t sampled_waiting = 0;
    std::int64_t sampled_in_flight = 0;
    double sampled_at_s = 0;
    bool has_sample = false;
    bool leaving = false;  // forgotten, but with requests under way
    bool used = false;
  };
  struct Row {
    double prefill_s = 0;
    double progress_since_s = 0;
    double prefilled_s = 0;
    std::int64_t prefill_tokens = 0;
    std::int64_t active_tokens = 0;
    std::int64_t decodes = 0;
    std::uint32_t worker = kNone;  // kNone: free
    std::uint32_t oldest = kNone;  // prefilling promise
    std::uint32_t newest = kNone;
  };
  struct Promise {
    double prefill_s = 0;
    double due_s = 0;
    std::int64_t prompt_tokens = 0;
    std::int64_t missing_tokens = 0;
    std::uint32_t row = kNone;
    PulledFrom sources;
    std::uint32_t older = kNone;  // neighbours among the prefilling promises of the row
    std::uint32_t newer = kNone;
    std::uint32_t generation = 0;
    bool observable = true;
    bool prefilling = false;
    bool live = false;
  };
  struct Others {
    std::int64_t running = 0;
    std::int64_t waiting = 0;
  };
  struct HashRowKey {
    std::size_t operator()(std::uint64_t key) const noexcept { return mix64(key); }
  };

  std::uint32_t row_locked(std::uint32_t worker, std::uint32_t rank);
  [[nodiscard]] std::uint32_t find_promise(std::uint64_t ticket) const;
  void end_prefill(std::uint32_t index, double now_s);
  void clear_rows(std::uint32_t worker);
  // Requests at the worker that are not ours, by its newest sample while that is fresh.
  [[nodiscard]] Others others(const Worker& worker, double now_s) const;
  void disconnect(std::uint32_t worker);
  void widen_sessions(std::size_t workers);

  std::vector<Worker> workers_;
  std::vector<std::uint32_t> free_workers_;
  std::vector<Row> rows_;
  std::vector<std::uint32_t> free_rows_;
  FlatMap<std::uint64_t, std::uint32_t, HashRowKey> row_of_;  // worker << 32 | rank
  std::vector<Promise> promises_;
  std::vector<std::uint32_t> free_promises_;
  std::vector<std::uint64_t> sessions_;  // stride_ words per source
  std::size_t stride_ = 0;
  double mean_prefill_s_ = 0;
  mutable std::mutex mutex_;
};

}  // namespace pointsman
