// SPDX-License-Identifier: Apache-2.0
// A region of memory of a fixed size: private, a memfd, or a file that other processes map too.
//
// The whole size is reserved at once and never changes, so nothing is ever mapped again and an address stays good
// for the life of the region; pages come into being when they are first touched. `commit` asks the system for pages
// beforehand: writing to a shared page that the file system has no room for would be a signal, and so would reading
// it, so a writer commits before it publishes and readers read only what was published.
//
// A file is written aside and put in its place by `publish` (rename), so whoever opens the path finds a whole region.
// Who has the old one mapped keeps it: `replaced` tells when to attach again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pointsman {

class Mapping {
 public:
  enum class Access { read_only, read_write };

  Mapping() noexcept = default;
  // Zeroed memory of this process alone. All of these throw std::system_error.
  static Mapping anonymous(std::size_t bytes);
  // Zeroed memory that children, and who is given the descriptor, may map.
  static Mapping memfd(const char* name, std::size_t bytes);
  // A zeroed file (mode 0600) beside `path`; at `path` once published.
  static Mapping create(const std::string& path, std::size_t bytes);
  static Mapping attach(const std::string& path, Access access);
  static Mapping attach(int descriptor, Access access);  // keeps its own copy of it

  Mapping(Mapping&& other) noexcept { swap(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    swap(other);
    return *this;
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] bool shared() const noexcept { return descriptor_ >= 0; }
  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }  // -1: private
  template <typename T>
  [[nodiscard]] T* at(std::size_t offset) const noexcept {
    return reinterpret_cast<T*>(data_ + offset);
  }

  // Puts a created file in its place.
  void publish();
  // Whether another file stands at the path, or none. One system call; false without a path.
  [[nodiscard]] bool replaced() const;

  // Backs [offset, offset + bytes) with storage; throws std::bad_alloc when a file has none left.
  void commit(std::size_t offset, std::size_t bytes) const;
  // Gives the whole pages within [offset, offset + bytes) back; they read as zeros.
  void release(std::size_t offset, std::size_t bytes) const;
  // Maps [offset, offset + bytes) of a region attached read-only a second time, to be written; both in whole pages.
  [[nodiscard]] Mapping writable_part(std::size_t offset, std::size_t bytes) const;

 private:
  Mapping(int descriptor, std::size_t bytes, Access access, std::size_t offset = 0);
  void swap(Mapping& other) noexcept;

  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  int descriptor_ = -1;
  std::string path_;   // where it is, or will be
  std::string aside_;  // where it is until published
};

inline constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t whole_pages(std::size_t bytes) { return (bytes + kPageBytes - 1) & ~(kPageBytes - 1); }

}  // namespace pointsman
