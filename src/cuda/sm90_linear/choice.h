// Which tile of sm90_linear is the fastest: the heuristic dataflow of FlashDecoding++.
#pragma once

#include "cuda/gpu.h"
#include "cuda/sm90_linear/plan.h"

namespace octavo::cuda {

// With more rows of x than this, a library's product is taken as the faster one where no table says
// otherwise: it is the faster one for 16 of 17 layers with 256 rows, and for 8 of them with 128
// (cuda/linear/tables/h100.inc).
constexpr int64_t kSm90MostRows = 128;

// Returns the tile of the tables (cuda/linear/table.h), or otherwise the one with the least estimated time;
// with batch_invariant, one whose order of addition does not depend on the rows of x; with normalises, one
// that normalises x as well. Each thread remembers its choices until a table changes.
LinearChoice choose_tile(const LinearProblem& problem, DType dtype, const Gpu& gpu, bool batch_invariant,
                         bool normalises);

// The smallest number of rows of x in a tile that holds `num_rows`, or the largest there is.
int32_t x_rows_for(Sm90LinearKernel kernel, int64_t num_rows);

// Calls `visit` with each tile that may have an instance.
template <class Visit>
void for_each_tile(const LinearProblem& problem, Visit visit) {
    auto each = [&](Sm90LinearKernel kernel, int32_t w_rows) {
        for (int32_t splits = 1; splits <= kMaxLinearSplits; splits *= 2) {
            for (int32_t ctas_per_sm : {1, 2})
                visit(Sm90LinearTile{kernel, w_rows, x_rows_for(kernel, problem.num_rows), splits,
                                     ctas_per_sm});
        }
    };
    for (const FlatTile& tile : kFlatTiles) each(Sm90LinearKernel::flat, tile.w_rows);
    for (const WideTile& tile : kWideTiles) each(Sm90LinearKernel::wide, tile.w_rows);
}

// Whether the tile is worth an estimate: sm90_flat is for few rows of x, and splits pay within one wave of
// CTAs, but for two of sm90_flat with two CTAs on an SM.
bool may_be_fastest(const LinearProblem& problem, const Gpu& gpu, const Sm90LinearPlan& plan);

// A rough estimate of the time, in microseconds.
double estimated_time(const LinearProblem& problem, const Gpu& gpu, const Sm90LinearPlan& plan);

}  // namespace octavo::cuda
