// How rms_norm would work: with one CTA per row, or with one warp where rows are short enough.
#pragma once

#include "cuda/plan.h"
#include "params/rms_norm_params.h"

#include <cstdint>

namespace octavo::cuda {

// A thread keeps this many numbers of a row in registers, so that the largest number of threads holds 16384.
// The rest of a longer row is read twice.
constexpr int32_t kRmsNormHeld = 16;
constexpr int32_t kRmsNormMaxThreads = 1024;

struct RmsNormPlan {
    DType dtype, weight_dtype;
    int64_t num_rows;
    int32_t dim;
    int32_t threads_per_row;  // a multiple of 32; with 32, a CTA has kRowsPerBlock rows
    bool in_chunks;           // whether rows move in pieces of 16 bytes

    bool is_warp_each() const { return threads_per_row == 32; }
    int64_t num_ctas() const;
    int32_t threads() const;  // threads of a CTA
};

RmsNormPlan plan_rms_norm(const RmsNormParams& params);

Explanation describe(const RmsNormPlan& plan);

}  // namespace octavo::cuda
