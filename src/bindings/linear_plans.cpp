#include "bindings/linear_plans.h"

#include "bindings/bindings.h"
#include "bindings/scalars.h"
#include "checks/check.h"
#include "common/fail.h"
#include "cuda/linear/plan.h"
#include "cuda/linear/table.h"
#include "cuda/sm90_linear/tiles.h"
#include "operators/find_device.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <utility>
#include <vector>

namespace octavo::bindings {
namespace {

constexpr LinearKernel kKernels[] = {LinearKernel::library, LinearKernel::sm80_linear,
                                     LinearKernel::sm90_flat, LinearKernel::sm90_wide};
constexpr LinearPlanSource kSources[] = {LinearPlanSource::measured, LinearPlanSource::tuned,
                                         LinearPlanSource::estimated};

template <class Enum, size_t kCount>
Enum enum_argument(const char* op, const char* name, const Enum (&all)[kCount], nb::handle value) {
    const std::string_view given = str_argument(op, name, value);
    std::string names;
    for (Enum known : all) {
        if (to_string(known) == given) return known;
        names += (names.empty() ? "" : ", ") + to_string(known);
    }
    fail<ValueError>(op, name, " must be one of ", names, "; got ", given);
}

int32_t int32_argument(const char* op, const char* name, nb::handle value) {
    const int64_t number = int_argument(op, name, value);
    if (number < 0 || number > std::numeric_limits<int32_t>::max())
        fail<ValueError>(op, name, " must be at least 0 and fit in 32 bits; got ", number);
    return static_cast<int32_t>(number);
}

const cuda::Gpu& gpu_argument(const char* op, const std::string& device) {
    const cuda::Gpu* const gpu = find_device(op, device);
    if (!gpu) fail<ValueError>(op, "device must be a GPU; on the CPU one kernel computes all products");
    load_tuned_of(device);
    return *gpu;
}

// The keywords of octavo.LinearPlan.
nb::dict to_python(const LinearPlan& plan) {
    nb::dict fields;
    fields["kernel"] = to_string(plan.kernel);
    fields["dtype"] = to_string(plan.dtype);
    fields["w_rows"] = plan.w_rows;
    fields["x_rows"] = plan.x_rows;
    fields["splits"] = plan.splits;
    fields["ctas_per_sm"] = plan.ctas_per_sm;
    fields["source"] = to_string(plan.source);
    return fields;
}

DType float_dtype(const char* op, nb::handle dtype) {
    const std::string_view name = str_argument(op, "dtype", dtype);
    for (DType type : {DType::float32, DType::float16, DType::bfloat16}) {
        if (name == to_string(type)) return type;
    }
    constexpr const char* wanted = "dtype must be float32, float16 or bfloat16; got ";
    for (DType type : kDTypes) {
        if (name == to_string(type)) fail<TypeError>(op, wanted, name);
    }
    fail<ValueError>(op, wanted, name);
}

nb::dict linear_plan(nb::handle num_rows, nb::handle w_rows, nb::handle depth, nb::handle dtype,
                     const std::string& device, nb::handle activation, nb::handle batch_invariant) {
    constexpr const char* op = "linear_plan";
    const int64_t m = int_argument(op, "M", num_rows), n = int_argument(op, "N", w_rows);
    const int64_t k = int_argument(op, "K", depth);
    const auto of_dtype = float_dtype(op, dtype);
    const auto of_activation = scalar_argument<std::optional<Activation>>(op, "activation", activation);
    const bool is_invariant = bool_argument(op, "batch_invariant", batch_invariant);
    gpu_argument(op, device);
    return to_python(octavo::linear_plan(m, n, k, of_dtype, device, of_activation, is_invariant));
}

nb::list linear_candidates(int64_t num_rows, int64_t w_rows, int64_t depth, nb::handle dtype,
                           const std::string& device) {
    constexpr const char* op = "tune_linear";
    const cuda::Gpu& gpu = gpu_argument(op, device);
    if (std::min({num_rows, w_rows, depth}) < 1)
        fail<ValueError>(op, "M, N and K must be at least 1; got ", num_rows, ", ", w_rows, " and ", depth);
    nb::list candidates;
    for (const auto& [plan, us] :
         cuda::linear_candidates({num_rows, w_rows, depth}, float_dtype(op, dtype), gpu))
        candidates.append(nb::make_tuple(to_python(plan), us));
    return candidates;
}

template <class Rows>
nb::list rows_to_python(const Rows& rows) {
    nb::list list;
    for (const cuda::LinearTableRow& row : rows) {
        list.append(nb::make_tuple(row.w_rows, row.depth, row.num_rows, to_string(row.kernel),
                                   row.tile_w_rows, row.splits, row.ctas_per_sm, row.library_is_faster));
    }
    return list;
}

nb::object shipped_linear_table(const std::string& device) {
    const cuda::LinearTable* const table = cuda::shipped_table(gpu_argument("linear_table", device));
    if (!table) return nb::none();
    nb::dict dict;
    dict["gpu"] = table->gpu;
    dict["driver"] = table->driver;
    dict["date"] = table->date;
    dict["read_gb_per_s"] = table->read_gb_per_s;
    dict["rows"] = rows_to_python(*table);
    return dict;
}

bool is_candidate(const cuda::LinearTableRow& row, DType dtype, const cuda::Gpu& gpu) {
    for (int64_t length : {row.num_rows, row.w_rows, row.depth}) {
        if (length < 1 || length > kMaxLength) return false;
    }
    for (const auto& [plan, us] :
         cuda::linear_candidates({row.num_rows, row.w_rows, row.depth}, dtype, gpu)) {
        if (plan.kernel == row.kernel && plan.w_rows == row.tile_w_rows && plan.splits == row.splits &&
            plan.ctas_per_sm == row.ctas_per_sm)
            return true;
    }
    return false;
}

// What set_tuned_linear() is given, checked.
struct TunedRows {
    const cuda::Gpu* gpu;
    DType dtype;
    std::vector<cuda::LinearTableRow> rows;
};

TunedRows tuned_rows(const std::string& device, nb::handle dtype, nb::list rows) {
    constexpr const char* op = "tune_linear";
    TunedRows tuned{find_device(op, device), float_dtype(op, dtype), {}};
    if (!tuned.gpu) fail<ValueError>(op, "device must be a GPU; got ", device);
    if (tuned.dtype != DType::float16 && tuned.dtype != DType::bfloat16)
        fail<ValueError>(op, "dtype must be float16 or bfloat16; got ", to_string(tuned.dtype));
    for (nb::handle given : rows) {
        const nb::tuple row(given);
        cuda::LinearTableRow to{};
        to.w_rows = int_argument(op, "N", row[0]);
        to.depth = int_argument(op, "K", row[1]);
        to.num_rows = int_argument(op, "M", row[2]);
        to.kernel = enum_argument(op, "kernel", kKernels, row[3]);
        to.tile_w_rows = int32_argument(op, "w_rows", row[4]);
        to.splits = int32_argument(op, "splits", row[5]);
        to.ctas_per_sm = int32_argument(op, "ctas_per_sm", row[6]);
        to.library_is_faster = bool_argument(op, "library_is_faster", row[7]);
        if (!is_candidate(to, tuned.dtype, *tuned.gpu)) {
            fail<ValueError>(op, "no kernel computes ", to.num_rows, " rows for [", to.w_rows, ", ", to.depth,
                             "] as ", to_string(to.kernel), " with w_rows ", to.tile_w_rows, ", splits ",
                             to.splits, " and ctas_per_sm ", to.ctas_per_sm);
        }
        tuned.rows.push_back(to);
    }
    return tuned;
}

void check_tuned_linear(const std::string& device, nb::handle dtype, nb::list rows) {
    tuned_rows(device, dtype, rows);
}

void set_tuned_linear(const std::string& device, nb::handle dtype, nb::list rows) {
    TunedRows tuned = tuned_rows(device, dtype, rows);
    cuda::set_tuned_rows(*tuned.gpu, tuned.dtype, std::move(tuned.rows));
}

}  // namespace

std::optional<LinearPlan> plan_argument(const char* op, nb::handle given) {
    if (given.is_none()) return std::nullopt;
    if (!nb::isinstance(given, nb::module_::import_("octavo._linear_plan").attr("LinearPlan"))) {
        fail<TypeError>(op, "plan must be an octavo.LinearPlan or None; got ", bindings::type_name(given));
    }
    auto number = [&](const char* name) {
        return int32_argument(op, (std::string("plan.") + name).c_str(), given.attr(name));
    };
    LinearPlan plan;
    plan.kernel = enum_argument(op, "plan.kernel", kKernels, given.attr("kernel"));
    plan.dtype = scalar_argument<DType>(op, "plan.dtype", given.attr("dtype"));
    plan.w_rows = number("w_rows");
    plan.x_rows = number("x_rows");
    plan.splits = number("splits");
    plan.ctas_per_sm = number("ctas_per_sm");
    plan.source = enum_argument(op, "plan.source", kSources, given.attr("source"));
    return plan;
}

void load_tuned_once(int32_t device) {
    static std::atomic<uint64_t> loaded{0};  // a bit for each GPU; no machine shows more than 64
    const uint64_t bit = uint64_t{1} << (device % 64);
    if (loaded.load(std::memory_order_relaxed) & bit) return;
    if (loaded.fetch_or(bit) & bit) return;
    nb::module_::import_("octavo._linear_cache").attr("load")("cuda:" + std::to_string(device));
}

void load_tuned_of(const std::string& device) {
    if (device.rfind("cuda:", 0) != 0) return;
    find_device("linear", device);
    load_tuned_once(std::stoi(device.substr(5)));
}

void bind_linear_plans(nb::module_& m) {
    m.attr("LINEAR_KERNELS") = cuda::kLinearKernels;
    m.def("linear_plan", &linear_plan, nb::arg("M"), nb::arg("N"), nb::arg("K"), nb::arg("dtype"),
          nb::arg("device"), nb::arg("activation").none(), nb::arg("batch_invariant"),
          nb::sig("def linear_plan(M: object, N: object, K: object, dtype: object, device: str, activation: "
                  "object, batch_invariant: object) -> dict[str, typing.Any]"),
          "The fields of octavo.LinearPlan.");
    m.def(
        "linear_candidates", &linear_candidates, nb::arg("M"), nb::arg("N"), nb::arg("K"), nb::arg("dtype"),
        nb::arg("device"),
        nb::sig("def linear_candidates(M: int, N: int, K: int, dtype: str, device: str) -> "
                "list[tuple[dict[str, typing.Any], float]]"),
        "The fields of plans, and what each ought to take, in microseconds, the fastest first; 0: unknown.");
    m.def("shipped_linear_table", &shipped_linear_table, nb::arg("device"),
          nb::sig("def shipped_linear_table(device: str) -> dict[str, typing.Any] | None"),
          "gpu, driver, date, read_gb_per_s and the rows: N, K, M, kernel, w_rows, splits, ctas_per_sm, and "
          "whether the library is faster.");
    m.def(
        "linear_most_rows",
        [](const std::string& device, const std::string& op) {
            return cuda::most_rows_without_table(gpu_argument(op.c_str(), device));
        },
        nb::arg("device"), nb::arg("operator"),
        nb::sig("def linear_most_rows(device: str, operator: str) -> int"),
        "The most rows of x for which a kernel of Octavo is the faster one where no table says which it is. "
        "Errors name the operator.");
    m.def(
        "memory_gb_per_s",
        [](const std::string& device) { return gpu_argument("linear_table", device).memory_gb_per_s; },
        nb::arg("device"), nb::sig("def memory_gb_per_s(device: str) -> int"),
        "What the memory of a GPU could transfer by its clock and width, in GB/s.");
    m.def("check_tuned_linear", &check_tuned_linear, nb::arg("device"), nb::arg("dtype"), nb::arg("rows"),
          nb::sig(
              "def check_tuned_linear(device: str, dtype: str, rows: list[tuple[typing.Any, ...]]) -> None"),
          "Refuse what set_tuned_linear would refuse.");
    m.def(
        "set_tuned_linear", &set_tuned_linear, nb::arg("device"), nb::arg("dtype"), nb::arg("rows"),
        nb::sig("def set_tuned_linear(device: str, dtype: str, rows: list[tuple[typing.Any, ...]]) -> None"),
        "Have these rows, like those of a shipped table, in place of what was tuned before.");
}

}  // namespace octavo::bindings
