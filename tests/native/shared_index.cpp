// SPDX-License-Identifier: Apache-2.0
// One thread that changes an index and several that read its region: for ThreadSanitizer, which cannot look into Python.
// Exits with 1 when a reader is told what was never true.
//   tests/native/race.sh
#include <atomic>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "index.hpp"

using namespace pointsman;

namespace {

constexpr int kWorkers = 3, kChains = 6, kLength = 24, kReaders = 4;

void put_integer(std::vector<std::uint8_t>& out, std::uint64_t value) {
  out.push_back(0xcf);
  for (int shift = 56; shift >= 0; shift -= 8) out.push_back(static_cast<std::uint8_t>(value >> shift));
}

void put_array(std::vector<std::uint8_t>& out, std::size_t count) {
  out.push_back(0xdc);
  out.push_back(static_cast<std::uint8_t>(count >> 8));
  out.push_back(static_cast<std::uint8_t>(count));
}

void put_text(std::vector<std::uint8_t>& out, std::string_view text) {
  out.push_back(static_cast<std::uint8_t>(0xa0 | text.size()));
  out.insert(out.end(), text.begin(), text.end());
}

// Blocks of one token each.
std::vector<std::uint8_t> batch(bool stored, std::uint64_t first, int count) {
  std::vector<std::uint8_t> out;
  put_array(out, 2);
  put_integer(out, 0);
  put_array(out, 1);
  put_array(out, stored ? 5 : 2);
  put_text(out, stored ? "BlockStored" : "BlockRemoved");
  put_array(out, static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) put_integer(out, first + static_cast<std::uint64_t>(i));
  if (!stored) return out;
  out.push_back(0xc0);
  put_array(out, static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) put_integer(out, (first + static_cast<std::uint64_t>(i)) & 0xffffffff);
  put_integer(out, 1);
  return out;
}

bool stores(int worker, int chain) { return (worker + chain) % 3 != 0; }
std::uint64_t first_of(int chain) { return static_cast<std::uint64_t>(chain + 1) * 1000; }

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 4000;
  PrefixIndex index(HashKey{1, 2}, Limits{.blocks = 4000});
  std::vector<SlotId> slots;
  for (int worker = 0; worker < kWorkers; ++worker) slots.push_back(index.open("m", false));
  const SlotId filler = index.open("other", false);
  std::vector<std::vector<std::uint64_t>> hashes(kChains);
  for (int chain = 0; chain < kChains; ++chain) {
    std::vector<std::uint32_t> tokens;
    for (int i = 0; i < kLength; ++i) tokens.push_back(static_cast<std::uint32_t>(first_of(chain)) + static_cast<std::uint32_t>(i));
    index.chain().blocks(index.chain().root("m", ""), tokens, 1, {}, hashes[static_cast<std::size_t>(chain)]);
  }
  std::atomic<bool> done = false, wrong = false;
  std::vector<std::thread> readers;
  for (int reader = 0; reader < kReaders; ++reader) {
    readers.emplace_back([&, reader] {
      std::mt19937 random(static_cast<unsigned>(reader));
      std::vector<Run> runs;
      while (!done) {
        const int chain = static_cast<int>(random() % kChains);
        runs.clear();
        index.match(hashes[static_cast<std::size_t>(chain)], runs, 1.0);
        for (const Run& run : runs) {
          for (int worker = 0; worker < kWorkers; ++worker) {
            if (run.slot == slots[static_cast<std::size_t>(worker)] && !stores(worker, chain)) wrong = true;
          }
          if (run.slot == filler || run.start >= run.end || run.end > kLength) wrong = true;
        }
      }
    });
  }
  std::mt19937 random(7);
  std::vector<std::vector<bool>> held(kWorkers, std::vector<bool>(kChains));
  for (int round = 0; round < rounds; ++round) {
    const int worker = static_cast<int>(random() % kWorkers), chain = static_cast<int>(random() % kChains);
    const SlotId slot = slots[static_cast<std::size_t>(worker)];
    if (stores(worker, chain)) {
      const bool was = held[static_cast<std::size_t>(worker)][static_cast<std::size_t>(chain)];
      const auto payload = batch(!was, first_of(chain), kLength);
      index.apply({&slot, 1}, 0, slot, payload.data(), payload.size(), 1.0);
      held[static_cast<std::size_t>(worker)][static_cast<std::size_t>(chain)] = !was;
    }
    const auto payload = batch(random() % 2 == 0, 1'000'000 + random() % 50 * 100, 100);
    index.apply({&filler, 1}, 0, filler, payload.data(), payload.size(), 1.0);
  }
  done = true;
  for (std::thread& reader : readers) reader.join();
  const std::string problem = index.check();
  if (!problem.empty() || wrong) {
    std::printf("wrong: %s\n", wrong ? "a reader was told what was never true" : problem.c_str());
    return 1;
  }
  return 0;
}
