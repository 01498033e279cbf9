// SPDX-License-Identifier: Apache-2.0
// Words that one process writes while others read them.
#pragma once

#include <atomic>
#include <cstdint>

namespace pointsman {

template <typename T>
T load(const T& word, std::memory_order order = std::memory_order_acquire) noexcept {
  // Reading changes nothing, but atomic_ref of C++20 wants a word that may be written.
  return std::atomic_ref<T>(const_cast<T&>(word)).load(order);
}

template <typename T>
void store(T& word, T value, std::memory_order order = std::memory_order_release) noexcept {
  std::atomic_ref<T>(word).store(value, order);
}

}  // namespace pointsman
