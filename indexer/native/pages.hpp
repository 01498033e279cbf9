// SPDX-License-Identifier: Apache-2.0
// A zeroed array of this process that grows in place. Large ones come straight from the system, so that their memory
// goes back to it when a worker has left: on the heap it would stay in holes behind whatever was allocated later.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#include "populate.hpp"

namespace pointsman {

template <typename T>
class Pages {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Pages() = default;
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages() { drop(); }

  [[nodiscard]] std::size_t count() const { return count_; }
  [[nodiscard]] std::size_t bytes() const { return count_ * sizeof(T); }
  [[nodiscard]] T& operator[](std::size_t index) { return data_[index]; }
  [[nodiscard]] const T& operator[](std::size_t index) const { return data_[index]; }

  // Grows to `count`; what is new reads as zeros.
  void resize(std::size_t count) {
    const std::size_t old = bytes(), wanted = count * sizeof(T);
    if (data_ != nullptr && old >= kLargeBytes) {
      void* moved = ::mremap(static_cast<void*>(data_), old, wanted, MREMAP_MAYMOVE);
      if (moved == MAP_FAILED) throw std::bad_alloc();
      data_ = static_cast<T*>(moved);
      if (wanted > old) populate(reinterpret_cast<std::byte*>(data_) + old, wanted - old);
      // The last page of the old size held zeros behind it.
    } else if (wanted >= kLargeBytes) {
      void* fresh = ::mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (fresh == MAP_FAILED) throw std::bad_alloc();
      populate(fresh, wanted);
      if (old != 0) std::memcpy(fresh, static_cast<void*>(data_), old);
      std::free(static_cast<void*>(data_));
      data_ = static_cast<T*>(fresh);
    } else {
      void* fresh = std::realloc(static_cast<void*>(data_), wanted);
      if (fresh == nullptr) throw std::bad_alloc();
      std::memset(static_cast<std::byte*>(fresh) + old, 0, wanted - old);
      data_ = static_cast<T*>(fresh);
    }
    count_ = count;
  }

  void swap(Pages& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
  }

 private:
  static constexpr std::size_t kLargeBytes = 128 * 1024;

  void drop() {
    if (bytes() >= kLargeBytes) {
      ::munmap(static_cast<void*>(data_), bytes());
    } else {
      std::free(static_cast<void*>(data_));
    }
  }

  T* data_ = nullptr;
  std::size_t count_ = 0;
};

}  // namespace pointsman
