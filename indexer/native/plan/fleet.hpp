// SPDX-License-Identifier: Apache-2.0
// Decides for a whole fleet at once: hash, match, load, price every candidate, rank. No Python in here.
//
// The fleet is a table of rows, one per rank; ranks of a worker lie side by side. Workers are numbered by the load
// board. What changes seldom (rows, constants, slots, trust) is written by the caller when it changes; what changes
// with each request is read from the index and the board. A Selection names who may take a request and who may serve
// as a source; it is made once and used until the fleet changes.
//
// Cost of a decision: O(prompt tokens x block sizes + changes of holders along the prompt + candidates + candidates that
// are priced x sources x spans). Priced are those whose score might be among the best: of the others a bound is enough.
// One call at a time (locked); the index and the board may be written by others meanwhile.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "board.hpp"
#include "../flat_map.hpp"
#include "../mix.hpp"
#include "index_source.hpp"
#include "residents.hpp"
#include "pricer.hpp"
#include "score.hpp"

namespace pointsman {

// When each slot last had a batch applied, seconds of the caller's clock. Written by the thread that applies.
class SlotStamps {
 public:
  static constexpr double kNever = -std::numeric_limits<double>::infinity();
  void set(SlotId slot, double at_s);
  // The latest of these; empty when none was ever set.
  [[nodiscard]] std::optional<double> newest(std::span<const SlotId> slots) const;

 private:
  std::vector<double> at_s_;
  mutable std::mutex mutex_;
};

namespace plan {

struct Member {
  std::uint32_t row;
  std::uint32_t fingerprint;  // equal where blocks may be exchanged
};

struct Selection {
  std::vector<Member> candidates;
  std::vector<Member> sources;  // reachable and answering
};

struct Asked {
  std::vector<std::span<const std::uint32_t>> prompts;  // empty: decided by load alone
  std::int64_t estimated_tokens = 0;                    // where there are no prompts
  std::uint64_t root = 0;                               // hash of the namespace
  std::vector<std::uint8_t> first_block_keys;
  bool may_pull = false;
  std::int64_t output_tokens = 0;
  std::optional<double> slo_tpot_s;
  double pressure = 0;
  double now_s = 0;
  std::uint64_t seed = 0;  // of the order of equals
  std::size_t keep = 0;    // of the ranking
};

// Who of a selection is meant.
struct Only {
  std::int64_t rank = -1;  // of workers that have it; -1: all
  std::vector<std::uint32_t> without;  // workers
};

struct Survey {
  std::size_t busy = 0;  // with prefills under way
  std::size_t ranks = 0;
};

// A candidate with its best plan, and what that was priced with.
struct Ranked {
  std::uint32_t row = 0;
  std::uint32_t rank = 0;
  Candidate candidate;             // its spans are the outcome's; its constants are not kept
  std::vector<Residence> residence;  // per prompt
  Action action;
  std::uint32_t connected = 0;  // bit per source tried
  std::int64_t in_flight = 0;
  std::int64_t prefill_tokens = 0;
  std::int64_t active_tokens = 0;
};

struct TriedSource {
  std::uint32_t row = 0;
  std::uint32_t rank = 0;
  Source source;
  Residence residence;  // of the only prompt
};

// The block hashes of a prompt.
struct HashedPrompt {
  std::int64_t block_size = 0;
  std::vector<std::uint64_t> hashes;
};

struct Outcome {
  // The best `kept`, best first; then, if it is not among them, the one that could have most of the prompt cached.
  std::vector<Ranked> ranking;
  std::size_t kept = 0;
  std::vector<TriedSource> sources;
  std::vector<std::int64_t> prompt_tokens;
  std::int64_t output_tokens = 0;
  std::optional<double> slo_tpot_s;
  double pressure = 0;
  std::size_t candidates = 0;
  std::uint64_t index_version = 0;
  std::optional<double> newest_event_s;  // of any candidate
  bool indexed = false;
  std::vector<Span> spans;
  std::vector<HashedPrompt> hashed;  // by block size, then by prompt

  Outcome() = default;
  Outcome(Outcome&&) = default;  // spans point into `spans`, which a move leaves in place
  Outcome(const Outcome&) = delete;
};

// How far a worker's map is to be believed: the formula of router/decisions/trust.py.
struct TrustRecord {
  double promised = 0;
  double kept = 0;
  double at_s = 0;
};
struct TrustSettings {
  double good_faith_tokens = 1;
  double memory_s = 1;
  double least = 0;

  [[nodiscard]] double trust(const TrustRecord& record, double now_s) const;
};

class FleetPlanner {
 public:
  FleetPlanner(std::unique_ptr<const IndexSource> index, const LoadBoard& board, const Residents& residents,
               const SlotStamps& stamps, const Settings& settings, double speculative_s, const TrustSettings& trust)
      : index_(std::move(index)),
        board_(board),
        in_flight_(residents),
        stamps_(stamps),
        settings_(settings),
        speculative_s_(speculative_s),
        trust_(trust) {}

  struct Row {
    std::uint32_t worker = kNone;  // kNone: unused
    std::uint32_t rank = 0;
    std::uint32_t ranks = 0;
    std::uint32_t board_row = kNone;
    std::int64_t block_size = 0;  // 0: not known
    std::int64_t chunk_blocks = 1;
    bool can_pull = false;   // through vLLM's P2P protocol
    bool extension = false;  // it runs our engine extension
    bool p2p = false;        // it serves pulls through vLLM's P2P protocol
    std::int64_t kv_capacity_tokens = 0;  // of its HBM; 0: not known
  };

