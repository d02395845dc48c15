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

// The tile that a row of a table names, unless the row is of a kernel for other GPUs.
std::optional<Sm90LinearTile> tile_of(const LinearTableRow& row, const LinearProblem& problem) {
    if (row.kernel != LinearKernel::sm90_flat && row.kernel != LinearKernel::sm90_wide) return std::nullopt;
    const auto kernel =
        row.kernel == LinearKernel::sm90_flat ? Sm90LinearKernel::flat : Sm90LinearKernel::wide;
    return Sm90LinearTile{kernel, row.tile_w_rows, x_rows_for(kernel, problem.num_rows), row.splits,
                          row.ctas_per_sm};
}

// Chooses among all tiles that have an instance and that `is_wanted` accepts.
template <class Predicate>
Sm90LinearTile estimated_tile(const LinearProblem& problem, DType dtype, const Gpu& gpu,
                              Predicate is_wanted) {
    Sm90LinearTile best{};
    double least = HUGE_VAL;
    for_each_tile(problem, [&](const Sm90LinearTile& tile) {
        if (!is_wanted(tile)) return;
        const std::optional<Sm90LinearPlan> plan = plan_sm90_linear(problem, dtype, gpu, tile);
        if (!plan || !may_be_fastest(problem, gpu, *plan)) return;
        const double time = estimated_time(problem, gpu, tile);
        if (time >= least) return;
        least = time;
        best = tile;
    });
    return best;
}

// Constants of the estimate, in microseconds: to launch and end; for a product of 8 rows of w with 16 columns
// of K; for each 16 columns that a CTA works through; for each number that a CTA gets from another one of its
// cluster; for a CTA that leaves room for a second one. They were fitted to the times of
// benchmarks/results/tiles-h100.jsonl so that the tile with the least estimate is a fast one. The estimates
// themselves are off by more.
struct Costs {
    double launch, product, depth, exchange, second_cta;
};
constexpr Costs kFlatCosts{1.394, 1.803e-3, 15.63e-3, 0.457e-3, 0.811};
constexpr Costs kWideCosts{2.920, 2.140e-3, 28.11e-3, 0.034e-3, 2.620};
constexpr double kSplitCost = 0.436;
constexpr double kWideResult = 0.370e-3;  // for each number that a CTA of sm90_wide writes
// For each further CTA that has to wait for a place on an SM, where there is room for one CTA and for two.
// sm90_wide does not need it.
constexpr double kFlatWave[] = {1.342, 0.329};
// The share of the memory's bandwidth that is reached with all SMs at work, and the powers by which it falls
// with the share of SMs that are: where none has more than one CTA, and on the average of several.
constexpr double kShareOfBandwidth = 0.959;
constexpr double kOneFalls = 0.483, kFlatFalls = 0.134, kWideFalls = 0.046;

// How many SMs clusters of this size can occupy at once: some SMs of a GPC are left over.
double num_usable_sms(const Gpu& gpu, int32_t splits) {
    if (splits == 8) return gpu.num_sms * (112.0 / 132);
    return splits == 4 ? gpu.num_sms * (120.0 / 132) : gpu.num_sms;
}

LinearChoice choose(const LinearProblem& problem, DType dtype, const Gpu& gpu) {
    LinearChoice choice{{}, LinearPlanSource::estimated, problem.num_rows > kSm90MostRows};
    std::optional<Sm90LinearTile> tile;
    if (const std::optional<FoundRow> found = find_table_row(problem, dtype, gpu)) {
        choice.source = found->source;
        choice.library_is_faster = found->row.library_is_faster;
        tile = tile_of(found->row, problem);
    }
    choice.tile =
        tile ? *tile : estimated_tile(problem, dtype, gpu, [](const Sm90LinearTile&) { return true; });
    return choice;
}

