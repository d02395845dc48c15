#pragma once
#include "cuda/ptx/cp_async.h"
namespace octavo::cuda::ptx {
inline void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, uint64_t, int c0, int c1, int c2, int c3, int c4) {
    EmuMap m; memcpy(&m, map, sizeof(m));
    const int c[5] = {c0, c1, c2, c3, c4};
    uint32_t address = shared_address(to);
    assert(address % 128 == 0 && m.box[0] == 64);
    int32_t bytes = 0;
    for (int e = 0; e < m.box[4]; ++e) for (int d = 0; d < m.box[3]; ++d) for (int k = 0; k < m.box[2]; ++k) for (int j = 0; j < m.box[1]; ++j) for (int i = 0; i < 64; ++i) {
        const int64_t at[5] = {c[0] + i, c[1] + j, c[2] + k, c[3] + d, c[4] + e};
        int64_t offset = at[0]; bool inside = at[0] < m.size[0];
        for (int a = 1; a < 5; ++a) { inside = inside && at[a] < m.size[a]; offset += at[a] * m.stride[a - 1]; }
        const uint16_t x = inside ? m.base[offset] : 0;
        memcpy(emu_at(swizzled(address + bytes)), &x, 2);
        bytes += 2;
    }
    auto& b = *reinterpret_cast<Barrier*>(barrier);
    b.tx -= bytes; emu_complete(b);
}
}
