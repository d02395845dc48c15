// The products of latent_decode, by mma.sync: scores of a quarter of the keys and half of their numbers, and
// values of half of the keys and a quarter of the columns. Rows of queries are on the instruction's side of
// 16.
//
// A lane is lane 4 g + t, as mma.sync numbers them. Codes of fp8 become float16 in registers, exactly, in the
// order in which ldmatrix loads them, as in decode/code_products.cuh:
//
//     keys     a word holds numbers 4t .. 4t + 3 of a chunk of 16, of key g; queries have the same order
//     values   transposed in units of two bytes: columns 2g, 2g + 1 of keys 2t, 2t + 1. Every other column
//              belongs to one tile of results, and the columns between them to the next one
#pragma once

#include "cuda/latent_decode/tiles.cuh"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/tile/code_numbers.cuh"
#include "cuda/warp.cuh"

#include <cstdint>

namespace octavo::cuda {

template <class Config>
class LatentProducts {
  public:
    __device__ LatentProducts() {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int group = warp % Config::kKeyGroups, depth = warp / Config::kKeyGroups;
        // Matrix i of four has eight keys and 16 bytes of each, from byte 16 i on.
        keys_ = (group * Config::kGroupKeys + lane % 8) * Config::kRowStride + depth * kDepthBytes +
                lane / 8 * 16;
        const int column = warp % Config::kColumnParts * Config::kColumns;
        values_ = (warp / Config::kColumnParts * Config::kPartKeys + lane % 16) * Config::kRowStride +
                  column * static_cast<int>(sizeof(typename Config::Stored)) + lane / 16 * 16;
        last_keys_ = keys_ - lane / 16 * 32;
        pin_in_register(keys_);
        pin_in_register(last_keys_);
        pin_in_register(values_);
    }

    // Loads this warp's half of the queries' numbers into registers.
    __device__ void load_queries(const unsigned char* queries) {
        const int lane = threadIdx.x % 32, depth = threadIdx.x / 32 / Config::kKeyGroups;
        const uint32_t row = ptx::shared_address(queries) + depth * Config::kSteps * 32 +
                             lane % 16 * Config::kQueryStride + lane / 16 * 16;
#pragma unroll
        for (int step = 0; step < Config::kSteps; ++step) ptx::ldmatrix_x4(q_[step], row + 32 * step);
    }

    // Multiplies the queries with this warp's keys of a tile. scores[i][0] and [1] are those of row g and
    // keys 2t and 2t + 1 of the i-th eight, the others those of row g + 8.
    __device__ void multiply_keys(float (&scores)[Config::kGroupTiles][4], uint32_t tile) const {
        constexpr int kSteps = Config::kSteps, kTiles = Config::kGroupTiles;
        constexpr int kChains = 4 / kTiles;  // sums of every so many steps, so that products can overlap
        constexpr int kStepsAtOnce = Config::kFp8 ? 4 : 2;  // that a load serves
        constexpr int kLoads = (kSteps + kStepsAtOnce - 1) / kStepsAtOnce * kTiles;
        float sums[kTiles][kChains][4] = {};
        // The n-th load brings steps of tile n % kTiles. Where only two steps are left, their codes come
        // twice.
        auto load = [&](int n, uint32_t (&loaded)[4]) {
            const int step = n / kTiles * kStepsAtOnce;
            const uint32_t keys = tile + (step + kStepsAtOnce > kSteps ? last_keys_ : keys_);
            ptx::ldmatrix_x4(loaded, keys + n % kTiles * 8 * Config::kRowStride + step * 64 / kStepsAtOnce);
        };
        uint32_t loaded[kAhead + 1][4];  // loads are kAhead ahead of products
#pragma unroll
        for (int n = 0; n < kAhead; ++n) load(n, loaded[n]);
#pragma unroll
        for (int n = 0; n < kLoads; ++n) {
            if (n + kAhead < kLoads) load(n + kAhead, loaded[(n + kAhead) % (kAhead + 1)]);
            const uint32_t (&words)[4] = loaded[n % (kAhead + 1)];
            const int step = n / kTiles * kStepsAtOnce;
#pragma unroll
            for (int j = 0; j < kStepsAtOnce && step + j < kSteps; ++j) {
                uint32_t b[2];
                if constexpr (Config::kFp8)
                    convert(words[j], b);
                else
                    b[0] = words[2 * j], b[1] = words[2 * j + 1];
                ptx::mma_m16n8k16<Number>(sums[n % kTiles][(step + j) % kChains], q_[step + j], b[0], b[1]);
            }
        }
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                scores[i][j] = sums[i][0][j];
#pragma unroll
                for (int chain = 1; chain < kChains; ++chain) scores[i][j] += sums[i][chain][j];
            }
        }
    }

    // Adds weights * values to `out`, for this warp's keys and columns of a tile.
    __device__ void multiply_values(float (&out)[Config::kColumnTiles][4],
                                    const uint32_t (&weights)[Config::kPartSteps][4], uint32_t tile) const {
        constexpr int kTilesAtOnce = Config::kFp8 ? 4 : 2;  // that a load serves
        constexpr int kStepLoads = Config::kColumnTiles / kTilesAtOnce,
                      kLoads = Config::kPartSteps * kStepLoads;
        const uint32_t values = tile + values_;
        auto load = [&](int n, uint32_t (&loaded)[4]) {
            ptx::ldmatrix_x4_trans(loaded,
                                   values + n / kStepLoads * 16 * Config::kRowStride + n % kStepLoads * 32);
        };
        uint32_t loaded[kAhead + 1][4];
#pragma unroll
        for (int n = 0; n < kAhead; ++n) load(n, loaded[n]);
#pragma unroll
        for (int n = 0; n < kLoads; ++n) {
            if (n + kAhead < kLoads) load(n + kAhead, loaded[(n + kAhead) % (kAhead + 1)]);
            const uint32_t (&words)[4] = loaded[n % (kAhead + 1)], (&own)[4] = weights[n / kStepLoads];
            float (*const sums)[4] = out + n % kStepLoads * kTilesAtOnce;
            if constexpr (Config::kFp8) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint32_t upper[2], lower[2];  // of every other column, then of those between
                    convert(select_bytes<0x3120>(words[2 * half]), upper);
                    convert(select_bytes<0x3120>(words[2 * half + 1]), lower);
                    ptx::mma_m16n8k16<Number>(sums[2 * half], own, upper[0], lower[0]);
                    ptx::mma_m16n8k16<Number>(sums[2 * half + 1], own, upper[1], lower[1]);
                }
            } else {
                ptx::mma_m16n8k16<Number>(sums[0], own, words[0], words[1]);
                ptx::mma_m16n8k16<Number>(sums[1], own, words[2], words[3]);
            }
        }
    }

  private:
    using Number = typename Config::Number;
    static constexpr int kAhead = 2;
    static constexpr int kDepthBytes = Config::kRowBytes / Config::kDepthParts;

    // Converts four codes to two pairs of numbers.
    __device__ static void convert(uint32_t codes, uint32_t (&pairs)[2]) {
        CodeNumbers<DType::float8_e4m3fn, false>(0).convert(codes, pairs);
    }

    uint32_t q_[Config::kSteps][4];
    uint32_t keys_, last_keys_, values_;  // the places in a tile from which this lane loads
};

}  // namespace octavo::cuda
