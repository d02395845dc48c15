// Host emulation: fibers stand for the threads of a cluster.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __global__
#define __global__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

namespace octavo::cuda { extern char shared[]; }
constexpr uint32_t kBase = 1024, kSharedSize = 232448;

struct Warp { uint64_t slots[2][32][8]; int arrived = 0; unsigned phase = 0; };
struct Named { int arrived = 0; unsigned phase = 0; };
struct Cta { std::vector<char> memory; Warp warps[16]; Named named[16]; int cluster_waits = 0; };
struct Fiber { ucontext_t context; int cta, thread; bool done = false; std::function<bool()> ready; std::vector<char> stack; };
extern std::vector<Cta> ctas; extern std::vector<Fiber> fibers; extern int cur, loaded_cta, threads_per_cta; extern ucontext_t scheduler;
extern int cluster_arrived; extern long emu_progress;
struct Dim { unsigned x = 0, y = 0, z = 0; };
extern Dim emu_block, emu_grid, emu_thread;
#define threadIdx emu_thread
#define blockIdx emu_block
#define gridDim emu_grid

inline void emu_wait(std::function<bool()> ready) {
    if (ready()) return;
    fibers[cur].ready = std::move(ready);
    swapcontext(&fibers[cur].context, &scheduler);
}
inline Warp& emu_warp() { return ctas[fibers[cur].cta].warps[fibers[cur].thread / 32]; }
// Exchanges a value of up to 64 bytes over the warp.
template <class V>
inline void emu_collect(const V& mine, V (&all)[32]) {
    static_assert(sizeof(V) <= 64);
    Warp& w = emu_warp();
    const unsigned phase = w.phase;
    const int lane = fibers[cur].thread % 32;
    memcpy(w.slots[phase % 2][lane], &mine, sizeof(V));
    if (++w.arrived == 32) { w.arrived = 0; ++w.phase; }
    emu_wait([&w, phase] { return w.phase != phase; });
    for (int i = 0; i < 32; ++i) memcpy(&all[i], w.slots[phase % 2][i], sizeof(V));
}
inline void emu_syncwarp() { int all[32]; emu_collect(0, all); }
#undef __syncwarp
#define __syncwarp() emu_syncwarp()
inline float emu_shfl_xor(float x, int mask) { float all[32]; emu_collect(x, all); return all[(fibers[cur].thread % 32) ^ mask]; }
inline int emu_shfl(int x, int from) { int all[32]; emu_collect(x, all); return all[from]; }
#define __shfl_xor_sync(m, x, k) emu_shfl_xor(x, k)
#define __shfl_sync(m, x, k) emu_shfl(x, k)
inline void emu_named(int id, int threads) {
    Named& n = ctas[fibers[cur].cta].named[id];
    const unsigned phase = n.phase;
    if (++n.arrived == threads) { n.arrived = 0; ++n.phase; }
    emu_wait([&n, phase] { return n.phase != phase; });
}
#define __syncthreads() emu_named(0, threads_per_cta)
// Memory of a CTA by an address, with the CTA's rank + 1 above bit 24; or of this CTA.
inline char* emu_at(uint32_t address) {
    const int tag = address >> 24, offset = (address & 0xffffff) - kBase;
    assert(offset >= 0 && offset < (int)kSharedSize);
    const int cta = tag == 0 ? fibers[cur].cta : tag - 1;
    return (cta == loaded_cta ? octavo::cuda::shared : ctas[cta].memory.data()) + offset;
}
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }
struct Barrier { int32_t tx; uint16_t pending; uint16_t init_phase; };
static_assert(sizeof(Barrier) == 8);
inline void emu_complete(Barrier& b) { if (b.pending == 0 && b.tx == 0) { b.init_phase ^= 0x8000; b.pending = b.init_phase & 0x7fff; ++emu_progress; } }
inline int emu_float_as_int(float x) { int i; memcpy(&i, &x, 4); return i; }
#define __float_as_int emu_float_as_int
#ifndef __noinline__
#define __noinline__ __attribute__((noinline))
#endif
#undef __ffs
#define __ffs(x) __builtin_ffs(x)
inline float emu_rsqrt(float x) { return 1.0f / std::sqrt(x); }
#define rsqrtf emu_rsqrt
using std::max; using std::min;
// The tensor map: what make_tensor_map would describe.
struct EmuMap { const uint16_t* base; int64_t size[5], stride[4]; int32_t box[5]; };
static_assert(sizeof(EmuMap) <= sizeof(CUtensorMap));
void emu_run(int num_ctas, int cluster, int threads, const std::function<void()>& kernel);
