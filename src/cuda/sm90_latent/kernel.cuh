// Attention of 64 rows over a paged cache of latents, by wgmma (sm_90a). A row is a query of one head; all
// read the one latent head, whose keys are values too: their first 512 numbers.
//
// grid: x a tile of rows of a sequence, y a run of its keys. Two warpgroups multiply, one warp loads. Keys
// come in tiles of 64, two at a time, an even one and an odd one. Warpgroup w has the scores of tile w of a
// pair, and the columns of half w of the results, 64 x 256 in registers, for both tiles:
//
//     warpgroup 0   S0 = Q K0   softmax   O0 += P0 V0[0]             O0 += P1 V1[0]
//     warpgroup 1   S1 = Q K1             softmax   O1 += P1 V1[1]   O1 += P0 V0[1]
//
// so that one multiplies while the other makes weights. The maximum of a row goes from tile to tile:
// warpgroup 0 raises it by tile 0 and hands it on, warpgroup 1 raises it by tile 1 and hands it back, each
// with the factor for what was summed up before. (This schedule is FlashMLA's: "A Deep Dive Into The Flash
// MLA FP8 Decoding Kernel on Hopper" and its predecessor, DeepSeek, 2025.)
//
// A tile lies in shared memory as nine blocks of 64 columns: two halves of four, and the rotary part, of
// which only scores are made. Where that was, weights go from one warpgroup to the other. The half that a
// tile's own warpgroup multiplies is free first, the other half and the rotary part last: each is loaded
// again by itself.
#pragma once

#include "common/online_softmax.h"
#include "cuda/latent/parameters.h"
#include "cuda/latent/plan.h"
#include "cuda/ptx/exp2.h"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/stmatrix.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/types.h"

#include <cuda.h>

#include <cstdint>

namespace octavo::cuda {

// Named barriers. For each pair of tiles, warpgroup 0 arrives at the first and waits at the second, and
// warpgroup 1 the other way round; then warpgroup 0 arrives at the third, where warpgroup 1 waits. They do so
// in turns even where there is no odd tile, so that neither arrives at a barrier twice before the other has
// been there. kOfWarpgroup + w is for warpgroup w alone. compute-sanitizer's racecheck does not know such
// barriers: it reports max, factor and sum of Sm90LatentShared, each of which is written on one side of a
// barrier and read on the other.
enum Sm90LatentBarrier : int { kMaxOfEven = 1, kWeightsOfOdd, kWeightsOfEven, kSums, kOfWarpgroup };

struct Sm90LatentShared {
    static constexpr int kBlocks = kLatentQkDim / 64, kHalfBlocks = kLatentVDim / 128;
    struct Block {
        unsigned char rows[64][128];  // 64 numbers each, with 128-byte swizzle
    };
    Block q[kBlocks];
    Block keys[2][kBlocks];
    float max[64];
    float factor[2][64];  // what sums from before a tile are multiplied by
    float sum[2][64];
    uint64_t full[2][2], empty[2][2];  // barriers of a tile's halves

    __device__ Block& rotary(int tile) { return keys[tile][kBlocks - 1]; }
};

// The rows and keys of one CTA.
struct Sm90LatentWork {
    LatentSequence sequence;
    int32_t b;
    int32_t first_row, num_rows;  // num_rows counts the sequence's
    int32_t begin_tile, num_tiles;
    int32_t end_key;  // the key behind the last one that the last row sees

