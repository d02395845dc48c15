#include "cuda/linear/output.h"

#include "cuda/alignment.h"

namespace octavo::cuda {
namespace {

LinearActivation activation_of(const LinearParams& p) {
    if (!p.activation) return LinearActivation::none;
    switch (*p.activation) {
        case Activation::silu: return LinearActivation::silu;
        case Activation::gelu: return LinearActivation::gelu;
        default: return LinearActivation::silu_gate;
    }
}

}  // namespace

LinearOutput output_of(const LinearParams& p) {
    const bool in_pairs = aligned(p.out, 4, {p.out_rows.strides[0]}, p.dtype) &&
                          aligned(p.residual, 4, {p.residual ? p.residual_rows.strides[0] : 0}, p.dtype) &&
                          aligned(p.bias, 4, {p.is_gated() ? p.width : 0}, p.dtype);
    return {p.bias,
            p.residual,
            p.out,
            p.residual_rows.strides[0],
            p.out_rows.strides[0],
            static_cast<int32_t>(p.num_rows),
            static_cast<int32_t>(p.width),
            activation_of(p),
            in_pairs};
}

}  // namespace octavo::cuda
