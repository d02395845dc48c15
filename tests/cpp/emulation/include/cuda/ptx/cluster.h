#pragma once
#include "cuda/ptx/cp_async.h"
namespace octavo::cuda::ptx {
inline void cluster_arrive_relaxed() { ++cluster_arrived; }
inline void cluster_wait() { emu_wait([] { return cluster_arrived % ((int)ctas.size() * threads_per_cta) == 0 && cluster_arrived > 0; }); ++ctas[fibers[cur].cta].cluster_waits; }
inline uint32_t cluster_rank() { return fibers[cur].cta; }
inline uint32_t cluster_address(uint32_t shared, uint32_t rank) { return shared | (rank + 1) << 24; }
inline void store_cluster_async(uint32_t address, int4 x, uint32_t barrier) {
    assert(address >> 24 == barrier >> 24 && address % 16 == 0);
    memcpy(emu_at(address), &x, 16);
    auto& b = *reinterpret_cast<Barrier*>(emu_at(barrier)); b.tx -= 16; emu_complete(b);
}
}
