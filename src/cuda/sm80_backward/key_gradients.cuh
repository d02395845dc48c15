// Computes dK and dV (sm_80 and newer). A CTA owns a tile of keys of one KV head and walks over the queries
// of all heads of the group that see some of them. A warp's scores S^T = K Q^T and products V dO^T have its
// keys as rows, so that weights and gradients of scores are operands of dV += P^T dO and dK += dS^T Q as they
// lie in registers. With kDqSums, gradients of scores also pass through shared memory, where all warps read
// them for dQ += dS K. Page: docs/kernels/attention_backward.md.
//
// grid: x key tiles over the batch, y KV heads, z parts of the columns of dK and dV, and of dQ.
#pragma once

#include "common/query_range.h"
#include "cuda/sm80_backward/query_sums.cuh"
#include "cuda/sm80_backward/tile.cuh"
#include "cuda/tile/kept_blocks.cuh"

#include <type_traits>

namespace octavo::cuda {

struct NoScoreGradients {};

template <class T, class Config, bool kDropout, bool kDqSums>
struct KeyGradientsShared {
    alignas(16) T k[Config::kRows * Config::kRowStride];  // in the end each warp's dK and dV, in its own rows
    alignas(16) T v[Config::kRows * Config::kRowStride];
    alignas(16) T q[Config::kStages][Config::kKeys * Config::kRowStride];
    alignas(16) T dout[Config::kStages][Config::kKeys * Config::kRowStride];
    alignas(16) QueryStatistics statistics[Config::kStages][Config::kKeys];
    uint32_t kept[kDropout ? Config::kKeys * (Config::kRows / 32) : 1];
    std::conditional_t<kDqSums, ScoreGradientTile<T, Config>, NoScoreGradients> ds;
};

template <class T, class Config, int kDimSplits, int kCtasPerSm, bool kDropout, bool kBlocks, bool kRanges,
          bool kDqSums>
__global__ void __launch_bounds__(Config::kThreads, kCtasPerSm)
    key_gradients_kernel(const __grid_constant__ AttentionBackwardParams p,
                         const __grid_constant__ Sm80BackwardLaunch plan) {
    constexpr int kQueries = Config::kKeys, kDims = Config::kHeadDim / kDimSplits;
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    auto& shared = *reinterpret_cast<KeyGradientsShared<T, Config, kDropout, kDqSums>*>(shared_bytes);

    const SequenceTile tile =
        find_sequence_tile<Config::kRows>(p.cu_seqlens_k, p.batch, plan.key_tiles, blockIdx.x);
    if (tile.batch < 0) return;
    const auto seq = sequence_of<kDropout, kRanges>(p, tile.batch);
    const int32_t first_key = tile.index * Config::kRows;
    const int32_t num_keys = min(seq.see.seqlen_k - first_key, Config::kRows);
    if (num_keys <= 0) return;
    const int32_t kv_head = blockIdx.y, first_dim = blockIdx.z * kDims, group_size = p.group_size();
    const QueryRange queries(seq.see, seq.seqlen_q, first_key, first_key + num_keys);
    const int32_t first_tile = queries.begin / kQueries;
    const int32_t num_tiles = (queries.end + kQueries - 1) / kQueries - first_tile;
    const int32_t num_steps = queries.begin < queries.end ? group_size * num_tiles : 0;
    const int32_t first_q_row = p.cu_seqlens_q ? p.cu_seqlens_q[tile.batch] : tile.batch * p.seqlen_q;

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
            p.cu_seqlens_q ? int64_t{first_q_row} * p.dout_strides.token : tile.batch * p.dout_strides.batch;
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

    float dk[Config::kRowTiles][kDims / 8][4] = {}, dv[Config::kRowTiles][kDims / 8][4] = {};
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warp_row = warp * Config::kWarpRows;
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
            RowArray<T>{static_cast<const T*>(p.k) + seq.k_begin + kv_head * p.k_head_stride,
                        p.k_token_stride, plan.k_aligned},
            first_key, p.head_dim, is_read);
        load_tile<T, Config, Config::kRows>(
            shared.v,
            RowArray<T>{static_cast<const T*>(p.v) + seq.v_begin + kv_head * p.v_head_stride,
                        p.v_token_stride, plan.v_aligned},
            first_key, p.head_dim_v, is_read);
        load_step(first_step, 0);
        ptx::cp_async_commit();
    }
    const uint32_t k_address = rows_address<Config>(shared.k + warp_row * Config::kRowStride);
    const uint32_t v_address = rows_address<Config>(shared.v + warp_row * Config::kRowStride);
    const auto ranges = RangesOfRows<2 * Config::kRowTiles, kRanges>::make(
        seq.see, first_key + warp_row + static_cast<int32_t>(threadIdx.x) % 32 / 4);
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
        float scores[Config::kRowTiles][kQueries / 8][4], products[Config::kRowTiles][kQueries / 8][4];
        multiply_q_k<T, Config>(scores, k_address, columns_address<Config>(shared.q[stage]));
        multiply_q_k<T, Config>(products, v_address, columns_address<Config>(shared.dout[stage]));
        const ScoreGradients<true, kDropout, kBlocks, Config::kRows, std::decay_t<decltype(seq)>> gradients{
            seq,
            ScoreTransform::make(p.softmax_scale, p.softcap),
            p.alibi_slopes != nullptr,
            p.alibi_symmetric,
            slope,
            p.out_scale,
            (kBlocks || kRanges) && !p.dropout.any() ? nullptr : shared.kept,
            warp_row,
            kBlocks ? p.block_mask.row(tile.batch, head, 0) : nullptr,
            &p.block_mask,
            ranges.of_row};
        const QueryStatistics* const statistics = shared.statistics[stage] + 2 * (threadIdx.x % 4);
        gradients.run(scores, products, first_key + warp_row, first_query, !is_whole,
                      [&](int, int i, int j) { return statistics[8 * i + j % 2]; });
        if constexpr (kDqSums) shared.ds.put(products, warp_row);
        const uint32_t q_rows = rows_address<Config>(shared.q[stage] + first_dim);
        const uint32_t dout_rows = rows_address<Config>(shared.dout[stage] + first_dim);
        using Columns = BackwardConfig<kDims, Config::kWarps, Config::kRowTiles, kQueries, 1>;
