// The warps that make dQ of its sums as soon as these are complete, beside the products of other tiles: in
// long launches a kernel of its own would have to read most of them from memory again. Loaders and consumers
// never wait for them, and consumers join them once all tiles of keys are taken, so that every tile is added
// however few CTAs run.
#pragma once

#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/release.h"
#include "cuda/ptx/tma.h"
#include "cuda/sm90_backward/convert.cuh"
#include "cuda/sm90_backward/shared.cuh"

namespace octavo::cuda {

// Part of a tile of sums, which one warpgroup added for 64 queries. Warps take parts in about the order in
// which CTAs come to them: by KV head, sequence, tile, and head of the group.
template <class T, class Config>
class FinishedSums {
  public:
    static constexpr int kPieces = Config::kDqColumns / 8;  // what a warpgroup adds at once: 16 bytes a lane
    static constexpr int kRows = 4;                         // warps of the warpgroup, of 16 queries each

    // How many there are.
    __device__ static int32_t count(const AttentionBackwardParams& p, const Sm90BackwardLaunch& plan) {
        return plan.num_tiles * p.num_q_heads * Config::kDqParts;
    }
    // Takes the next one for this warp.
    __device__ static int32_t take(const Sm90BackwardLaunch& plan) {
        int32_t number = 0;
        if (threadIdx.x % 32 == 0) number = atomicAdd(plan.sums.parts_taken, 1);
        return __shfl_sync(~0u, number, 0);
    }

    __device__ FinishedSums(const AttentionBackwardParams& p, const Sm90BackwardLaunch& plan,
                            int32_t number) {
        const int32_t group = p.group_size(), of_head = number / Config::kDqParts;
        part_ = number - of_head * Config::kDqParts;
        kv_head_ = of_head / (plan.num_tiles * group);
        const int32_t in_group = of_head - kv_head_ * (plan.num_tiles * group), tile = in_group / group;
        head_ = kv_head_ * group + in_group - tile * group;
        first_ = find_workspace_row<Config::kQueries>(p, plan, tile * Config::kQueries);
        sums_ = reinterpret_cast<const float4*>(plan.dq_sums) +
                ((int64_t{head_} * plan.num_tiles + tile) * Config::kDqParts + part_) *
                    (64 * Config::kDqColumns / 4) +
                threadIdx.x % 32;
    }
    // Whether the tile has queries.
    __device__ bool any() const { return first_.batch >= 0; }

    // Waits until all tiles of keys of its sequence have been added. Of a sequence with more keys than the
    // caller's bound some tiles never come, but its first one ends the launch: dK and dV of it would begin
    // before the edge, where the copy engine refuses to store (illegal instruction).
    __device__ void wait(const AttentionBackwardParams& p, const Sm90BackwardLaunch& plan) const {
        if (threadIdx.x % 32 == 0) {
            const int32_t seqlen_k =
                p.cu_seqlens_k ? p.cu_seqlens_k[first_.batch + 1] - p.cu_seqlens_k[first_.batch] : p.seqlen_k;
            const int32_t key_tiles = (seqlen_k + Config::kKeys - 1) / Config::kKeys;
            const int32_t* const finished = plan.sums.key_tiles + kv_head_ * p.batch + first_.batch;
            while (ptx::load_acquire(finished) < key_tiles) __nanosleep(100);
        }
        __syncwarp();
    }
    // The sums of 16 queries in a piece of eight columns, of this lane.
    __device__ const float4* place_of(int rows, int piece) const { return sums_ + piece * 128 + rows * 32; }

    // Writes dQ of 16 queries; sums(i) are those of piece i. `room` is shared memory of this warp.
    template <class Sums>
    __device__ __forceinline__ void convert(const AttentionBackwardParams& p, const Sm90BackwardLaunch& plan,
                                            int rows, T* room, Sums sums) const {
        convert_dq_rows<T, Config>(p, plan, first_, head_, part_, rows, room, sums);
        __syncwarp();
    }

  private:
    int32_t part_, head_, kv_head_;
    WorkspaceRow first_;  // the tile's first query
    const float4* sums_;
};

// A warp beside the loader converts parts as long as there are some. It has few registers, and so sums come
// by way of shared memory.
template <class T, class Config>
__device__ __forceinline__ void convert_beside(const AttentionBackwardParams& p,
                                               const Sm90BackwardLaunch& plan,
                                               typename Sm90SumsRooms<Config>::Room& room) {
    using Sums = FinishedSums<T, Config>;
    const int lane = threadIdx.x % 32;
    uint32_t parity = 0;
#pragma unroll 1
    for (int32_t number; (number = Sums::take(plan)) < Sums::count(p, plan);) {
        const Sums sums(p, plan, number);
        if (!sums.any()) continue;
        sums.wait(p, plan);
        ptx::fence_proxy_async_global();  // others added by ordinary accesses
        auto load = [&](int rows) {
            uint64_t* const full = &room.full[rows % 2];
            if (lane == 0) ptx::mbarrier_arrive_expect(full, Sums::kPieces * 512);
            __syncwarp();
            if (lane < Sums::kPieces)
                ptx::bulk_load(room.sums[rows % 2][lane], sums.place_of(rows, lane) - lane, 512, full);
        };
        load(0);
#pragma unroll 1
        for (int rows = 0; rows < Sums::kRows; ++rows) {
            if (rows + 1 < Sums::kRows) load(rows + 1);
            ptx::mbarrier_wait(&room.full[rows % 2], parity);
            parity ^= rows % 2;
            sums.convert(p, plan, rows, reinterpret_cast<T*>(room.rows),
                         [&](int piece) { return room.sums[rows % 2][piece][lane]; });
        }
    }
}

// A warp of consumers, behind its last tile of keys. `room` is shared memory of its own.
template <class T, class Config>
__device__ __forceinline__ void convert_rest(const AttentionBackwardParams& p, const Sm90BackwardLaunch& plan,
                                             T* room) {
    using Sums = FinishedSums<T, Config>;
#pragma unroll 1
    for (int32_t number; (number = Sums::take(plan)) < Sums::count(p, plan);) {
        const Sums sums(p, plan, number);
        if (!sums.any()) continue;
        sums.wait(p, plan);
#pragma unroll 1
        for (int rows = 0; rows < Sums::kRows; ++rows)
            sums.convert(p, plan, rows, room, [&](int piece) { return __ldcg(sums.place_of(rows, piece)); });
    }
}

}  // namespace octavo::cuda