  // Rows of a worker, side by side; the first one's number.
  std::uint32_t add_rows(std::span<const Row> ranks);
  void remove_rows(std::uint32_t first);
  // The number may be given to another worker: its constants, trust and links are gone. O(links).
  void forget(std::uint32_t worker);
  void set_costs(std::uint32_t worker, const CostModel& costs);
  void set_trust(std::uint32_t worker, const TrustRecord& record);
  void set_usual_link(const Link& link);
  // A link that is not like the rest, or is again.
  void set_link(std::uint32_t source, std::uint32_t destination, const Link& link);
  void unset_link(std::uint32_t source, std::uint32_t destination);
  // Replaces where the worker's blocks are: a slot per rank, those under suspicion left out of answers, and a store.
  void bind_slots(std::uint32_t first_row, std::span<const SlotId> slots, const std::vector<bool>& suspect,
                  SlotId store);
  void unbind_slots(std::uint32_t worker);

  [[nodiscard]] Survey survey(const Selection& selection, const Only& only, double now_s) const;
  [[nodiscard]] Outcome decide(const Selection& selection, const Only& only, const Asked& asked);
 private:
  struct Worker {
    CostModel costs;
    TrustRecord trust;
    bool registered = false;
    std::vector<SlotId> slots;  // of the ranks
    SlotId store = kNoSlot;
  };
  struct Binding {
    std::uint32_t first_row = 0;
    std::uint32_t rows = 0;
  };
  struct Scored {
    double score_s = 0;        // at least this, where there is no action yet
    std::uint64_t chance = 0;  // orders equals
    std::size_t action = kUnpriced;
    const Member* member = nullptr;

    // Whether it comes before another in the ranking.
    bool operator<(const Scored& other) const {
      return score_s != other.score_s ? score_s < other.score_s : chance < other.chance;
    }
  };
  static constexpr std::size_t kUnpriced = ~std::size_t{0};
  struct HeldSpan {
    std::uint32_t place;  // (prompt * rows + row) * kTiers + tier
    Span span;
  };
  struct HashPair {
    std::size_t operator()(std::uint64_t key) const noexcept { return mix64(key); }
  };

  void match_prompts(const Selection& selection, const Asked& asked, Outcome& outcome);
  void match_in_flight(const Selection& selection, const Residents::Reading& there, double now_s,
                       const Outcome& outcome);
  void expect();
  void order_spans(std::size_t prompts, std::vector<Span>& spans);
  [[nodiscard]] Residence residence(std::size_t prompt, std::uint32_t row) const;
  void copy_loads(const Selection& selection, const Only& only, double now_s);
  void choose_sources(const Selection& selection, double now_s, Outcome& outcome);
  void rank_candidates(const Selection& selection, const Only& only, const Asked& asked, Outcome& outcome);
  [[nodiscard]] Reach reach_of(const Candidate& candidate, std::int64_t prompt_tokens) const;
  // Finds the best plan of a candidate; the most tokens that any of its plans finds cached.
  std::int64_t price(const Request& request, const Candidate& candidate, Scored& scored);
  void keep_best(const Scored& scored, std::size_t keep);
  void keep_ranked(const Member& member, const Action& action, double now_s, Outcome& outcome) const;
  [[nodiscard]] Candidate candidate(const Member& member, std::span<const Residence> residences, double now_s) const;
  void note_events(const Selection& selection, const Only& only, Outcome& outcome) const;
  [[nodiscard]] bool admits(const Only& only, const Row& row) const;
  void unbind_locked(std::uint32_t worker);
  void note_link(const Link& link);
  [[nodiscard]] const Link& link(std::uint32_t source, std::uint32_t destination) const;
  Worker& worker(std::uint32_t number);

  std::unique_ptr<const IndexSource> index_;
  const LoadBoard& board_;
  const Residents& in_flight_;
  const SlotStamps& stamps_;
  Settings settings_;
  double speculative_s_;  // for how long what was sent to a rank is expected there
  TrustSettings trust_;
  std::vector<Row> rows_;
  std::vector<Worker> workers_;
  Link usual_link_;
  FlatMap<std::uint64_t, Link, HashPair> links_;  // source << 32 | destination
  LeastPull least_pull_;           // by any of these links, as they are or were
  std::size_t links_written_ = 0;  // since it was made anew
  std::vector<Binding> bindings_;                 // by slot

  // Of the decision under way.
  std::vector<Run> runs_;
  std::vector<HeldSpan> held_;
  std::vector<std::uint32_t> span_ends_;  // by place
  std::span<const Span> spans_;
  std::vector<LoadBoard::RankLoad> loads_;  // by row, of those that may take the request
  std::vector<Source> sources_;
  std::array<board::WorkerSet, kMaxSources> sessions_;  // of the sources
  std::vector<Residence> residences_;
  std::vector<Residents::Leading> leading_;  // by board row
  std::vector<HeldSpan> expected_;           // what in-flight prompts will have brought into HBM
  std::vector<std::int64_t> in_flight_ends_;  // of them, before what the index knows was added
  std::vector<std::int64_t> fresh_tokens_;   // by row
  std::vector<std::int64_t> resident_tokens_;
  std::vector<std::int64_t> speculative_tokens_;
  std::vector<Action> actions_;
  std::vector<Scored> waiting_;  // not priced yet
  std::vector<Scored> best_;     // a heap, the worst on top
  ScoreScratch scratch_;
  mutable std::mutex mutex_;
};

}  // namespace plan
}  // namespace pointsman
