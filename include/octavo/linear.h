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

// out = activation(x w^T + bias) + residual: x [..., K], up to five leading axes; w [N, K], as nn.Linear has
// it; out [..., N]. With silu_gate w is [2 F, K], the rows of the gate first, and out [..., F]. Sums and
// everything after them are float32; the result is rounded once.
//
// On the CPU each element of out is summed in an order that follows from K and the instruction set alone:
// its bits depend neither on the other rows of x nor on the number of threads. There is no CUDA kernel yet.
struct LinearArgs {
    TensorView x;                        // float32, float16 or bfloat16
    TensorView w;                        // like x; beside float32 x also float16 or bfloat16
    TensorView out;                      // like x; `residual` itself, or apart from all that is read
    std::optional<TensorView> bias;      // like x, [N]; with silu_gate [2 F]
    std::optional<TensorView> residual;  // like out
    std::optional<Activation> activation;
    // A promise that nothing which is still at work on the stream writes to w, so that a kernel may read it
    // before what is in front of it has ended. No effect on the CPU.
    bool static_weight = false;
    bool batch_invariant = false;  // bits of a row must not depend on other rows; on the CPU they never do
    void* stream = nullptr;        // cudaStream_t; ignored on the CPU
};

void linear(const LinearArgs& args);

}  // namespace octavo
