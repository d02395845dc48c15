// How sm90_linear would compute a product with weights.
#pragma once

#include "cuda/gpu.h"
#include "cuda/linear/table.h"
#include "cuda/plan.h"
#include "cuda/sm90_linear/tiles.h"
#include "params/linear_params.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace octavo::cuda {

enum class Sm90LinearKernel : uint8_t { flat, wide };

// An instance, except for its type, and how it is launched.
struct Sm90LinearTile {
    Sm90LinearKernel kernel;
    int32_t w_rows, x_rows;
    int32_t splits;       // splits of K: the CTAs of a cluster, a power of two
    int32_t ctas_per_sm;  // how many CTAs an SM has room for, 1 or 2
};

struct LinearChoice {
    Sm90LinearTile tile;
    LinearPlanSource source;
    bool library_is_faster;
};

struct Sm90LinearPlan {
    DType dtype;
    Sm90LinearTile tile;
    LinearPlanSource source;  // where the tile comes from
    bool library_is_faster;   // according to the tables or, without one, to the number of rows of x
    bool normalises;          // whether x is normalised in the same launch
    int32_t w_tiles, x_tiles;
    int32_t steps;  // the number of stages that K fills
    int32_t num_ctas;
    int32_t stages;       // the stages that the ring has room for
    int32_t norm_offset;  // where the weights of the norm lie, from the first stage on
    int32_t shared_bytes;

    LinearStage stage() const;
};

// The problem that these parameters describe.
LinearProblem linear_problem(const LinearParams& params);

// Plans with the tile of params.plan if that is given; it must name a kernel of sm90_linear. With a norm it
// is a plan for both in one launch. Returns nothing where sm90_linear does not serve; why_not, unless null,
// then gets the reason.
std::optional<Sm90LinearPlan> plan_sm90_linear(const LinearParams& params, const Gpu& gpu,
                                               std::string* why_not = nullptr);

// Plans with this tile. Returns nothing if the tile has no instance, or if there is no room for its stages.
std::optional<Sm90LinearPlan> plan_sm90_linear(const LinearProblem& problem, DType dtype, const Gpu& gpu,
                                               const Sm90LinearTile& tile, bool normalises = false);

// The tiles that may be the fastest, and their estimated times in microseconds, the fastest first.
std::vector<std::pair<LinearPlan, double>> sm90_linear_candidates(const LinearProblem& problem, DType dtype,
                                                                  const Gpu& gpu);

LinearPlan public_plan(const Sm90LinearPlan& plan);
Explanation describe(const Sm90LinearPlan& plan);
std::vector<std::string> sm90_linear_instances();

}  // namespace octavo::cuda
