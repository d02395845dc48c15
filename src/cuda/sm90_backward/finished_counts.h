// What says which sums of dQ are complete, where the kernel that adds to them converts them
// (finished_sums.cuh).
#pragma once

#include <cstdint>

namespace octavo::cuda {

struct FinishedCounts {
    int32_t* parts_taken;  // that warps have taken to convert
    int32_t* key_tiles;    // [num_kv_heads, batch], tiles of keys that were added

    // Warps that wait read key_tiles, which lie in cache lines of their own.
    static constexpr int64_t kPartsTaken = 1, kKeyTiles = 32;  // behind tiles_taken
};

}  // namespace octavo::cuda
