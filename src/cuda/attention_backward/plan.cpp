#include "cuda/attention_backward/plan.h"

#include "cuda/backend.h"

#include <utility>

namespace octavo::cuda {

BackwardPlan plan_attention_backward(const AttentionBackwardParams& p, const Gpu& gpu) {
    if (const auto plan = plan_sm90_backward(p, gpu)) return *plan;
    return plan_sm80_backward(p, gpu);
}

Explanation explain(const AttentionBackwardParams& p, const Gpu& gpu) {
    std::string why_not_sm90;
    if (const auto plan = plan_sm90_backward(p, gpu, &why_not_sm90)) {
        Explanation text = describe(*plan);
        text.why_not.emplace_back("sm80_backward",
                                  "it could serve this call, but sm90_backward is faster where both can");
        return text;
    }
    Explanation text = describe(plan_sm80_backward(p, gpu));
    text.why_not.emplace_back("sm90_backward", why_not_sm90);
    return text;
}

std::vector<std::string> backward_instances(bool with_sm90) {
    std::vector<std::string> names = sm80_backward_instances();
    if (!with_sm90) return names;
    for (std::string& name : sm90_backward_instances()) names.push_back(std::move(name));
    return names;
}

}  // namespace octavo::cuda
