// SPDX-License-Identifier: Apache-2.0
// One candidate with one source, several or none: what each action costs. Mirrors `_price` of router/plan/planner.py,
// router/plan/pulling.py and router/plan/cuts.py.
#pragma once

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "score.hpp"

namespace pointsman::plan {

inline constexpr double kRebuilds = 4.0;  // promotions that a displaced token stands for
inline constexpr double kWaits = 4.0;      // router/plan/displacement.py: WAITS, MOST_WAITS, FULL
inline constexpr double kMostWaits = 20.0;
inline constexpr double kFull = 0.999;
inline constexpr std::size_t kMostRuns = 8;  // ends of runs that are tried as cuts

// Seconds of a load: start_s once, then block_s per block.
struct Affine {
  double start_s = 0;
  double block_s = 0;
  Affine() = default;
  Affine(double one_s, double two_s) : start_s(one_s - (two_s - one_s)), block_s(two_s - one_s) {}
};

// What those who wait for room in HBM lose to a request: `occupied_s` of router/plan/displacement.py.
inline double occupied_s(const CostModel& costs, const Candidate& candidate, std::int64_t output_tokens) {
  if (candidate.kv_capacity_tokens == 0) return 0.0;
  const auto capacity = static_cast<double>(candidate.kv_capacity_tokens);
  const double used = std::min(static_cast<double>(candidate.resident_tokens) / capacity, kFull);
  const double waits = kWaits * std::min(used * used * used * used * used / (1 - used), kMostWaits);
  const double stay_s = static_cast<double>(output_tokens) * costs.decode_step_s(candidate.decodes + 1);
  return waits * (static_cast<double>(candidate.fresh_tokens) / capacity) * stay_s;
}

// How much of a prompt a candidate might find cached: blocks, counted from its first.
struct Reach {
  std::int64_t hbm = 0;  // found there by each plan
  std::int64_t own = 0;  // none is held by the candidate behind it
  std::int64_t any = 0;  // nor by a source
};

// Cuts in rising order; each ends with a whole chunk.
struct Cuts {
  std::array<std::int64_t, 3 * kMostRuns> blocks;
  std::size_t count = 0;
};

// Blocks that `left_s` suffices for, if that is within the run; else 0.
inline std::int64_t reached(double left_s, double block_s, std::int64_t blocks) {
  if (left_s <= 0 || block_s * static_cast<double>(blocks) <= left_s) return 0;
  return static_cast<std::int64_t>(left_s / block_s);
}

// One candidate with one source or none.
class Pricer {
 public:
  // `all`: takes every action that is priced; null: only the best is wanted.
  Pricer(const Settings& settings, const Request& request, const Candidate& candidate, std::vector<Action>* all)
      : settings_(settings), request_(request), candidate_(candidate), costs_(*candidate.costs), all_(all),
        weight_(settings.gpu_seconds_weight + request.pressure) {
    terms_.queue_s = candidate.queue_s;
    terms_.admit_s = costs_.admit_s(candidate.queue_s);
    const auto output_tokens = static_cast<double>(request.output_tokens);
    double over_s = 0;
    if (request.slo_tpot_s) {
      const double excess_s = costs_.decode_step_s(candidate.decodes + 1) - *request.slo_tpot_s;
      over_s = std::max(excess_s, 0.0) * output_tokens;
    }
    // What this answer and those that decode beside it take from each other.
    const double each_s = costs_.decode_s_per_request() * output_tokens;
    const double crowding_s = static_cast<double>(2 * candidate.decodes) * each_s;
    terms_.decode_s = over_s + settings.gpu_seconds_weight * crowding_s;
    occupied_s_ = occupied_s(costs_, candidate, request.output_tokens);
  }

  void pull_from(std::int32_t index, const Source& source, const Pair& pair) {
    source_ = index;
    source_trust_ = source.trust;
    pair_ = &pair;
    share_bytes_per_s_ = pair.link.share_bytes_per_s(std::max(candidate_.pulls, source.pulls));
  }

