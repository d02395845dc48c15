#pragma once
#include "cuda/ptx/mma.h"
#include "cuda/ptx/cp_async.h"
namespace octavo::cuda::ptx {
inline void wgmma_fence() {} inline void wgmma_commit() {} template <int k> inline void wgmma_wait() {}
template <int k> inline void wgmma_results(float (&)[k]) {}
inline uint64_t wgmma_descriptor(uint32_t address, uint32_t) { return address; }
template <class T, int N> struct Wgmma {
    static void ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
        const int t = fibers[cur].thread % 128;
        auto number = [](uint32_t base, int row, int k) { T x; const uint32_t at = base + row * 128 + k * 2; memcpy(&x, emu_at(swizzled(at)), 2); return (float)x; };
        for (int i = 0; i < N / 2; ++i) {
            const int row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
            float sum = accumulate ? d[i] : 0;
            for (int k = 0; k < 16; ++k) sum += number(a, row, k) * number(b, column, k);
            d[i] = sum;
        }
    }
};
}
