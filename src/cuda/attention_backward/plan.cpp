#include "cuda/attention_backward/plan.h"

#include "common/fail.h"
#include "cuda/backend.h"

namespace octavo::cuda {

std::string why_no_backward(const AttentionBackwardParams&) {
    return "no CUDA kernel computes gradients yet; it takes arrays on the CPU alone";
}

Explanation explain(const AttentionBackwardParams& p, const Gpu&) {
    fail<TypeError>(p.op, why_no_backward(p));  // as the check does before
}

}  // namespace octavo::cuda
