#pragma once
#include "emu.h"
namespace octavo::cuda::ptx {
inline void named_barrier_sync(int id, int threads) { emu_named(id, threads); }
inline bool elect_one() { emu_syncwarp(); return fibers[cur].thread % 32 == 0; }
}
