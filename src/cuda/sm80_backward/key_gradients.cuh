// Computes dK and dV (sm_80 and newer). A CTA owns a tile of keys of one KV head and walks over the queries
// of all heads of the group that see some of them. Scores S^T = K Q^T and products dP^T = V dO^T have keys as
// rows, so that weights and gradients of scores are operands of dV += P^T dO and dK += dS^T Q as they lie in
// registers. Page: docs/kernels/attention_backward.md.
//
// What bounds it is reading operands from shared memory, of which a warp with m x n results reads 1 / m + 1 /
// n for each product. So some warps, kParts of them, share the same keys, of which each has more:
//
//     S, dP: queries ->       dV, dK: columns ->          dQ: columns ->
//     +-------+-------+       +-----------+-----------+   +-----+-----+-----+-----+
//     |   0   |   1   | keys  |   0: dV   |   1: dK   |   |  0  |  2  |  4  |  6  | queries
//     +-------+-------+       +-----------+-----------+   +-----+-----+-----+-----+
//     |   2   |   3   |       |   2: dV   |   3: dK   |   |  1  |  3  |  5  |  7  |
//     +-------+-------+       +-----------+-----------+   +-----+-----+-----+-----+
//       ...                     ...
//
//     8 warps, 2 parts. With 1 part, a warp has the scores of all queries, and dV and dK of its keys. With 4,
//     two warps have dV, of half of the columns each, and two dK.
//
// In one step, for a tile of queries, a warp
//   1. computes S and dP of its keys and its part of the queries, and P and dS of these;
//   2. multiplies P with dO or dS with Q for its own part of the queries, out of registers;
//   3. does the same for the other parts of the queries, which warps with the same keys left in shared memory
//      (exchange.cuh);
//   4. with kDqSums, multiplies dS of all keys with K and adds to sums of dQ (query_sums.cuh).
//
// With one slot of dS, all warps wait for each other before the fourth (with parts, before the third). With
// two, a step multiplies dS of the step before, and only warps with the same keys wait for each other within
// a step. Half of them then begin with that product, so that its tensor cores' work lies beside the
// exponentials of the others on the same scheduler:
//
//     warps 0 to 3    S, dP | exponentials | own | dQ of the step before | others' parts
//     warps 4 to 7    dQ of the step before | S, dP | exponentials | own | others' parts
//
// grid: x pairs of sequence and KV head x key tiles, in TileOrder.
#pragma once

#include "common/query_range.h"
#include "cuda/attention_backward/find_head_tile.cuh"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm80_backward/exchange.cuh"
#include "cuda/sm80_backward/query_sums.cuh"
#include "cuda/sm80_backward/tile.cuh"
#include "cuda/tile/kept_blocks.cuh"

#include <type_traits>

namespace octavo::cuda {

struct NoExchange {};

template <class T, class Config, bool kDropout, bool kDqSums>
struct KeyGradientsShared {
    static constexpr int kKeyRows = Config::kRows, kQueries = Config::kKeys;
    // Of which queries weights pass from warp to warp.
    static constexpr int kFirstWeights = Config::kParts == 2 ? kQueries / 2 : 0;
    using Gradients = ExchangeTile<T, kKeyRows, kQueries>;
    using Weights = ExchangeTile<T, kKeyRows, kQueries - kFirstWeights>;

