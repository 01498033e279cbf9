// SPDX-License-Identifier: Apache-2.0
#include "board_memory.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <system_error>

namespace pointsman {
namespace {

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

int open_locked(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) fail(errno, path);
  while (::flock(file, LOCK_EX) != 0) {
    if (errno == EINTR) continue;
    const int error = errno;
    ::close(file);
    fail(error, path);
  }
  return file;
}

// 0, or why the file cannot be of that size. Its pages are there from then on: a full file system is told of here, not
// by a signal when one is first written.
int make_size(int file, std::size_t bytes) {
  struct stat found{};
  if (::fstat(file, &found) != 0) return errno;
  if (found.st_size == static_cast<off_t>(bytes)) return 0;
  if (found.st_size != 0) return EINVAL;
  const int result = ::posix_fallocate(file, 0, static_cast<off_t>(bytes));
  if (result == 0) return 0;
  static_cast<void>(::ftruncate(file, 0));
  return result;
}

}  // namespace

BoardMemory::BoardMemory(std::size_t bytes) : bytes_(bytes) {
  data_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data_ == MAP_FAILED) throw std::bad_alloc();
}

BoardMemory::BoardMemory(const std::string& path, std::size_t bytes) : bytes_(bytes), file_(open_locked(path)) {
  const int error = make_size(file_, bytes);
  if (error == 0) data_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (error == 0 && data_ != MAP_FAILED) return;
  const int reason = error != 0 ? error : errno;
  ::close(file_);
  fail(reason, reason == EINVAL ? path + " is no load board of this version" : path);
}

BoardMemory::~BoardMemory() {
  ::munmap(data_, bytes_);
  if (file_ >= 0) ::close(file_);
}

void BoardMemory::ready() {
  if (file_ >= 0) ::flock(file_, LOCK_UN);
}

}  // namespace pointsman
