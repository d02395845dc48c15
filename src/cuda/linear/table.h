// The tables of linear's dataflow: which kernel was the fastest where it was measured.
#pragma once

#include "cuda/gpu.h"

#include <octavo/linear.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace octavo::cuda {

// What the choice of a kernel depends on: the rows of x and of w, and K.
struct LinearProblem {
    int64_t num_rows, w_rows, depth;
};

// For up to num_rows rows of x, and more than those of the row before it. Rows of x in a tile follow from
// those there are.
struct LinearTableRow {
    int64_t w_rows, depth, num_rows;
    LinearKernel kernel;  // the fastest of Octavo's
    int32_t tile_w_rows, splits, ctas_per_sm;
    bool library_is_faster;
};

struct LinearTable {
    const char *gpu, *driver, *date;
    int32_t memory_gb_per_s;  // as that of Gpu
    int32_t read_gb_per_s;    // the most at which one of the products read its weights
    const LinearTableRow *first, *last;

    const LinearTableRow* begin() const { return first; }
    const LinearTableRow* end() const { return last; }
};

// That Octavo ships for this GPU, or for the one nearest to it in memory bandwidth; null: none for its
// architecture. Measured in bfloat16, from which float16 does not differ.
const LinearTable* shipped_table(const Gpu& gpu);

// The table of octavo.tune_linear(), in place of the one before. From any thread.
void set_tuned_rows(const Gpu& gpu, DType dtype, std::vector<LinearTableRow> rows);
std::vector<LinearTableRow> tuned_rows(const Gpu& gpu, DType dtype);

// Changes with each set_tuned_rows(), for those who remember what they found.
uint64_t tables_version();

struct FoundRow {
    LinearTableRow row;
    LinearPlanSource source;
};

// Looks in the tuned table, and otherwise in the shipped one.
std::optional<FoundRow> find_table_row(const LinearProblem& problem, DType dtype, const Gpu& gpu);

}  // namespace octavo::cuda
