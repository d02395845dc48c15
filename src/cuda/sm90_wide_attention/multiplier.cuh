// The multipliers: warpgroups that multiply the scorer's weights with values, each with half of the columns.
#pragma once

#include "cuda/ptx/wgmma.h"
#include "cuda/sm90_attention/rows.cuh"
#include "cuda/sm90_wide_attention/shared.cuh"
#include "cuda/types.h"

namespace octavo::cuda {

// One multiplier: run() works through all row tiles of its CTA. The sums stay in its registers.
template <class T>
class Sm90WideMultiplier {
  public:
    __device__ Sm90WideMultiplier(const AttentionParams& p, const Sm90Launch& plan, Sm90WideShared& shared,
                                  int number)
        : p_(p), plan_(plan), shared_(shared), first_chunk_(number * Config::kMultiplierChunks) {}

    __device__ __forceinline__ void run() {
        while (true) {
            // The row tile stays in its slot meanwhile, and takes no registers.
            const Sm90Work work = take_work<Config, false>(shared_, work_ring_);
            if (work.batch < 0) return;
            int32_t tiles_left = key_tiles<Config>(p_, plan_, work).count;
            float low[kSums], high[kSums];
#pragma unroll
            for (int i = 0; i < kSums; ++i) low[i] = high[i] = 0.0f;
            const bool any = tiles_left > 0;
            while (--tiles_left >= 0) {
                uint32_t weights[kWeights];
                take_weights(weights, low, high);
                multiply(low, weights, first_chunk_);
                multiply(high, weights, first_chunk_ + 1);
                ptx::wgmma_wait<1>();
                release_chunk(&shared_.v_empty[first_chunk_]);
                ptx::wgmma_wait<0>();
                release_chunk(&shared_.v_empty[first_chunk_ + 1]);
                ptx::wgmma_results(low);
                ptx::wgmma_results(high);
                v_parity_ ^= 1;
            }
            store(low, high, any);
        }
    }

  private:
    using Config = Sm90WideConfig;
    static constexpr int kSums = Config::kChunkColumns / 2;
    static constexpr int kWeights = Config::kKeys / 4;  // registers, two weights each
    static_assert(Config::kMultiplierChunks == 2, "low and high");

    // Reads the next tile's weights, and multiplies the sums by the factor that belongs to them.
    __device__ __forceinline__ void take_weights(uint32_t (&weights)[kWeights], float (&low)[kSums],
                                                 float (&high)[kSums]) {
        const Sm90WideWeights& from = shared_.weights[weights_ring_.slot];
        ptx::mbarrier_wait(&shared_.weights_full[weights_ring_.slot], weights_ring_.parity);
        const float factor[2] = {from.factor[sm90_row(0)], from.factor[sm90_row(1)]};
#pragma unroll
        for (int step = 0; step < kWeights / 4; ++step) {
            const uint4 pairs = from.pairs[step][threadIdx.x % 128];
            weights[4 * step] = pairs.x;
            weights[4 * step + 1] = pairs.y;
            weights[4 * step + 2] = pairs.z;
            weights[4 * step + 3] = pairs.w;
        }
        if (!__all_sync(~0u, factor[0] == 1.0f && factor[1] == 1.0f)) {
#pragma unroll
            for (int i = 0; i < kSums; ++i) {
                low[i] *= factor[i / 2 % 2];
                high[i] *= factor[i / 2 % 2];
            }
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared_.weights_empty[weights_ring_.slot]);
        weights_ring_.advance();
    }

    // Starts sums += P V over one chunk.
    __device__ __forceinline__ void multiply(float (&sums)[kSums], const uint32_t (&weights)[kWeights],
                                             int chunk) {
        ptx::mbarrier_wait(&shared_.v_full[chunk], v_parity_);
        uint32_t v_address = ptx::shared_address(shared_.v[chunk]);
        asm volatile("" : "+r"(v_address));  // as in Sm90WideScorer::multiply
        const uint64_t v = ptx::wgmma_descriptor(v_address, Config::kKeyBlockBytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step) {
            ptx::Wgmma<T, Config::kChunkColumns>::rs(sums, &weights[4 * step],
                                                     v + step * 16 * Config::kRowBytes / 16);
        }
        ptx::wgmma_commit();
    }

    // Where this thread's row lies in `out`; null if there is no such row.
    __device__ __forceinline__ T* find_row(const Sm90Work& work, int half) const {
        const int row = sm90_row(half);
        const int32_t token = work.first_token + tile_block<Config>(0) * plan_.tokens + row / plan_.heads;
        if (row >= plan_.heads * plan_.tokens || token >= work.seqlen_q) return nullptr;
        return static_cast<T*>(p_.out) + work.out_place(p_, token, row % plan_.heads);
    }

    // Writes the result, 64 bytes of a row at a time; zeros unless there was `any` key.
    __device__ __forceinline__ void store(const float (&low)[kSums], const float (&high)[kSums], bool any) {
        const float (&scales)[Config::kGroupRows] = shared_.scale[work_ring_.slot];
        const float scale[2] = {any ? scales[sm90_row(0)] : 0.0f, any ? scales[sm90_row(1)] : 0.0f};
        __syncwarp();
        const Sm90Work work = take_work<Config>(shared_, work_ring_);
        const int first_column = first_chunk_ * Config::kChunkColumns + threadIdx.x % 4 * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            T* const row = find_row(work, half);
#pragma unroll
            for (int i = 0; i < Config::kMultiplierChunks * kSums / 16; ++i) {
                const float* const sums = (i < kSums / 16 ? low : high) + i % (kSums / 16) * 16 + 2 * half;
                uint32_t pairs[4];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    pairs[j] = pack<T>(sums[4 * j] * scale[half], sums[4 * j + 1] * scale[half]);
                transpose(pairs);
                const int column = first_column + 32 * i;
                if (row && column < p_.head_dim)
                    *reinterpret_cast<uint4*>(row + column) =
                        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
        }
    }
    // Lane i of four gets the i-th of the four registers of each.
    __device__ __forceinline__ static void transpose(uint32_t (&x)[4]) {
#pragma unroll
        for (int bit = 1; bit <= 2; bit *= 2) {
            const bool upper = threadIdx.x & bit;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (i & bit) continue;
                const uint32_t other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + bit], bit);
                (upper ? x[i] : x[i + bit]) = other;
            }
        }
    }

    const AttentionParams& p_;
    const Sm90Launch& plan_;
    Sm90WideShared& shared_;
    const int first_chunk_;
    uint32_t v_parity_ = 0;
    Ring<Config::kWeightSlots> weights_ring_;
    Ring<kSm90WorkSlots> work_ring_;
};

}  // namespace octavo::cuda
