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
// (docs/notebook/linear.md); they are the same for both GPUs. The costs of a kernel, in microseconds: to
// launch and end; for a product of 8 rows of w with 16 columns of K; for each stage; for each further CTA
// that has to wait for a place on an SM, where the SM has room for one and where it has room for several.
struct Costs {
    double launch, product, stage, wave_of_one, wave_of_several;
};
constexpr Costs kFlatCosts{1.91, 0.42e-3, 0.242, 0.95, 0.52};
constexpr Costs kWideCosts{2.53, 2.79e-3, 0.051, 1.42, 1.42};
constexpr double kResultCost = 0.16e-3;    // for each number that a CTA writes
constexpr double kSplitCost = 0.204;       // for each further CTA of a cluster
constexpr double kExchangeCost = 0.64e-3;  // for each number that a CTA of sm90_flat gets or sends
constexpr double kLatency = 1.25;          // the latency of a copy, while the memory is busy
// The share of the memory's bandwidth that an even load reaches; the power of the evenness by which it falls;
// by how much copies of 128 bytes of a row take longer than longer ones; the most that a CTA alone reads.
constexpr double kShareOfBandwidth = 0.923, kFalls = 0.14, kMoreOfOnePanel = 0.06, kMostOfCta = 171;  // GB/s
constexpr double kNorm = 2.6;  // the norm by which limits that bind at once are combined

// How many SMs clusters of this size can occupy together: some SMs of a GPC are left over.
double num_usable_sms(const Gpu& gpu, int32_t splits) {
    if (splits == 8) return gpu.num_sms * (112.0 / 132);
    return splits == 4 ? gpu.num_sms * (120.0 / 132) : gpu.num_sms;
}

// How many CTAs an SM has room for. It is more than the tile says where K, and with it the ring, is short.
// Registers are roughly those of the compiled kernels.
double ctas_on_sm(const Sm90LinearPlan& plan) {
    const Sm90LinearTile& tile = plan.tile;
    const bool is_flat = tile.kernel == Sm90LinearKernel::flat;
    if (!is_flat && tile.splits == 1) return tile.ctas_per_sm;  // the grid has no more CTAs
    constexpr double kSharedOfSm = 228 * 1024, kSharedOfSystem = 1024, kRegistersOfSm = 65536;
    const int32_t threads = is_flat ? 32 * kFlatWarps + 32 : 128 * wide_warpgroups(tile.x_rows) + 32;
    const double registers = is_flat ? 56 + tile.w_rows * tile.x_rows / 28.0 : 40 + tile.w_rows / 2.0;
    const double fit = std::floor(std::min(kSharedOfSm / (plan.shared_bytes + kSharedOfSystem),
                                           kRegistersOfSm / (threads * registers)));
    return std::max<double>(fit, tile.ctas_per_sm);
}

// How evenly `parts` fill `places`: the average number in a place over the largest number.
double evenness(double parts, double places) { return parts / places / std::ceil(parts / places); }

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
    return tile.splits <= plan.steps && plan.num_ctas <= gpu.num_sms * tile.ctas_per_sm;
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
    const double num_sms = num_usable_sms(gpu, tile.splits), on_sm = ctas_on_sm(plan);
    const double places = num_sms * on_sm;
    const double parts = static_cast<double>(plan.w_tiles) * plan.x_tiles * tile.splits;
    const double waves = std::ceil(parts / places), rest = parts - std::floor(parts / places) * places;

    // Full waves read at the bandwidth of the memory. The last wave is slower: SMs, and pairs of SMs, with
    // more CTAs than others end last, and few CTAs cannot draw the whole bandwidth. Tiles of x share the
    // weights in L2.
    const double bytes =
        2.0 * tile.w_rows * depth / plan.x_tiles * (plan.stage().panels == 1 ? 1 + kMoreOfOnePanel : 1);
    const double bytes_per_us = kShareOfBandwidth * std::max(gpu.memory_gb_per_s, 1) * 1e3;
    double reading = (parts - rest) * bytes / bytes_per_us;
    if (rest > 0) {
        const double evenly = evenness(rest, gpu.num_sms / 2.0) * evenness(rest, gpu.num_sms);
        reading +=
            add_limits(rest * bytes / bytes_per_us * std::pow(evenly, -kFalls), bytes / (kMostOfCta * 1e3));
    }
    // Stages that do not fit in the ring have to wait until it has gone round.
    const double stages = static_cast<double>(ceil_divide(plan.steps, tile.splits));
    const double waiting = waves * std::max(stages / plan.stages - 1, 0.0) * kLatency;
    const double x_columns = is_flat ? tile.x_rows / 8.0 : 1.0;  // two warpgroups multiply at once
    const double products = std::ceil(parts / num_sms) * (tile.w_rows / 8.0) * x_columns * depth / 16;
    const double multiplying = costs.product * products + costs.stage * waves * stages;

    const double results = static_cast<double>(tile.w_rows) * tile.x_rows;
    const double exchanging = kSplitCost * (tile.splits - 1) +
                              (is_flat ? kExchangeCost * results * (tile.splits - 1) / tile.splits : 0.0);
    return costs.launch + add_limits(add_limits(reading, waiting), multiplying) + kResultCost * results +
           exchanging + (on_sm > 1 ? costs.wave_of_several : costs.wave_of_one) * (waves - 1);
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
