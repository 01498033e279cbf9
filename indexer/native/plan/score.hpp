// SPDX-License-Identifier: Apache-2.0
// The best plan of one candidate. Mirrors router/plan/planner.py and cuts.py, which say what is priced and why:
//
//   local    the engine's own walk over HBM, RAM and storage, whole or cut short
//   none     HBM only
//   peer s   the walk with one peer as a further source, whole or cut short
//   split    the walk with two or three peers (split.hpp)
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "costs.hpp"
#include "split.hpp"
#include "walk.hpp"

namespace pointsman::plan {

inline constexpr std::size_t kMaxSources = 4;  // tried per decision
static_assert(kMaxSources <= kMostHolders);
inline constexpr std::int64_t kWhole = -1;     // a walk that is not cut short
inline constexpr std::int32_t kNoSource = -1;

struct Settings {
  double gpu_seconds_weight = 0;
  double pull_deadline_s = 0;
  std::int64_t min_pull_tokens = 1;
};

struct Request {
  std::span<const std::int64_t> prompt_tokens;
  std::int64_t output_tokens = 0;
  std::optional<double> slo_tpot_s;
  double pressure = 0;
};

// A rank that peers can pull from.
struct Source {
  std::uint32_t worker = 0;
  std::uint32_t fingerprint = 0;
  double pulls = 0;
  double trust = 1;
  Spans ram;
  bool p2p = true;         // it serves pulls through vLLM's P2P protocol
  bool extension = false;  // it serves pulls of our engine extension
};

// What one candidate has to do with one source.
struct Pair {
  Link link;
  bool connected = false;
};

struct Candidate {
  std::uint32_t worker = 0;
  std::uint32_t fingerprint = 0;
  const CostModel* costs = nullptr;
  std::int64_t block_size = 1;
  std::int64_t chunk_blocks = 1;
  std::span<const Residence> residence;  // per prompt
  double queue_s = 0;
  std::int64_t decodes = 0;
  double pulls = 0;
  double trust = 1;
  bool can_pull = false;   // through vLLM's P2P protocol
  bool extension = false;  // it runs our engine extension
  std::int64_t fresh_tokens = 0;        // of the prompts, in full blocks, not shared with a request in flight there
  std::int64_t resident_tokens = 0;     // distinct prompt tokens in flight there
  std::int64_t kv_capacity_tokens = 0;  // 0: not known
  std::int64_t speculative_tokens = 0;  // of the residences, what no event tells of yet

  [[nodiscard]] bool can_pull_from(const Source& source) const {
    const bool common = (extension && source.extension) || (can_pull && source.p2p);
    return common && source.worker != worker && source.fingerprint == fingerprint;
  }
};

struct Terms {
  double queue_s = 0;
  double admit_s = 0;
  double ram_s = 0;
  double peer_s = 0;
  double storage_s = 0;
  double prefill_s = 0;
  double decode_s = 0;
  double displaced_s = 0;  // what others lose whose blocks give way in HBM, or who wait for room in it

  [[nodiscard]] double total_s() const {
    const double load_s = admit_s + ram_s + peer_s + storage_s;
    return (queue_s < load_s ? load_s : queue_s) + prefill_s;
  }
};

// What a worker with our extension takes from one source.
struct Pulled {
  std::int32_t source = kNoSource;  // among the sources tried
  std::int64_t start = 0;           // blocks, whole chunks
  std::int64_t end = 0;
  std::int64_t blocks = 0;          // without those that the worker holds itself
  double seconds = 0;
};

struct Action {
  double score_s = std::numeric_limits<double>::infinity();
  Loads loads;
  Terms terms;
  std::int32_t source = kNoSource;   // among the sources tried; of several the first
  std::int64_t cap_blocks = kWhole;  // to be loaded behind the HBM hit at most, where no range of a pull says it
  bool use_storage = true;
  std::array<Pulled, kMostParts> pulls{};
  std::uint32_t pull_count = 0;
};

// Buffers that live from one candidate to the next.
struct ScoreScratch {
  WalkScratch chunks;
  std::vector<Walk> walks;
  Walk pull;
  std::array<std::vector<Span>, kMaxSources> runs;
  std::vector<Span> own_runs;
  // Of the last candidate: the most tokens that any of its actions finds cached.
  std::int64_t reach_tokens = 0;
};

// `pairs[i]` is about `sources[i]`; read only where the candidate can pull from it. `all`, where given, takes every action in
// the order in which they are priced. O(sources x spans).
Action best_action(const Settings& settings, const Request& request, const Candidate& candidate,
                   std::span<const Source> sources, std::span<const Pair> pairs, ScoreScratch& scratch,
                   std::vector<Action>* all = nullptr);

// Indices of the sources that are tried: those that hold most; of equals, those that serve the fewest pulls.
std::vector<std::uint32_t> most_useful(std::span<const Source> sources);

}  // namespace pointsman::plan
