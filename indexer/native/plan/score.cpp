// SPDX-License-Identifier: Apache-2.0
#include "score.hpp"

#include <algorithm>
#include <numeric>

#include "pricer.hpp"

namespace pointsman::plan {
namespace {

// `able`: the sources that the candidate can pull from.
void attempt_splits(const Pricer& pricer, const Request& request, const Candidate& candidate,
                    std::span<const std::uint32_t> able, std::span<const Source> sources,
                    std::span<const Pair> pairs, ScoreScratch& scratch, Action& best) {
  const std::int64_t tokens = request.prompt_tokens[0], size = candidate.block_size, chunk = candidate.chunk_blocks;
  const Span missing = missing_chunks(tokens, size, chunk, candidate.residence[0], scratch.own_runs);
  if (missing.end - missing.start < 2) return;
  std::array<Holder, kMaxSources> holders{};
  Need need{missing, candidate.costs->bytes(chunk * size), 0, 0};
  for (std::size_t i = 0; i < able.size(); ++i) {
    const Source& source = sources[able[i]];
    const Pair& pair = pairs[able[i]];
    chunk_runs(source.ram, chunk, scratch.runs[i]);
    holders[i] = {source.worker, scratch.runs[i],
                  pair.link.share_bytes_per_s(std::max(candidate.pulls, source.pulls)),
                  pair.link.start_s(pair.connected)};
    // Its own link carries at least what the fastest pair does.
    need.bytes_per_s = std::max(need.bytes_per_s, pair.link.share_bytes_per_s(candidate.pulls));
  }
  const auto held = static_cast<double>(missing.start * chunk * size);
  const double compute_s = candidate.costs->prefill_s(held, static_cast<double>(tokens) - held, candidate.decodes) /
                           static_cast<double>(missing.end - missing.start);
  need.gain_s = compute_s - candidate.costs->promote_bytes_s(need.chunk_bytes);
  const std::span<const Holder> known = std::span(holders).first(able.size());
  for (const Split& split : splits(known, need)) {
    if (split.count == 0) continue;
    const Span whole{split.parts[0].start * chunk, split.parts[split.count - 1].end * chunk};
    derive_walk(tokens, size, chunk, candidate.residence[0], {&whole, 1}, scratch.chunks, scratch.pull);
    pricer.attempt_split(scratch.pull, split, known, able, sources, need.bytes_per_s, best);
  }
}

}  // namespace

Action best_action(const Settings& settings, const Request& request, const Candidate& candidate,
                   std::span<const Source> sources, std::span<const Pair> pairs, ScoreScratch& scratch,
                   std::vector<Action>* all) {
  const std::size_t prompts = request.prompt_tokens.size();
  if (scratch.walks.size() < prompts) scratch.walks.resize(prompts);
  const std::span<Walk> walks = std::span(scratch.walks).first(prompts);
  bool external = false;
  std::int64_t reach = 0;
  for (std::size_t i = 0; i < prompts; ++i) {
    derive_walk(request.prompt_tokens[i], candidate.block_size, candidate.chunk_blocks, candidate.residence[i], {},
                scratch.chunks, walks[i]);
    external = external || walks[i].external != 0;
    reach += walks[i].hbm + walks[i].external;
  }
  scratch.reach_tokens = reach * candidate.block_size;
  Pricer pricer(settings, request, candidate, all);
  Action best;
  pricer.attempt(walks, kWhole, best);
  if (external) pricer.attempt(walks, 0, best);
  if (prompts != 1) return best;
  pricer.attempt_cuts(walks[0], best);
  if (!candidate.can_pull && !candidate.extension) return best;
  std::array<std::uint32_t, kMaxSources> able{};
  std::size_t able_count = 0;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const Source& source = sources[i];
    if (!candidate.can_pull_from(source)) continue;
    able[able_count++] = static_cast<std::uint32_t>(i);
    derive_walk(request.prompt_tokens[0], candidate.block_size, candidate.chunk_blocks, candidate.residence[0],
                source.ram, scratch.chunks, scratch.pull);
    reach = scratch.pull.hbm + scratch.pull.external;
    scratch.reach_tokens = std::max(scratch.reach_tokens, reach * candidate.block_size);
    pricer.pull_from(static_cast<std::int32_t>(i), source, pairs[i]);
    pricer.attempt({&scratch.pull, 1}, kWhole, best);
    pricer.attempt_cuts(scratch.pull, best);
  }
  if (candidate.extension && able_count > 1) {
    attempt_splits(pricer, request, candidate, std::span(able).first(able_count), sources, pairs, scratch, best);
  }
  return best;
}

std::vector<std::uint32_t> most_useful(std::span<const Source> sources) {
  std::vector<std::uint32_t> order(sources.size());
  std::iota(order.begin(), order.end(), 0U);
  if (order.size() <= kMaxSources) return order;
  std::vector<std::int64_t> held(sources.size());
  for (std::size_t i = 0; i < sources.size(); ++i) {
    for (const Span& span : sources[i].ram) held[i] += span.end - span.start;
  }
  const auto sooner = [&](std::uint32_t a, std::uint32_t b) {
    if (held[a] != held[b]) return held[a] > held[b];
    if (sources[a].pulls != sources[b].pulls) return sources[a].pulls < sources[b].pulls;
    return a < b;
  };
  std::partial_sort(order.begin(), order.begin() + kMaxSources, order.end(), sooner);
  order.resize(kMaxSources);
  return order;
}

}  // namespace pointsman::plan
