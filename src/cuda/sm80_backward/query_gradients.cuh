// Computes dQ where it is not summed, and the gradients of ALiBi's slopes (sm_80 and newer). A CTA owns a
// tile of queries of one head and walks over the keys that some of them see, as the forward kernel does.
// Gradients of scores are operands of dQ += dS K as they lie in registers. Page:
// docs/kernels/attention_backward.md.
//
// grid: x query tiles over the batch, the last of a sequence first; y query heads.
#pragma once

#include "cuda/sm80_backward/tile.cuh"
#include "cuda/tile/kept_blocks.cuh"

namespace octavo::cuda {

template <class T, class Config, bool kDropout>
struct QueryGradientsShared {
    alignas(16) T q[Config::kRows * Config::kRowStride];  // in the end each warp's dQ, in its own rows
    alignas(16) T dout[Config::kRows * Config::kRowStride];
    alignas(16) T k[Config::kStages][Config::kKeys * Config::kRowStride];
    alignas(16) T v[Config::kStages][Config::kKeys * Config::kRowStride];
    uint32_t kept[kDropout ? Config::kRows * (Config::kKeys / 32) : 1];
    float slope_gradients[Config::kWarps];
};

template <class T, class Config, int kCtasPerSm, bool kDropout, bool kBlocks, bool kRanges>
__global__ void __launch_bounds__(Config::kThreads, kCtasPerSm)
    query_gradients_kernel(const __grid_constant__ AttentionBackwardParams p,
                           const __grid_constant__ Sm80BackwardLaunch plan) {
    constexpr int kKeys = Config::kKeys;
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    auto& shared = *reinterpret_cast<QueryGradientsShared<T, Config, kDropout>*>(shared_bytes);

    const SequenceTile tile =
        find_sequence_tile<Config::kRows>(p.cu_seqlens_q, p.batch, plan.query_tiles, blockIdx.x);
    if (tile.batch < 0) return;
    const auto seq = sequence_of<kDropout, kRanges>(p, tile.batch);
    const int32_t num_tiles = (seq.seqlen_q + Config::kRows - 1) / Config::kRows;
    const int32_t tile_index = num_tiles - 1 - tile.index;  // the last sees most keys under a causal mask
    const int32_t first_query = tile_index * Config::kRows;
    const int32_t num_queries = min(seq.seqlen_q - first_query, Config::kRows);
    if (num_queries <= 0) return;
    const int32_t head = blockIdx.y, key_head = head / p.group_size() / plan.group_parts;
    const KeyTiles tiles(seq.see, seq.q_pos(first_query), seq.q_pos(first_query + num_queries - 1), kKeys);
    const int64_t first_q_row = p.first_token(tile.batch);

    // With a block mask: which tiles some of the queries look at.
    const auto kept_at = [&] {
        return KeptBlocks(p, tile.batch, head, 1, first_query, first_query + num_queries - 1);
    };
    const auto kept_from = [&](int32_t i) {
        if constexpr (kBlocks) {
            while (i < tiles.count && !kept_at().any(tiles.start(i), tiles.start(i))) ++i;
        }
        return i;
    };
    const int32_t first_tile = kept_from(0);

    auto load_keys = [&](int32_t i, int32_t stage) {
        const int32_t first = tiles.start(i);
        auto is_read = [&](int32_t key) { return tiles.needed(key); };
        load_tile<T, Config, kKeys>(
            shared.k[stage],
            RowArray<T>{static_cast<const T*>(p.k) + seq.k_begin + key_head * p.k_head_stride,
                        p.k_token_stride, plan.k_aligned},
            first, p.head_dim, is_read);
        load_tile<T, Config, kKeys>(
            shared.v[stage],
            RowArray<T>{static_cast<const T*>(p.v) + seq.v_begin + key_head * p.v_head_stride,
                        p.v_token_stride, plan.v_aligned},
            first, p.head_dim_v, is_read);
    };

    float dq[Config::kRowTiles][Config::kHeadDim / 8][4] = {};
    float slope_gradient = 0.0f;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warp_row = warp * Config::kWarpRows;
    QueryStatistics statistics[Config::kRowTiles][2];
#pragma unroll
    for (int t = 0; t < Config::kRowTiles; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int32_t row = warp_row + 16 * t + 8 * half + threadIdx.x % 32 / 4;
            statistics[t][half] = {INFINITY, 0.0f};
            if (row < num_queries)
                statistics[t][half] = plan.statistics[head * p.total_q + first_q_row + first_query + row];
        }
    }
    if (first_tile < tiles.count) {
        if (p.head_dim < Config::kHeadDim) {
            zero_columns<Config, Config::kRows>(shared.q, p.head_dim);
            zero_columns<Config, Config::kStages * kKeys>(shared.k[0], p.head_dim);
        }
        if (p.head_dim_v < Config::kHeadDim) {
            zero_columns<Config, Config::kRows>(shared.dout, p.head_dim_v);
            zero_columns<Config, Config::kStages * kKeys>(shared.v[0], p.head_dim_v);
        }
        auto is_read = [&](int32_t row) { return row < seq.seqlen_q; };
        load_tile<T, Config, Config::kRows>(
            shared.q,
            RowArray<T>{static_cast<const T*>(p.q) + seq.q_begin + head * p.q_head_stride, p.q_token_stride,
                        plan.q_aligned},
            first_query, p.head_dim, is_read);
        const int64_t dout_begin =
            p.cu_seqlens_q ? first_q_row * p.dout_strides.token : tile.batch * p.dout_strides.batch;
        load_tile<T, Config, Config::kRows>(
            shared.dout,
            RowArray<T>{static_cast<const T*>(p.dout) + dout_begin + head * p.dout_strides.head,
                        p.dout_strides.token, plan.dout_aligned},
            first_query, p.head_dim_v, is_read);
        load_keys(first_tile, 0);
        ptx::cp_async_commit();
    }
    const float slope =
        p.alibi_slopes ? p.alibi_slopes[tile.batch * p.alibi_batch_stride + head] * kLog2e : 0.0f;
    const uint32_t q_address = rows_address<Config>(shared.q + warp_row * Config::kRowStride);
    const uint32_t dout_address = rows_address<Config>(shared.dout + warp_row * Config::kRowStride);
    const auto ranges = RangesOfRows<2 * Config::kRowTiles, kRanges>::make(
        seq.see, seq.q_pos(first_query + warp_row + static_cast<int32_t>(threadIdx.x) % 32 / 4));
    int32_t num_visited = 0;  // tiles, with a block mask
    for (int32_t i = first_tile, next; i < tiles.count; i = next) {
        next = kept_from(i + 1);
        const int32_t first_key = tiles.start(i), stage = (kBlocks ? num_visited++ : i) % Config::kStages;
        const int32_t next_stage = (stage + 1) % Config::kStages;
        ptx::cp_async_wait<0>();
        __syncthreads();  // the tile has arrived, and every warp is done with the one before
        if (Config::kStages > 1 && next < tiles.count) load_keys(next, next_stage);
        ptx::cp_async_commit();
        if (kDropout && !((kBlocks || kRanges) && !p.dropout.any())) {
            draw_kept<Config::kThreads, Config::kRows, kKeys>(shared.kept, p.dropout,
                                                              p.dropout.head(tile.batch, p.num_q_heads, head),
                                                              first_query, first_key);
            __syncthreads();
        }
        const bool is_whole =
            first_query + Config::kRows <= seq.seqlen_q &&
            KeyTiles::all_visible(seq.see, seq.q_pos(first_query), seq.q_pos(first_query + Config::kRows - 1),
                                  first_key, kKeys) &&
            (!kBlocks || kept_at().all(first_key, first_key));
        float scores[Config::kRowTiles][kKeys / 8][4], products[Config::kRowTiles][kKeys / 8][4];
        multiply_q_k<T, Config>(scores, q_address, columns_address<Config>(shared.k[stage]));
        multiply_q_k<T, Config>(products, dout_address, columns_address<Config>(shared.v[stage]));
        const ScoreGradients<false, kDropout, kBlocks, kKeys, std::decay_t<decltype(seq)>> gradients{
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
        slope_gradient += gradients.run(scores, products, first_query + warp_row, first_key, !is_whole,
                                        [&](int t, int, int j) { return statistics[t][j / 2]; });
        const uint32_t k_rows = rows_address<Config>(shared.k[stage]);
#pragma unroll
        for (int key = 0; key < kKeys; key += 16) {
            uint32_t a[Config::kRowTiles][4];
            pack_operand<T>(a, products, key / 8);
            multiply_p_v<T, Config>(dq, a, k_rows + sizeof(T) * key * Config::kRowStride);
        }
        if (Config::kStages == 1 && next < tiles.count) {
            __syncthreads();  // every warp is done with this tile
            load_keys(next, 0);
            ptx::cp_async_commit();
        }
    }

    if (plan.slopes.parts) {
        slope_gradient = warp_sum(slope_gradient);
        if (threadIdx.x % 32 == 0) shared.slope_gradients[warp] = slope_gradient;
        __syncthreads();
        if (threadIdx.x == 0) {
            float sum = 0.0f;
            for (float part : shared.slope_gradients) sum += part;
            plan.slopes.of(p, head, tile.batch)[tile_index] = sum;
        }
    }
    const int32_t warp_queries = num_queries - warp_row;
    if (warp_queries <= 0) return;
    const int64_t begin = p.cu_seqlens_q ? first_q_row * p.dq_strides.token : tile.batch * p.dq_strides.batch;
    T* const target = static_cast<T*>(p.dq) + begin + (first_query + warp_row) * p.dq_strides.token +
                      head * p.dq_strides.head;
    __syncwarp();
    store_gradients<T, Config, Config::kHeadDim>(
        dq, p.softmax_scale, shared.q + warp_row * Config::kRowStride, target, p.dq_strides.token,
        plan.dq_aligned, warp_queries, p.head_dim);
}

}  // namespace octavo::cuda
