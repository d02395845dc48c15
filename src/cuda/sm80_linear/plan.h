// How sm80_linear would compute a product with weights.
#pragma once

#include "cuda/plan.h"
#include "params/linear_params.h"

#include <string>
#include <vector>

namespace octavo::cuda {

struct Sm80LinearPlan {
    DType dtype;
    int32_t x_rows;  // rows of x in a tile
    bool in_pieces;  // whether rows of w and x are copied 16 bytes at a time; otherwise one number at a time
    int64_t w_tiles, x_tiles;
};

// Serves all products that any CUDA kernel computes (why_no_cuda_kernel). Plans with the rows of x of
// params.plan if that is given; it must name this kernel and satisfy is_sm80_plan().
Sm80LinearPlan plan_sm80_linear(const LinearParams& params);

bool is_sm80_plan(const LinearPlan& plan);
LinearPlan public_plan(const Sm80LinearPlan& plan);
Explanation describe(const Sm80LinearPlan& plan);
std::vector<std::string> sm80_linear_instances();

}  // namespace octavo::cuda
