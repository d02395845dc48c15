// How attention of many queries over pages of codes would be worked through in two launches: the first one
// converts codes to 16-bit numbers in the workspace, once, and sm90_attention reads these. In a mixed batch
// they serve the sequences with many queries, and two more launches serve the others.
#pragma once

#include "common/fast_divide.h"
#include "cuda/codes.h"
#include "cuda/decode/plan.h"
#include "cuda/gpu.h"
#include "cuda/plan.h"
#include "cuda/sm80_attention/plan.h"
#include "cuda/sm90_attention/plan.h"
#include "params/attention_params.h"

#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace octavo::cuda {

constexpr int32_t kExpandThreads = 256;  // in a CTA
constexpr int32_t kExpandPasses = 4;     // the most pieces that a thread takes, of K and of V each
constexpr int32_t kExpandColumns = 8;    // numbers in a piece
// Threads that share a row: up to head dim 128, and above.
constexpr int32_t kFewExpandLanes = 4, kManyExpandLanes = 8;

// If this would take more workspace, codes are not converted. The host knows only how many tokens the page
// table has room for.
constexpr int64_t kMaxExpandedBytes = int64_t{512} << 20;
// The most that whole tiles and the page table may add to that.
constexpr int64_t kMaxRoundingBytes = int64_t{64} << 20;

struct ExpandedPlan {
    DType dtype;
    Codes codes;
    bool token_scales;      // whether keys or values have scales of their own
    int32_t num_sequences;  // all sequences of the batch
    // A mixed batch: the fewest queries of a sequence whose codes become numbers, and the most of one that
    // decodes. Otherwise all sequences are converted, and both are 0.
    int32_t many_queries, few_queries;
    int32_t num_slots;  // places in the workspace, each for one sequence
    // A mixed batch: SMs that attention over the numbers leaves to split_kv_decode over the sequences with
    // few queries, which then runs beside it; 0: they run one after the other.
    int32_t sms_left;
    int32_t num_kv_heads, head_dim;
    int32_t room;          // tokens of a slot
    int32_t lanes;         // threads that share a row
    int32_t num_runs;      // the most runs of run_tokens() tokens in a sequence
    int32_t num_turns;     // CTAs that take turns at the runs of a (sequence, KV head)
    int64_t tensor_bytes;  // bytes of all keys; values take as many
    int64_t table_bytes;   // bytes of the page table, one number for each sequence
    Sm90Plan attention;    // the plan of attention over the numbers
    // A mixed batch: the plans of attention over the codes of sequences with few queries, and of those with
    // more, but not many.
    std::optional<DecodePlan> few;
    std::optional<std::variant<Sm90Plan, Sm80Plan>> between;

    bool is_mixed() const { return many_queries > 0; }
    Grid grid() const { return {int64_t{num_turns} * num_kv_heads * num_slots}; }
    int32_t threads() const { return kExpandThreads; }
    int32_t run_tokens() const { return kExpandThreads / lanes; }
    // Leaves out the workspace of the kernels over the numbers and over codes, which take their own.
    int64_t workspace_bytes() const { return 2 * tensor_bytes + table_bytes; }
};

// Returns nothing where this way does not serve, or takes longer than the kernels that read codes; why_not,
// unless null, then gets the reason.
std::optional<ExpandedPlan> plan_expanded_attention(const AttentionParams& params, const Gpu& gpu,
                                                    std::string* why_not = nullptr);
// Makes the plan that converts all sequences, whether it pays or not; above head dim 128 as many at a time as
// there is workspace for.
std::optional<ExpandedPlan> make_expanded_plan(const AttentionParams& params, const Gpu& gpu,
                                               std::string* why_not = nullptr);
// Makes the plan of a mixed batch, whether it pays or not, in which sequences of many_queries are converted.
std::optional<ExpandedPlan> make_mixed_plan(const AttentionParams& params, const Gpu& gpu,
                                            int32_t many_queries, std::string* why_not = nullptr);

// The part of a packed batch whose sequences have from `fewest` up to `most` queries.
AttentionParams with_queries(AttentionParams params, int32_t fewest, int32_t most);

// The call of attention over the numbers in the workspace: every converted sequence is one page of `room`
// tokens, [slot, KV head, token, head_dim]. Keys come first, then values, then the page table.
AttentionParams over_expanded(const AttentionParams& params, int32_t num_slots, int32_t room,
                              void* workspace);

Explanation describe(const ExpandedPlan& plan);
inline bool operator==(const ExpandedPlan& a, const ExpandedPlan& b) {
    return describe(a).plan == describe(b).plan && a.attention == b.attention && a.few == b.few &&
           a.between == b.between;
}

std::vector<std::string> expand_codes_instances();

}  // namespace octavo::cuda
