// SPDX-License-Identifier: Apache-2.0
// A mutex between processes, in memory that they share. If its owner dies, the next one gets it and is told.
#pragma once

#include <pthread.h>

#include <cerrno>
#include <system_error>

namespace pointsman {

class RobustMutex {
 public:
  // Once, before anyone locks.
  void init() {
    pthread_mutexattr_t attributes;
    check(pthread_mutexattr_init(&attributes));
    check(pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED));
    check(pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST));
    check(pthread_mutex_init(&mutex_, &attributes));
    pthread_mutexattr_destroy(&attributes);
  }

  // True: its last owner died with it, so what it guards may be half written.
  [[nodiscard]] bool lock() {
    const int result = pthread_mutex_lock(&mutex_);
    if (result == 0) return false;
    if (result != EOWNERDEAD) check(result);
    check(pthread_mutex_consistent(&mutex_));
    return true;
  }
  void unlock() noexcept { pthread_mutex_unlock(&mutex_); }

 private:
  static void check(int result) {
    if (result != 0) throw std::system_error(result, std::generic_category(), "lock of a shared mapping");
  }
  pthread_mutex_t mutex_;
};

}  // namespace pointsman
