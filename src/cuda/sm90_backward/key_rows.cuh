// What all kinds of consumers do with the 64 keys of a warpgroup: products, masks, and at the end handing
// over the gradients.
#pragma once

#include "cuda/ptx/reduce.h"
#include "cuda/ptx/stmatrix.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90_backward/shared.cuh"
#include "cuda/types.h"

namespace octavo::cuda {

template <class T, class Config>
class Sm90KeyRows {
  public:
    __device__ Sm90KeyRows(const AttentionBackwardParams& p, const Sm90BackwardLaunch& plan,
                           const Sm90BackwardWork<Config>& work, Sm90BackwardShared<Config>& shared,
                           int group, Sm90TileCount at)
        : p_(p), plan_(plan), work_(work), shared_(shared), group_(group), at_(at) {}

  protected:
    static constexpr int kScores = Config::kQueries / 2;
    static constexpr int kPairs = Config::kQueries / 4;  // registers, two 16-bit numbers each
    static constexpr int kSums = Config::kHeadDim / 2;
    static constexpr int kDqSums = Config::kDqColumns / 2;
    using ProductOfKeys = ptx::Wgmma<T, Config::kQueries>;
    using ProductOfTerms = ptx::Wgmma<bfloat16, Config::kQueries>;
    using ProductOfSums = ptx::Wgmma<T, Config::kHeadDim>;

    __device__ const Sm90KeyTile& key_tile() const { return shared_.tiles[at_.slot()]; }

    // The key of this lane's first scores, among those of the CTA. The other lies eight behind.
    __device__ int row() const { return first_row() + warp() * 16 + lane() / 4; }
    __device__ static int lane() { return threadIdx.x % 32; }
    __device__ static int warp() { return threadIdx.x % 128 / 32; }

    // The row whose address this lane gives when a warp loads or stores matrices of eight rows.
    __device__ int matrix_row() const { return first_row() + warp() * 16 + lane() % 16; }
    __device__ int first_row() const { return Config::kRoles ? 0 : group_ * 64; }

    // Describes a tile of keys or of queries.
    __device__ static uint64_t descriptor(uint32_t tile, uint32_t block_bytes) {
        return ptx::wgmma_descriptor<Config::kRowBytes>(tile, block_bytes);
    }

    // Lane 0 arrives for the warp.
    __device__ static void arrive(uint64_t* barrier) {
        __syncwarp();
        if (lane() == 0) ptx::mbarrier_arrive(barrier);
    }
    // Sets the results to the sum of each query's terms.
    __device__ __forceinline__ void multiply_terms(float (&results)[kScores],
                                                   const BfloatTerms* statistics) const {
        ProductOfTerms::ss(results,
                           ptx::wgmma_descriptor_plain(ptx::shared_address(shared_.factors + first_row())),
                           ptx::wgmma_descriptor_plain(ptx::shared_address(statistics)), false);
    }
    // Multiplies this warpgroup's rows of K or V by a tile of Q or dO, and adds the terms of each query.
    template <bool kTerms, class Statistics>
    __device__ __forceinline__ void multiply(float (&results)[kScores], const unsigned char* keys,
                                             const unsigned char* queries,
                                             const Statistics* statistics) const {
        const uint64_t a = descriptor(ptx::shared_address(keys) + first_row() * Config::kRowBytes, 0);
        const uint64_t b = descriptor(ptx::shared_address(queries), 0);
        ptx::wgmma_fence();
        if constexpr (kTerms) multiply_terms(results, statistics);
#pragma unroll
        for (int step = 0; step < Config::kHeadDim / 16; ++step) {
            constexpr int kSteps = Config::kBlockColumns / 16;  // of a block
            const int block = step / kSteps, offset = step % kSteps * 32;
            ProductOfKeys::ss(results, a + (block * Config::kKeyBlockBytes + offset) / 16,
                              b + (block * Config::kQueryBlockBytes + offset) / 16, kTerms || step != 0);
        }
        ptx::wgmma_commit();
    }

    // sums += a times a tile of Q or dO.
    __device__ __forceinline__ void add_product(float (&sums)[kSums], const uint32_t (&a)[kPairs],
                                                const unsigned char* queries) const {
        const uint64_t b = descriptor(ptx::shared_address(queries), Config::kQueryBlockBytes);
#pragma unroll
        for (int step = 0; step < Config::kQueries / 16; ++step)
            ProductOfSums::rs(sums, &a[4 * step], b + step * 16 * Config::kRowBytes / 16);
    }

    // Whether some query of the step does not see some key.
    template <class Step>
    __device__ bool is_masked(const Step& step) const {
        return step.is_masked(work_, group_);
    }
    // Calls `apply` for each pair of elements of this lane, and says which of the two queries see their key.
    // Queries past the last one have no weight anyway.
    template <class Step, class Apply>
    __device__ __forceinline__ void mask(const Step& step, Apply apply) const {
#pragma unroll
        for (int part = 0; part < Config::kParts; ++part) mask_part(step, part, apply);
    }
    // The same for queries that follow one another.
    template <class Step, class Apply>
    __device__ __forceinline__ void mask_part(const Step& step, int part, Apply apply) const {
        constexpr int kPartPairs = kPairs / Config::kParts;
        const Visibility see = key_tile().see;
        const int32_t first_q_pos = key_tile().first_q_pos + step.first_query(part) + 2 * (lane() % 4);
        const bool kept = step.keeps(part, group_);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // The queries that see this lane's key, as columns from `begin` on.
            const int32_t key = key_tile().first_key + row() + 8 * half;
            constexpr int32_t kMany = 1 << 20;  // columns
            int32_t begin = -kMany, end = kMany;
            if (key >= see.prefix_len) {
                if (see.window_right >= 0) begin = max(key - see.window_right - first_q_pos, -kMany);
                if (see.window_left >= 0) end = min(key + see.window_left + 1 - first_q_pos, kMany);
                if (see.has_chunks()) end = min(end, see.chunk_end(key) - first_q_pos);
            }
            const uint32_t count = kept && key < see.seqlen_k && begin < end ? end - begin : 0;
            auto sees = [&](int column) { return static_cast<uint32_t>(column - begin) < count; };
#pragma unroll
            for (int j = half; j < kPartPairs; j += 2)
                apply(part * kPartPairs + j, sees(4 * (j - half)), sees(4 * (j - half) + 1));
        }
    }

