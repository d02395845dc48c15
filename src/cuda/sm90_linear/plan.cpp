#include "cuda/sm90_linear/plan.h"

#include "cuda/alignment.h"
#include "cuda/sm90_linear/choice.h"

#include <algorithm>
#include <iterator>

namespace octavo::cuda {
namespace {

constexpr int32_t kBarrierBytes = 1024;  // the room that LinearBarriers takes
// The shared memory of a CTA, with one or two on an SM.
constexpr int32_t kSharedOfOne = 227 * 1024, kSharedOfTwo = 113 * 1024;
// If no more stages of two panels fit, sm90_wide takes stages of one.
constexpr int32_t kFewStages = 4;

template <class Tile, size_t kCount>
const Tile* find_tile(const Tile (&tiles)[kCount], int32_t w_rows) {
    for (const Tile& tile : tiles) {
        if (tile.w_rows == w_rows) return &tile;
    }
    return nullptr;
}

int32_t shared_bytes_of(const Sm90LinearTile& tile) {
    return tile.ctas_per_sm == 1 ? kSharedOfOne : kSharedOfTwo;
}

bool normalises_in(const Sm90LinearTile& tile, DType dtype) {
    return dtype == DType::bfloat16 && tile.kernel == Sm90LinearKernel::flat &&
           tile.x_rows <= kMostNormalisedXRows;
}

// Why no launch of sm90_linear normalises the x of this call as well; empty if one does.
std::string why_no_norm(const LinearParams& p) {
    if (p.batch_invariant) return "with batch_invariant all numbers of rows of x are rounded alike";
    if (p.dtype != DType::bfloat16) return "x times norm_weight might not fit in float16";
    if (p.norm_weight_dtype != p.dtype) return "norm_weight must be bfloat16 like x";
    if (!aligned(p.norm_weight, 16, {}, p.dtype)) return "norm_weight must start on 16 bytes";
    if (p.depth == 0) return "K is 0";
    if (p.num_rows > kMostNormalisedXRows)
        return text_of("it has instances for up to ", kMostNormalisedXRows, " rows of x");
    return {};
}

bool has_instance(const Sm90LinearTile& tile) {
    auto is_compiled = [&](const auto* of_rows) { return of_rows && tile.x_rows <= of_rows->max_x_rows; };
    const bool is_one = tile.ctas_per_sm == 1;
    if (tile.kernel == Sm90LinearKernel::flat)
        return is_compiled(find_tile(kFlatTiles, tile.w_rows)) &&
               (is_one || flat_fits_twice(tile.w_rows, tile.x_rows));
    return is_compiled(find_tile(kWideTiles, tile.w_rows)) &&
           (is_one || wide_fits_twice(tile.w_rows, tile.x_rows));
}

template <size_t kCount>
bool is_one_of(const int32_t (&values)[kCount], int32_t value) {
    return std::find(std::begin(values), std::end(values), value) != std::end(values);
}

// Whether there is such a tile; a plan of the user's may name one that does not exist.
bool has_tile(const Sm90LinearTile& tile) {
    const bool is_flat = tile.kernel == Sm90LinearKernel::flat;
    return (is_flat ? is_one_of(kFlatXRows, tile.x_rows) : is_one_of(kWideXRows, tile.x_rows)) &&
           is_one_of({1, 2, 4, 8}, tile.splits) && is_one_of({1, 2}, tile.ctas_per_sm) && has_instance(tile);
}
static_assert(kMaxLinearSplits == 8);

Sm90LinearTile tile_of(const LinearPlan& plan) {
    const bool is_flat = plan.kernel == LinearKernel::sm90_flat;
    return {is_flat ? Sm90LinearKernel::flat : Sm90LinearKernel::wide, plan.w_rows, plan.x_rows, plan.splits,
            plan.ctas_per_sm};
}

// The room for sums that other CTAs of the cluster send.
int32_t landing_bytes(const Sm90LinearTile& tile) {
    const bool is_flat = tile.kernel == Sm90LinearKernel::flat;
    const int64_t parts = is_flat ? tile.w_rows / 16 * (tile.x_rows / 8) : tile.w_rows / 16;
    const int64_t part_bytes = is_flat ? 32 * 16 : 2 * 128 * wide_warpgroups(tile.x_rows) * 16;
    return static_cast<int32_t>((tile.splits - 1) * ceil_divide(parts, tile.splits) * part_bytes);
}

std::string instance(DType dtype, Sm90LinearKernel kernel, int32_t w_rows, int32_t x_rows,
                     bool normalises = false) {
    return text_of(kernel == Sm90LinearKernel::flat ? "sm90_flat<" : "sm90_wide<", to_string(dtype), ", ",
                   w_rows, "x", x_rows, normalises ? ", normalises x>" : ">");
}

}  // namespace

// A product without rows has the plan of one row; it is not executed.
LinearProblem linear_problem(const LinearParams& p) {
    return {std::max<int64_t>(p.num_rows, 1), std::max<int64_t>(p.w_rows(), 1), p.depth};
}

LinearStage Sm90LinearPlan::stage() const {
    if (tile.kernel == Sm90LinearKernel::flat)
        return {tile.w_rows, tile.x_rows, find_tile(kFlatTiles, tile.w_rows)->panels};
    const LinearStage stage{tile.w_rows, tile.x_rows, 2};
    if (kFewStages * stage.bytes() <= shared_bytes_of(tile)) return stage;
    return {tile.w_rows, tile.x_rows, 1};
}

std::optional<Sm90LinearPlan> plan_sm90_linear(const LinearProblem& problem, DType dtype, const Gpu& gpu,
                                               const Sm90LinearTile& tile, bool normalises) {
    if (!has_instance(tile) || (normalises && !normalises_in(tile, dtype))) return std::nullopt;
    const int64_t w_tiles = ceil_divide(problem.w_rows, tile.w_rows);
    const int64_t x_tiles = ceil_divide(problem.num_rows, tile.x_rows);
    // The second bound is needed by Sm90LinearLaunch::first_column.
    if (w_tiles > INT32_MAX / x_tiles || w_tiles > UINT32_MAX / ceil_divide(problem.w_rows, 8))
        return std::nullopt;
    Sm90LinearPlan plan{};
    plan.dtype = dtype;
    plan.tile = tile;
    plan.normalises = normalises;
    plan.w_tiles = static_cast<int32_t>(w_tiles);
    plan.x_tiles = static_cast<int32_t>(x_tiles);
    const LinearStage stage = plan.stage();
    plan.steps = static_cast<int32_t>(ceil_divide(problem.depth, stage.panels * kPanelColumns));
    const int64_t tiles = w_tiles * x_tiles;
    const bool is_persistent = tile.kernel == Sm90LinearKernel::wide && tile.splits == 1;
    const int64_t ctas =
        is_persistent ? std::min<int64_t>(tiles, gpu.num_sms * tile.ctas_per_sm) : tiles * tile.splits;
    if (ctas > INT32_MAX) return std::nullopt;
    plan.num_ctas = static_cast<int32_t>(ctas);

    const int32_t landing =
        landing_bytes(tile) + (normalises ? norm_factor_bytes(tile.splits, tile.x_rows) : 0);
    const int32_t norm_bytes = normalises ? stage.panels * 128 : 0;  // of a stage
    const int32_t room = (shared_bytes_of(tile) - kBarrierBytes - landing) / (stage.bytes() + norm_bytes);
    int64_t least = 2;
    if (tile.kernel == Sm90LinearKernel::flat) {  // in the end the stages hold the sums of all warps
        const int32_t sums = kFlatWarps * (tile.w_rows / 16) * (tile.x_rows / 8) * 32 * 16;
        least = std::max<int64_t>(least, ceil_divide(sums, stage.bytes()));
    }
    if (room < least) return std::nullopt;
    const int64_t steps_of_cta =
        ceil_divide(plan.steps, tile.splits) * ceil_divide(tiles * tile.splits, ctas);
    plan.stages =
        static_cast<int32_t>(std::clamp<int64_t>(steps_of_cta, least, std::min(room, kMaxLinearStages)));
    plan.norm_offset = plan.stages * stage.bytes() + landing;
    plan.shared_bytes = kBarrierBytes + plan.norm_offset + plan.stages * norm_bytes;
    return plan;
}

std::optional<Sm90LinearPlan> plan_sm90_linear(const LinearParams& p, const Gpu& gpu, std::string* why_not) {
    if (!gpu.has_sm90_kernels) return refuse(why_not, "it is for Hopper (sm_90a)");
    const int64_t x_stride = p.x_rows.strides[0];
    if (!aligned(p.w, 16, {p.w_stride}, p.dtype) || !aligned(p.x, 16, {x_stride}, p.dtype))
        return refuse(why_not, "rows of x and w must start on 16 bytes");
    // The same kernel has to serve a single row, whose stride does not matter, and many.
    if (p.batch_invariant && p.depth % 8 != 0)
        return refuse(why_not, "rows of x and w must start on 16 bytes");
    if (p.w_stride < 0 || x_stride < 0) return refuse(why_not, "strides of x and w must not be negative");
    const bool normalises = p.norm_weight != nullptr;
    if (normalises) {
        const std::string why = why_no_norm(p);
        if (!why.empty()) return refuse(why_not, "it does not normalise x: ", why);
    }
    const LinearProblem problem = linear_problem(p);
    LinearChoice choice;
    if (p.plan) {
        choice = {tile_of(*p.plan), p.plan->source, false};
        if (!has_tile(choice.tile)) return refuse(why_not, "it has no instance of this tile");
    } else {
        choice = choose_tile(problem, p.dtype, gpu, p.batch_invariant, normalises);
    }
    std::optional<Sm90LinearPlan> plan = plan_sm90_linear(problem, p.dtype, gpu, choice.tile, normalises);
    if (!plan) {
        if (normalises && !normalises_in(choice.tile, p.dtype))
            return refuse(why_not, "it does not normalise x in this tile");
        return refuse(why_not, p.plan ? "an SM has no room for this many CTAs of this tile"
                                      : "x and w have too many rows");
    }
    plan->source = choice.source;
    plan->library_is_faster = choice.library_is_faster;
    return plan;
}

std::vector<std::pair<LinearPlan, double>> sm90_linear_candidates(const LinearProblem& problem, DType dtype,
                                                                  const Gpu& gpu) {
    std::vector<std::pair<LinearPlan, double>> candidates;
    for_each_tile(problem, [&](const Sm90LinearTile& tile) {
        const auto plan = plan_sm90_linear(problem, dtype, gpu, tile);
        if (plan && may_be_fastest(problem, gpu, *plan))
            candidates.emplace_back(public_plan(*plan), estimated_time(problem, gpu, *plan));
    });
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const auto& a, const auto& b) { return a.second < b.second; });
    return candidates;
}

