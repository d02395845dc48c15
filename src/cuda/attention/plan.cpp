#include "cuda/attention/plan.h"

#include "cuda/backend.h"

namespace octavo::cuda {
namespace {

std::string name_without_instance(const std::string& kernel) { return kernel.substr(0, kernel.find('<')); }

Explanation describe(NothingToDo) {
    Explanation text;
    text.kernel = "none";
    text.summary = "there is no query";
    return text;
}

// Why the kernels that serve a batch without a shared prefix do not run, in the order in which they are
// asked.
void add_why_not(Explanation& text, const AttentionParams& p, const Gpu& gpu) {
    const std::string chosen = name_without_instance(text.kernel);
    auto add = [&](const char* kernel, bool serves, const std::string& why) {
        if (kernel == chosen) return;
        text.why_not.emplace_back(kernel,
                                  serves ? "it could serve this call, but " + chosen + " is preferred" : why);
    };
    std::string why;
    if (p.paged()) text.why_not.emplace_back("shared_prefix", "shared_prefix_len is 0");
    add("split_kv_decode", plan_split_kv(p, gpu, &why).has_value(), why);
    add("batch_invariant_decode", plan_batch_invariant_decode(p, gpu, &why).has_value(), why);
    add("stream_k_decode", plan_stream_k(p, gpu, &why).has_value(), why);
    add("sm90_attention", plan_sm90_attention(p, gpu, &why).has_value(), why);
    add("sm80_attention", true, {});
}

}  // namespace

AttentionPlan plan_attention(const AttentionParams& p, const Gpu& gpu) {
    if (p.total_q == 0 || p.batch == 0 || p.seqlen_q == 0) return NothingToDo{};
    if (p.shared_prefix_len > 0) return plan_shared_prefix(p, gpu);
    return std::visit([](const auto& plan) { return AttentionPlan(plan); }, plan_kernel(p, gpu));
}

Explanation explain(const AttentionParams& p, const Gpu& gpu) {
    const AttentionPlan plan = plan_attention(p, gpu);
    Explanation text = std::visit([](const auto& plan) { return describe(plan); }, plan);
    if (std::holds_alternative<NothingToDo>(plan)) return text;
    if (!std::holds_alternative<SharedPrefixPlan>(plan)) {
        add_why_not(text, p, gpu);
        return text;
    }
    for (const char* kernel : {"split_kv_decode", "batch_invariant_decode", "stream_k_decode",
                               "sm90_attention", "sm80_attention"}) {
        text.why_not.emplace_back(kernel, "by itself it would read the shared prefix once for each sequence");
    }
    return text;
}

std::vector<std::string> attention_instances(bool with_sm90) {
    std::vector<std::string> names = sm80_attention_instances();
    for (std::string& name : decode_instances()) names.push_back(std::move(name));
    if (!with_sm90) return names;
    for (std::string& name : sm90_attention_instances()) names.push_back(std::move(name));
    return names;
}

}  // namespace octavo::cuda
