// SPDX-License-Identifier: Apache-2.0
#include "mapping.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <system_error>
#include <utility>

#include "populate.hpp"

namespace pointsman {
namespace {

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

int checked(int descriptor, const std::string& what) {
  if (descriptor < 0) fail(what);
  return descriptor;
}

void resize(int descriptor, std::size_t bytes) {
  if (::ftruncate(descriptor, static_cast<off_t>(bytes)) == 0) return;
  const int error = errno;
  ::close(descriptor);
  errno = error;
  fail("cannot reserve " + std::to_string(bytes) + " bytes");
}

std::size_t size_of(int descriptor) {
  struct stat found {};
  if (::fstat(descriptor, &found) != 0) fail("cannot look at a mapped file");
  return static_cast<std::size_t>(found.st_size);
}

}  // namespace

Mapping::Mapping(int descriptor, std::size_t bytes, Access access, std::size_t offset)
    : size_(bytes), descriptor_(descriptor) {
  const int protection = access == Access::read_only ? PROT_READ : PROT_READ | PROT_WRITE;
  const int kind = descriptor < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
  void* pages = ::mmap(nullptr, bytes, protection, kind, descriptor, static_cast<off_t>(offset));
  if (pages == MAP_FAILED) {
    const int error = errno;
    if (descriptor >= 0) ::close(descriptor);
    errno = error;
    fail("cannot map " + std::to_string(bytes) + " bytes");
  }
  data_ = static_cast<std::byte*>(pages);
}

Mapping Mapping::anonymous(std::size_t bytes) { return Mapping(-1, whole_pages(bytes), Access::read_write); }

Mapping Mapping::memfd(const char* name, std::size_t bytes) {
  const int descriptor = checked(::memfd_create(name, MFD_CLOEXEC), "memfd_create");
  resize(descriptor, whole_pages(bytes));
  return Mapping(descriptor, whole_pages(bytes), Access::read_write);
}

Mapping Mapping::create(const std::string& path, std::size_t bytes) {
  const std::string aside = path + "." + std::to_string(::getpid()) + ".new";
  ::unlink(aside.c_str());  // of a process that died with the same number
  const int descriptor = checked(::open(aside.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600), aside);
  try {
    resize(descriptor, whole_pages(bytes));
    Mapping made(descriptor, whole_pages(bytes), Access::read_write);
    made.path_ = path;
    made.aside_ = aside;
    return made;
  } catch (...) {
    ::unlink(aside.c_str());
    throw;
  }
}

Mapping Mapping::attach(const std::string& path, Access access) {
  const int flags = (access == Access::read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC;
  const int descriptor = checked(::open(path.c_str(), flags), path);
  Mapping made(descriptor, size_of(descriptor), access);
  made.path_ = path;
  return made;
}

Mapping Mapping::attach(int descriptor, Access access) {
  const int own = checked(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0), "cannot copy a descriptor");
  return Mapping(own, size_of(own), access);
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, size_);
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!aside_.empty()) ::unlink(aside_.c_str());
}

void Mapping::publish() {
  if (aside_.empty()) return;
  if (::rename(aside_.c_str(), path_.c_str()) != 0) fail("cannot publish " + path_);
  aside_.clear();
}

bool Mapping::replaced() const {
  if (path_.empty() || !aside_.empty()) return false;
  struct stat there {}, own {};
  if (::stat(path_.c_str(), &there) != 0 || ::fstat(descriptor_, &own) != 0) return true;
  return there.st_ino != own.st_ino || there.st_dev != own.st_dev;
}

void Mapping::commit(std::size_t offset, std::size_t bytes) const {
  if (bytes == 0) return;
  if (shared()) {
    int result = 0;
    do {
      result = ::fallocate(descriptor_, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
    } while (result != 0 && errno == EINTR);
    // A file system that cannot reserve has to be trusted.
    if (result != 0 && errno != EOPNOTSUPP) throw std::bad_alloc();
  }
  populate(data_ + offset, bytes);
}

void Mapping::release(std::size_t offset, std::size_t bytes) const {
  const std::size_t from = whole_pages(offset);
  const std::size_t to = (offset + bytes) & ~(kPageBytes - 1);
  if (from >= to) return;
  // A file system without holes keeps the pages: nothing is lost but memory.
  ::madvise(data_ + from, to - from, shared() ? MADV_REMOVE : MADV_DONTNEED);
}

Mapping Mapping::writable_part(std::size_t offset, std::size_t bytes) const {
  // The same file even if another one has its name by now.
  const int own = ::open(("/proc/self/fd/" + std::to_string(descriptor_)).c_str(), O_RDWR | O_CLOEXEC);
  checked(own, "cannot open a region for writing");
  return Mapping(own, bytes, Access::read_write, offset);
}

void Mapping::swap(Mapping& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(descriptor_, other.descriptor_);
  path_.swap(other.path_);
  aside_.swap(other.aside_);
}

}  // namespace pointsman
