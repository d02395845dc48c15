#include "cuda/linear/table.h"

#include <atomic>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

namespace octavo::cuda {
namespace {

// The names that the tables use, which benchmarks/linear_table.py writes.
constexpr LinearKernel flat = LinearKernel::sm90_flat, wide = LinearKernel::sm90_wide;
constexpr bool library = true;

#include "cuda/linear/tables/h100.inc"
#include "cuda/linear/tables/h200.inc"

constexpr const LinearTable* kShipped[] = {&kH100, &kH200};

struct TunedTables {
    std::mutex mutex;
    std::map<std::pair<const Gpu*, DType>, std::vector<LinearTableRow>> rows;
};

TunedTables& tuned() {
    static TunedTables tables;
    return tables;
}

std::atomic<uint64_t> version{0};

template <class Rows>
std::optional<LinearTableRow> find_row(const Rows& rows, const LinearProblem& problem) {
    std::optional<LinearTableRow> found;
    for (const LinearTableRow& row : rows) {
        if (row.w_rows == problem.w_rows && row.depth == problem.depth && row.num_rows >= problem.num_rows &&
            (!found || row.num_rows < found->num_rows))
            found = row;
    }
    return found;
}

}  // namespace

const LinearTable* shipped_table(const Gpu& gpu) {
    if (!gpu.has_sm90_kernels) return nullptr;
    const LinearTable* nearest = kShipped[0];
    auto distance = [&](const LinearTable& table) {
        return std::abs(table.memory_gb_per_s - gpu.memory_gb_per_s);
    };
    for (const LinearTable* table : kShipped) {
        if (distance(*table) < distance(*nearest)) nearest = table;
    }
    return nearest;
}

void set_tuned_rows(const Gpu& gpu, DType dtype, std::vector<LinearTableRow> rows) {
    const std::lock_guard<std::mutex> lock(tuned().mutex);
    tuned().rows[{&gpu, dtype}] = std::move(rows);
    version.fetch_add(1, std::memory_order_release);
}

std::vector<LinearTableRow> tuned_rows(const Gpu& gpu, DType dtype) {
    const std::lock_guard<std::mutex> lock(tuned().mutex);
    const auto found = tuned().rows.find({&gpu, dtype});
    return found == tuned().rows.end() ? std::vector<LinearTableRow>{} : found->second;
}

uint64_t tables_version() { return version.load(std::memory_order_acquire); }

std::optional<FoundRow> find_table_row(const LinearProblem& problem, DType dtype, const Gpu& gpu) {
    if (tables_version() > 0) {
        if (const auto row = find_row(tuned_rows(gpu, dtype), problem))
            return FoundRow{*row, LinearPlanSource::tuned};
    }
    if (const LinearTable* shipped = shipped_table(gpu)) {
        if (const auto row = find_row(*shipped, problem)) return FoundRow{*row, LinearPlanSource::measured};
    }
    return std::nullopt;
}

}  // namespace octavo::cuda
