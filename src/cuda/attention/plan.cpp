#include "cuda/attention/plan.h"

#include "cuda/backend.h"

namespace octavo::cuda {
namespace {

// The kernels that serve a batch without a shared prefix, in the order of plan_kernel: of those that can
// serve a call, the first is the fastest.
struct Kernel {
    const char* name;
    bool (*serves)(const AttentionParams& params, const Gpu& gpu, std::string* why_not);
    // Explanations leave it out of other calls.
    bool (*concerns)(const AttentionParams& params) = [](const AttentionParams&) { return true; };
};
template <auto kPlan>
bool serves(const AttentionParams& params, const Gpu& gpu, std::string* why_not) {
    return kPlan(params, gpu, why_not).has_value();
}
bool reads_codes(const AttentionParams& params) { return is_code(params.k_dtype); }
constexpr Kernel kKernels[] = {
    {"split_kv_decode", serves<plan_split_kv>},
    {"stream_k_decode", serves<plan_stream_k>},
    {"expand_codes", serves<plan_expanded_attention>, reads_codes},
    {"divide_queries", serves<plan_divided_queries>, reads_codes},
    {"sm90_attention", serves<plan_sm90_attention>},
    {"sm90_wide_attention", serves<plan_sm90_wide_attention>,
     [](const AttentionParams& params) { return params.head_dim > kSm90MostHeadDim; }},
    {"sm80_attention",
     [](const AttentionParams& params, const Gpu&, std::string* why_not) {
         if (params.chosen_pages) refuse(why_not, kReadsAllPages);
         return !params.chosen_pages;
     }},
};

void add_why_not(Explanation& text, const AttentionParams& p, const Gpu& gpu) {
    const std::string chosen = text.kernel.substr(0, text.kernel.find('<'));
    if (p.paged()) {
        std::string why_not;
        plan_shared_prefix(p, gpu, &why_not);
        text.why_not.emplace_back("shared_prefix", why_not);
    }
    for (const Kernel& kernel : kKernels) {
        if (kernel.name == chosen || !kernel.concerns(p)) continue;
        std::string why_not;
        if (kernel.serves(p, gpu, &why_not))
            why_not = text_of("it could serve this call, but ", chosen, " is faster where both can");
        text.why_not.emplace_back(kernel.name, why_not);
    }
}

}  // namespace

AttentionPlan plan_attention(const AttentionParams& p, const Gpu& gpu) {
    if (p.total_q == 0 || p.batch == 0 || p.seqlen_q == 0) return NothingToDo{};
    if (p.shared_prefix_len > 0) {
        if (const auto plan = plan_shared_prefix(p, gpu)) return *plan;
    }
    return plan_kernel(p, gpu);
}

Explanation explain(const AttentionParams& p, const Gpu& gpu) {
    const AttentionPlan plan = plan_attention(p, gpu);
    Explanation text;
    if (const auto* kernel = std::get_if<KernelPlan>(&plan)) {
        text = describe(*kernel);
        const int32_t count = num_sequences(*kernel);
        if (count < p.batch)
            text.summary += text_of(", for the first ", count, " of ", p.batch, " sequences; others follow");
        add_why_not(text, p, gpu);
    } else if (const auto* shared = std::get_if<SharedPrefixPlan>(&plan)) {
        text = describe(*shared);
        for (const Kernel& kernel : kKernels) {
            if (!kernel.concerns(p)) continue;
            text.why_not.emplace_back(kernel.name,
                                      "by itself it would read the shared prefix once for each sequence");
        }
    } else {
        text.kernel = "none";
        text.summary = "there is no query";
    }
    return text;
}

std::vector<std::string> attention_instances(bool with_sm90) {
    std::vector<std::string> names = sm80_attention_instances();
    for (std::string& name : decode_instances()) names.push_back(std::move(name));
    names.emplace_back("divide_queries");
    if (!with_sm90) return names;
    for (std::string& name : sm90_attention_instances()) names.push_back(std::move(name));
    for (std::string& name : sm90_wide_attention_instances()) names.push_back(std::move(name));
    for (std::string& name : expand_codes_instances()) names.push_back(std::move(name));
    return names;
}

}  // namespace octavo::cuda