    __device__ static Sm90LatentWork make(const LatentAttentionParams& p, const LatentLaunch& launch) {
        Sm90LatentWork work;
        work.b = launch.tiles_per_sequence.quotient(static_cast<int32_t>(blockIdx.x));
        work.first_row =
            launch.tiles_per_sequence.remainder(static_cast<int32_t>(blockIdx.x)) * kSm90LatentRows;
        work.sequence = LatentSequence::make(p, work.b);
        work.num_rows = work.sequence.seqlen_q * p.num_q_heads;
        work.end_key = work.first_row < work.num_rows
                           ? work.end_key_of(p, launch, work.first_row + kSm90LatentRows - 1)
                           : 0;
        const int32_t all_tiles = (work.end_key + kSm90LatentKeys - 1) / kSm90LatentKeys;
        const auto split = static_cast<int64_t>(blockIdx.y);
        work.begin_tile = static_cast<int32_t>(all_tiles * split / launch.num_splits);
        work.num_tiles = static_cast<int32_t>(all_tiles * (split + 1) / launch.num_splits) - work.begin_tile;
        return work;
    }
    __device__ int32_t end_key_of(const LatentAttentionParams& p, const LatentLaunch& launch,
                                  int32_t row) const {
        const int32_t query = launch.num_q_heads.quotient(min(row, num_rows - 1));
        return min(sequence.end_key(p.causal, query), sequence.seqlen_k);
    }
    // How many keys of the i-th tile the last row sees, from the tile's first on: 64 but in the last tile.
    __device__ int32_t keys_of(int32_t i) const {
        return min(end_key - (begin_tile + i) * kSm90LatentKeys, kSm90LatentKeys);
    }
};

// Loads the tiles, a half at a time, in the order in which they are needed.
class Sm90LatentProducer {
  public:
    __device__ Sm90LatentProducer(const LatentAttentionParams& p, const LatentLaunch& launch,
                                  const CUtensorMap& map, Sm90LatentShared& shared,
                                  const Sm90LatentWork& work)
        : p_(p),
          launch_(launch),
          map_(map),
          shared_(shared),
          work_(work),
          box_keys_(min(p.page_size, kSm90LatentKeys)),
          lane_(threadIdx.x % 32) {}

    // Called by one whole warp.
    __device__ void run() {
        int32_t pages[2] = {page_of_box(0), page_of_box(1)};
        for (int32_t pair = 0; 2 * pair < work_.num_tiles; ++pair) {
            const int32_t next[2] = {page_of_box(2 * pair + 2), page_of_box(2 * pair + 3)};
            for (int tile = 0; tile < 2; ++tile) {
                if (2 * pair + tile >= work_.num_tiles) break;
                load_half(2 * pair + tile, tile, tile, pair, pages[tile]);
                load_half(2 * pair + tile, tile, 1 - tile, pair, pages[tile]);
            }
            pages[0] = next[0];
            pages[1] = next[1];
        }
    }

  private:
    // The page of this lane's box of the i-th tile, if it has one.
    __device__ int32_t page_of_box(int32_t i) const {
        if (i >= work_.num_tiles || lane_ * box_keys_ >= work_.keys_of(i)) return 0;
        const int32_t key = (work_.begin_tile + i) * kSm90LatentKeys + lane_ * box_keys_;
        return p_.page_table[work_.b * p_.page_table_stride + launch_.page_size.quotient(key)];
    }

    // `half` of the i-th tile, with the rotary part where the other warpgroup has this half.
    __device__ void load_half(int32_t i, int tile, int half, int32_t pair, int32_t page_of_lane) {
        constexpr int kHalfBlocks = Sm90LatentShared::kHalfBlocks;
        const int blocks = kHalfBlocks + (half != tile);
        const int boxes = (work_.keys_of(i) + box_keys_ - 1) / box_keys_;
        const int32_t slot = launch_.page_size.remainder((work_.begin_tile + i) * kSm90LatentKeys);
        ptx::mbarrier_wait(&shared_.empty[tile][half], (pair & 1) ^ 1);
        if (lane_ == 0)
            ptx::mbarrier_arrive_expect(&shared_.full[tile][half], 128 * blocks * boxes * box_keys_);
        __syncwarp();
        for (int first = 0; first < blocks * boxes; first += 32) {
            const int copy = first + lane_, box = min(copy / blocks, boxes - 1), place = copy % blocks;
            const int32_t page = __shfl_sync(~0u, page_of_lane, box);
            if (copy >= blocks * boxes) continue;
            const int block = place < kHalfBlocks ? half * kHalfBlocks + place : 2 * kHalfBlocks;
            ptx::tma_load(shared_.keys[tile][block].rows[box * box_keys_], &map_, &shared_.full[tile][half],
                          64 * block, slot, page, 0, 0);
        }
    }

