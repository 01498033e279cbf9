// SPDX-License-Identifier: Apache-2.0
// Where a load board lies: private pages, or a file that the processes of a node map.
#pragma once

#include <cstddef>
#include <string>

namespace pointsman {

class BoardMemory {
 public:
  // Zeroed pages of this process, backed as they are written.
  explicit BoardMemory(std::size_t bytes);
  // A file, made if it is not there; of zeros if it was empty. It stays locked against other processes that come
  // until `ready`. Throws std::system_error: it cannot be opened, is of another size, or there is no room for it.
  BoardMemory(const std::string& path, std::size_t bytes);
  BoardMemory(const BoardMemory&) = delete;
  ~BoardMemory();

  // Others may open it.
  void ready();
  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] bool shared() const { return file_ >= 0; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  int file_ = -1;
};

}  // namespace pointsman
