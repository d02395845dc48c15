// Products with weights on the CPU: which thread computes what. The arithmetic is in linear_tile.inl.
#include "cpu/backend.h"
#include "cpu/kernels.h"
#include "cpu/thread_pool.h"
#include "params/linear_norm.h"

#include <octavo/build_info.h>

#include <algorithm>
#include <memory>

namespace octavo::cpu {
namespace {

LinearScratch& thread_scratch() {
    thread_local std::unique_ptr<LinearScratch> scratch;
    if (!scratch) scratch.reset(new LinearScratch);
    return *scratch;
}

constexpr int64_t kGrainProducts = 64 << 10;  // below, waking a thread costs more than it saves
constexpr int64_t kItemsPerThread = 4;        // threads that are held up leave items to others

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

void linear(const LinearParams& p) {
    if (p.num_rows == 0 || p.width == 0) return;
    if (p.norm_weight) {
        const std::unique_ptr<char[]> memory(new char[p.num_rows * p.depth * size_of(p.dtype)]);
        const NormalisedRows rows{memory.get(), p.depth};
        rms_norm(norm_of(p, rows));
        return linear(behind_norm(p, rows));
    }
    const int64_t products = std::max<int64_t>(1, p.num_rows * p.w_rows() * p.depth);
    const int64_t num_items =
        std::min(get_num_threads() * kItemsPerThread, divide_up(products, kGrainProducts));
    const int64_t num_columns = divide_up(divide_up(p.width, num_items), kPanelRows) * kPanelRows;
    const int64_t column_items = divide_up(p.width, num_columns);
    // Weights are read once by the items that share them; only where these are few are rows cut as well.
    const int64_t num_rows =
        divide_up(divide_up(p.num_rows, divide_up(num_items, column_items)), kLinearTileRows) *
        kLinearTileRows;
    const int64_t row_items = divide_up(p.num_rows, num_rows);
    const LinearKernels& kernels = cpu::kernels().linear;
    parallel_for(column_items * row_items, [&](int64_t item) {
        const int64_t column = item / row_items * num_columns, row = item % row_items * num_rows;
        kernels.compute(
            p, {row, std::min(num_rows, p.num_rows - row), column, std::min(num_columns, p.width - column)},
            thread_scratch());
    });
}

}  // namespace octavo::cpu
