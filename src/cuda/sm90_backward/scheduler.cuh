// The warp that takes tiles of keys for its CTA, and sends their gradients away. While the consumers are at
// the last queries of a tile, it takes the next one and computes its facts, so that these wait for nobody;
// then it waits for dK and dV.
#pragma once

#include "cuda/ptx/l2_policy.h"
#include "cuda/ptx/release.h"
#include "cuda/ptx/tma.h"
#include "cuda/sm90_backward/shared.cuh"

namespace octavo::cuda {

// Takes tiles of keys: the first one by the CTA's number, the others in the order in which CTAs come for
// them.
template <class Config>
class Sm90TileTaker {
  public:
    __device__ Sm90TileTaker(const AttentionBackwardParams& p, const Sm90BackwardLaunch& plan,
                             Sm90BackwardShared<Config>& shared)
        : p_(p), plan_(plan), shared_(shared) {}

    // Publishes the next tile, and returns whether there is one.
    __device__ __forceinline__ bool take_next() {
        const int32_t end = plan_.key_order.num_ctas() * Config::kCtas;
#pragma unroll 1
        while (true) {
            const int32_t cta_tile = next(end);
            if (cta_tile >= end) break;
            const Sm90BackwardWork<Config> work(p_, plan_, cta_tile);
            bool has_keys = work.num_keys > 0;
            if constexpr (Config::kCtas > 1) has_keys = work.cluster_keys > 0;
            if (has_keys) {
                publish([&](Sm90BackwardWork<Config>& to) { to = work; });
                return true;
            }
        }
        publish([&](Sm90BackwardWork<Config>& to) { to.cta_tile = -1; });
        return false;
    }

  private:
    // With turns, a CTA waits for tiles before its own; where sums are converted beside, its spare warps wait
    // for tiles that complete a sum. If a tile's number were that of a CTA, these could be tiles of CTAs that
    // do not start before this one ends.
    static constexpr bool kInOrder = Config::kOrdered || Config::kBeside;

    __device__ int32_t next(int32_t end) {
        if (!kInOrder && is_first_) {
            is_first_ = false;
            return blockIdx.x;
        }
        if (!Config::kPersistent) return end;
        int32_t cta_tile = 0;
        if (threadIdx.x % 32 == 0) cta_tile = (kInOrder ? 0 : gridDim.x) + atomicAdd(plan_.tiles_taken, 1);
        return __shfl_sync(~0u, cta_tile, 0);
    }

    template <class Write>
    __device__ void publish(Write write) {
        if (threadIdx.x % 32 == 0) {
            ptx::mbarrier_wait(&shared_.tile_empty[next_.slot()], next_.slot_parity() ^ 1);
            write(shared_.tiles[next_.slot()]);
            ptx::mbarrier_arrive(&shared_.tile_full[next_.slot()]);
        }
        __syncwarp();
        ++next_.count;
    }

    const AttentionBackwardParams& p_;
    const Sm90BackwardLaunch& plan_;
    Sm90BackwardShared<Config>& shared_;
    Sm90TileCount next_;
    bool is_first_ = true;
};

// Sends dK and dV of a tile away. One thread; the copy engine leaves out what lies behind the last key.
template <class Config>
__device__ __forceinline__ void store_gradients_of(const AttentionBackwardParams& p,
                                                   const Sm90BackwardLaunch& plan, Sm90TileCount at,
                                                   Sm90BackwardShared<Config>& shared) {
    const Sm90BackwardWork<Config>& tile = shared.tiles[at.slot()];
    ptx::mbarrier_wait(&shared.gradients_full, at.parity());
    const int32_t seqlen_k = tile.seq.see.seqlen_k, place = plan.k_edge - seqlen_k + tile.first_key,
                  shift = tile.k_begin + seqlen_k, outer = p.cu_seqlens_k ? 0 : tile.batch;
    const bool any = Config::kCtas == 1 || tile.first_key < seqlen_k;
#pragma unroll
    for (int block = 0; block < (any ? Config::kColumnBlocks : 0); ++block) {
        ptx::tma_store(&plan.dv, shared.dv_out() + block * Config::kKeyBlockBytes, ptx::kEvictFirst,
                       Config::kBlockColumns * block, tile.kv_head, place, shift, outer);
        ptx::tma_store(&plan.dk, shared.dk_out() + block * Config::kKeyBlockBytes, ptx::kEvictFirst,
                       Config::kBlockColumns * block, tile.kv_head, place, shift, outer);
    }
    ptx::tma_store_commit();
    const int32_t sequence_head = tile.kv_head * p.batch + tile.batch;
    ptx::mbarrier_arrive(&shared.tile_empty[at.slot()]);
    ptx::tma_store_wait_read<0>();
    ptx::mbarrier_arrive(&shared.gradients_empty);
    // Now, since it waits for all that the consumers added.
    if constexpr (Config::kBeside) ptx::add_release(plan.sums.key_tiles + sequence_head, 1);
}

template <class Config>
__device__ __forceinline__ void run_backward_scheduler(const AttentionBackwardParams& p,
                                                       const Sm90BackwardLaunch& plan,
                                                       Sm90BackwardShared<Config>& shared) {
    Sm90TileTaker<Config> tiles(p, plan, shared);
    bool has_tile = tiles.take_next();
#pragma unroll 1
    for (Sm90TileCount at; has_tile; ++at.count) {
        ptx::mbarrier_wait(&shared.tile_wanted, at.parity());
        has_tile = tiles.take_next();
        if (threadIdx.x % 32 == 0) store_gradients_of(p, plan, at, shared);
        __syncwarp();
    }
}

}  // namespace octavo::cuda
