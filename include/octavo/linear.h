// The products of a layer with its weights.
#pragma once

#include <octavo/error.h>
#include <octavo/tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace octavo {

// What a linear layer makes of its sums: silu(s) = s / (1 + exp(-s)); gelu(s) = s (1 + erf(s / sqrt(2))) / 2,
// the exact one; silu_gate: silu of the first half of the sums times the other half (SwiGLU).
enum class Activation : uint8_t { silu, gelu, silu_gate };

std::string to_string(Activation activation);  // "silu_gate"

// What multiplies on a GPU: the library of the arrays (of Python: C++ and C have none to hand over to), or a
// kernel of Octavo.
enum class LinearKernel : uint8_t { library, sm80_linear, sm90_flat, sm90_wide };

std::string to_string(LinearKernel kernel);  // "sm90_flat"

// Where a plan comes from: from the table that Octavo ships, from that of octavo.tune_linear() on this
// machine, or, for products in neither, from an estimate of each kernel's time.
enum class LinearPlanSource : uint8_t { measured, tuned, estimated };

std::string to_string(LinearPlanSource source);  // "measured"

// How a GPU multiplies x [M, K] with w [N, K]: the heuristic dataflow of FlashDecoding++. The numbers are 0
// for the library.
struct LinearPlan {
    LinearKernel kernel = LinearKernel::library;
    DType dtype = DType::bfloat16;
    int32_t w_rows = 0, x_rows = 0;  // the rows of a tile, which a CTA multiplies
    int32_t splits = 0;              // parts of K: as many CTAs compute a tile and add up their sums
    int32_t ctas_per_sm = 0;         // for which a CTA leaves room
    LinearPlanSource source = LinearPlanSource::estimated;

    // In one line.
    std::string to_string() const;
};

// Two plans are equal if they do the same, wherever they come from.
bool operator==(const LinearPlan& a, const LinearPlan& b);
inline bool operator!=(const LinearPlan& a, const LinearPlan& b) { return !(a == b); }

// What linear() in Python runs for contiguous x [num_rows, depth] and w [w_rows, depth], on a GPU by its name
// as explain() knows it ("h100", "sm_90", "cuda:0"), or on the first one of this machine. With
// batch_invariant it is a plan in which the bits of a row of the result do not depend on num_rows.
LinearPlan linear_plan(int64_t num_rows, int64_t w_rows, int64_t depth, DType dtype,
                       const std::string& device = {}, std::optional<Activation> activation = {},
                       bool batch_invariant = false);

// out = activation(norm(x) w^T + bias) + residual: x [..., K], up to five leading axes; w [N, K], as
// nn.Linear has it; out [..., N]. With silu_gate w is [2 F, K], the rows of the gate first, and out [..., F].
// Sums and everything after them are float32; the result is rounded once.
//
// On the CPU each element of out is summed in an order that follows from K and the instruction set alone:
// its bits depend neither on the other rows of x nor on the number of threads. On a GPU x and w are float16
// or bfloat16, with the leading axes of x, out and residual one behind the other, and the order of addition
// depends on the number of rows of x unless `batch_invariant` is set. Made for few rows, such as decoding
// has: with more than some 128 of them a GPU's own library is faster.
struct LinearArgs {
    TensorView x;                        // float32, float16 or bfloat16
    TensorView w;                        // like x; beside float32 x also float16 or bfloat16
    TensorView out;                      // like x; `residual` itself, or apart from all that is read
    std::optional<TensorView> bias;      // like x, [N]; with silu_gate [2 F]
    std::optional<TensorView> residual;  // like out
    std::optional<Activation> activation;
    // RMSNorm (rms_norm.h) of the rows of x, if norm_weight is given: x / sqrt(mean(x^2) + norm_eps) *
    // norm_weight. Then x has at most three leading axes that do not lie behind one another. On Hopper one
    // launch does both for up to 16 rows of bfloat16 with such a norm_weight, unless `batch_invariant` is set
    // or `plan` names another kernel than sm90_flat: it rounds x * norm_weight, and divides the sums of
    // products.
    std::optional<TensorView> norm_weight;  // [K], of x's dtype or float32
    double norm_eps = 1e-6;
    // A promise that nothing which is still at work on the stream writes to w or to norm_weight, so that the
    // kernel may read them before what is in front of it has ended. No effect on the CPU.
    bool static_weight = false;
    bool batch_invariant = false;    // bits of a row must not depend on other rows; on the CPU they never do
    std::optional<LinearPlan> plan;  // in place of linear_plan()'s, on a GPU; any but the library
    void* stream = nullptr;          // cudaStream_t; ignored on the CPU
};

void linear(const LinearArgs& args);

}  // namespace octavo