  // No plan for the only prompt scores less. Loads take as long as their tokens, computing the rest is concave in them,
  // so the least is at an end: all from HBM, all that the candidate holds, or all that anybody holds. With a margin for
  // rounding. Constants must be plain, and nobody believed more than fully.
  [[nodiscard]] double least_s(const Reach& reach, const LeastPull& pull) const {
    const std::int64_t prompt = request_.prompt_tokens[0], size = candidate_.block_size;
    const auto rest_s = [&](std::int64_t blocks) {
      const auto missing = static_cast<double>(std::max<std::int64_t>(prompt - blocks * size, 0));
      return (1 + weight_) * costs_.least_prefill_s(static_cast<double>(prompt), missing, candidate_.decodes);
    };
    double furthest_s = rest_s(reach.hbm);
    double least_s = furthest_s;
    if (reach.own > reach.hbm) {
      furthest_s = rest_s(reach.own);
      least_s = std::min(least_s, costs_.promotion_s((reach.own - reach.hbm) * size) + furthest_s);
    }
    if (reach.any > reach.own) {
      furthest_s = rest_s(reach.any);
      const double wire_s = costs_.wire_s((reach.any - reach.own) * size, pull.bytes_per_s);
      const double load_s = pull.start_s + wire_s + costs_.promotion_s((reach.any - reach.hbm) * size);
      least_s = std::min(least_s, load_s + furthest_s);
    }
    const double total_s = std::max(terms_.queue_s + furthest_s, terms_.admit_s + least_s);
    constexpr double kMargin = 1 - 1e-9;
    return (total_s + terms_.decode_s + displaced_s({.hbm = reach.hbm})) * kMargin;
  }

  // Prices the walks, cut short after `cap` blocks behind HBM or whole, and keeps it if it is better than `best`.
  void attempt(std::span<const Walk> walks, std::int64_t cap, Action& best) const {
    double prefill_s = 0;
    Loads loads;
    for (std::size_t i = 0; i < walks.size(); ++i) {
      const Loads found = walks[i].loads(cap == kWhole ? walks[i].external : cap);
      prefill_s += prefill(expected(found), request_.prompt_tokens[i]);
      loads.add(found);
    }
    Terms terms = terms_;
    terms.ram_s = costs_.promotion_s(loads.below[kRam] * candidate_.block_size);
    terms.peer_s = peer_s(loads.below[kPeer] * candidate_.block_size);
    terms.storage_s = costs_.storage_s(loads.below[kStorage] * candidate_.block_size);
    terms.prefill_s = prefill_s;
    if (source_ != kNoSource && !allowed(loads.below[kPeer] * candidate_.block_size, terms.peer_s)) return;
    terms.displaced_s = displaced_s(loads);
    const double score_s = terms.total_s() + weight_ * prefill_s + terms.decode_s + terms.displaced_s;
    if (all_ == nullptr && !(score_s < best.score_s)) return;
    const bool finds_storage = std::ranges::any_of(walks, [](const Walk& walk) { return walk.finds(kStorage); });
    const bool use_storage = cap == kWhole || loads.below[kStorage] > 0 || !finds_storage;
    Action action{score_s, loads, terms, source_, cap, use_storage, {}, 0};
    if (candidate_.extension && source_ != kNoSource) {
      action.pulls[action.pull_count++] = pulled(walks[0], cap, loads.below[kPeer]);
      // Where the engine finds nothing behind its ranges, they need no cap beside them.
      const bool ends = cap != kWhole && walks[0].is_behind(kPeer, cap) && candidate_.residence[0].storage.empty();
      if (ends) action.cap_blocks = kWhole;
    }
    keep(action, best);
  }

