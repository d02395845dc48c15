// Prefetches of data that a decode kernel will need.
#pragma once

#include "common/fast_divide.h"
#include "params/attention_params.h"

#include <cstddef>
#include <cstdint>

namespace octavo::cuda {

// Brings the parameters into the constant cache. Each warp waits for one cache line, instead of all warps for
// each line. The addresses are constants, since indexed reads go through another cache. The last fields are
// left out: the scales where there are none, and softmax_phi and all behind it always.
template <class Config>
__device__ __forceinline__ void prefetch_params(const AttentionParams& p) {
    constexpr int kLineWords = 16;
    constexpr size_t kBytes = Config::kHasCodes ? offsetof(AttentionParams, softmax_phi_of_heads)
                                                : offsetof(AttentionParams, k_scales);
    const int32_t* const words = reinterpret_cast<const int32_t*>(&p);
#pragma unroll
    for (int line = 0; line < static_cast<int>(kBytes / sizeof(int32_t)) / kLineWords; ++line) {
        if (threadIdx.x / 32 == line) asm volatile("" ::"r"(words[line * kLineWords]));
    }
}

// Brings the page table into the L2 cache while the lengths are being loaded. Of a large one, little would be
// used.
__device__ __forceinline__ void prefetch_page_table(const AttentionParams& p, const FastDivide& page_size) {
    constexpr int64_t kLineEntries = 32, kMaxEntries = 32 * 1024;
    const int64_t entry = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kLineEntries;
    const int64_t end = (p.batch - 1) * p.page_table_stride + page_size.quotient(p.seqlen_k);
    if (entry < end && end <= kMaxEntries)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(p.page_table.at(entry)));
}

}  // namespace octavo::cuda
