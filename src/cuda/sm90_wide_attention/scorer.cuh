// The scorer: a warpgroup that multiplies the 64 rows of its CTA with keys and makes weights of the scores.
#pragma once

#include "common/online_softmax.h"
#include "common/score.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90_attention/rows.cuh"
#include "cuda/sm90_attention/softmax.cuh"
#include "cuda/sm90_wide_attention/shared.cuh"
#include "cuda/types.h"

namespace octavo::cuda {

// run() works through all row tiles of its CTA. While it makes weights, the multipliers have products to do.
template <class T>
class Sm90WideScorer {
  public:
    __device__ Sm90WideScorer(const AttentionParams& p, const Sm90Launch& plan, Sm90WideShared& shared)
        : p_(p),
          plan_(plan),
          shared_(shared),
          block_(tile_block<Config>(0)),
          places_(plan),
          transform_(ScoreTransform::make(p.softmax_scale, p.softcap)),
          scale_(transform_.has_softcap ? 1.0f : transform_.inner) {}

    __device__ __forceinline__ void run() {
        while (true) {
            // The row tile stays in its slot meanwhile, and takes no registers.
            const Sm90Work work = take_work<Config, false>(shared_, work_ring_);
            if (work.batch < 0) return;
            const auto tiles = key_tiles<Config>(p_, plan_, work);
            const Rows rows(p_, plan_, work, block_, places_, scale_);
            Sm90Softmax softmax(scale_);
            int32_t i = tiles.last();
            if (i < 0) {
                finish(softmax);
                continue;
            }
            read_first_queries();
            for (const int32_t last = i; i >= 0; --i) {
                float scores[kScores];
                multiply(scores, i == last);
                await(scores, i == 0);
                // Not before, so that products with values are left to run while the next weights are made
                // (before the scores, up to 2 % slower on an H100).
                if (i < last) hand_on();
                weigh(scores, rows, softmax, tiles.start(i), i == 0);
            }
            hand_on();
            q_parity_ ^= 1;
        }
    }

  private:
    using Config = Sm90WideConfig;
    using Rows = Sm90Rows<Config>;
    static constexpr int kScores = Config::kKeys / 2;
    static constexpr int kSteps = Config::kChunkColumns / 16;  // of a chunk's product

    // Reads the queries of the first chunk into registers: otherwise every product would read them from
    // shared memory, whose bandwidth is the limit. There are no registers for more.
    __device__ __forceinline__ void read_first_queries() {
        ptx::mbarrier_wait(&shared_.q_full[0], q_parity_);
        const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
        const uint32_t from = ptx::shared_address(shared_.q) + row * Config::kRowBytes;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int column = (step % 4 * 2 + lane / 16) ^ (row % 8);  // 16 bytes wide, swizzled
            ptx::ldmatrix_x4(first_queries_[step], from + step / 4 * Config::kQBlockBytes + 16 * column);
        }
    }