    const LatentAttentionParams& p_;
    const LatentLaunch& launch_;
    const CUtensorMap& map_;
    Sm90LatentShared& shared_;
    const Sm90LatentWork& work_;
    int32_t box_keys_;
    int lane_;
};

// One of the two warpgroups.
template <class T, int kWarpgroup>
class Sm90LatentConsumer {
  public:
    __device__ Sm90LatentConsumer(const LatentAttentionParams& p, const LatentLaunch& launch,
                                  Sm90LatentShared& shared, const Sm90LatentWork& work)
        : p_(p), launch_(launch), shared_(shared), work_(work), scale_log2_(p.softmax_scale * kLog2e) {
#pragma unroll
        for (int i = 0; i < 2; ++i) end_keys_[i] = work.end_key_of(p, launch, work.first_row + row(i));
    }

    __device__ void run() {
        for (int32_t pair = 0; 2 * pair < work_.num_tiles; ++pair) {
            const bool has_odd = 2 * pair + 1 < work_.num_tiles;
            if constexpr (kWarpgroup == 0)
                even_tile(pair, has_odd);
            else
                odd_tile(pair, has_odd);
        }
        finish();
    }

  private:
    using Block = Sm90LatentShared::Block;
    static constexpr int kBlocks = Sm90LatentShared::kBlocks, kHalfBlocks = Sm90LatentShared::kHalfBlocks;
    static constexpr int kOther = 1 - kWarpgroup;

    // A thread has two rows of the accumulators (wgmma.h).
    __device__ static int row(int i) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i; }

