// Finds the tile of a sequence and head that TileOrder::of or TurnOrder::of names.
#pragma once

#include "cuda/attention_backward/tile_order.h"
#include "cuda/sequence_tile.cuh"

namespace octavo::cuda {

struct HeadTile {
    SequenceTile tile;
    int32_t head;
};

// Every lane of a warp gets the answer.
template <int kRows>
__device__ __forceinline__ HeadTile find_head_tile(const TileOrder::Place& at, const IndexArray& cu_seqlens,
                                                   int32_t batch) {
    if (cu_seqlens) return {find_sequence_tile<kRows>(cu_seqlens, batch, 0, at.tile), at.pair};
    const int32_t head = at.pair / batch;
    return {{at.pair - head * batch, at.tile}, head};
}

}  // namespace octavo::cuda