  // Prices the walk of a split. `able`: where each holder stands among the sources.
  void attempt_split(const Walk& walk, const Split& split, std::span<const Holder> holders,
                     std::span<const std::uint32_t> able, std::span<const Source> sources,
                     double capacity_bytes_per_s, Action& best) const {
    const std::int64_t chunk = candidate_.chunk_blocks, size = candidate_.block_size;
    const Loads loads = walk.loads(walk.external);
    Action action;
    std::array<SourceShare, kMostParts> shares{};
    double pulled_expected = 0;
    for (const Part& part : split.all()) {
      const std::uint32_t source = able[part.holder];
      const std::int64_t blocks = walk.pulled_within(part.start * chunk, part.end * chunk);
      if (blocks == 0 || blocks * size < settings_.min_pull_tokens) return;
      pulled_expected += sources[source].trust * static_cast<double>(blocks);
      shares[action.pull_count] = {blocks * size, holders[part.holder].start_s, holders[part.holder].bytes_per_s};
      action.pulls[action.pull_count++] = {static_cast<std::int32_t>(source), part.start * chunk, part.end * chunk,
                                           blocks, 0};
    }
    const auto used = std::span(shares).first(action.pull_count);
    Terms& terms = action.terms = terms_;
    terms.peer_s = costs_.pulls_s(used, capacity_bytes_per_s);
    if (!(terms.peer_s < settings_.pull_deadline_s)) return;
    terms.ram_s = costs_.promotion_s(loads.below[kRam] * size);
    terms.storage_s = costs_.storage_s(loads.below[kStorage] * size);
    terms.prefill_s = prefill(own_expected(loads) + pulled_expected, request_.prompt_tokens[0]);
    terms.displaced_s = displaced_s(loads);
    action.score_s = terms.total_s() + weight_ * terms.prefill_s + terms.decode_s + terms.displaced_s;
    if (all_ == nullptr && !(action.score_s < best.score_s)) return;
    action.loads = loads;
    action.source = action.pulls[0].source;
    for (std::size_t i = 0; i < used.size(); ++i) {
      action.pulls[i].seconds = costs_.share_s(used[i], loads.below[kPeer] * size, capacity_bytes_per_s);
    }
    keep(action, best);
  }

  // A walk with every cut that can pay.
  void attempt_cuts(const Walk& walk, Action& best) const {
    if (walk.runs.empty()) return;
    if (walk.runs.size() == 1 && !is_timed(walk)) return;  // its only end is that of the walk
    const Cuts found = cuts(walk);
    for (std::size_t i = 0; i < found.count; ++i) attempt({&walk, 1}, found.blocks[i], best);
  }

 private:
  // router/plan/displacement.py
  [[nodiscard]] double displaced_s(const Loads& loads) const {
    std::int64_t prompt_tokens = 0;
    for (const std::int64_t tokens : request_.prompt_tokens) prompt_tokens += tokens;
    const double brought_s = costs_.displaced_s(prompt_tokens - loads.hbm * candidate_.block_size);
    return kRebuilds * weight_ * brought_s + occupied_s_;
  }

  // Where it can pay to load less than the engine would find.
  [[nodiscard]] Cuts cuts(const Walk& walk) const {
    Cuts found;
    const double hidden_s = terms_.queue_s - terms_.admit_s;
    std::array<bool, kPlaces> begun{};
    double load_s = 0, pull_s = 0;
    std::int64_t before = 0;
    for (std::size_t i = 0; i < std::min(kMostRuns, walk.runs.size()); ++i) {
      const auto [place, blocks] = walk.runs[i];
      const Affine rate = affine(place);
      const double first_s = begun[place] ? 0.0 : rate.start_s;
      begun[place] = true;
      keep_cut(found, walk, before, reached(hidden_s - load_s - first_s, rate.block_s, blocks));
      const double run_s = first_s + static_cast<double>(blocks) * rate.block_s;
      if (place == kPeer) {
        keep_cut(found, walk, before, reached(settings_.pull_deadline_s - pull_s - first_s, rate.block_s, blocks));
        pull_s += run_s;
      }
      load_s += run_s;
      keep_cut(found, walk, before, blocks);
      before += blocks;
    }
    std::sort(found.blocks.begin(), found.blocks.begin() + found.count);
    const auto end = std::unique(found.blocks.begin(), found.blocks.begin() + found.count);
    found.count = static_cast<std::size_t>(end - found.blocks.begin());
    return found;
  }

