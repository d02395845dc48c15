// What the host hands the kernels of latent_attention beside the call itself.
#pragma once

#include "common/fast_divide.h"

#include <cstdint>

namespace octavo::cuda {

struct LatentLaunch {
    FastDivide tiles_per_sequence, num_q_heads, page_size;
    int32_t num_splits;
    bool q_aligned, kv_aligned;  // rows move 16 bytes at a time
    // What each split finds, where there are several: normalised results of every row of [total_q,
    // num_q_heads], and their log-sum-exps. Rows of padding are not written.
    float* partial_out;  // [num_splits, total_rows, kLatentVDim]
    float* partial_lse;  // [num_splits, total_rows]
};

}  // namespace octavo::cuda
