// How the kernels that write a cache work: one warp a row of what they move.
#pragma once

#include "cuda/plan.h"
#include "params/cache_params.h"

namespace octavo::cuda {

struct AppendKvPlan {
    DType dtype, k_dtype, v_dtype;  // of new keys and values, and of pages
    int64_t num_rows;               // tokens; of codes [tokens, num_kv_heads]
    bool in_chunks;                 // whether rows move in pieces of 16 bytes, bit for bit

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