  // Whether a cut may end where the queue no longer hides the load, or at the deadline; with a margin for rounding.
  [[nodiscard]] bool is_timed(const Walk& walk) const {
    if (terms_.queue_s > terms_.admit_s) return true;
    return source_ != kNoSource && peer_s(walk.external * candidate_.block_size) > 0.9 * settings_.pull_deadline_s;
  }

  [[nodiscard]] bool allowed(std::int64_t pulled_tokens, double pull_s) const {
    return pulled_tokens >= settings_.min_pull_tokens && pull_s < settings_.pull_deadline_s;
  }

  void keep(const Action& action, Action& best) const {
    if (action.score_s < best.score_s) best = action;
    if (all_ != nullptr) all_->push_back(action);
  }

  // The only pull of a walk.
  [[nodiscard]] Pulled pulled(const Walk& walk, std::int64_t cap, std::int64_t blocks) const {
    const Span span = walk.pulled(cap == kWhole ? walk.external : cap);
    const std::int64_t start = span.start / candidate_.chunk_blocks * candidate_.chunk_blocks;
    const double seconds =
        costs_.pull_s(blocks * candidate_.block_size, pair_->link, share_bytes_per_s_, pair_->connected);
    return {source_, start, span.end, blocks, seconds};
  }

  [[nodiscard]] double prefill(double expected_blocks, std::int64_t prompt_tokens) const {
    const auto tokens = static_cast<double>(prompt_tokens);
    // The engine always computes at least the last token.
    const double missing = std::max(tokens - expected_blocks * static_cast<double>(candidate_.block_size), 1.0);
    return costs_.prefill_s(tokens - missing, missing, candidate_.decodes);
  }

  // Blocks that will be there, by what was there of late of all that was promised.
  [[nodiscard]] double expected(const Loads& loads) const {
    const double peer = source_ == kNoSource ? 0.0 : source_trust_ * static_cast<double>(loads.below[kPeer]);
    return own_expected(loads) + peer;
  }

  [[nodiscard]] double own_expected(const Loads& loads) const {
    return candidate_.trust * static_cast<double>(loads.hbm + loads.below[kRam] + loads.below[kStorage]);
  }

  [[nodiscard]] double peer_s(std::int64_t tokens) const {
    if (source_ == kNoSource) return 0.0;
    return costs_.peer_s(tokens, pair_->link, share_bytes_per_s_, pair_->connected);
  }

  [[nodiscard]] Affine affine(Place place) const {
    const std::int64_t one = candidate_.block_size, two = 2 * one;
    switch (place) {
      case kRam:
        return {costs_.promotion_s(one), costs_.promotion_s(two)};
      case kPeer:
        return {peer_s(one), peer_s(two)};
      case kStorage:
        return {costs_.storage_s(one), costs_.storage_s(two)};
    }
    return {};
  }

  void keep_cut(Cuts& found, const Walk& walk, std::int64_t before, std::int64_t blocks) const {
    if (blocks == 0) return;
    const std::int64_t whole = whole_chunks(walk.hbm, before + blocks, candidate_.chunk_blocks);
    if (whole != 0 && whole != walk.external) found.blocks[found.count++] = whole;
  }

  const Settings& settings_;
  const Request& request_;
  const Candidate& candidate_;
  const CostModel& costs_;
  std::vector<Action>* all_;
  double weight_;
  Terms terms_;  // those that are the same for all actions
  double occupied_s_ = 0;  // part of displaced_s
  std::int32_t source_ = kNoSource;
  double source_trust_ = 1;
  const Pair* pair_ = nullptr;
  double share_bytes_per_s_ = 1;
};

}  // namespace pointsman::plan
