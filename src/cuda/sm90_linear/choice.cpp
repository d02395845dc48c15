#include "cuda/sm90_linear/choice.h"

#include "cuda/linear/table.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <optional>
#include <tuple>

namespace octavo::cuda {
namespace {

template <size_t kCount>
int32_t x_rows_for(const int32_t (&x_rows)[kCount], int64_t num_rows) {
    return *std::find_if(std::begin(x_rows), std::end(x_rows) - 1,
                         [&](int32_t rows) { return rows >= num_rows; });
}

// Returns the tile that a row of a table names, unless the row names a kernel for other GPUs.
std::optional<Sm90LinearTile> tile_of(const LinearTableRow& row, const LinearProblem& problem) {
    if (row.kernel != LinearKernel::sm90_flat && row.kernel != LinearKernel::sm90_wide) return std::nullopt;
    const auto kernel =
        row.kernel == LinearKernel::sm90_flat ? Sm90LinearKernel::flat : Sm90LinearKernel::wide;
    return Sm90LinearTile{kernel, row.tile_w_rows, x_rows_for(kernel, problem.num_rows), row.splits,
                          row.ctas_per_sm};
}

// Returns the tile with the least estimated time among those that have an instance, which normalises x if
// that is asked for, and that `is_wanted` accepts.
template <class Predicate>
Sm90LinearTile estimated_tile(const LinearProblem& problem, DType dtype, const Gpu& gpu, bool normalises,
                              Predicate is_wanted) {
    Sm90LinearTile best{};
    double least = HUGE_VAL;
    for_each_tile(problem, [&](const Sm90LinearTile& tile) {
        if (!is_wanted(tile)) return;
        const std::optional<Sm90LinearPlan> plan = plan_sm90_linear(problem, dtype, gpu, tile, normalises);
        if (!plan || !may_be_fastest(problem, gpu, *plan)) return;
        const double time = estimated_time(problem, gpu, *plan);
        if (time >= least) return;
        least = time;
        best = tile;
    });
    return best;
}

// Constants of the estimate, fitted to the times of benchmarks/results/tiles-h100.jsonl and tiles-h200.jsonl
// (docs/notebook/linear.md); they are the same for both GPUs. Times are in microseconds, of up to 256 rows of
// x; with more, estimates only rank tiles.
struct Costs {
    double launch;    // to launch and end
    double result;    // for each number that a CTA writes
    double exchange;  // for each number that a CTA of a cluster gets or sends
};
constexpr Costs kFlatCosts{1.99, 1.36e-3, 0.29e-3};
constexpr Costs kWideCosts{3.15, 0.085e-3, 0.24e-3};
constexpr double kStartCost = 2.9e-3;     // for each CTA of the first wave
constexpr double kWaveCost = 6.7;         // between two tiles in the same place on an SM
constexpr double kProductCost = 1.00e-3;  // of sm90_wide, for 8 rows of w and 16 columns of K
constexpr double kLatency = 0.78;         // of a copy, while the memory is busy
// 16 rows of w with 16 of x take longer than 16 with 8 or 32, and 32 with 16; why was not found.
constexpr double kCostOf16x16 = 0.66;
// The share of the memory's bandwidth that CTAs on all SMs reach; by how much copies of 128 bytes of a row
// take longer than longer ones; how fast a CTA copies that has the memory to itself; by how much reading
// takes longer on SMs that have unlike numbers of CTAs, for each TB/s of the memory.
constexpr double kShareOfBandwidth = 0.975, kMoreOfOnePanel = 0.12, kMostOfCta = 490 /* GB/s */,
                 kUneven = 0.084;
constexpr double kNorm = 2.1;  // the norm by which limits that bind at once are combined

// How many SMs clusters of this size can occupy together: some SMs of a GPC are left over.
int32_t num_usable_sms(const Gpu& gpu, int32_t splits) {
    const int32_t of_132 = splits == 8 ? 112 : splits == 4 ? 120 : 132;
    return std::max(gpu.num_sms * of_132 / 132, 1);
}

// How many CTAs an SM has room for. It is more than the tile says where K, and with it the ring, is short.
// Registers are roughly those of the compiled kernels.
int32_t ctas_on_sm(const Sm90LinearPlan& plan) {
    const Sm90LinearTile& tile = plan.tile;
    const bool is_flat = tile.kernel == Sm90LinearKernel::flat;
    if (!is_flat && tile.splits == 1) return tile.ctas_per_sm;  // the grid has no more CTAs
    constexpr double kSharedOfSm = 228 * 1024, kSharedOfSystem = 1024, kRegistersOfSm = 65536;
    const int32_t threads = is_flat ? 32 * kFlatWarps + 32 : 128 * wide_warpgroups(tile.x_rows) + 32;
    const double registers = is_flat ? 56 + tile.w_rows * tile.x_rows / 28.0 : 40 + tile.w_rows / 2.0;
    const double fit = std::floor(std::min(kSharedOfSm / (plan.shared_bytes + kSharedOfSystem),
                                           kRegistersOfSm / (threads * registers)));
    return std::max(static_cast<int32_t>(fit), tile.ctas_per_sm);
}

// By which factor reading takes longer where `parts` CTAs have `places` on the SMs. As many launches as fit
// wait there for the one in front (programmatic dependent launch), and the next of them has some of its CTAs
// in the places left over and the others where a launch ends. That is even where launches fill all places, or
// nearly so with one more; otherwise some parts of the GPU presumably get more of its CTAs than others do.
double unevenness(int64_t parts, int64_t places, const Gpu& gpu) {
    const int64_t launches = places / parts;
    if (launches == 0) return 1;
    const double left = static_cast<double>(places % parts) / static_cast<double>(parts);
    const double tb_per_s = gpu.memory_gb_per_s / 1e3;
    return 1 + kUneven * tb_per_s * std::min(left, 2 * (1 - left)) / static_cast<double>(launches);
}

// The larger of the two, or somewhat more if both are large.
double add_limits(double a, double b) {
    const double larger = std::max(a, b);
    return larger == 0 ? 0 : larger * std::pow(1 + std::pow(std::min(a, b) / larger, kNorm), 1 / kNorm);
}

// The tables were measured without a norm. Inside of sm90_flat it mostly takes less than a launch of its own,
// also where a table names sm90_wide (docs/notebook/linear.md).
LinearChoice choose(const LinearProblem& problem, DType dtype, const Gpu& gpu, bool normalises) {
    LinearChoice choice{{}, LinearPlanSource::estimated, problem.num_rows > kSm90MostRows};
    std::optional<Sm90LinearTile> tile;
    if (const std::optional<FoundRow> found = find_table_row(problem, dtype, gpu)) {
        choice.source = found->source;
        choice.library_is_faster = found->row.library_is_faster;
        tile = tile_of(found->row, problem);
    }
    if (tile && normalises && !plan_sm90_linear(problem, dtype, gpu, *tile, true)) {
        choice.source = LinearPlanSource::estimated;
        tile.reset();
    }
    auto any = [](const Sm90LinearTile&) { return true; };
    choice.tile = tile ? *tile : estimated_tile(problem, dtype, gpu, normalises, any);
    return choice;
}

// Chooses one tile for any number of rows of x, so that bits do not depend on that number; only the tile's
// rows of x vary. It is the tile of sm90_flat that serves few rows best; its order of addition follows from
// the panels of a stage and the splits.
LinearChoice choose_invariant(const LinearProblem& problem, DType dtype, const Gpu& gpu) {
    const LinearProblem few{kFlatXRows[0], problem.w_rows, problem.depth};
    const int32_t most_x_rows = *(std::end(kFlatXRows) - 1);
    auto serves_any = [&](const Sm90LinearTile& tile) {
        Sm90LinearTile largest = tile;
        largest.x_rows = most_x_rows;
        return tile.kernel == Sm90LinearKernel::flat && tile.ctas_per_sm == 1 &&
               plan_sm90_linear(problem, dtype, gpu, largest);
    };
    Sm90LinearTile tile = estimated_tile(few, dtype, gpu, false, serves_any);
    tile.x_rows = x_rows_for(kFlatXRows, problem.num_rows);
    return {tile, LinearPlanSource::estimated, false};
}

}  // namespace

bool may_be_fastest(const LinearProblem& problem, const Gpu& gpu, const Sm90LinearPlan& plan) {
    const Sm90LinearTile& tile = plan.tile;
    if (tile.kernel == Sm90LinearKernel::flat && problem.num_rows > *(std::end(kFlatXRows) - 1)) return false;
    if (tile.splits == 1) return true;
    const bool is_one_wave = plan.num_ctas <= gpu.num_sms * tile.ctas_per_sm;
    const bool in_any_waves =
        tile.kernel == Sm90LinearKernel::flat && tile.splits == 2 && tile.ctas_per_sm == 2;
    return tile.splits <= plan.steps && (is_one_wave || in_any_waves);
}

int32_t x_rows_for(Sm90LinearKernel kernel, int64_t num_rows) {
    return kernel == Sm90LinearKernel::flat ? x_rows_for(kFlatXRows, num_rows)
                                            : x_rows_for(kWideXRows, num_rows);
}

double estimated_time(const LinearProblem& problem, const Gpu& gpu, const Sm90LinearPlan& plan) {
    const Sm90LinearTile& tile = plan.tile;
    const bool is_flat = tile.kernel == Sm90LinearKernel::flat;
    const Costs& costs = is_flat ? kFlatCosts : kWideCosts;
    const auto depth = static_cast<double>(problem.depth) / tile.splits;  // columns of K for a CTA
    const int32_t num_sms = num_usable_sms(gpu, tile.splits), on_sm = ctas_on_sm(plan);
    const int64_t places = int64_t{num_sms} * on_sm;
    const int64_t parts = int64_t{plan.w_tiles} * plan.x_tiles * tile.splits;
    const auto waves = static_cast<double>(ceil_divide(parts, places));

    // What the memory takes. Tiles of x share the weights in L2.
    const double more = plan.stage().panels == 1 ? 1 + kMoreOfOnePanel : 1;
    const double w_bytes = 2 * tile.w_rows * depth / plan.x_tiles * more;
    const double bytes_per_us = kShareOfBandwidth * std::max(gpu.memory_gb_per_s, 1) * 1e3;
    const double reading =
        static_cast<double>(parts) * w_bytes / bytes_per_us * unevenness(parts, places, gpu);
    // What a place on an SM takes for its CTAs, one after the other. Stages that do not fit in the ring have
    // to wait until it has gone round, and the CTAs of an SM share its tensor cores.
    const double copying = (w_bytes + 2 * tile.x_rows * depth) / (kMostOfCta * 1e3);
    const double stages = static_cast<double>(ceil_divide(plan.steps, tile.splits));
    const double waiting = std::max(stages / plan.stages - 1, 0.0) * kLatency;
    const auto at_once = static_cast<double>(std::min<int64_t>(on_sm, ceil_divide(parts, num_sms)));
    const double multiplying = is_flat ? 0 : kProductCost * at_once * (tile.w_rows / 8.0) * depth / 16;
    const double of_place = waves * (copying + waiting + multiplying) + kWaveCost * (waves - 1);

    // A CTA of sm90_flat adds up sums of all its warps; one of sm90_wide exchanges 64 rows of x in any case.
    const double results = static_cast<double>(tile.w_rows) * tile.x_rows;
    const double written = is_flat ? results : results / tile.splits;
    const double exchanged = (is_flat ? results : tile.w_rows * 64.0) * (tile.splits - 1) / tile.splits;
    const bool is_16x16 = is_flat && tile.w_rows == 16 && tile.x_rows == 16;
    return costs.launch + kStartCost * static_cast<double>(std::min(parts, places)) +
           add_limits(reading, of_place) + costs.result * written + costs.exchange * exchanged +
           (is_16x16 ? kCostOf16x16 : 0);
}

LinearChoice choose_tile(const LinearProblem& problem, DType dtype, const Gpu& gpu, bool batch_invariant,
                         bool normalises) {
    using Key = std::tuple<int64_t, int64_t, int64_t, const Gpu*, DType, bool, bool>;
    struct Memory {
        std::map<Key, LinearChoice> choices;
        uint64_t version = 0;  // the version of the tables that the choices were made by
    };
    thread_local Memory thread_memory;
    Memory& memory = thread_memory;  // looking it up takes time
    constexpr size_t kMostRemembered = 4096;
    const uint64_t version = tables_version();
    if (memory.version != version || memory.choices.size() >= kMostRemembered) memory.choices.clear();
    memory.version = version;
    const Key key{problem.num_rows, problem.w_rows, problem.depth, &gpu, dtype, batch_invariant, normalises};
    const auto found = memory.choices.find(key);
    if (found != memory.choices.end()) return found->second;
    return memory.choices[key] = batch_invariant ? choose_invariant(problem, dtype, gpu)
                                                 : choose(problem, dtype, gpu, normalises);
}

}  // namespace octavo::cuda
