#pragma once
#include "emu.h"
namespace octavo::cuda::ptx {
template <class T> inline float emu_number(uint32_t pair, int high) { uint16_t h = high ? pair >> 16 : pair; T x; memcpy(&x, &h, 2); return (float)x; }
template <class T>
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    struct All { uint32_t a[4], b[2]; } all[32]; emu_collect(All{{a[0], a[1], a[2], a[3]}, {b0, b1}}, all);
    const int lane = fibers[cur].thread % 32;
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = d[i];
        for (int k = 0; k < 16; ++k) {
            const All& of_a = all[row % 8 * 4 + k % 8 / 2]; const All& of_b = all[column * 4 + k % 8 / 2];
            sum += emu_number<T>(of_a.a[row / 8 + k / 8 * 2], k % 2) * emu_number<T>(of_b.b[k / 8], k % 2);
        }
        d[i] = sum;
    }
}
}
