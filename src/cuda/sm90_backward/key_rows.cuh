// What all kinds of consumers do with the 64 keys of a warpgroup: products, masks, and at the end handing
// over the gradients.
#pragma once

#include "cuda/ptx/reduce.h"
#include "cuda/ptx/sign_bits.h"
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

    // For what there are no registers to keep.
    __device__ const Sm90BackwardWork<Config>& key_tile() const { return shared_.tiles[at_.slot()]; }

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
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Columns seen = seen_columns(step, part, half);
            const uint32_t count = seen.begin < seen.end ? seen.end - seen.begin : 0;
            auto sees = [&](int column) { return static_cast<uint32_t>(column - seen.begin) < count; };
#pragma unroll
            for (int j = half; j < kPartPairs; j += 2)
                apply(part * kPartPairs + j, sees(4 * (j - half)), sees(4 * (j - half) + 1));
        }
    }
    // The queries that see this lane's first key, or its second one, as columns from its first one on.
    struct Columns {
        int32_t begin, end;
    };
    template <class Step>
    __device__ __forceinline__ Columns seen_columns(const Step& step, int part, int half) const {
        const Visibility see = key_tile().seq.see;
        const int32_t first_q_pos = key_tile().seq.q_pos(0) + step.first_query(part) + 2 * (lane() % 4);
        const int32_t key = key_tile().first_key + row() + 8 * half;
        constexpr int32_t kMany = 1 << 20;  // columns
        int32_t begin = -kMany, end = kMany;
        if (key >= see.prefix_len) {
            if (see.window_right >= 0) begin = max(key - see.window_right - first_q_pos, -kMany);
            if (see.window_left >= 0) end = min(key + see.window_left + 1 - first_q_pos, kMany);
            if (see.has_chunks()) end = min(end, see.chunk_end(key) - first_q_pos);
        }
        if (!step.keeps(part, group_) || key >= see.seqlen_k) end = begin;
        return {begin, end};
    }
    // Clears those of two arrays of pairs of elements whose query does not see its key.
    template <class Step>
    __device__ __forceinline__ void mask_pairs(const Step& step, uint32_t (&a)[kPairs],
                                               uint32_t (&b)[kPairs]) const {
        static_assert(Config::kParts == 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Columns seen = seen_columns(step, 0, half);
            // Bits 2 i and 2 i + 1 are for columns 8 i and 8 i + 1.
            auto columns_before = [](int32_t end) {
                const int32_t column = min(max(end, 0), 4 * kPairs);
                return __funnelshift_lc(~0u, 0, column / 8 * 2 + min(column % 8, 2));
            };
            const uint32_t bits = columns_before(seen.end) & ~columns_before(seen.begin);
#pragma unroll
            for (int i = 0; i < kPairs / 2; ++i) {
                const uint32_t even = bits << (7 - i % 4 * 2), odd = bits << (6 - i % 4 * 2);
                const uint32_t mask = i < 4    ? ptx::spread_signs<0>(even, odd)
                                      : i < 8  ? ptx::spread_signs<1>(even, odd)
                                      : i < 12 ? ptx::spread_signs<2>(even, odd)
                                               : ptx::spread_signs<3>(even, odd);
                a[2 * i + half] &= mask;
                b[2 * i + half] &= mask;
            }
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

    // Writes scaled sums to a tile that no warpgroup reads any more, from where the scheduler takes them.
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
        const uint32_t first = first_gradient(ds);
#pragma unroll
        for (int i = 0; i < kPairs; i += 4) store_gradients_of_16(gradients, i, first);
    }
    // The same for 16 queries, whose gradients are the four registers from `i` on.
    __device__ __forceinline__ void store_gradients_of_16(const uint32_t (&gradients)[kPairs], int i,
                                                          uint32_t first) const {
        ptx::stmatrix_x4((first ^ (i / 4 % 4 * 32)) + i / 16 * Config::kDsBlockBytes, gradients[i],
                         gradients[i + 1], gradients[i + 2], gradients[i + 3]);
    }
    // Where this lane's part of dS begins, in pieces of 16 bytes, swizzled.
    __device__ __forceinline__ uint32_t first_gradient(unsigned char* ds) const {
        return ptx::shared_address(ds) + matrix_row() * Config::kDsRowBytes +
               16 * ((lane() / 16) ^ (lane() % 8));
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
    // Tells the scheduler that this warp's gradients are written, and that it has read the facts.
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
