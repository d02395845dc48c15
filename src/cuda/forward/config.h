// The tile sizes of the sm_80 forward kernel.
#pragma once

namespace octavo::cuda {

template <int kHeadDim_>
struct ForwardConfig {
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kWarps = 4;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kRows = 16 * kWarps;                // a row: one query token of one head
    static constexpr int kKeys = kHeadDim <= 128 ? 64 : 32;  // 256: the accumulator takes 128 registers
    // A row of a tile in shared memory is 16 bytes longer than its data: eight rows of one 16-byte column
    // then lie in different banks, for every head dim here.
    static constexpr int kRowStride = kHeadDim + 8;
};

}  // namespace octavo::cuda
