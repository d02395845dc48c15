// All kernels of one instruction set. Included inside its namespace, after simd.inl and what that set's own
// file defines.
#include "cpu/rows.inl"

#include "cpu/gemm.inl"

#include "cpu/panel.inl"

#include "cpu/key_tile.inl"

#include "cpu/streamed_rows.inl"

#include "cpu/forward_tile.inl"

#include "cpu/backward_tile.inl"

#include "cpu/linear_tile.inl"

#include "cpu/rms_norm.inl"

#include "cpu/latent.inl"

const Kernels kKernels = {kForwardKernels, kBackwardKernels, kLinearKernels, kRmsNormKernels, kLatentKernels};
