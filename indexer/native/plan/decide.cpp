// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "fleet.hpp"

namespace pointsman::plan {

bool FleetPlanner::admits(const Only& only, const Row& row) const {
  const bool of_rank = only.rank < 0 || only.rank >= row.ranks || only.rank == row.rank;
  return of_rank && std::ranges::find(only.without, row.worker) == only.without.end();
}

const Link& FleetPlanner::link(std::uint32_t source, std::uint32_t destination) const {
  const Link* own = links_.find(std::uint64_t{source} << 32 | destination);
  return own == nullptr ? usual_link_ : *own;
}

Survey FleetPlanner::survey(const Selection& selection, const Only& only, double now_s) const {
  const std::lock_guard lock(mutex_);
  const LoadBoard::Reading load(board_);
  Survey found;
  for (const Member& member : selection.candidates) {
    const Row& row = rows_[member.row];
    if (!admits(only, row)) continue;
    ++found.ranks;
    found.busy += load.queue_s(row.board_row, now_s) > 0;
  }
  return found;
}

Outcome FleetPlanner::decide(const Selection& selection, const Only& only, const Asked& asked) {
  const std::lock_guard lock(mutex_);
  Outcome outcome;
  outcome.index_version = index_->version();
  for (const auto& prompt : asked.prompts) outcome.prompt_tokens.push_back(static_cast<std::int64_t>(prompt.size()));
  if (asked.prompts.empty()) outcome.prompt_tokens.push_back(asked.estimated_tokens);
  outcome.output_tokens = asked.output_tokens;
  outcome.slo_tpot_s = asked.slo_tpot_s;
  outcome.pressure = asked.pressure;
  match_prompts(selection, asked, outcome);
  copy_loads(selection, only, asked.now_s);
  match_in_flight(selection, Residents::Reading(in_flight_), asked.now_s, outcome);
  order_spans(outcome.prompt_tokens.size(), outcome.spans);
  note_events(selection, only, outcome);
  sources_.clear();
  if (asked.may_pull) choose_sources(selection, asked.now_s, outcome);
  rank_candidates(selection, only, asked, outcome);
  return outcome;
}

// The board is read at once and then left to others.
void FleetPlanner::copy_loads(const Selection& selection, const Only& only, double now_s) {
  loads_.resize(rows_.size());
  const LoadBoard::Reading load(board_);
  for (const Member& member : selection.candidates) {
    const Row& row = rows_[member.row];
    if (admits(only, row)) loads_[member.row] = load.rank(row.board_row, now_s);
  }
}

// Hashes each prompt once per block size and notes who holds what.
void FleetPlanner::match_prompts(const Selection& selection, const Asked& asked, Outcome& outcome) {
  held_.clear();
  if (asked.prompts.empty()) return;
  std::vector<std::int64_t> sizes;
  for (const auto* members : {&selection.candidates, &selection.sources}) {
    for (const Member& member : *members) {
      const std::int64_t size = rows_[member.row].block_size;
      if (size > 0 && std::ranges::find(sizes, size) == sizes.end()) sizes.push_back(size);
    }
  }
  for (const std::int64_t size : sizes) {
    for (std::size_t prompt = 0; prompt < asked.prompts.size(); ++prompt) {
      std::vector<std::uint64_t>& hashes = outcome.hashed.emplace_back(HashedPrompt{size, {}}).hashes;
      hashes.reserve(asked.prompts[prompt].size() / static_cast<std::size_t>(size));
      runs_.clear();
      index_->chain().blocks(asked.root, asked.prompts[prompt], static_cast<std::size_t>(size), asked.first_block_keys,
                            hashes);
      index_->match(hashes, runs_, asked.now_s);
      for (const Run& run : runs_) {
        // A plan must not promise what is in doubt.
        if (run.doubtful || run.demoting || run.slot >= bindings_.size()) continue;
        const Binding& binding = bindings_[run.slot];
        for (std::uint32_t row = binding.first_row; row < binding.first_row + binding.rows; ++row) {
          if (rows_[row].block_size != size) continue;
          const std::size_t place = (prompt * rows_.size() + row) * kTiers + run.tier;
          held_.push_back({static_cast<std::uint32_t>(place), {run.start, run.end}});
        }
      }
    }
  }
}

// What of the prompts would be new to each candidate's HBM, beside the requests in flight there, and what of it those
// of the last moments will have brought. Mirrors router/plan/speculation.py.
void FleetPlanner::match_in_flight(const Selection& selection, const Residents::Reading& there, double now_s,
                                   const Outcome& outcome) {
  fresh_tokens_.assign(rows_.size(), 0);
  resident_tokens_.assign(rows_.size(), 0);
  speculative_tokens_.assign(rows_.size(), 0);
  for (const Member& member : selection.candidates) {
    resident_tokens_[member.row] = there.tokens(rows_[member.row].board_row);
  }
  expected_.clear();
  std::size_t number = 0;
  for (const HashedPrompt& prompt : outcome.hashed) {
    there.leading(prompt.block_size, prompt.hashes, leading_);
    // Prompts are hashed in their order, once per block size.
    const std::size_t first_place = number++ % outcome.prompt_tokens.size() * rows_.size() * kTiers;
    for (const Member& member : selection.candidates) {
      const Row& row = rows_[member.row];
      if (row.block_size != prompt.block_size) continue;
      const Residents::Leading known = row.board_row < leading_.size() ? leading_[row.board_row] : Residents::Leading{};
      fresh_tokens_[member.row] += static_cast<std::int64_t>(prompt.hashes.size() - known.shared) * prompt.block_size;
      if (known.ready_s < now_s - speculative_s_ || known.ready_s > now_s + loads_[member.row].queue_s) continue;
      const std::size_t place = first_place + member.row * kTiers + index_of(Tier::hbm);
      expected_.push_back({static_cast<std::uint32_t>(place), {0, known.shared}});
    }
  }
  if (!expected_.empty()) expect();
}

// What is in flight takes the place of what the index knows of it.
void FleetPlanner::expect() {
  std::ranges::sort(expected_, {}, &HeldSpan::place);
  const auto of = [&](std::uint32_t place) {
    const auto found = std::ranges::lower_bound(expected_, place, {}, &HeldSpan::place);
    return found != expected_.end() && found->place == place ? &*found : nullptr;
  };
  const auto row_of = [&](std::uint32_t place) { return place / kTiers % rows_.size(); };
  in_flight_ends_.clear();
  for (const HeldSpan& one : expected_) in_flight_ends_.push_back(one.span.end);
  std::erase_if(held_, [&](const HeldSpan& held) {
    HeldSpan* one = of(held.place);
    if (one == nullptr || held.span.start > in_flight_ends_[static_cast<std::size_t>(one - expected_.data())]) return false;
    one->span.end = std::max(one->span.end, held.span.end);
    speculative_tokens_[row_of(held.place)] -= held.span.end - held.span.start;
    return true;
  });
  for (const HeldSpan& one : expected_) speculative_tokens_[row_of(one.place)] += one.span.end;
  for (std::size_t row = 0; row < rows_.size(); ++row) speculative_tokens_[row] *= rows_[row].block_size;
  held_.insert(held_.begin(), expected_.begin(), expected_.end());  // each begins its place
}

// A counting sort by place that keeps the order within one.
void FleetPlanner::order_spans(std::size_t prompts, std::vector<Span>& spans) {
  span_ends_.assign(prompts * rows_.size() * kTiers + 1, 0);
  for (const HeldSpan& held : held_) ++span_ends_[held.place + 1];
  for (std::size_t place = 1; place < span_ends_.size(); ++place) span_ends_[place] += span_ends_[place - 1];
  spans.resize(held_.size());
  for (const HeldSpan& held : held_) spans[span_ends_[held.place]++] = held.span;
  // Every start has become the end: a place begins where the one before it ends.
  spans_ = spans;
}

Residence FleetPlanner::residence(std::size_t prompt, std::uint32_t row) const {
  const std::size_t first = (prompt * rows_.size() + row) * kTiers;
  std::uint32_t start = first == 0 ? 0 : span_ends_[first - 1];
  std::array<Spans, kTiers> tiers;
  for (std::size_t tier = 0; tier < kTiers; ++tier) {
    tiers[tier] = spans_.subspan(start, span_ends_[first + tier] - start);
    start = span_ends_[first + tier];
  }
  return {tiers[index_of(Tier::hbm)], tiers[index_of(Tier::ram)], tiers[index_of(Tier::storage)]};
}

void FleetPlanner::choose_sources(const Selection& selection, double now_s, Outcome& outcome) {
  std::vector<Source> able;
  std::vector<std::uint32_t> rows;
  const LoadBoard::Reading load(board_);
  for (const Member& member : selection.sources) {
    const Spans ram = residence(0, member.row).ram;
    if (ram.empty()) continue;
    const std::uint32_t number = rows_[member.row].worker;
    able.push_back({number, member.fingerprint, load.pulls(number), trust_.trust(workers_[number].trust, now_s), ram,
                    rows_[member.row].p2p, rows_[member.row].extension});
    rows.push_back(member.row);
  }
  for (const std::uint32_t index : most_useful(able)) {
    sessions_[sources_.size()] = load.sessions(able[index].worker);
    sources_.push_back(able[index]);
    const std::uint32_t row = rows[index];
    outcome.sources.push_back({row, rows_[row].rank, able[index], {{}, able[index].ram, {}}});
  }
}

Candidate FleetPlanner::candidate(const Member& member, std::span<const Residence> residences,
                                  double now_s) const {
  const Row& row = rows_[member.row];
  const Worker& one = workers_[row.worker];
  const LoadBoard::RankLoad& load = loads_[member.row];
  return {.worker = row.worker,
          .fingerprint = member.fingerprint,
          .costs = &one.costs,
          .block_size = std::max<std::int64_t>(row.block_size, 1),
          .chunk_blocks = row.chunk_blocks,
          .residence = residences,
          .queue_s = load.queue_s,
          .decodes = load.decodes,
          .pulls = load.pulls,
          .trust = trust_.trust(one.trust, now_s),
          .can_pull = row.can_pull,
          .extension = row.extension,
          .fresh_tokens = fresh_tokens_[member.row],
          .resident_tokens = resident_tokens_[member.row],
          .kv_capacity_tokens = row.kv_capacity_tokens,
          .speculative_tokens = speculative_tokens_[member.row]};
}

Reach FleetPlanner::reach_of(const Candidate& candidate, std::int64_t prompt_tokens) const {
  const auto end = [](Spans spans) { return spans.empty() ? std::int64_t{0} : spans.back().end; };
  const Residence& held = candidate.residence[0];
  Reach reach;
  reach.hbm = hbm_blocks(prompt_tokens, candidate.block_size, held);
  reach.own = std::max({reach.hbm, end(held.ram), end(held.storage)});
  reach.any = reach.own;
  for (const Source& source : sources_) {
    if (candidate.can_pull_from(source)) reach.any = std::max(reach.any, end(source.ram));
  }
  return reach;
}

std::int64_t FleetPlanner::price(const Request& request, const Candidate& candidate, Scored& scored) {
  std::array<Pair, kMaxSources> pairs;
  for (std::size_t i = 0; i < sources_.size() && (candidate.can_pull || candidate.extension); ++i) {
    pairs[i] = {link(sources_[i].worker, candidate.worker), board::has(sessions_[i], candidate.worker)};
  }
  scored.action = actions_.size();
  actions_.push_back(best_action(settings_, request, candidate, sources_, pairs, scratch_));
  scored.score_s = actions_.back().score_s;
  return scratch_.reach_tokens;
}

void FleetPlanner::keep_best(const Scored& scored, std::size_t keep) {
  if (best_.size() == keep) {
    if (keep == 0 || !(scored < best_.front())) return;
    std::ranges::pop_heap(best_, std::less{});
    best_.pop_back();
  }
  best_.push_back(scored);
  std::ranges::push_heap(best_, std::less{});
}

// Every candidate gets a bound of its score first. In the order of these they are priced, until the bound of the next
// is above the scores that are kept.
void FleetPlanner::rank_candidates(const Selection& selection, const Only& only, const Asked& asked,
                                   Outcome& outcome) {
  const std::size_t prompts = outcome.prompt_tokens.size();
  const Request request{outcome.prompt_tokens, asked.output_tokens, asked.slo_tpot_s, asked.pressure};
  const bool bounded = prompts == 1 && settings_.gpu_seconds_weight >= 0 && asked.pressure >= 0 &&
                       least_pull_.known &&
                       std::ranges::all_of(sources_, [](const Source& source) { return source.trust <= 1; });
  const auto of = [&](const Member& member) {
    residences_.resize(prompts);
    for (std::size_t prompt = 0; prompt < prompts; ++prompt) residences_[prompt] = residence(prompt, member.row);
    return candidate(member, residences_, asked.now_s);
  };
  waiting_.clear();
  best_.clear();
  actions_.clear();
  std::uint64_t chance = asked.seed;
  std::int64_t reach_tokens = -1;
  Scored furthest;
  for (const Member& member : selection.candidates) {
    if (!admits(only, rows_[member.row])) continue;
    const Candidate one = of(member);
    chance += 0x9e3779b97f4a7c15ULL;  // SplitMix64
    Scored scored{0, mix64(chance), kUnpriced, &member};
    ++outcome.candidates;
    if (bounded && one.costs->plain() && one.trust <= 1) {
      const Reach reach = reach_of(one, outcome.prompt_tokens[0]);
      if (reach.any * one.block_size <= reach_tokens) {
        scored.score_s = Pricer(settings_, request, one, nullptr).least_s(reach, least_pull_);
        waiting_.push_back(scored);
        continue;
      }
    }
    const std::int64_t found = price(request, one, scored);
    if (found > reach_tokens) {
      reach_tokens = found;
      furthest = scored;
    }
    keep_best(scored, asked.keep);
  }
  const auto later = [](const Scored& a, const Scored& b) { return b < a; };
  std::ranges::make_heap(waiting_, later);
  while (!waiting_.empty() && asked.keep > 0) {
    std::ranges::pop_heap(waiting_, later);
    Scored& next = waiting_.back();
    if (best_.size() == asked.keep && next.score_s > best_.front().score_s) break;
    price(request, of(*next.member), next);
    keep_best(next, asked.keep);
    waiting_.pop_back();
  }
  std::ranges::sort_heap(best_, std::less{});
  outcome.kept = best_.size();
  outcome.ranking.reserve(best_.size() + 1);
  bool kept_furthest = furthest.member == nullptr;
  for (const Scored& one : best_) {
    keep_ranked(*one.member, actions_[one.action], asked.now_s, outcome);
    kept_furthest = kept_furthest || one.member == furthest.member;
  }
  if (!kept_furthest) keep_ranked(*furthest.member, actions_[furthest.action], asked.now_s, outcome);
}

// Once more for one of the best: what it was priced with.
void FleetPlanner::keep_ranked(const Member& member, const Action& action, double now_s,
                               Outcome& outcome) const {
  const Row& row = rows_[member.row];
  Ranked& one = outcome.ranking.emplace_back();
  one.row = member.row;
  one.rank = row.rank;
  one.action = action;
  for (std::size_t prompt = 0; prompt < outcome.prompt_tokens.size(); ++prompt) {
    one.residence.push_back(residence(prompt, member.row));
  }
  one.candidate = candidate(member, one.residence, now_s);
  one.candidate.costs = nullptr;
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    one.connected |= static_cast<std::uint32_t>(board::has(sessions_[i], row.worker)) << i;
  }
  const LoadBoard::RankLoad& load = loads_[member.row];
  one.in_flight = load.in_flight;
  one.prefill_tokens = load.prefill_tokens;
  one.active_tokens = load.active_tokens;
}

void FleetPlanner::note_events(const Selection& selection, const Only& only, Outcome& outcome) const {
  std::vector<SlotId> slots;
  for (const Member& member : selection.candidates) {
    const Row& row = rows_[member.row];
    if (row.rank != 0 || std::ranges::find(only.without, row.worker) != only.without.end()) continue;
    const Worker& one = workers_[row.worker];
    outcome.indexed = outcome.indexed || one.registered;
    slots.insert(slots.end(), one.slots.begin(), one.slots.end());
  }
  outcome.newest_event_s = stamps_.newest(slots);
}

}  // namespace pointsman::plan
