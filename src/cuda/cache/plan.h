// How the kernels that write a cache would work: with one warp for each row that they move, unless keys are
// rotated.
#pragma once

#include "cuda/plan.h"
#include "params/cache_params.h"

namespace octavo::cuda {

constexpr int32_t kRotaryThreads = 128;  // threads of a CTA of append_rotary_kernel

struct AppendKvPlan {
    DType dtype, k_dtype, v_dtype;  // the dtype of new keys and values, and those of pages
    int64_t num_rows;               // [tokens]; for codes [tokens, num_kv_heads + num_q_heads]
    bool in_chunks;                 // whether rows move in pieces of 16 bytes
    bool has_rotary;                // whether keys are rotated, and queries if there are any
    int32_t units_per_row;          // units of append_rotary_kernel: two pieces of a row each
    int32_t ctas_per_token;         // of append_rotary_kernel

    bool has_codes() const { return is_code(k_dtype); }
};

struct CopyPagesPlan {
    DType dtype;
    int64_t num_rows;           // [num_copies, page_size, num_kv_heads]
    bool k_aligned, v_aligned;  // whether rows move in pieces of 16 bytes
};

AppendKvPlan plan_append_kv(const AppendKvParams& params);
CopyPagesPlan plan_copy_pages(const CopyPagesParams& params);

Explanation describe(const AppendKvPlan& plan);
Explanation describe(const CopyPagesPlan& plan);

}  // namespace octavo::cuda
