#pragma once
#include "cuda/ptx/cp_async.h"
namespace octavo::cuda::ptx {
inline void ldmatrix_x4(uint32_t (&m)[4], uint32_t row) {
    uint32_t rows[32]; emu_collect(row, rows);
    const int lane = fibers[cur].thread % 32;
    for (int i = 0; i < 4; ++i) { assert(rows[8 * i + lane / 4] % 16 == 0); memcpy(&m[i], emu_at(rows[8 * i + lane / 4] + lane % 4 * 4), 4); }
}
}
