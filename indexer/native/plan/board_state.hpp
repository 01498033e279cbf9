// SPDX-License-Identifier: Apache-2.0
// What a load board is made of, as it lies in private pages or in a file that several processes map. No pointers, only
// indices; everything has its place from the start, so nothing moves and no mapping grows.
//
//   | header: version, lock, counts, heads of the free lists | processes | workers | names | peaks | rows | promises |
//   | sessions |
//
//   workers[w]     requests in flight, pulls, the newest sample of the worker's metrics, who refers to its number
//   names[w]       which worker it is: numbers mean the same to all processes
//   peaks[w][p]    most requests in flight since process p last sampled the worker
//   rows[r]        one rank: queued seconds and tokens, decodes, the list of its prefilling promises, oldest first
//   promises[p]    one request; ticket = generation << 32 | p, so a ticket is valid once
//   sessions[s]    a bit for each destination that has a session with source s
//
// Promises are the truth; sums and lists follow from them, so whoever finds the lock of a dead process makes those anew
// (board_repair.cpp). That needs the flags of promises, rows and workers written before or after all else: `commit`.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <span>

#include "processes.hpp"
#include "robust_mutex.hpp"

namespace pointsman {

inline constexpr std::uint32_t kNone = 0xffffffff;
inline constexpr std::size_t kMostSources = 3;  // of one request
inline constexpr std::int64_t kPull = 6;        // units of a whole pull, so that shares of it are whole numbers too

inline constexpr std::uint32_t kMostWorkers = 4096;
inline constexpr std::uint32_t kMostRows = 16384;
inline constexpr std::uint32_t kMostPromises = 131072;
inline constexpr std::uint32_t kMostNameBytes = 510;
inline constexpr std::uint32_t kSessionWords = kMostWorkers / 64;

// Workers that a request pulls from.
struct PulledFrom {
  std::array<std::uint32_t, kMostSources> workers{};
  std::uint32_t count = 0;

  [[nodiscard]] std::span<const std::uint32_t> all() const { return std::span(workers).first(count); }
  // What each counts for on the links that it crosses.
  [[nodiscard]] std::int64_t units() const { return count == 0 ? 0 : kPull / static_cast<std::int64_t>(count); }
};

namespace board {

// Written after all that comes before it and before all that comes after it, as seen by who finds it so.
template <typename T>
void commit(T& place, T value) {
  std::atomic_ref<T>(place).store(value, std::memory_order_release);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

using WorkerSet = std::array<std::uint64_t, kSessionWords>;

inline bool has(const WorkerSet& set, std::uint32_t worker) { return (set[worker / 64] >> worker % 64 & 1) != 0; }

struct Worker {
  std::int64_t in_flight;
  std::int64_t pull_units;
  std::int64_t sampled_running;
  std::int64_t sampled_waiting;
  std::int64_t sampled_in_flight;
  double sampled_at_s;
  std::uint64_t held_by;   // a bit per process to which the number means this worker
  std::uint32_t first_row; // of its ranks
  std::uint32_t next_free;
  bool has_sample;
  bool leaving;  // forgotten, but with requests under way
  bool used;
};

struct Name {
  std::uint16_t bytes;
  std::array<char, kMostNameBytes> text;
};

struct Row {
  double prefill_s;
  double progress_since_s;
  double prefilled_s;
  std::int64_t prefill_tokens;
  std::int64_t active_tokens;
  std::int64_t decodes;
  std::uint32_t worker;  // kNone: free
  std::uint32_t rank;
  std::uint32_t oldest;  // prefilling promise
  std::uint32_t newest;
  std::uint32_t next;    // row of the worker, or next free one
};

struct Promise {
  double prefill_s;
  double due_s;
  std::int64_t prompt_tokens;
  std::int64_t missing_tokens;
  std::uint64_t order;  // promises of all count up
  std::uint32_t row;
  PulledFrom sources;
  std::uint32_t older;  // neighbours among the prefilling promises of the row; `newer` also links the free ones
  std::uint32_t newer;
  std::uint32_t generation;
  std::uint32_t owner;  // process
  bool observable;
  bool prefilling;
  bool live;
};

// Places of an array: those below `begun` were used at some time, of which the free ones form a list.
struct Pool {
  std::uint32_t begun;
  std::uint32_t free;
};

struct State {
  static constexpr std::uint64_t kVersion = 0x706d626f61726401;  // "pmboard", 1

  std::uint64_t version;  // written last; 0: not yet made
  RobustMutex mutex;
  Pool worker_pool, row_pool, promise_pool;
  std::uint64_t order;
  std::uint64_t active;  // a bit per process
  std::uint64_t overflows;  // promises for which there was no place
  std::uint64_t repairs;
  double mean_prefill_s;
  std::array<ProcessEntry, kMostProcesses> processes;
  std::array<Worker, kMostWorkers> workers;
  std::array<Name, kMostWorkers> names;
  std::array<std::array<std::uint32_t, kMostProcesses>, kMostWorkers> peaks;
  std::array<Row, kMostRows> rows;
  std::array<Promise, kMostPromises> promises;
  std::array<WorkerSet, kMostWorkers> sessions;
};

}  // namespace board
}  // namespace pointsman
