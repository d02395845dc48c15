#include "cpu/backend.h"
#include "cpu/isa.h"

#include <octavo/build_info.h>

namespace octavo::cpu {
namespace {

// `has_isa`: the arithmetic of the operator depends on the instruction set.
Explanation make(const char* name, DType dtype, bool has_isa, const char* file) {
    Explanation text;
    text.kernel =
        std::string(name) + "<" + to_string(dtype) + (has_isa ? std::string(", ") + isa_name() : "") + ">";
    const int threads = get_num_threads();
    text.summary = "on the CPU, " + std::to_string(threads) + (threads == 1 ? " thread" : " threads");
    text.file = file;
    text.plan = {{"dtype", to_string(dtype)}, {"num_threads", threads}};
    if (has_isa) text.plan.emplace_back("isa", isa_name());
    text.why_not = {{"CUDA kernels", "the device is the CPU"}};
    return text;
}

}  // namespace

Explanation explain(const AttentionParams& p) {
    if (p.shared_prefix_len == 0) return make("cpu_attention", p.dtype, true, "src/cpu/forward.cpp");
    return make("cpu_shared_prefix", p.dtype, true, "src/cpu/shared_prefix.cpp");
}
Explanation explain(const AppendKvParams& p) {
    return make("cpu_append_kv", p.dtype, false, "src/cpu/cache.cpp");
}
Explanation explain(const CopyPagesParams& p) {
    return make("cpu_copy_pages", p.dtype, false, "src/cpu/cache.cpp");
}
Explanation explain(const MergeStatesParams& p) {
    return make("cpu_merge_states", p.dtype, false, "src/cpu/merge_states.cpp");
}
Explanation explain(const AttentionBackwardParams& p) {
    return make("cpu_attention_backward", p.dtype, true, "src/cpu/attention_backward.cpp");
}
Explanation explain(const LinearParams& p) {
    return make("cpu_linear", p.w_dtype, true, "src/cpu/linear.cpp");
}
Explanation explain(const RmsNormParams& p) {
    return make("cpu_rms_norm", p.dtype, true, "src/cpu/rms_norm.cpp");
}
Explanation explain(const LatentAttentionParams& p) {
    return make("cpu_latent_attention", p.dtype, true, "src/cpu/latent.cpp");
}

}  // namespace octavo::cpu
