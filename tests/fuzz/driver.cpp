// SPDX-License-Identifier: Apache-2.0
// Runs a fuzz target without libFuzzer: random changes of seeds, for some seconds. It sees no coverage; inputs that
// libFuzzer finds are better, but this runs wherever there is a compiler.
//
//   target SECONDS RANDOM_SEED SEED_FOLDER
#include <sanitizer/common_interface_defs.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr std::size_t kMostBytes = 64 * 1024;

Bytes running;

// The input that ended the run, for the next run's seeds.
void save_running() {
  std::ofstream("crash-input", std::ios::binary)
      .write(reinterpret_cast<const char*>(running.data()), static_cast<std::streamsize>(running.size()));
}

class Mutator {
 public:
  Mutator(std::uint64_t seed, const std::vector<Bytes>& seeds) : random_(seed), seeds_(seeds) {}

  Bytes next() {
    Bytes bytes = seeds_[below(seeds_.size())];
    for (std::size_t changes = below(6); changes > 0; --changes) change(bytes);
    if (bytes.size() > kMostBytes) bytes.resize(kMostBytes);
    return bytes;
  }

 private:
  std::size_t below(std::size_t bound) { return bound == 0 ? 0 : random_() % bound; }

  void change(Bytes& bytes) {
    // Tags and lengths of msgpack, marks of JSON and HTTP, digits.
    static constexpr std::uint8_t kOdd[] = {0x00, 0x01, 0x7f, 0x80, 0x90, 0xc0, 0xc1, 0xc4, 0xc6, 0xcf, 0xd3, 0xd9,
                                            0xdc, 0xdd, 0xde, 0xdf, 0xe0, 0xff, '"',  '\\', '{',  '}',  '[',  ']',
                                            ',',  ':',  '0',  '9',  '\r', '\n', ' ',  '-'};
    const std::size_t at = below(bytes.size() + 1);
    const std::size_t left = bytes.size() - at;
    const auto position = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    switch (below(7)) {
      case 0:
        if (left != 0) *position = static_cast<std::uint8_t>(*position ^ 1U << below(8));
        break;
      case 1:
        if (left != 0) *position = kOdd[below(std::size(kOdd))];
        break;
      case 2:
        bytes.insert(position, kOdd[below(std::size(kOdd))]);
        break;
      case 3:
        bytes.erase(position, position + static_cast<std::ptrdiff_t>(std::min(left, below(16) + 1)));
        break;
      case 4: {  // a stretch again
        const Bytes copy(position, position + static_cast<std::ptrdiff_t>(below(std::min<std::size_t>(left, 200) + 1)));
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(below(bytes.size() + 1)), copy.begin(), copy.end());
        break;
      }
      case 5: {  // go on as another seed
        const Bytes& other = seeds_[below(seeds_.size())];
        bytes.resize(at);
        bytes.insert(bytes.end(), other.begin() + static_cast<std::ptrdiff_t>(below(other.size() + 1)), other.end());
        break;
      }
      default:
        bytes.resize(at);
    }
  }

  std::mt19937_64 random_;
  const std::vector<Bytes>& seeds_;
};

std::vector<Bytes> seeds_in(const char* folder) {
  std::vector<Bytes> seeds;
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
  std::ranges::sort(paths);
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return seeds;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return std::fprintf(stderr, "usage: %s SECONDS RANDOM_SEED SEED_FOLDER\n", argv[0]), 2;
  const std::vector<Bytes> seeds = seeds_in(argv[3]);
  if (seeds.empty()) return std::fprintf(stderr, "no seeds in %s\n", argv[3]), 2;
  __sanitizer_set_death_callback(save_running);
  Mutator mutator(std::strtoull(argv[2], nullptr, 10), seeds);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoi(argv[1]));
  std::uint64_t runs = 0;
  do {
    for (int i = 0; i < 100; ++i, ++runs) {
      running = mutator.next();
      running.shrink_to_fit();  // so that a byte beyond the end is seen
      LLVMFuzzerTestOneInput(running.data(), running.size());
    }
  } while (std::chrono::steady_clock::now() < end);
  std::printf("%llu executions\n", static_cast<unsigned long long>(runs));
}
