// The kernels of attention, of linear layers, of rms_norm and of latent attention, in one build for each
// instruction set (tiles_*.cpp).
#pragma once

#include "cpu/backward_tile.h"
#include "cpu/forward_tile.h"
#include "cpu/latent.h"
#include "cpu/linear_tile.h"
#include "cpu/rms_norm.h"

namespace octavo::cpu {

struct Kernels {
    ForwardKernels forward;
    BackwardKernels backward;
    LinearKernels linear;
    RmsNormKernels rms_norm;
    LatentKernels latent;
};

namespace baseline {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx512_bf16 {
extern const Kernels kKernels;
}

// Those for the instruction set in use.
const Kernels& kernels();

}  // namespace octavo::cpu
