// Attention of 16 rows over a paged cache of latents (sm_80 and newer). All rows attend to the one latent
// head, so that a key is read once for 16 query heads; its first 512 numbers are the value. Page:
// docs/kernels/latent_attention.md.
//
// grid: x tiles of rows over the sequences, y splits of the keys. A CTA owns 16 rows of a sequence and one
// split of its keys, and has eight warps. For each tile of keys
//  - each warp multiplies all rows with eight keys (with tiles of 32 keys, over half of their numbers), with
//    the queries in registers;
//  - 16 threads for each row turn the scores, which have gone through shared memory, into weights;
//  - each warp multiplies the weights with 64 columns of the values.
// Tiles arrive by cp.async, kStages of them at a time, since decoding is bound by memory. Codes of fp8 become
// 16-bit numbers in shared memory, exactly.
#pragma once

#include "common/float8.h"
#include "common/online_softmax.h"
#include "cuda/latent/load.cuh"
#include "cuda/ptx/exp2.h"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/tile/code_numbers.cuh"
#include "cuda/types.h"

#include <cstdint>
#include <type_traits>

namespace octavo::cuda {

template <class T, bool kIsFp8, int kKeyCount, int kStageCount>
struct LatentConfig {
    using Type = T;
    using Stored = std::conditional_t<kIsFp8, uint8_t, T>;
    static constexpr bool kFp8 = kIsFp8;
    static constexpr int kKeys = kKeyCount, kStages = kStageCount;
    static constexpr int kWarps = kLatentThreads / 32;
    static constexpr int kKeyGroups = kKeys / 8;                    // groups of eight keys
    static constexpr int kDepthParts = kWarps / kKeyGroups;         // parts of a key's numbers
    static constexpr int kSteps = kLatentQkDim / 16 / kDepthParts;  // steps that a warp takes
    static constexpr int kWarpColumns = kLatentVDim / kWarps;
    static constexpr int kRowStride = KeyCopy<T, kKeys>::kRowStride;  // bytes of a row of 16-bit numbers
    static constexpr int kScoreStride = kKeys + 8;  // elements of a row of scores or weights
    static constexpr int kRowThreads = kLatentThreads / kLatentRows;
    static constexpr int kThreadKeys = kKeys / kRowThreads;
    static_assert(kKeyGroups * kDepthParts == kWarps && kSteps % 2 == 0);
};

// The dynamic shared memory behind the stages.
template <class Config>
struct LatentShared {
    float scores[Config::kDepthParts][kLatentRows][Config::kScoreStride];
    typename Config::Type weights[kLatentRows][Config::kScoreStride];
    float factor[kLatentRows];  // the factor that sums so far are multiplied by; in the end, 1 / sum
    float lse[kLatentRows];
};

// Converts four codes of fp8 to two pairs of 16-bit numbers. Both types have all of these numbers.
template <class T>
__device__ __forceinline__ void convert_word(uint32_t codes, uint32_t* pairs) {
#if __CUDA_ARCH__ >= 890
    CodeNumbers<DType::float8_e4m3fn, false>(0).convert(codes, pairs);
    if constexpr (std::is_same_v<T, bfloat16>) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 both = unpack<float16>(pairs[i]);
            pairs[i] = pack<bfloat16>(both.x, both.y);
        }
    }
#else
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        pairs[i] = pack<T>(float8_to_float<E4m3>(static_cast<uint8_t>(codes >> (16 * i))),
                           float8_to_float<E4m3>(static_cast<uint8_t>(codes >> (16 * i + 8))));
    }
#endif
}