    __device__ void even_tile(int32_t pair, bool has_odd) {
        multiply_keys(pair);
        zero_unseen(2 * pair);
        mask(2 * pair);
        float max[2], factor[2];
        highest(max);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            max[i] = fmaxf(max[i], max_[i]);
            factor[i] = factor_of(max_[i], max[i]);
            max_[i] = max[i];
            if (threadIdx.x % 4 == 0) {
                shared_.max[row(i)] = max[i];
                shared_.factor[0][row(i)] = factor[i];
            }
        }
        ptx::named_barrier_arrive(kMaxOfEven, 256);
        scale(factor);
        weigh();
        multiply_own_values();
        release(0, 0);
        ptx::named_barrier_sync(kWeightsOfOdd, 256);  // all warps have multiplied the keys, too
        if (has_odd) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                max_[i] = shared_.max[row(i)];
                factor[i] = shared_.factor[1][row(i)];
            }
            scale_weights(factor);
            hand_over_weights();
            ptx::named_barrier_arrive(kWeightsOfEven, 256);
            scale(factor);
            multiply_others_values(pair);
            release(1, 0);
        } else {
            hand_over_weights();
            ptx::named_barrier_arrive(kWeightsOfEven, 256);
        }
    }

    __device__ void odd_tile(int32_t pair, bool has_odd) {
        float max[2], factor[2];
        if (has_odd) {
            multiply_keys(pair);
            zero_unseen(2 * pair + 1);
            mask(2 * pair + 1);
            highest(max);
        }
        ptx::named_barrier_sync(kMaxOfEven, 256);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            max_[i] = shared_.max[row(i)];
            factor[i] = shared_.factor[0][row(i)];
        }
        if (has_odd) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                max[i] = fmaxf(max[i], max_[i]);
                const float of_odd = factor_of(max_[i], max[i]);
                max_[i] = max[i];
                factor[i] *= of_odd;
                if (threadIdx.x % 4 == 0) shared_.factor[1][row(i)] = of_odd;
            }
            __syncwarp();  // all lanes of a row have read its maximum
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (threadIdx.x % 4 == 0) shared_.max[row(i)] = max[i];
            }
            scale_sums(factor);
            weigh();
            hand_over_weights();
            ptx::named_barrier_arrive(kWeightsOfOdd, 256);
            scale_out(factor);
            multiply_own_values();
            release(1, 1);
        } else {
            ptx::named_barrier_arrive(kWeightsOfOdd, 256);
            scale(factor);
        }
        ptx::named_barrier_sync(kWeightsOfEven, 256);
        multiply_others_values(pair);
        release(0, 1);
    }

    // The scores of this warpgroup's tile. Its own half of the columns is multiplied first, since that
    // arrives first.
    __device__ void multiply_keys(int32_t pair) {
        const auto parity = static_cast<uint32_t>(pair & 1);
        auto multiply_block = [&](int block, bool accumulate) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const uint64_t a = ptx::wgmma_descriptor(ptx::shared_address(&shared_.q[block]) + 32 * k, 1);
                const uint64_t b =
                    ptx::wgmma_descriptor(ptx::shared_address(&shared_.keys[kWarpgroup][block]) + 32 * k, 1);
                ptx::Wgmma<T, 64>::ss(scores_, a, b, accumulate || k > 0);
            }
        };
        ptx::mbarrier_wait(&shared_.full[kWarpgroup][kWarpgroup], parity);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kHalfBlocks; ++i) multiply_block(kWarpgroup * kHalfBlocks + i, i > 0);
        ptx::wgmma_commit();
        ptx::mbarrier_wait(&shared_.full[kWarpgroup][kOther], parity);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kHalfBlocks; ++i) multiply_block(kOther * kHalfBlocks + i, true);
        multiply_block(kBlocks - 1, true);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(scores_);
    }

    // Zeroes the values of keys behind the last one, which may be any number: 0 x NaN would spoil the sums.
    __device__ void zero_unseen(int32_t i) {
        const int32_t keys = work_.keys_of(i);
        if (keys >= kSm90LatentKeys) return;
        constexpr int kChunks = 2 * kHalfBlocks * 8;  // pieces of 16 bytes in a row
        for (int c = threadIdx.x % 128; c < (kSm90LatentKeys - keys) * kChunks; c += 128) {
            const int key = keys + c / kChunks, chunk = c % kChunks;
            *reinterpret_cast<uint4*>(&shared_.keys[kWarpgroup][chunk / 8].rows[key][chunk % 8 * 16]) =
                make_uint4(0, 0, 0, 0);
        }
        ptx::fence_proxy_async();
        ptx::named_barrier_sync(kOfWarpgroup + kWarpgroup, 128);
    }

    __device__ void mask(int32_t i) {
        const int32_t first =
            (work_.begin_tile + i) * kSm90LatentKeys + 2 * static_cast<int>(threadIdx.x % 4);
        if (__all_sync(~0u, first + kSm90LatentKeys <= min(end_keys_[0], end_keys_[1]))) return;
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            if (first + 8 * (j / 4) + j % 2 >= end_keys_[j / 2 % 2]) scores_[j] = -INFINITY;
        }
    }

    // The highest score of each row, in units of log2(e).
    __device__ void highest(float (&max)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            max[i] = -INFINITY;
#pragma unroll
            for (int j = 0; j < 32; ++j) {
                if (j / 2 % 2 == i) max[i] = fmaxf(max[i], scores_[j]);
            }
            max[i] = fmaxf(max[i], __shfl_xor_sync(~0u, max[i], 1));
            max[i] = fmaxf(max[i], __shfl_xor_sync(~0u, max[i], 2)) * scale_log2_;
        }
    }

    __device__ static float safe(float max) { return max == -INFINITY ? 0.0f : max; }
    __device__ static float factor_of(float before, float after) {
        return ptx::exp2_approx(before - safe(after));
    }

    // Turns scores into weights, and adds these to the sums of the rows.
    __device__ void weigh() {
        const float max[2] = {safe(max_[0]), safe(max_[1])};
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            scores_[j] = ptx::exp2_approx(fmaf(scores_[j], scale_log2_, -max[j / 2 % 2]));
            sums_[j / 2 % 2] += scores_[j];
        }
        pack_weights();
    }
    __device__ void pack_weights() {
#pragma unroll
        for (int j = 0; j < 16; ++j) weights_[j] = pack<T>(scores_[2 * j], scores_[2 * j + 1]);
    }
    __device__ void scale_weights(const float (&factor)[2]) {
        if (are_ones(factor)) return;
#pragma unroll
        for (int j = 0; j < 32; ++j) scores_[j] *= factor[j / 2 % 2];
        pack_weights();
    }

    __device__ static bool are_ones(const float (&factor)[2]) {
        return __all_sync(~0u, factor[0] == 1.0f && factor[1] == 1.0f);
    }
    __device__ void scale_sums(const float (&factor)[2]) {
        sums_[0] *= factor[0];
        sums_[1] *= factor[1];
    }
    __device__ void scale_out(const float (&factor)[2]) {
        if (are_ones(factor)) return;
#pragma unroll
        for (int j = 0; j < 128; ++j) out_[j] *= factor[j / 2 % 2];
    }
    __device__ void scale(const float (&factor)[2]) {
        scale_sums(factor);
        scale_out(factor);
    }

    // Lays this tile's weights where its rotary part was, for the other warpgroup.
    __device__ void hand_over_weights() {
        const int lane = threadIdx.x % 32, matrix = lane / 8;
        const int r = threadIdx.x % 128 / 32 * 16 + lane % 8 + 8 * (matrix % 2);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int chunk = (2 * k + matrix / 2) ^ (r % 8);
            ptx::stmatrix_x4(&shared_.rotary(kWarpgroup).rows[r][16 * chunk], weights_[4 * k],
                             weights_[4 * k + 1], weights_[4 * k + 2], weights_[4 * k + 3]);
        }
        ptx::fence_proxy_async();
    }

    // This warpgroup's columns of a tile's values, of 16 keys from key 16 k on.
    __device__ uint64_t values(int tile, int k) {
        return ptx::wgmma_descriptor(
            ptx::shared_address(&shared_.keys[tile][kWarpgroup * kHalfBlocks]) + 16 * 128 * k, sizeof(Block));
    }
    __device__ void multiply_own_values() {
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::Wgmma<T, 256>::rs(out_, weights_ + 4 * k, values(kWarpgroup, k));
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(out_);
    }
    __device__ void multiply_others_values(int32_t pair) {
        ptx::mbarrier_wait(&shared_.full[kOther][kWarpgroup], static_cast<uint32_t>(pair & 1));
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const uint64_t a =
                ptx::wgmma_descriptor(ptx::shared_address(&shared_.rotary(kOther)) + 32 * k, 1);
            ptx::Wgmma<T, 256>::ss_values(out_, a, values(kOther, k));
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(out_);
    }

    // Says that this warp is done with a half of a tile.
    __device__ void release(int tile, int half) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared_.empty[tile][half]);
    }

    __device__ void finish() {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sums_[i] += __shfl_xor_sync(~0u, sums_[i], 1);
            sums_[i] += __shfl_xor_sync(~0u, sums_[i], 2);
            if (threadIdx.x % 4 == 0) shared_.sum[kWarpgroup][row(i)] = sums_[i];
        }
        ptx::named_barrier_sync(kSums, 256);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const SoftmaxState state{max_[i], shared_.sum[0][row(i)] + shared_.sum[1][row(i)]};
            store_row(i, state);
        }
    }

    __device__ void store_row(int i, const SoftmaxState& state) {
        const int32_t r = work_.first_row + row(i);
        if (r >= work_.num_rows) return;
        const float inverse = state.inverse_sum();
        const int64_t token = work_.sequence.first_q + launch_.num_q_heads.quotient(r);
        const int64_t head = launch_.num_q_heads.remainder(r);
        const int column = kWarpgroup * kLatentVDim / 2 + 2 * static_cast<int>(threadIdx.x % 4);
        const bool writes_lse = kWarpgroup == 0 && threadIdx.x % 4 == 0;
        if (launch_.num_splits > 1) {
            const int64_t total_rows = p_.total_q * p_.num_q_heads;
            const int64_t partial = blockIdx.y * total_rows + token * p_.num_q_heads + head;
            float* const to = launch_.partial_out + partial * kLatentVDim + column;
#pragma unroll
            for (int j = 0; j < 32; ++j)
                *reinterpret_cast<float2*>(to + 8 * j) =
                    make_float2(out_[4 * j + 2 * i] * inverse, out_[4 * j + 2 * i + 1] * inverse);
            if (writes_lse) launch_.partial_lse[partial] = state.lse();
            return;
        }
        T* const to =
            static_cast<T*>(p_.out) + token * p_.out_token_stride + head * p_.out_head_stride + column;
        const float scale = inverse * p_.out_scale;
#pragma unroll
        for (int j = 0; j < 32; ++j)
            *reinterpret_cast<uint32_t*>(to + 8 * j) =
                pack<T>(out_[4 * j + 2 * i] * scale, out_[4 * j + 2 * i + 1] * scale);
        if (writes_lse && p_.lse)
            p_.lse[token * p_.lse_token_stride + head * p_.lse_head_stride] = state.lse();
    }

    const LatentAttentionParams& p_;
    const LatentLaunch& launch_;
    Sm90LatentShared& shared_;
    const Sm90LatentWork& work_;
    float scale_log2_;
    int32_t end_keys_[2];
    float scores_[32];  // weights, once they are made
    uint32_t weights_[16];
    float max_[2] = {-INFINITY, -INFINITY}, sums_[2] = {0.0f, 0.0f};
    float out_[128] = {};
};