LinearPlan public_plan(const Sm90LinearPlan& plan) {
    const Sm90LinearTile& tile = plan.tile;
    const bool is_flat = tile.kernel == Sm90LinearKernel::flat;
    return {is_flat ? LinearKernel::sm90_flat : LinearKernel::sm90_wide,
            plan.dtype,
            tile.w_rows,
            tile.x_rows,
            tile.splits,
            tile.ctas_per_sm,
            plan.source};
}

Explanation describe(const Sm90LinearPlan& plan) {
    const Sm90LinearTile& tile = plan.tile;
    const bool is_flat = tile.kernel == Sm90LinearKernel::flat;
    Explanation text;
    text.kernel = instance(plan.dtype, tile.kernel, tile.w_rows, tile.x_rows, plan.normalises);
    text.summary = text_of(counted(plan.num_ctas, "CTA"), ", tiles of ", tile.w_rows, " rows of w and ",
                           tile.x_rows, " of x, K in ", counted(tile.splits, "split"),
                           plan.normalises ? "; it normalises x as well" : "");
    text.file = is_flat ? "src/cuda/sm90_linear/flat.cuh" : "src/cuda/sm90_linear/wide.cuh";
    text.plan = {
        {"dtype", to_string(plan.dtype)},
        {"kernel", std::string(is_flat ? "sm90_flat" : "sm90_wide")},
        {"w_rows", int64_t{tile.w_rows}},
        {"x_rows", int64_t{tile.x_rows}},
        {"splits", int64_t{tile.splits}},
        {"ctas_per_sm", int64_t{tile.ctas_per_sm}},
        {"num_ctas", int64_t{plan.num_ctas}},
        {"stages", int64_t{plan.stages}},
        {"shared_bytes", int64_t{plan.shared_bytes}},
        {"source", to_string(plan.source)},
    };
    if (plan.normalises) text.plan.emplace_back("norm", std::string("sm90_flat"));
    return text;
}

std::vector<std::string> sm90_linear_instances() {
    std::vector<std::string> all;
    for (DType dtype : kAttentionTypes) {
        for (const FlatTile& tile : kFlatTiles) {
            for (int32_t x_rows : kFlatXRows) {
                if (x_rows > tile.max_x_rows) continue;
                all.push_back(instance(dtype, Sm90LinearKernel::flat, tile.w_rows, x_rows));
                if (normalises_in({Sm90LinearKernel::flat, tile.w_rows, x_rows, 1, 1}, dtype))
                    all.push_back(instance(dtype, Sm90LinearKernel::flat, tile.w_rows, x_rows, true));
            }
        }
        for (const WideTile& tile : kWideTiles) {
            for (int32_t x_rows : kWideXRows)
                all.push_back(instance(dtype, Sm90LinearKernel::wide, tile.w_rows, x_rows));
        }
    }
    return all;
}

}  // namespace octavo::cuda