// Converts a tile of codes to numbers.
template <class Config>
__device__ __forceinline__ void convert_codes(const char* codes, char* numbers) {
    constexpr int kRowChunks = kLatentQkDim / 16;
    for (int i = threadIdx.x; i < Config::kKeys * kRowChunks; i += kLatentThreads) {
        const int key = i / kRowChunks, chunk = i % kRowChunks;
        const uint4 loaded = *reinterpret_cast<const uint4*>(
            codes + key * KeyCopy<uint8_t, Config::kKeys>::kRowStride + 16 * chunk);
        const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
        uint32_t pairs[8];
#pragma unroll
        for (int w = 0; w < 4; ++w) convert_word<typename Config::Type>(words[w], pairs + 2 * w);
        auto* const to = reinterpret_cast<uint4*>(numbers + key * Config::kRowStride + 32 * chunk);
        to[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        to[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
    }
}

// Multiplies the 16 rows, which are in registers, with eight keys of the tile, over this warp's part of their
// numbers.
template <class Config>
__device__ __forceinline__ void multiply_scores(const uint32_t (&q)[Config::kSteps][4], const char* tile,
                                                LatentShared<Config>& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int group = warp % Config::kKeyGroups, part = warp / Config::kKeyGroups;
    // Matrix i of four has the eight keys and, of 32 numbers, those from 8 i to 8 i + 7.
    const uint32_t keys = ptx::shared_address(tile + (8 * group + lane % 8) * Config::kRowStride +
                                              part * Config::kSteps * 32 + lane / 8 * 16);
    float sums[4][4] = {};  // each adds up every fourth step, so that products can overlap
#pragma unroll
    for (int step = 0; step < Config::kSteps; step += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, keys + 32 * step);
        ptx::mma_m16n8k16<typename Config::Type>(sums[step % 4], q[step], b[0], b[1]);
        ptx::mma_m16n8k16<typename Config::Type>(sums[(step + 1) % 4], q[step + 1], b[2], b[3]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float2 both;
        both.x = sums[0][2 * half] + sums[1][2 * half] + (sums[2][2 * half] + sums[3][2 * half]);
        both.y =
            sums[0][2 * half + 1] + sums[1][2 * half + 1] + (sums[2][2 * half + 1] + sums[3][2 * half + 1]);
        *reinterpret_cast<float2*>(&shared.scores[part][lane / 4 + 8 * half][8 * group + 2 * (lane % 4)]) =
            both;
    }
}

// The softmax of the row that this thread shares with the 15 others of its half warp.
struct LatentSoftmax {
    float max = -INFINITY;  // in units of log2(e)
    float sum = 0.0f;       // the sum over this thread's keys

    // Turns the scores of a tile into weights. The row sees the first num_seen keys of the tile.
    template <class Config>
    __device__ __forceinline__ void weigh(LatentShared<Config>& shared, float scale_log2, int32_t num_seen) {
        const int row = threadIdx.x / Config::kRowThreads;
        const int first = threadIdx.x % Config::kRowThreads * Config::kThreadKeys;
        float scores[Config::kThreadKeys];
        float highest = max;
#pragma unroll
        for (int i = 0; i < Config::kThreadKeys; ++i) {
            float score = shared.scores[0][row][first + i];
            if constexpr (Config::kDepthParts == 2) score += shared.scores[1][row][first + i];
            scores[i] = first + i < num_seen ? score * scale_log2 : -INFINITY;
            highest = fmaxf(highest, scores[i]);
        }
#pragma unroll
        for (int step = Config::kRowThreads / 2; step > 0; step /= 2)
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
        const float safe = highest == -INFINITY ? 0.0f : highest;
        const float factor = ptx::exp2_approx(max - safe);  // 0 from -inf
        max = highest;
        sum *= factor;
#pragma unroll
        for (int i = 0; i < Config::kThreadKeys; ++i) {
            const float weight = ptx::exp2_approx(scores[i] - safe);
            sum += weight;
            shared.weights[row][first + i] = from_float<typename Config::Type>(weight);
        }
        if (first == 0) shared.factor[row] = factor;
    }

    template <class Config>
    __device__ __forceinline__ void finish(LatentShared<Config>& shared) {
#pragma unroll
        for (int step = Config::kRowThreads / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        const SoftmaxState state{max, sum};
        const int row = threadIdx.x / Config::kRowThreads;
        if (threadIdx.x % Config::kRowThreads != 0) return;
        shared.factor[row] = state.inverse_sum();
        shared.lse[row] = state.lse();
    }
};

// Multiplies the sums of this lane's two rows by their factors.
template <class Config, int kColumnTiles>
__device__ __forceinline__ void scale_rows(const LatentShared<Config>& shared,
                                           float (&out)[kColumnTiles][4]) {
    const int row = threadIdx.x % 32 / 4;
    const float factors[2] = {shared.factor[row], shared.factor[row + 8]};
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[i][j] *= factors[j / 2];
    }
}

// Adds weights * values to `out`, for this warp's columns.
template <class Config, int kColumnTiles>
__device__ __forceinline__ void multiply_values(const LatentShared<Config>& shared, const char* tile,
                                                float (&out)[kColumnTiles][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t weights = ptx::shared_address(&shared.weights[lane % 16][lane / 16 * 8]);
    const uint32_t values = ptx::shared_address(tile + lane % 16 * Config::kRowStride +
                                                2 * (warp * Config::kWarpColumns + lane / 16 * 8));
#pragma unroll
    for (int key = 0; key < Config::kKeys; key += 16) {
        uint32_t a[4];
        ptx::ldmatrix_x4(a, weights + 2 * key);
#pragma unroll
        for (int i = 0; i < kColumnTiles; i += 2) {
            uint32_t b[4];
            ptx::ldmatrix_x4_trans(b, values + key * Config::kRowStride + 16 * i);
            ptx::mma_m16n8k16<typename Config::Type>(out[i], a, b[0], b[1]);
            ptx::mma_m16n8k16<typename Config::Type>(out[i + 1], a, b[2], b[3]);
        }
    }
}

// Writes this warp's columns to the result, or to the partial result of its split.
template <class Config, int kColumnTiles>
__device__ __forceinline__ void store_rows(const LatentAttentionParams& p, const LatentLaunch& launch,
                                           const LatentSequence& sequence, int32_t first_row,
                                           int32_t num_rows, const LatentShared<Config>& shared,
                                           const float (&out)[kColumnTiles][4]) {
    using T = typename Config::Type;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = lane / 4 + 8 * half;
        const int32_t row = first_row + r;
        if (row >= num_rows) continue;
        const int64_t token = sequence.first_q + launch.num_q_heads.quotient(row);
        const int64_t head = launch.num_q_heads.remainder(row);
        const int column = warp * Config::kWarpColumns + 2 * (lane % 4);
        const bool writes_lse = warp == 0 && lane % 4 == 0;
        if (launch.num_splits > 1) {
            const int64_t total_rows = p.total_q * p.num_q_heads;
            const int64_t partial = blockIdx.y * total_rows + token * p.num_q_heads + head;
            float* const to = launch.partial_out + partial * kLatentVDim + column;
#pragma unroll
            for (int i = 0; i < kColumnTiles; ++i)
                *reinterpret_cast<float2*>(to + 8 * i) = make_float2(out[i][2 * half], out[i][2 * half + 1]);
            if (writes_lse) launch.partial_lse[partial] = shared.lse[r];
        } else {
            T* const to =
                static_cast<T*>(p.out) + token * p.out_token_stride + head * p.out_head_stride + column;
#pragma unroll
            for (int i = 0; i < kColumnTiles; ++i) {
                to[8 * i] = from_float<T>(out[i][2 * half] * p.out_scale);
                to[8 * i + 1] = from_float<T>(out[i][2 * half + 1] * p.out_scale);
            }
            if (writes_lse && p.lse)
                p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = shared.lse[r];
        }
    }
}

template <class Config>
__global__ void __launch_bounds__(kLatentThreads, 1)
    latent_attention_kernel(const __grid_constant__ LatentAttentionParams p,
                            const __grid_constant__ LatentLaunch launch) {
    using T = typename Config::Type;
    using Copy = KeyCopy<typename Config::Stored, Config::kKeys>;
    constexpr int kColumnTiles = Config::kWarpColumns / 8;
    extern __shared__ __align__(128) char memory[];
    char* const stages = memory;
    char* const numbers = stages + Config::kStages * Copy::kTileBytes;  // a tile converted from fp8
    auto& shared = *reinterpret_cast<LatentShared<Config>*>(
        numbers + (Config::kFp8 ? Config::kKeys * Config::kRowStride : 0));
    ptx::launch_dependents();
    ptx::wait_for_previous_grid();

    const auto b = launch.tiles_per_sequence.quotient(static_cast<int32_t>(blockIdx.x));
    const int32_t first_row =
        launch.tiles_per_sequence.remainder(static_cast<int32_t>(blockIdx.x)) * kLatentRows;
    const LatentSequence sequence = LatentSequence::make(p, b);
    const int32_t num_rows = sequence.seqlen_q * p.num_q_heads;
    if (first_row >= num_rows) return;
    const int32_t last_row = min(first_row + kLatentRows, num_rows) - 1;
    auto end_key_of = [&](int32_t row) {
        return min(sequence.end_key(p.causal, launch.num_q_heads.quotient(min(row, last_row))),
                   sequence.seqlen_k);
    };
    // The tiles of keys that some row sees, and those of them that this split owns.
    const int32_t end_key = end_key_of(last_row);
    const int32_t all_tiles = (end_key + Config::kKeys - 1) / Config::kKeys;
    const auto split = static_cast<int64_t>(blockIdx.y);
    const auto begin_tile = static_cast<int32_t>(all_tiles * split / launch.num_splits);
    const auto num_tiles = static_cast<int32_t>(all_tiles * (split + 1) / launch.num_splits) - begin_tile;
    const int32_t own_end = end_key_of(first_row + threadIdx.x / Config::kRowThreads);

    // The queries arrive in the last stage, which keys do not need yet.
    char* const queries = Config::kFp8 ? numbers : stages + (Config::kStages - 1) * Copy::kTileBytes;
    copy_queries<T>(p, launch, sequence, first_row, num_rows, queries);
    ptx::cp_async_commit();
    Copy copy(p, launch, b, begin_tile * Config::kKeys, end_key);
    for (int stage = 0; stage < Config::kStages - 1; ++stage) {
        if (stage < num_tiles) copy.run(stages + stage * Copy::kTileBytes);
        ptx::cp_async_commit();
    }
    ptx::cp_async_wait<Config::kStages - 1>();
    __syncthreads();
    uint32_t q[Config::kSteps][4];
    {
        const int lane = threadIdx.x % 32, part = threadIdx.x / 32 / Config::kKeyGroups;
        const uint32_t from = ptx::shared_address(queries + lane % 16 * Config::kRowStride +
                                                  part * Config::kSteps * 32 + lane / 16 * 16);
#pragma unroll
        for (int step = 0; step < Config::kSteps; ++step) ptx::ldmatrix_x4(q[step], from + 32 * step);
    }

    LatentSoftmax softmax;
    float out[kColumnTiles][4] = {};
    int stage = 0, free_stage = Config::kStages - 1;
#pragma unroll 1
    for (int32_t t = 0; t < num_tiles; ++t) {
        // After this, the tile has arrived for all threads, and all are done with the tile before it and with
        // the queries.
        ptx::cp_async_wait<Config::kStages - 2>();
        __syncthreads();
        if (t + Config::kStages - 1 < num_tiles) copy.run(stages + free_stage * Copy::kTileBytes);
        ptx::cp_async_commit();
        const char* tile = stages + stage * Copy::kTileBytes;
        if constexpr (Config::kFp8) {
            convert_codes<Config>(tile, numbers);
            __syncthreads();
            tile = numbers;
        }
        multiply_scores<Config>(q, tile, shared);
        __syncthreads();
        softmax.weigh(shared, p.softmax_scale * kLog2e, own_end - (begin_tile + t) * Config::kKeys);
        __syncthreads();
        scale_rows<Config>(shared, out);
        multiply_values<Config>(shared, tile, out);
        free_stage = stage;
        stage = stage + 1 == Config::kStages ? 0 : stage + 1;
    }
    __syncthreads();  // all threads have read the factors of the last tile
    softmax.finish(shared);
    __syncthreads();
    scale_rows<Config>(shared, out);
    store_rows<Config>(p, launch, sequence, first_row, num_rows, shared, out);
}

}  // namespace octavo::cuda
