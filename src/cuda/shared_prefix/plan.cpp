#include "cuda/shared_prefix/plan.h"

#include "params/shared_prefix.h"

#include <algorithm>

namespace octavo::cuda {
namespace {

// Stands for the workspace, as far as plans look at addresses: a multiple of 256 bytes with room below it.
void* const kSomeWorkspace = reinterpret_cast<void*>(uintptr_t{1} << 46);

// The keys of one run, whole pages: as many runs as give the SMs a tile of rows each, of some length.
int32_t choose_run_len(const AttentionParams& p, const Gpu& gpu) {
    constexpr int64_t kTileRows = 128, kMinKeys = 256;
    const int64_t tiles = ceil_divide(p.total_q * p.group_size(), kTileRows) * p.num_kv_heads;
    const int64_t runs = std::clamp<int64_t>(std::min(gpu.num_sms / tiles, p.shared_prefix_len / kMinKeys), 1,
                                             int64_t{kMaxPrefixRuns});
    const int64_t num_pages = p.shared_prefix_len / p.page_size;
    return static_cast<int32_t>(ceil_divide(num_pages, runs) * p.page_size);
}

bool is_decode(const KernelPlan& plan) {
    return !std::holds_alternative<Sm90Plan>(plan) && !std::holds_alternative<Sm80Plan>(plan);
}

}  // namespace

SharedPrefixPlan plan_shared_prefix(const AttentionParams& p, const Gpu& gpu) {
    auto plan_over_prefix = [&](int32_t run_len) {
        return plan_kernel(over_shared_prefix(p, run_len, kSomeWorkspace, nullptr), gpu);
    };
    SharedPrefixPlan plan{};
    plan.dtype = p.dtype;
    plan.run_len = p.shared_prefix_len;
    plan.over_prefix = plan_over_prefix(plan.run_len);
    if (!is_decode(plan.over_prefix)) {  // which cuts keys itself
        plan.run_len = choose_run_len(p, gpu);
        plan.over_prefix = plan_over_prefix(plan.run_len);
    }
    plan.num_runs = static_cast<int32_t>(ceil_divide(p.shared_prefix_len, plan.run_len));
    plan.behind_prefix = plan_kernel(after_shared_prefix(p, nullptr), gpu);
    const int64_t rows = p.total_q * p.num_q_heads;
    plan.out_bytes = plan.num_runs * rows * p.head_dim * size_of(p.dtype);
    plan.lse_bytes = (plan.num_runs + 1) * rows * int64_t{sizeof(float)};
    return plan;
}

Explanation describe(const SharedPrefixPlan& plan) {
    auto one_line = [](const KernelPlan& plan) {
        const Explanation text = describe(plan);
        return text.kernel + ": " + text.summary;
    };
    Explanation text;
    text.kernel = text_of("shared_prefix<", to_string(plan.dtype), ">");
    text.summary = text_of("over the prefix, in ", counted(plan.num_runs, "run"), " of ", plan.run_len,
                           " keys, ", one_line(plan.over_prefix), "; behind it, ",
                           one_line(plan.behind_prefix), "; then a kernel that combines both");
    text.file = "src/cuda/shared_prefix/combine_prefix.cu";
    text.plan = {
        {"dtype", to_string(plan.dtype)},
        {"run_len", plan.run_len},
        {"num_runs", plan.num_runs},
        {"over_prefix", one_line(plan.over_prefix)},
        {"behind_prefix", one_line(plan.behind_prefix)},
        {"workspace_bytes", plan.workspace_bytes()},
    };
    return text;
}

}  // namespace octavo::cuda
