// SPDX-License-Identifier: Apache-2.0
// Large arrays straight from the system, so that their memory goes back to it when a worker has left. On the heap it
// would stay in holes behind whatever small piece was allocated later.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>

namespace pointsman {

template <typename T>
struct PageAllocator {
  using value_type = T;
  static constexpr std::size_t kLargeBytes = 128 * 1024;

  PageAllocator() = default;
  template <typename U>
  PageAllocator(const PageAllocator<U>&) noexcept {}

  T* allocate(std::size_t count) {
    const std::size_t bytes = count * sizeof(T);
    if (bytes < kLargeBytes) return static_cast<T*>(::operator new(bytes));
    void* pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    return static_cast<T*>(pages);
  }

  void deallocate(T* data, std::size_t count) noexcept {
    const std::size_t bytes = count * sizeof(T);
    if (bytes < kLargeBytes) {
      ::operator delete(data);
    } else {
      ::munmap(data, bytes);
    }
  }

  friend bool operator==(const PageAllocator&, const PageAllocator&) { return true; }
};

}  // namespace pointsman