    // Starts scores = Q K^T, in a group of products for each chunk. `first`: of a row tile.
    __device__ __forceinline__ void multiply(float (&scores)[kScores], bool first) {
        using Product = ptx::Wgmma<T, Config::kKeys>;
        uint32_t q_address = ptx::shared_address(shared_.q), k_address = ptx::shared_address(shared_.k);
        // Otherwise the compiler would keep all the descriptors below in registers.
        asm volatile("" : "+r"(q_address), "+r"(k_address));
        const uint64_t q = ptx::wgmma_descriptor(q_address, 0), k = ptx::wgmma_descriptor(k_address, 0);
#pragma unroll
        for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
            if (first && chunk > 0) ptx::mbarrier_wait(&shared_.q_full[chunk], q_parity_);
            ptx::mbarrier_wait(&shared_.k_full[chunk], k_parity_);
            ptx::wgmma_fence();
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                const int block = chunk * Config::kChunkBlocks + step / 4, offset = step % 4 * 32;
                const uint64_t keys = k + (block * Config::kKeyBlockBytes + offset) / 16;
                if (chunk == 0) {
                    Product::rs_keys(scores, first_queries_[step], keys, step > 0);
                } else {
                    Product::ss(scores, q + (block * Config::kQBlockBytes + offset) / 16, keys, true);
                }
            }
            ptx::wgmma_commit();
        }
        k_parity_ ^= 1;
    }

    // Waits for the products, and hands back each chunk of keys, and of queries at last, as it was read.
    __device__ __forceinline__ void await(float (&scores)[kScores], bool last) {
        static_assert(Config::kChunks == 4);
        await_chunk<0>(last);
        await_chunk<1>(last);
        await_chunk<2>(last);
        await_chunk<3>(last);
        ptx::wgmma_results(scores);
    }
    template <int kChunk>
    __device__ __forceinline__ void await_chunk(bool last) {
        ptx::wgmma_wait<Config::kChunks - 1 - kChunk>();
        release_chunk(&shared_.k_empty[kChunk]);
        if (last && threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared_.q_empty[kChunk]);
    }
    // Tells the multipliers that the weights of a tile are there.
    __device__ __forceinline__ void hand_on() {
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared_.weights_full[weights_ring_.slot]);
        weights_ring_.advance();
    }

    // Makes weights of a tile's scores, and puts them where the multipliers find them.
    __device__ __forceinline__ void weigh(float (&scores)[kScores], const Rows& rows, Sm90Softmax& softmax,
                                          int32_t first_key, bool last) {
        float factor[2] = {1.0f, 1.0f};
        score_tile<Config::kKeys>(scores, transform_, false, rows, first_key);
        softmax.apply<false>(scores, {}, factor);
        if (last) finish(softmax);
        ptx::mbarrier_wait(&shared_.weights_empty[weights_ring_.slot], weights_ring_.parity ^ 1);
        Sm90WideWeights& weights = shared_.weights[weights_ring_.slot];
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step) {
            auto pair = [&](int i) { return pack<T>(scores[8 * step + i], scores[8 * step + i + 1]); };
            weights.pairs[step][threadIdx.x % 128] = make_uint4(pair(0), pair(2), pair(4), pair(6));
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (threadIdx.x % 4 == 0) weights.factor[sm90_row(half)] = factor[half];
        }
        __syncwarp();
    }

    // Once all weights are known: writes the LSE, and what turns sums into results.
    __device__ __forceinline__ void finish(const Sm90Softmax& softmax) {
        SoftmaxState states[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
            states[half] = {softmax.max_log2(half), row_sum(softmax.sum[half])};
        float (&scale)[Config::kGroupRows] = shared_.scale[work_ring_.slot];
        const Sm90Work work = take_work<Config>(shared_, work_ring_);
        if (threadIdx.x % 4 != 0) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            SoftmaxState& state = states[half];
            float factor = p_.out_scale;
            if (OCTAVO_RARE(p_.sinks != nullptr))
                factor *= state.add_sink(p_.sinks[work.first_head + places_.head(half)] * kLog2e);
            scale[sm90_row(half)] = state.inverse_sum() * factor;
            const int32_t token = work.first_token + block_ * plan_.tokens + places_.token(half);
            if (p_.lse && sm90_row(half) < plan_.heads * plan_.tokens && token < work.seqlen_q)
                p_.lse[work.lse_place(p_, token, places_.head(half))] = state.lse();
        }
    }

    const AttentionParams& p_;
    const Sm90Launch& plan_;
    Sm90WideShared& shared_;
    const int block_;  // the CTA's block of 64 rows in the row tile
    const Sm90RowPlaces<true> places_;
    const ScoreTransform transform_;
    const float scale_;
    uint32_t q_parity_ = 0, k_parity_ = 0;
    uint32_t first_queries_[kSteps][4];  // operand a of the products of the first chunk
    Ring<Config::kWeightSlots> weights_ring_;
    Ring<kSm90WorkSlots> work_ring_;
};

}  // namespace octavo::cuda