// Copies queries to shared memory, and zeros where the tile has more rows than there are.
template <class T>
__device__ void copy_sm90_latent_queries(const LatentAttentionParams& p, const LatentLaunch& launch,
                                         const Sm90LatentWork& work, Sm90LatentShared& shared) {
    constexpr int kChunks = kLatentQkDim / 8;
    for (int i = threadIdx.x; i < kSm90LatentRows * kChunks; i += 256) {
        const int r = i / kChunks, chunk = i % kChunks;
        uint4 numbers = make_uint4(0, 0, 0, 0);
        if (const int32_t row = work.first_row + r; row < work.num_rows) {
            const int64_t token = work.sequence.first_q + launch.num_q_heads.quotient(row);
            const int64_t head = launch.num_q_heads.remainder(row);
            numbers = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.q) + token * p.q_token_stride +
                                                      head * p.q_head_stride + 8 * chunk);
        }
        *reinterpret_cast<uint4*>(&shared.q[chunk / 8].rows[r][(chunk % 8 ^ r % 8) * 16]) = numbers;
    }
    ptx::fence_proxy_async();
}

template <class T>
__global__ void __launch_bounds__(kSm90LatentThreads, 1)
    sm90_latent_attention_kernel(const __grid_constant__ LatentAttentionParams p,
                                 const __grid_constant__ LatentLaunch launch,
                                 const __grid_constant__ CUtensorMap map) {
    extern __shared__ __align__(1024) unsigned char sm90_latent_bytes[];
    auto& shared = *reinterpret_cast<Sm90LatentShared*>(sm90_latent_bytes);
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 4; ++i) {
            ptx::mbarrier_init(&shared.full[i / 2][i % 2], 1);
            ptx::mbarrier_init(&shared.empty[i / 2][i % 2], 4);  // a warpgroup's warps
        }
        ptx::mbarrier_init_fence();
        ptx::tma_prefetch_map(&map);
    }
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();
    const Sm90LatentWork work = Sm90LatentWork::make(p, launch);
    if (work.first_row >= work.num_rows) return;
    if (warpgroup < 2) copy_sm90_latent_queries<T>(p, launch, work, shared);
    __syncthreads();
    if (warpgroup == 2) {
        ptx::lower_registers<24>();
        if (threadIdx.x / 32 == 8) Sm90LatentProducer(p, launch, map, shared, work).run();
    } else {
        ptx::raise_registers<240>();
        if (warpgroup == 0)
            Sm90LatentConsumer<T, 0>(p, launch, shared, work).run();
        else
            Sm90LatentConsumer<T, 1>(p, launch, shared, work).run();
    }
}

}  // namespace octavo::cuda
