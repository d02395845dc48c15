// How attention of many queries over pages of codes would be worked through in two launches: one turns codes
// into numbers of 16 bits in workspace, once, and sm90_attention reads these.
#pragma once

#include "common/fast_divide.h"
#include "cuda/codes.h"
#include "cuda/gpu.h"
#include "cuda/plan.h"
#include "cuda/sm90_attention/plan.h"
#include "params/attention_params.h"

#include <optional>
#include <string>
#include <vector>

namespace octavo::cuda {

constexpr int32_t kExpandThreads = 256;  // of a CTA
constexpr int32_t kExpandPasses = 4;     // pieces that a thread takes at most, of K and of V each
constexpr int32_t kExpandColumns = 8;    // numbers of a piece
// Threads that share a row, up to head dim 128 and above.
constexpr int32_t kFewExpandLanes = 4, kManyExpandLanes = 8;

// Beyond this much workspace, codes stay what they are. Only the room of the page table is known on the host.
constexpr int64_t kMaxExpandedBytes = int64_t{512} << 20;

struct ExpandedPlan {
    DType dtype;
    Codes codes;
    bool token_scales;      // whether keys or values have scales of their own
    int32_t num_sequences;  // all of the batch
    int32_t num_kv_heads, head_dim;
    int32_t room;          // tokens that each sequence has room for in workspace
    int32_t lanes;         // threads that share a row
    int32_t num_runs;      // of tokens, of one sequence at most: as many as a CTA has rows
    int32_t num_turns;     // CTAs that take these in turns
    int64_t tensor_bytes;  // keys, and values likewise
    int64_t table_bytes;   // a page number for each sequence
    Sm90Plan attention;    // over the numbers

    Grid grid() const { return {int64_t{num_turns} * num_kv_heads * num_sequences}; }
    int32_t threads() const { return kExpandThreads; }
    int32_t run_tokens() const { return kExpandThreads / lanes; }
    // Without that of the attention, which it takes by itself.
    int64_t workspace_bytes() const { return 2 * tensor_bytes + table_bytes; }
};

// Nothing where it does not serve, or takes longer than the kernels that read codes: why_not, unless null,
// then gets the reason.
std::optional<ExpandedPlan> plan_expanded_attention(const AttentionParams& params, const Gpu& gpu,
                                                    std::string* why_not = nullptr);
// The same whether it pays or not.
std::optional<ExpandedPlan> make_expanded_plan(const AttentionParams& params, const Gpu& gpu,
                                               std::string* why_not = nullptr);

// The attention over the numbers, once they are in workspace: every sequence is one page of `room` tokens,
// [sequence, KV head, token, head_dim], keys before values, and the page table behind both.
AttentionParams over_expanded(const AttentionParams& params, int32_t room, void* workspace);

Explanation describe(const ExpandedPlan& plan);
inline bool operator==(const ExpandedPlan& a, const ExpandedPlan& b) {
    return describe(a).plan == describe(b).plan && a.attention == b.attention;
}

std::vector<std::string> expand_codes_instances();

}  // namespace octavo::cuda