#pragma unroll
        for (int query = 0; query < kQueries; query += 16) {
            uint32_t a[Config::kRowTiles][4];
            const uint32_t offset = sizeof(T) * query * Config::kRowStride;
            pack_operand<T>(a, scores, query / 8);
            multiply_p_v<T, Columns>(dv, a, dout_rows + offset);
            pack_operand<T>(a, products, query / 8);
            multiply_p_v<T, Columns>(dk, a, q_rows + offset);
        }
        if constexpr (kDqSums) {
            __syncthreads();  // gradients of scores of all keys are written
            using Part = QuerySums<Config, kDims>;
            typename Part::Sums dq;
            multiply_ds_k<T, Config, kDims>(dq, Part(warp), shared.ds, shared.k + first_dim);
            const int64_t row = head * plan.num_rows + first_sum_row + first_query;
            Part::add(Part::place(plan.dq_sums + row * Config::kHeadDim, warp, blockIdx.z), dq);
        }
        if (Config::kStages == 1 && next < num_steps) {
            __syncthreads();  // every warp is done with this tile
            load_step(next, 0);
            ptx::cp_async_commit();
        }
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
    const int32_t num_dims = min(p.head_dim - first_dim, kDims);
    const int32_t num_dims_v = min(p.head_dim_v - first_dim, kDims);
    T* const rows = shared.k + warp_row * Config::kRowStride;
    store_gradients<T, Config, kDims>(dk, p.softmax_scale, rows, target(p.dk, p.dk_strides),
                                      p.dk_strides.token, plan.dk_aligned, warp_keys, num_dims);
    store_gradients<T, Config, kDims>(dv, p.out_scale, rows, target(p.dv, p.dv_strides), p.dv_strides.token,
                                      plan.dv_aligned, warp_keys, num_dims_v);
}

}  // namespace octavo::cuda
