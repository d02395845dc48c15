// How sm90_wide_attention would work through a batch.
#pragma once

#include "cuda/gpu.h"
#include "cuda/plan.h"
#include "cuda/sm90_attention/row_tiles.h"
#include "cuda/sm90_wide_attention/tiles.h"
#include "params/attention_params.h"

#include <optional>
#include <string>
#include <vector>

namespace octavo::cuda {

// Sm90Launch, in sm90_attention/parameters.h, says more about what most of these mean to the kernel.
struct Sm90WidePlan {
    DType dtype;
    int32_t num_sequences;
    int32_t heads, tokens;  // heads and tokens side by side in the 64 rows of a CTA
    int32_t box_keys;       // keys that one copy brings
    int64_t num_row_tiles;  // over the batch and all heads; a bound when the queries are packed
    Sm90Order order;
    int32_t num_ctas;

    Grid grid() const { return {num_ctas}; }
    int32_t threads() const { return Sm90WideConfig::kThreads; }
    int64_t workspace_bytes() const { return int64_t{sizeof(uint32_t)}; }  // Sm90Launch::counter
};

// Returns nothing where the kernel does not serve; why_not, unless null, then gets the reason.
std::optional<Sm90WidePlan> plan_sm90_wide_attention(const AttentionParams& params, const Gpu& gpu,
                                                     std::string* why_not = nullptr);

Explanation describe(const Sm90WidePlan& plan);
inline bool operator==(const Sm90WidePlan& a, const Sm90WidePlan& b) {
    return describe(a).plan == describe(b).plan;
}

std::vector<std::string> sm90_wide_attention_instances();

}  // namespace octavo::cuda