    // Clears keys that no query of the sequence sees: a NaN there would spoil products with gradients of
    // zero.
    __device__ __forceinline__ void clear_unseen_keys() const {
        const Visibility& see = work_.seq.see;
        const KeyTiles seen(see, work_.seq.q_pos(0), work_.seq.q_pos(work_.seq.seqlen_q - 1), Config::kKeys);
        const int32_t first_key = work_.first_key, last = first_key + work_.num_keys;
        const bool all =
            last <= seen.prefix_end || (first_key >= seen.window_begin && last <= seen.window_end);
        if (all) return;
        ptx::mbarrier_wait(&shared_.v_full, at_.parity());
        for (int row = threadIdx.x / 32 - 4; row < work_.num_keys; row += 4 * Config::kConsumers) {
            if (seen.needed(first_key + row) || 4 * lane() >= Config::kRowBytes) continue;
#pragma unroll
            for (int block = 0; block < Config::kColumnBlocks; ++block) {
                const int place = block * Config::kKeyBlockBytes + row * Config::kRowBytes + 4 * lane();
                *reinterpret_cast<uint32_t*>(shared_.k + place) = 0;
                *reinterpret_cast<uint32_t*>(shared_.v + place) = 0;
            }
        }
        ptx::fence_proxy_async();
        sync_consumers();
    }

    __device__ static void sync_consumers() { ptx::named_barrier_sync(3, 128 * Config::kConsumers); }

    // Writes scaled sums to a tile that no warpgroup reads any more, from where the storer takes them.
    __device__ __forceinline__ void put(unsigned char* tile, const float (&sums)[kSums], float scale) const {
#pragma unroll
        for (int i = 0; i < Config::kHeadDim / 16; ++i) {
            constexpr int kSteps = Config::kBlockColumns / 16;      // of a block
            constexpr int kSwizzledRows = 128 / Config::kRowBytes;  // rows that follow one another alike
            const int column = (i % kSteps * 2 + lane() / 16) ^ (lane() % 8 / kSwizzledRows);
            const int place =
                i / kSteps * Config::kKeyBlockBytes + matrix_row() * Config::kRowBytes + 16 * column;
            auto pair = [&](int j) { return pack<T>(sums[8 * i + j] * scale, sums[8 * i + j + 1] * scale); };
            ptx::stmatrix_x4(tile + place, pair(0), pair(2), pair(4), pair(6));
        }
    }
    // Writes dS of this warpgroup's keys to a tile [keys][queries].
    __device__ __forceinline__ void store_gradients(const uint32_t (&gradients)[kPairs],
                                                    unsigned char* ds) const {
        const uint32_t first = ptx::shared_address(ds) + matrix_row() * Config::kDsRowBytes +
                               16 * ((lane() / 16) ^ (lane() % 8));  // pieces of 16 bytes, swizzled
#pragma unroll
        for (int i = 0; i < Config::kQueries / 16; ++i) {
            ptx::stmatrix_x4((first ^ (i % 4 * 32)) + i / 4 * Config::kDsBlockBytes, gradients[4 * i],
                             gradients[4 * i + 1], gradients[4 * i + 2], gradients[4 * i + 3]);
        }
    }

    // The sums of a tile of dQ in workspace.
    __device__ float* sums_of(int32_t place) const {
        return plan_.dq_sums + int64_t{place} * (Config::kPartQueries * Config::kHeadDim);
    }
    // Adds parts of a tile of dQ to their sums, which lie in the order of accumulators.
    static constexpr int kPartSums = 64 * Config::kDqColumns;
    template <int kCount>
    __device__ __forceinline__ void add_to_sums(const float (&dq)[kCount], float* part) const {
        float* const to = part + threadIdx.x % 128 * 4;
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i)
            ptx::add_to_global(to + i * 512, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
    // Tells the storer that this warp's gradients are written, and the loader that the facts were read.
    __device__ __forceinline__ void hand_over() const {
        ptx::fence_proxy_async();
        arrive(&shared_.gradients_full);
        arrive(&shared_.tile_empty[at_.slot()]);
    }
    // Waits until the gradients of the tile before have left, so that their place is free.
    __device__ void wait_for_place() const { ptx::mbarrier_wait(&shared_.gradients_empty, at_.parity() ^ 1); }

    const AttentionBackwardParams& p_;
    const Sm90BackwardLaunch& plan_;
    const Sm90BackwardWork<Config>& work_;
    Sm90BackwardShared<Config>& shared_;
    const int group_;
    const Sm90TileCount at_;
};

}  // namespace octavo::cuda
