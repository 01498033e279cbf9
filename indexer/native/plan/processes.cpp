// SPDX-License-Identifier: Apache-2.0
// /proc/PID/stat as in proc_pid_stat(5): the state is field 3, the start time field 22, counted behind the name.
#include "processes.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace pointsman {
namespace {

std::atomic<std::uint64_t> forks{0};
const int watching = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

struct Stat {
  bool found = false;
  char state = '?';
  std::uint64_t started = 0;
};

Stat read_stat(std::uint64_t pid) {
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  std::FILE* file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return {};
  char text[1024];
  const std::size_t length = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[length] = 0;
  const char* at = std::strrchr(text, ')');  // a name may hold anything
  if (at == nullptr || at[1] == 0) return {};
  Stat stat{true, at[2], 0};
  for (int field = 2; field < 22 && at != nullptr; ++field) at = std::strchr(at + 1, ' ');
  if (at == nullptr) return {};
  stat.started = std::strtoull(at + 1, nullptr, 10);
  return stat;
}

}  // namespace

std::uint64_t fork_count() {
  static_cast<void>(watching);
  return forks.load(std::memory_order_relaxed);
}

ProcessId ProcessId::self() {
  ProcessId id;
  id.pid = static_cast<std::uint64_t>(getpid());
  id.started = read_stat(id.pid).started;
  struct stat space{};
  if (stat("/proc/self/ns/pid", &space) == 0) id.pid_space = space.st_ino;
  return id;
}

Life life_of(const ProcessId& one, const ProcessId& self) {
  if (one.pid_space != self.pid_space) return Life::unknown;
  if (kill(static_cast<pid_t>(one.pid), 0) != 0 && errno == ESRCH) return Life::dead;
  const Stat stat = read_stat(one.pid);
  if (!stat.found) return self.started == 0 ? Life::alive : Life::dead;  // without /proc a pid must do
  const bool ended = stat.state == 'Z' || stat.state == 'X';
  return ended || stat.started != one.started ? Life::dead : Life::alive;
}

}  // namespace pointsman
