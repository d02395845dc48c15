#include "cuda/attention_backward/plan.h"
#include "cuda/backend.h"

#include "common/fail.h"

namespace octavo::cuda {

void attention_backward(const AttentionBackwardParams& p, void*) {
    fail<TypeError>(p.op, why_no_backward(p));  // as the check does before
}

}  // namespace octavo::cuda