// One tile, but for its rows of x, for any number of rows of x, so that bits do not depend on that number. It
// is the tile of sm90_flat that serves few rows best; its order of addition follows from the panels of a
// stage and the splits.
LinearChoice choose_invariant(const LinearProblem& problem, DType dtype, const Gpu& gpu) {
    const LinearProblem few{kFlatXRows[0], problem.w_rows, problem.depth};
    const int32_t most_x_rows = *(std::end(kFlatXRows) - 1);
    auto serves_any = [&](const Sm90LinearTile& tile) {
        Sm90LinearTile largest = tile;
        largest.x_rows = most_x_rows;
        return tile.kernel == Sm90LinearKernel::flat && tile.ctas_per_sm == 1 &&
               plan_sm90_linear(problem, dtype, gpu, largest);
    };
    Sm90LinearTile tile = estimated_tile(few, dtype, gpu, serves_any);
    tile.x_rows = x_rows_for(kFlatXRows, problem.num_rows);
    return {tile, LinearPlanSource::estimated, false};
}

}  // namespace

bool may_be_fastest(const LinearProblem& problem, const Gpu& gpu, const Sm90LinearPlan& plan) {
    const Sm90LinearTile& tile = plan.tile;
    if (tile.kernel == Sm90LinearKernel::flat && problem.num_rows > *(std::end(kFlatXRows) - 1)) return false;
    if (tile.splits == 1) return true;
    return tile.splits <= plan.steps && plan.num_ctas <= gpu.num_sms * tile.ctas_per_sm;
}

int32_t x_rows_for(Sm90LinearKernel kernel, int64_t num_rows) {
    return kernel == Sm90LinearKernel::flat ? x_rows_for(kFlatXRows, num_rows)
                                            : x_rows_for(kWideXRows, num_rows);
}

double estimated_time(const LinearProblem& problem, const Gpu& gpu, const Sm90LinearTile& tile) {
    const bool is_flat = tile.kernel == Sm90LinearKernel::flat;
    const Costs& costs = is_flat ? kFlatCosts : kWideCosts;
    const auto tiles = static_cast<double>(ceil_divide(problem.w_rows, tile.w_rows) *
                                           ceil_divide(problem.num_rows, tile.x_rows));
    const double num_sms = num_usable_sms(gpu, tile.splits);
    const double parts = tiles * tile.splits, most = std::ceil(parts / num_sms);  // on all SMs; on one
    const double waves = std::ceil(parts / (num_sms * tile.ctas_per_sm));
    const double falls = most == 1 ? kOneFalls : is_flat ? kFlatFalls : kWideFalls;
    const double reading = static_cast<double>(problem.w_rows * problem.depth) * 2 /
                           (kShareOfBandwidth * std::max(gpu.memory_gb_per_s, 1) * 1e3 *
                            std::pow(parts / (num_sms * most), falls));
    const double x_columns = is_flat ? tile.x_rows / 8.0 : std::max(tile.x_rows, 64) / 64.0;
    const double depths = static_cast<double>(problem.depth) / 16 / tile.splits;
    const double multiplying =
        depths * (costs.product * most * tile.w_rows / 8 * x_columns + costs.depth * waves);
    const double results = most * tile.w_rows * tile.x_rows;
    const double writing = results * ((is_flat ? 0.0 : kWideResult) + costs.exchange * (tile.splits - 1));
    return costs.launch + std::max(reading, multiplying) + writing + (tile.splits > 1 ? kSplitCost : 0.0) +
           (is_flat ? kFlatWave[tile.ctas_per_sm - 1] * (waves - 1) : 0.0) +
           costs.second_cta * (tile.ctas_per_sm - 1);
}

LinearChoice choose_tile(const LinearProblem& problem, DType dtype, const Gpu& gpu, bool batch_invariant) {
    using Key = std::tuple<int64_t, int64_t, int64_t, const Gpu*, DType, bool>;
    struct Memory {
        std::map<Key, LinearChoice> choices;
        uint64_t version = 0;  // the version of the tables that they were made by
    };
    thread_local Memory thread_memory;
    Memory& memory = thread_memory;  // looking it up takes time
    constexpr size_t kMostRemembered = 4096;
    const uint64_t version = tables_version();
    if (memory.version != version || memory.choices.size() >= kMostRemembered) memory.choices.clear();
    memory.version = version;
    const Key key{problem.num_rows, problem.w_rows, problem.depth, &gpu, dtype, batch_invariant};
    const auto found = memory.choices.find(key);
    if (found != memory.choices.end()) return found->second;
    return memory.choices[key] =
               batch_invariant ? choose_invariant(problem, dtype, gpu) : choose(problem, dtype, gpu);
}

}  // namespace octavo::cuda
