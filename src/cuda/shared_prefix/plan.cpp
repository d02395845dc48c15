#include "cuda/shared_prefix/plan.h"

#include "cuda/cache_arrays.h"
#include "cuda/codes.h"
#include "params/shared_prefix.h"

#include <algorithm>
#include <cmath>

namespace octavo::cuda {
namespace {

// Returns the number of keys in a run, in whole pages. There are as many runs as give each SM a tile of rows,
// unless the runs would become too short.
int32_t choose_run_len(const AttentionParams& p, const Gpu& gpu) {
    constexpr int64_t kTileRows = 128, kMinKeys = 256;
    const int64_t tiles = ceil_divide(p.total_q * p.group_size(), kTileRows) * p.num_kv_heads;
    const int64_t runs = std::clamp<int64_t>(std::min(gpu.num_sms / tiles, p.shared_prefix_len / kMinKeys), 1,
                                             int64_t{kMaxPrefixRuns});
    const int64_t num_pages = p.shared_prefix_len / p.page_size;
    return static_cast<int32_t>(ceil_divide(num_pages, runs) * p.page_size);
}

// Whether the kernel's CTAs fit on an SM beside a CTA of the kernel over the prefix: CTAs for long items, and
// those of splits by length, take nearly all shared memory.
bool fits_beside(const KernelPlan& plan) {
    const auto* const split_kv = std::get_if<SplitKvPlan>(&plan);
    return split_kv && split_kv->items != SplitKvItems::long_items;
}

bool is_decode(const KernelPlan& plan) {
    return std::holds_alternative<SplitKvPlan>(plan) || std::holds_alternative<StreamKPlan>(plan);
}

// The work of a call, and estimates of its time in microseconds. The constants are fitted to an H100 and an
// H200 (docs/kernels/shared_prefix.md).
struct Cost {
    double prefix_flops;
    double different_bytes;  // bytes of keys and values, each counted once
    double all_bytes;        // the same, with those of the prefix counted for each sequence
    const Gpu& gpu;

    Cost(const AttentionParams& p, const Gpu& gpu) : gpu(gpu) {
        // Behind the prefix a page table may have much more room than keys.
        const double prefix = p.shared_prefix_len, own = std::min(p.seqlen_k - prefix, prefix);
        const int32_t bits = p.head_dim * bits_of(p.k_dtype) + p.head_dim_v * bits_of(p.v_dtype);
        const double token_bytes = p.num_kv_heads * (bits / 8.0 + (has_token_scales(p) ? 8 : 0));
        prefix_flops =
            2.0 * static_cast<double>(p.total_q) * p.num_q_heads * prefix * (p.head_dim + p.head_dim_v);
        different_bytes = token_bytes * (prefix + p.batch * own);
        all_bytes = token_bytes * p.batch * (prefix + own);
    }

    double read_us() const { return different_bytes / (0.93e3 * gpu.memory_gb_per_s); }
    // Sequences that share pages read them from the L2 cache once the first sequence has read them.
    double plain_us() const { return all_bytes / (68e3 * gpu.num_sms) + 0.3 * read_us(); }
    double shared_us() const {
        const double flops_per_us = gpu.has_sm90_kernels ? 3e6 : 1e6;  // by one SM
        return std::max(read_us(), prefix_flops / (flops_per_us * gpu.num_sms)) + 14.0;
    }
    // The instance that leaves room on its SM takes longer than the full-sized one. With very many products,
    // this costs more than the overlap saves.
    bool overlap_pays() const { return prefix_flops < 170.0 * different_bytes; }
};

}  // namespace

SharedPrefixPlan make_shared_prefix_plan(const AttentionParams& p, const Gpu& gpu) {
    auto over_prefix = [&](int32_t run_len) {
        return over_shared_prefix(p, run_len, kSomeWorkspace, nullptr);
    };
    SharedPrefixPlan plan{};
    plan.dtype = p.dtype;
    plan.behind_prefix = plan_kernel(after_shared_prefix(p, nullptr), gpu);
    plan.run_len = choose_run_len(p, gpu);
    const bool may_overlap = fits_beside(plan.behind_prefix) &&
                             num_sequences(plan.behind_prefix) == p.batch && Cost(p, gpu).overlap_pays();
    const auto beside =
        may_overlap ? plan_sm90_attention_beside(over_prefix(plan.run_len), gpu) : std::nullopt;
    if (beside) {
        plan.overlaps = true;
        plan.over_prefix = *beside;
    } else {
        plan.over_prefix = plan_kernel(over_prefix(p.shared_prefix_len), gpu);
        if (is_decode(plan.over_prefix))  // a decode kernel cuts the keys by itself
            plan.run_len = p.shared_prefix_len;
        else
            plan.over_prefix = plan_kernel(over_prefix(plan.run_len), gpu);
    }
    plan.num_runs = static_cast<int32_t>(ceil_divide(p.shared_prefix_len, plan.run_len));
    const int64_t rows = p.total_q * p.num_q_heads;
    plan.out_bytes = (plan.num_runs + plan.overlaps) * rows * p.head_dim_v * size_of(p.dtype);
    plan.lse_bytes = (plan.num_runs + 1) * rows * int64_t{sizeof(float)};
    return plan;
}

std::optional<SharedPrefixPlan> plan_shared_prefix(const AttentionParams& p, const Gpu& gpu,
                                                   std::string* why_not) {
    if (p.shared_prefix_len == 0) return refuse(why_not, "shared_prefix_len is 0");
    constexpr int64_t kManyRows = 64;
    const int64_t rows = p.total_q * p.group_size() / p.batch;
    if (rows >= kManyRows) {
        return refuse(why_not, "with ", rows,
                      " rows a sequence and KV head, its products take as long as those "
                      "of one kernel over all keys");
    }
    if (is_code(p.k_dtype) &&
        !plan_sm90_attention(over_shared_prefix(p, choose_run_len(p, gpu), kSomeWorkspace, nullptr), gpu)) {
        return refuse(why_not,
                      "only sm80_attention could read the prefix by itself, and it is not tuned for codes");
    }
    const Cost cost(p, gpu);
    if (cost.plain_us() <= cost.shared_us()) {
        return refuse(
            why_not,
            "one kernel, which reads the prefix from the L2 cache for each sequence, would take some ",
            std::lround(cost.plain_us()), " us, and to read it once some ", std::lround(cost.shared_us()),
            " us");
    }
    return make_shared_prefix_plan(p, gpu);
}

Explanation describe(const SharedPrefixPlan& plan) {
    auto one_line = [](const KernelPlan& plan) {
        const Explanation text = describe(plan);
        return text.kernel + ": " + text.summary;
    };
    Explanation text;
    text.kernel = text_of("shared_prefix<", to_string(plan.dtype), ">");
    text.summary =
        text_of("over the prefix, in ", counted(plan.num_runs, "run"), " of ", plan.run_len, " keys, ",
                one_line(plan.over_prefix), "; behind it, ", one_line(plan.behind_prefix),
                plan.overlaps ? ", beside the kernel over the prefix" : "", "; then combine_prefix_kernel");
    text.file = "src/cuda/shared_prefix/combine_prefix.cu";
    text.plan = {
        {"dtype", to_string(plan.dtype)},
        {"run_len", plan.run_len},
        {"num_runs", plan.num_runs},
        {"over_prefix", one_line(plan.over_prefix)},
        {"behind_prefix", one_line(plan.behind_prefix)},
        {"overlaps", plan.overlaps},
        {"workspace_bytes", plan.workspace_bytes()},
    };
    return text;
}

}  // namespace octavo::cuda