    alignas(16) T k[kKeyRows * Config::kRowStride];  // in the end a place for dK and dV
    alignas(16) T v[kKeyRows * Config::kRowStride];
    alignas(16) T q[Config::kStages][kQueries * Config::kRowStride];
    alignas(16) T dout[Config::kStages][kQueries * Config::kRowStride];
    alignas(16) QueryStatistics statistics[Config::kStages][kQueries];
    uint32_t kept[kDropout ? kQueries * (kKeyRows / 32) : 1];
    // Whether a step multiplies the gradients of scores of the step before with keys.
    static constexpr bool kLate = kDqSums && Config::kDsSlots > 1;
    std::conditional_t<kDqSums || (Config::kParts > 1), Gradients, NoExchange> ds[kLate ? 2 : 1];
    std::conditional_t<(Config::kParts > 1), Weights, NoExchange> weights;
};

template <class T, class Config, int kCtasPerSm, bool kDropout, bool kBlocks, bool kRanges, bool kDqSums>
__global__ void __launch_bounds__(Config::kThreads, kCtasPerSm)
    key_gradients_kernel(const __grid_constant__ AttentionBackwardParams p,
                         const __grid_constant__ Sm80BackwardLaunch plan) {
    constexpr int kQueries = Config::kKeys, kParts = Config::kParts;
    constexpr int kOwnQueries = kQueries / kParts;  // queries of a warp's scores
    constexpr int kAtOnce = kOwnQueries < 64 / Config::kRowTiles ? kOwnQueries : 64 / Config::kRowTiles;
    constexpr int kSums = kParts == 1 ? 2 : 1;  // which of dV and dK a warp has
    constexpr int kDimParts = kParts > 2 ? kParts / 2 : 1, kDims = Config::kHeadDim / kDimParts;
    static_assert(kParts == 1 || kParts % 2 == 0);
    using Scores = BackwardConfig<Config::kHeadDim, Config::kWarps, Config::kRowTiles, kAtOnce, 1>;
    using Columns = BackwardConfig<kDims, Config::kWarps, Config::kRowTiles, kQueries, 1>;
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    using Shared = KeyGradientsShared<T, Config, kDropout, kDqSums>;
    auto& shared = *reinterpret_cast<Shared*>(shared_bytes);

    const HeadTile at = find_head_tile<Config::kRows>(plan.key_order.of(static_cast<int32_t>(blockIdx.x)),
                                                      p.cu_seqlens_k, p.batch);
    const SequenceTile tile = at.tile;
    const int32_t kv_head = at.head, key_head = kv_head / plan.group_parts;
    if (tile.batch < 0) return;
    const auto seq = sequence_of<kDropout, kRanges>(p, tile.batch);
    const int32_t first_key = tile.index * Config::kRows;
    const int32_t num_keys = min(seq.see.seqlen_k - first_key, Config::kRows);
    if (num_keys <= 0) return;
    const int32_t group_size = p.group_size();
    const QueryRange queries(seq.see, seq.seqlen_q, first_key, first_key + num_keys);
    const int32_t first_tile = queries.begin / kQueries;
    const int32_t num_tiles = (queries.end + kQueries - 1) / kQueries - first_tile;
    const int32_t num_steps = queries.begin < queries.end ? group_size * num_tiles : 0;
    const int64_t first_q_row = p.first_token(tile.batch);

    // With a block mask: which blocks are kept in a step, and the first step from `step` on whose queries
    // look at some of the keys.
    const auto kept_at = [&](int32_t step) {
        const int32_t first = (first_tile + step % num_tiles) * kQueries;
        return KeptBlocks(p, tile.batch, kv_head * group_size + step / num_tiles, 1, first,
                          min(first + kQueries, seq.seqlen_q) - 1);
    };
    const int32_t last_key = first_key + num_keys - 1;
    const auto kept_from = [&](int32_t step) {
        if constexpr (kBlocks) {
            while (step < num_steps && !kept_at(step).any(first_key, last_key)) ++step;
        }
        return step;
    };
    const int32_t first_step = kept_from(0);
    [[maybe_unused]] const int32_t first_sum_row =
        kDqSums ? first_workspace_row<kQueries>(plan, p.cu_seqlens_q, tile.batch) : 0;

    auto load_step = [&](int32_t step, int32_t stage) {
        const int32_t head = kv_head * group_size + step / num_tiles;
        const int32_t first = (first_tile + step % num_tiles) * kQueries;
        auto is_read = [&](int32_t row) { return row < seq.seqlen_q; };
        load_tile<T, Config, kQueries>(
            shared.q[stage],
            RowArray<T>{static_cast<const T*>(p.q) + seq.q_begin + head * p.q_head_stride, p.q_token_stride,
                        plan.q_aligned},
            first, p.head_dim, is_read);
        const int64_t dout_begin =
            p.cu_seqlens_q ? first_q_row * p.dout_strides.token : tile.batch * p.dout_strides.batch;
        load_tile<T, Config, kQueries>(
            shared.dout[stage],
            RowArray<T>{static_cast<const T*>(p.dout) + dout_begin + head * p.dout_strides.head,
                        p.dout_strides.token, plan.dout_aligned},
            first, p.head_dim_v, is_read);
        const auto* const from =
            reinterpret_cast<const float*>(plan.statistics + head * p.total_q + first_q_row + first);
        for (int i = threadIdx.x; i < 2 * kQueries; i += Config::kThreads) {
            const bool inside = is_read(first + i / 2);
            ptx::cp_async_4(reinterpret_cast<float*>(shared.statistics[stage]) + i, inside ? from + i : from,
                            inside);
        }
    };

    float sums[kSums][Config::kRowTiles][kDims / 8][4] = {};
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int part = warp % kParts, warp_row = warp / kParts * Config::kWarpRows, own = part * kOwnQueries;
    const int first_dim = part % kDimParts * kDims;
    // Whether sums of index i are those of dK.
    const auto has_dk = [&](int i) { return kParts == 1 ? i == 1 : part >= kDimParts; };
    if (first_step < num_steps) {
        if (p.head_dim < Config::kHeadDim) {
            zero_columns<Config, Config::kRows>(shared.k, p.head_dim);
            zero_columns<Config, Config::kStages * kQueries>(shared.q[0], p.head_dim);
        }
        if (p.head_dim_v < Config::kHeadDim) {
            zero_columns<Config, Config::kRows>(shared.v, p.head_dim_v);
            zero_columns<Config, Config::kStages * kQueries>(shared.dout[0], p.head_dim_v);
        }
        // A key that no query of the sequence sees may be NaN, which would spoil dQ.
        const KeyTiles seen(seq.see, seq.q_pos(0), seq.q_pos(seq.seqlen_q - 1), Config::kRows);
        auto is_read = [&](int32_t row) { return row < seq.see.seqlen_k && (!kDqSums || seen.needed(row)); };
        load_tile<T, Config, Config::kRows>(
            shared.k,
            RowArray<T>{static_cast<const T*>(p.k) + seq.k_begin + key_head * p.k_head_stride,
                        p.k_token_stride, plan.k_aligned},
            first_key, p.head_dim, is_read);
        load_tile<T, Config, Config::kRows>(
            shared.v,
            RowArray<T>{static_cast<const T*>(p.v) + seq.v_begin + key_head * p.v_head_stride,
                        p.v_token_stride, plan.v_aligned},
            first_key, p.head_dim_v, is_read);
        load_step(first_step, 0);
        ptx::cp_async_commit();
    }
    const uint32_t k_address = rows_address<Config>(shared.k + warp_row * Config::kRowStride);
    const uint32_t v_address = rows_address<Config>(shared.v + warp_row * Config::kRowStride);
    const auto ranges = RangesOfRows<2 * Config::kRowTiles, kRanges>::make(
        seq.see, first_key + warp_row + static_cast<int32_t>(threadIdx.x) % 32 / 4);
    // Adds products of gradients of scores and keys to sums of dQ.
    [[maybe_unused]] const auto add_dq = [&](const auto& ds, float* to) {
        if constexpr (kDqSums) {
            typename QuerySums<Config>::Sums dq;
            multiply_ds_k<T, Config>(dq, QuerySums<Config>(warp), ds, shared.k);
            QuerySums<Config>::add(to, dq);
        }
    };
    constexpr bool kLate = Shared::kLate;
    [[maybe_unused]] float* late_sums = nullptr;  // of the step before
    const bool is_first_half = warp < Config::kWarps / 2;
    int32_t num_visited = 0;  // steps, with a block mask
    for (int32_t step = first_step, next; step < num_steps; step = next) {
        next = kept_from(step + 1);
        const int32_t stage = (kBlocks ? num_visited++ : step) % Config::kStages;
        const int32_t next_stage = (stage + 1) % Config::kStages;
        const int32_t head = kv_head * group_size + step / num_tiles;
        const int32_t first_query = (first_tile + step % num_tiles) * kQueries;
        ptx::cp_async_wait<0>();
        __syncthreads();  // the tile has arrived, and every warp is done with the one before
        if (Config::kStages > 1 && next < num_steps) load_step(next, next_stage);
        ptx::cp_async_commit();
        if (kDropout && !((kBlocks || kRanges) && !p.dropout.any())) {
            draw_kept<Config::kThreads, kQueries, Config::kRows>(
                shared.kept, p.dropout, p.dropout.head(tile.batch, p.num_q_heads, head), first_query,
                first_key);
            __syncthreads();
        }

        const float slope =
            p.alibi_slopes ? p.alibi_slopes[tile.batch * p.alibi_batch_stride + head] * kLog2e : 0.0f;
        const bool is_whole =
            first_query + kQueries <= seq.seqlen_q && first_key + Config::kRows <= seq.see.seqlen_k &&
            KeyTiles::all_visible(seq.see, seq.q_pos(first_query), seq.q_pos(first_query + kQueries - 1),
                                  first_key, Config::kRows) &&
            (!kBlocks || kept_at(step).all(first_key, last_key));
        auto& ds = shared.ds[kLate ? step % 2 : 0];
        [[maybe_unused]] const auto& late_ds = shared.ds[kLate ? (step + 1) % 2 : 0];
        if (kLate && kParts > 1 && !is_first_half && late_sums) add_dq(late_ds, late_sums);
        const auto rows_of = [&](int i, int query) {
            const T* const rows = has_dk(i) ? shared.q[stage] : shared.dout[stage];
            return rows_address<Config>(rows + query * Config::kRowStride + first_dim);
        };
        constexpr int kRowBytes = sizeof(T) * Config::kRowStride;
#pragma unroll 1
        for (int first = own; first < own + kOwnQueries; first += kAtOnce) {  // queries of the tile
            float scores[Config::kRowTiles][kAtOnce / 8][4], products[Config::kRowTiles][kAtOnce / 8][4];
            const int offset = first * Config::kRowStride;
            multiply_q_k<T, Scores>(scores, k_address, columns_address<Config>(shared.q[stage] + offset));
            multiply_q_k<T, Scores>(products, v_address,
                                    columns_address<Config>(shared.dout[stage] + offset));
            const ScoreGradients<true, kDropout, kBlocks, Config::kRows, std::decay_t<decltype(seq)>>
                gradients{seq,
                          ScoreTransform::make(p.softmax_scale, p.softcap),
                          p.alibi_slopes != nullptr,
                          p.alibi_symmetric,
                          slope,
                          p.out_scale,
                          (kBlocks || kRanges) && !p.dropout.any()
                              ? nullptr
                              : shared.kept + first * (Config::kRows / 32),
                          warp_row,
                          kBlocks ? p.block_mask.row(tile.batch, head, 0) : nullptr,
                          &p.block_mask,
                          ranges.of_row};
            const QueryStatistics* const statistics =
                shared.statistics[stage] + first + 2 * (threadIdx.x % 4);
            gradients.run(scores, products, first_key + warp_row, first_query + first, !is_whole,
                          [&](int, int i, int j) { return statistics[8 * i + j % 2]; });
            if constexpr (kDqSums || kParts > 1) ds.put(products, warp_row, first);
            if constexpr (kParts > 1) {
                if (first >= Shared::kFirstWeights)
                    shared.weights.put(scores, warp_row, first - Shared::kFirstWeights);
#pragma unroll
                for (int t = 0; t < Config::kRowTiles; ++t) {
#pragma unroll
                    for (int j = 0; j < kAtOnce / 2; ++j) {
                        float& weight = scores[t][j / 4][j % 4];
                        weight = has_dk(0) ? products[t][j / 4][j % 4] : weight;
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < kSums; ++i) {
                const uint32_t rows = rows_of(i, first);
#pragma unroll
                for (int query = 0; query < kAtOnce; query += 16) {
                    uint32_t a[Config::kRowTiles][4];
                    pack_operand<T>(a, i == 1 ? products : scores, query / 8);
                    multiply_p_v<T, Columns>(sums[i], a, rows + query * kRowBytes);
                }
            }
        }
        if (kLate && (kParts == 1 || is_first_half) && late_sums) add_dq(late_ds, late_sums);
        if constexpr (kParts > 1) {
            // Weights and gradients of the same keys are written, or those of all keys.
            if constexpr (kLate)
                ptx::named_barrier_sync(1 + warp / kParts, 32 * kParts);
            else
                __syncthreads();
#pragma unroll
            for (int other = 1; other < kParts; ++other) {
                const int first = (part + other) % kParts * kOwnQueries;
                const uint32_t rows = rows_of(0, first);
#pragma unroll
                for (int query = 0; query < kOwnQueries; query += 16) {
                    uint32_t a[Config::kRowTiles][4];
                    if (has_dk(0))
                        ds.load_rows(a, warp_row, first + query);
                    else
                        shared.weights.load_rows(a, warp_row, first + query - Shared::kFirstWeights);
                    multiply_p_v<T, Columns>(sums[0], a, rows + query * kRowBytes);
                }
            }
        }
        if (kDqSums && !kLate && kParts == 1) __syncthreads();  // gradients of scores of all keys are written
        if (Config::kStages == 1 && next < num_steps) {
            if (!kDqSums || kParts > 1) __syncthreads();  // every warp is done with these queries
            load_step(next, 0);
            ptx::cp_async_commit();
        }
        if constexpr (kDqSums) {
            const int64_t row = head * plan.num_rows + first_sum_row + first_query;
            float* const to = QuerySums<Config>::place(plan.dq_sums + row * Config::kHeadDim, warp);
            if constexpr (kLate)
                late_sums = to;
            else
                add_dq(ds, to);
        }
    }
    if (kLate && late_sums) {
        __syncthreads();  // gradients of scores of all keys are written
        add_dq(shared.ds[(num_steps - 1) % 2], late_sums);
    }

    __syncthreads();  // every warp is done with K and V, and with what is in flight
    const int32_t warp_keys = num_keys - warp_row;
    if (warp_keys <= 0) return;
    const int64_t first_row = first_key + warp_row;
    auto target = [&](void* array, const GradientStrides& strides) {
        const int64_t begin =
            p.cu_seqlens_k ? p.cu_seqlens_k[tile.batch] * strides.token : tile.batch * strides.batch;
        return static_cast<T*>(array) + begin + first_row * strides.token + kv_head * strides.head +
               first_dim;
    };
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
        const bool dk = has_dk(i);
        const GradientStrides strides = dk ? p.dk_strides : p.dv_strides;
        T* const rows = (dk ? shared.k : shared.v) + warp_row * Config::kRowStride + first_dim;
        store_gradients<T, Columns, kDims, Config::kRowStride>(
            sums[i], dk ? p.softmax_scale : p.out_scale, rows, target(dk ? p.dk : p.dv, strides),
            strides.token, dk ? plan.dk_aligned : plan.dv_aligned, warp_keys,
            min((dk ? p.head_dim : p.head_dim_v) - first_dim, kDims));
    }
}

}  // namespace octavo::cuda
