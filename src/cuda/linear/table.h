// The tables of linear's dataflow: which kernel was the fastest where it was measured.
#pragma once

#include "cuda/gpu.h"

#include <octavo/linear.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace octavo::cuda {

// The numbers that the choice of a kernel depends on: the rows of x and of w, and K.
struct LinearProblem {
    int64_t num_rows, w_rows, depth;
};

// A row holds for up to num_rows rows of x, and for more than num_rows of the row before it. The rows of x in
// a tile follow from the number of rows of x.
struct LinearTableRow {
    int64_t w_rows, depth, num_rows;
    LinearKernel kernel;  // the fastest of Octavo's kernels
    int32_t tile_w_rows, splits, ctas_per_sm;
    bool library_is_faster;
};

struct LinearTable {
    const char *gpu, *driver, *date;
    int32_t memory_gb_per_s;  // as in Gpu
    int32_t read_gb_per_s;    // the highest rate at which one of the products read its weights
    const LinearTableRow *first, *last;

    const LinearTableRow* begin() const { return first; }
    const LinearTableRow* end() const { return last; }
};

// Returns the table that Octavo ships for this GPU, or for the GPU nearest to it in memory bandwidth; null if
// there is none for its architecture. Tables were measured in bfloat16, from which float16 does not differ.
const LinearTable* shipped_table(const Gpu& gpu);

// Sets the table that octavo.tune_linear() measured, in place of the one before. Any thread may call it.
void set_tuned_rows(const Gpu& gpu, DType dtype, std::vector<LinearTableRow> rows);
std::vector<LinearTableRow> tuned_rows(const Gpu& gpu, DType dtype);

// A number that changes with each set_tuned_rows(), for callers that remember what they found.
uint64_t tables_version();

struct FoundRow {
    LinearTableRow row;
    LinearPlanSource source;
};

// Looks in the tuned table, and otherwise in the shipped one.
std::optional<FoundRow> find_table_row(const LinearProblem& problem, DType dtype, const Gpu& gpu);

}  // namespace octavo::cuda
