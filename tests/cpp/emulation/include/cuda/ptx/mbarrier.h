#pragma once
#include "cuda/ptx/cp_async.h"
namespace octavo::cuda::ptx {
inline void mbarrier_init(uint64_t* b, uint32_t count) { auto& x = *reinterpret_cast<Barrier*>(b); x = {0, (uint16_t)count, (uint16_t)count}; }
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint64_t* b) { auto& x = *reinterpret_cast<Barrier*>(b); assert(x.pending > 0); --x.pending; emu_complete(x); }
inline void mbarrier_arrive_expect(uint64_t* b, uint32_t bytes) { auto& x = *reinterpret_cast<Barrier*>(b); x.tx += bytes; assert(x.pending > 0); --x.pending; emu_complete(x); }
inline void mbarrier_wait(uint64_t* b, uint32_t parity) {
    const uint32_t address = shared_address(b);
    emu_wait([=] { return (reinterpret_cast<Barrier*>(emu_at(address))->init_phase >> 15) != parity; });
}
}
