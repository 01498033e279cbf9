// SPDX-License-Identifier: Apache-2.0
// Which processes share a mapping, and which of them live. A process is its pid and its start time, as a pid is given
// again; one of another pid namespace cannot be looked at and is judged by when it last said that it lives.
#pragma once

#include <cstdint>

namespace pointsman {

inline constexpr std::uint32_t kMostProcesses = 64;

struct ProcessId {
  std::uint64_t pid = 0;  // 0: nobody
  std::uint64_t started = 0;    // clock ticks since boot
  std::uint64_t pid_space = 0;  // inode of its pid namespace

  friend bool operator==(const ProcessId&, const ProcessId&) = default;

  static ProcessId self();
};

// A row of the table in the mapping.
struct ProcessEntry {
  ProcessId id;
  double seen_s = 0;  // when it last said that it lives
};

enum class Life { alive, dead, unknown };
// As seen by `self`. Some system calls. `unknown`: of another namespace.
[[nodiscard]] Life life_of(const ProcessId& one, const ProcessId& self);

// How often this process was forked off since it was loaded: another number means another process.
[[nodiscard]] std::uint64_t fork_count();

}  // namespace pointsman
