#include "cuda/sm90_wide_attention/plan.h"

#include <algorithm>
#include <numeric>

namespace octavo::cuda {
namespace {

using Config = Sm90WideConfig;

// Every block of 64 columns has to have some column, since a block that lies outside an array altogether must
// not be copied.
constexpr int32_t kLeastHeadDim = Config::kHeadDim - kSm90BlockColumns + 8;

constexpr int32_t kTileRows = Config::kTileBlocks * Config::kGroupRows;

std::string name_of(DType dtype) {
    return text_of("sm90_wide_attention<", to_string(dtype), ", head_dim ", int{Config::kHeadDim}, ">");
}

}  // namespace

std::optional<Sm90WidePlan> plan_sm90_wide_attention(const AttentionParams& p, const Gpu& gpu,
                                                     std::string* why_not) {
    if (!suits_sm90(p, gpu, why_not)) return std::nullopt;
    if (p.head_dim < kLeastHeadDim || p.head_dim_v != p.head_dim) {
        return refuse(why_not, "it serves head_dim ", kLeastHeadDim, " to ", int{Config::kHeadDim},
                      " of both keys and values, and these have ", p.head_dim, " and ", p.head_dim_v);
    }
    if (p.dropout.any()) return refuse(why_not, "it has no dropout");
    if (p.alibi_slopes) return refuse(why_not, "it has no ALiBi");
    if (p.has_tree_mask) return refuse(why_not, "it has no tree masks");
    if (p.block_mask) return refuse(why_not, "it has no block masks");
    if (p.ranges) return refuse(why_not, kHasNoRanges);
    if (p.k_dtype != p.dtype || p.v_dtype != p.dtype) {
        return refuse(why_not, "it reads keys and values of the type of q, and these are ",
                      to_string(p.k_dtype), " and ", to_string(p.v_dtype));
    }
    Sm90WidePlan plan{};
    plan.dtype = p.dtype;
    plan.num_sequences = p.batch;
    plan.heads = choose_heads(p);
    plan.tokens = kSm90GroupRows / plan.heads;
    plan.num_row_tiles = count_row_tiles(p, Config::kTileBlocks, plan.heads);
    const int32_t num_clusters = gpu.num_sms / Config::kCtas;
    // sm80_attention splits the keys of a paged batch, so that it fills the SMs, but takes three times as
    // long for the products.
    constexpr int64_t kSpeed = 3;
    const int64_t rows = p.total_q * p.num_q_heads;
    const int64_t rounds = ceil_divide(plan.num_row_tiles, num_clusters);
    if (p.paged() && !p.batch_invariant && kSpeed * rows <= rounds * num_clusters * kTileRows) {
        return refuse(why_not, "it would leave most of the ", gpu.num_sms,
                      " SMs, or of their rows, empty: ", counted(rows, "row"), " in ",
                      counted(plan.num_row_tiles, "tile"), " of ", kTileRows, ", for a pair of SMs each");
    }
    plan.box_keys = p.paged() ? std::gcd(p.page_size, Config::kKeys) : Config::kKeys;
    if (plan.box_keys % 8 != 0) {
        return refuse(why_not,
                      "the copy engine (TMA) brings a multiple of eight keys at a time, and pages of ",
                      p.page_size, " and tiles of ", int{Config::kKeys}, " keys have ", plan.box_keys,
                      " as their greatest common divisor");
    }
    constexpr int64_t kMaxIndex = (int64_t{1} << 31) - 1;
    if (plan.num_row_tiles + int64_t{p.num_q_heads} * p.batch >= kMaxIndex)
        return refuse(why_not, "it counts row tiles in 32 bits, and there are ", plan.num_row_tiles);
    if (!can_move_arrays(p, true, why_not)) return std::nullopt;
    plan.order = order_row_tiles(p, gpu, Config::kTileBlocks, Config::kCtas, plan.heads);
    plan.num_ctas = static_cast<int32_t>(Config::kCtas * std::min<int64_t>(plan.num_row_tiles, num_clusters));
    return plan;
}

Explanation describe(const Sm90WidePlan& plan) {
    Explanation text;
    text.kernel = name_of(plan.dtype);
    text.summary = text_of(counted(plan.num_row_tiles, "tile"), " of ", kTileRows, " rows: ", plan.num_ctas,
                           " CTAs in pairs, of ", plan.threads(), " threads");
    text.file = "src/cuda/sm90_wide_attention/kernel.cuh";
    text.plan = {
        {"dtype", to_string(plan.dtype)},
        {"head_dim", int{Config::kHeadDim}},
        {"num_sequences", plan.num_sequences},
        {"heads", plan.heads},
        {"tokens", plan.tokens},
        {"box_keys", plan.box_keys},
        {"num_row_tiles", plan.num_row_tiles},
        {"unit_row_tiles", plan.order.unit_row_tiles},
        {"num_units", plan.order.num_units},
        {"section", plan.order.section},
        {"first_section", plan.order.first_section},
        {"num_ctas", plan.num_ctas},
        {"threads", plan.threads()},
        {"workspace_bytes", plan.workspace_bytes()},
    };
    return text;
}

std::vector<std::string> sm90_wide_attention_instances() {
    std::vector<std::string> names;
    for (DType dtype : kAttentionTypes) names.push_back(name_of(dtype));
    return names;
}

}  // namespace octavo::cuda
