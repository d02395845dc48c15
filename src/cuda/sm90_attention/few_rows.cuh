// Row tiles of few rows: sequences that decode beside others that prefill, drafts, the end of a sequence.
//
// Here the 64 rows of wgmma would be mostly empty, one warpgroup would work alone, and a tile of keys would
// stay in its slot for both of its products. Instead the warps of all consumers divide the keys: the warps
// take turns at blocks of 16 keys, each with a softmax and accumulators of its own, as in the decode kernel
// (tile/transposed_softmax.cuh). In the end they combine their partial results through the slots of queries
// that only row tiles of many rows need.
#pragma once

#include "common/online_softmax.h"
#include "common/score.h"
#include "cuda/ptx/exp2.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm90_attention/shared.cuh"
#include "cuda/tile/transposed_softmax.cuh"
#include "cuda/warp.cuh"

namespace octavo::cuda {

// One warp's share of the keys of a row tile of up to 8 kRowTiles rows.
template <class T, class Config, int kRowTiles>
class PrefillFewRows {
  public:
    __device__ PrefillFewRows(const AttentionParams& p, const Sm90Launch& plan, Sm90Shared<Config>& shared,
                              const ScoreTransform& transform, float out_scale, const Sm90Work& work,
                              int q_slot)
        : p_(p),
          plan_(plan),
          shared_(shared),
          transform_(transform),
          out_scale_(out_scale),
          work_(work),
          q_slot_(q_slot),
          thread_(threadIdx.x - 128 * Config::kFirstConsumer) {
        // Without this, values computed from thread_ take registers from row tiles of many rows.
        pin_in_register(thread_);
        warp_ = __shfl_sync(~0u, thread_ / 32, 0);  // so that the compiler knows it to be warp-uniform
        const Visibility see = work.visibility<Config>(p);
        full_begin_ = see.window_begin(work.seqlen_k - 1);
        full_end_ = see.window_end(work.q_pos(work.first_token));
        Softmax::for_each_row(
            [&](int r, int i) { q_pos_[r][i] = work.q_pos(work.first_token + row_of(r, i) / plan.heads); });
        softmax_.reset();
    }

    // Goes through all tiles of keys, once the queries are there. The scores of the next tile are computed
    // while the softmax of the current one goes on.
    __device__ __forceinline__ void add_tiles(Ring<Config::kStages>& k_ring, Ring<Config::kVStages>& v_ring) {
        const auto tiles = key_tiles<Config>(p_, plan_, work_);
        if (tiles.count == 0) return;
        if constexpr (kKeepQueries) load_queries();
        auto add_keys = [&](float (&scores)[kRowTiles][4], int block) {
            ptx::mbarrier_wait(&shared_.k_full[k_ring.slot], k_ring.parity);
            if (has(block)) multiply_q_k(scores, shared_.k[k_ring.slot] + block * kBlockBytes);
            release(shared_.k_empty, k_ring);
        };
        float scores[kRowTiles][4], next_scores[kRowTiles][4];
        int block = warp_;  // the warp's next block of the tile; past its end, one of the tiles that follow
        add_keys(scores, block);
        for (int32_t tile = tiles.count - 1; tile >= 0; --tile) {
            const int next_block = block + (has(block) ? kWarps : 0) - kBlocks;
            if (tile > 0) add_keys(next_scores, next_block);
            uint32_t weights[kRowTiles][2];
            if (has(block)) {
                score(scores, tiles.start(tile) + block * kBlockKeys);
                softmax_.template weigh<Number>(weights, scores);
            }
            ptx::mbarrier_wait(&shared_.v_full[v_ring.slot], v_ring.parity);
            if (has(block)) multiply_p_v(weights, shared_.v[v_ring.slot] + block * kBlockBytes);
            release(shared_.v_empty, v_ring);
            Softmax::for_each_score(scores, [&](float& score, int r, int e) { score = next_scores[r][e]; });
            block = next_block;
        }
    }

    // Combines the partial results of all warps, writes the LSE, and puts the result into the slot of the
    // queries.
    __device__ __forceinline__ void finish() {
        Softmax::for_each_row([&](int r, int i) {
            softmax_.sum_over_keys(r, i);
            if (lane() / 4 == 0)
                shared_.parts[warp_][row_of(r, i)] = {softmax_.max[r][i], softmax_.sum[r][i]};
        });
        barrier();  // every warp's maximum is there, and none needs the queries any more
        Softmax::for_each_row([&](int r, int i) {
            const int row = row_of(r, i);
            SoftmaxState parts[kWarps], all;
#pragma unroll
            for (int other = 0; other < kWarps; ++other) {
                parts[other] = shared_.parts[other][row];
                all.max = fmaxf(all.max, parts[other].max);
            }
            const float max = all.safe_max();
#pragma unroll
            for (int other = 0; other < kWarps; ++other)
                all.sum += parts[other].sum * ptx::exp2_approx(parts[other].max - max);
            float own = ptx::exp2_approx(softmax_.max[r][i] - max);
            if (OCTAVO_RARE(p_.sinks != nullptr))
                own *= all.add_sink(p_.sinks[work_.first_head + row % plan_.heads] * kLog2e);
            const float factor = all.inverse_sum() * out_scale_ * own;
            softmax_.for_each_out_of(r, i, [&](float& out, int) { out *= factor; });
            if (p_.lse && lane() / 4 == 0 && warp_ == 0) store_lse(row, all);
        });

        // The partial results, [warp][column][row], take the place of the queries of all warpgroups.
        static_assert(kWarps * Config::kValueDim * 8 * sizeof(float) <=
                      Config::kConsumers * Config::kQTileBytes);
        auto* const parts = reinterpret_cast<float*>(shared_.q[q_slot_]);
        auto place = [](int warp, int column, int row) {
            return (warp * Config::kValueDim + column) * 8 + row;
        };
        constexpr int kPairs = 8 * Config::kValueDim / 2, kEach = (kPairs + 32 * kWarps - 1) / (32 * kWarps);
        uint32_t results[kRowTiles][kEach];  // a row's values of two columns
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
            if (r > 0) barrier();  // every warp has read the tile of eight rows before
#pragma unroll
            for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float* const out = &softmax_.out[r][d][2 * half];
                    *reinterpret_cast<float2*>(parts + place(warp_, 16 * d + 8 * half + lane() / 4,
                                                             row_of(0, 0))) = {out[0], out[1]};
                }
            }
            barrier();
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                const int pair = thread_ + i * 32 * kWarps;
                if (pair >= kPairs) break;
                float low = 0.0f, high = 0.0f;
#pragma unroll
                for (int other = 0; other < kWarps; ++other) {
                    low += parts[place(other, pair / 8 * 2, pair % 8)];
                    high += parts[place(other, pair / 8 * 2 + 1, pair % 8)];
                }
                results[r][i] = pack_output<T>(p_.dtype, low, high);
            }
        }
        barrier();
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                const int pair = thread_ + i * 32 * kWarps, column = pair / 8 * 2, row = pair % 8;
                if (pair >= kPairs) break;
                *reinterpret_cast<uint32_t*>(shared_.q[q_slot_][0] + column / 64 * Config::kQBlockBytes +
                                             (8 * r + row) * Config::kRowBytes +
                                             ((column % 64 / 8) ^ row) * 16 + column % 8 * 2) = results[r][i];
            }
        }
        ptx::fence_proxy_async();
        barrier();
        if (lane() == 0) ptx::mbarrier_arrive(&shared_.out_full[q_slot_][warp_ / 4]);
    }

  private:
    using Number = typename ProductType<T>::Type;
    static constexpr int kDimTiles = Config::kValueDim / 16;
    using Softmax = TransposedSoftmax<kRowTiles, kDimTiles>;
    static constexpr int kWarps = 4 * Config::kConsumers;
    static constexpr int kBlockKeys = 16;
    static constexpr int kBlocks = Config::kKeys / kBlockKeys;
    static constexpr int kBlockBytes = kBlockKeys * Config::kRowBytes;
    static_assert(!Config::kAlibi && !Config::kDropout && !Config::kRanges);
    static_assert(kBlocks * kBlockKeys == Config::kKeys && kBlocks <= kWarps);
    static constexpr bool kKeepQueries = kRowTiles * Config::kHeadDim <= 256;  // in registers
    static constexpr int kQueries = kKeepQueries ? Config::kHeadDim / 32 : 1;

    __device__ int lane() const { return thread_ % 32; }
    __device__ static void barrier() { ptx::named_barrier_sync(2 * Config::kConsumers + 1, 32 * kWarps); }
    // Whether the current tile has this block. A tile of as many blocks as there are warps has the next block
    // of every warp.
    __device__ static bool has(int block) { return kBlocks == kWarps || block < kBlocks; }

    // Lane 0 arrives for the warp, after every lane has read the slot.
    template <int kSize>
    __device__ static void release(uint64_t* empty, Ring<kSize>& ring) {
        __syncwarp();
        release_slot<Config>(empty, ring);
    }

    __device__ int row_of(int r, int i) const { return Softmax::row_of(lane(), r, i); }

    // Where this lane reads row `row` of a tile from the 16-byte chunk `chunk` on. advance() moves an address
    // `columns` further: within a block of 64 columns the swizzle makes that a flip of the chunk's bits.
    __device__ static uint32_t address(const unsigned char* tile, int row, int chunk) {
        return ptx::shared_address(tile) + row * Config::kRowBytes + (chunk ^ (row % 8)) * 16;
    }
    __device__ static uint32_t advance(uint32_t address, int columns, int block_bytes) {
        return (address ^ (columns % 64 * 2)) + columns / 64 * block_bytes;
    }

    // Loads operand b of two products over 16 columns each, from `column` on.
    __device__ __forceinline__ void load_queries(uint32_t (&b)[4], int r, int column) const {
        const uint32_t from = address(shared_.q[q_slot_][0], 8 * r + lane() % 8, lane() / 8);
        ptx::ldmatrix_x4(b, advance(from, column, Config::kQBlockBytes));
    }
    __device__ __forceinline__ void load_queries() {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
            for (int i = 0; i < kQueries; ++i) load_queries(queries_[r][i], r, 32 * i);
        }
    }

    __device__ __forceinline__ void multiply_q_k(float (&scores)[kRowTiles][4],
                                                 const unsigned char* k) const {
        const int lane = this->lane();
        const uint32_t a_from = address(k, lane % 16, lane / 16);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[r][e] = 0.0f;
        }
#pragma unroll
        for (int column = 0; column < Config::kHeadDim; column += 32) {
            uint32_t a[2][4];
            ptx::ldmatrix_x4(a[0], advance(a_from, column, Config::kKeyBlockBytes));
            ptx::ldmatrix_x4(a[1], advance(a_from, column + 16, Config::kKeyBlockBytes));
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
                uint32_t b[4];
                if constexpr (kKeepQueries) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) b[i] = queries_[r][column / 32][i];
                } else {
                    load_queries(b, r, column);
                }
                ptx::mma_m16n8k16<Number>(scores[r], a[0], b[0], b[1]);
                ptx::mma_m16n8k16<Number>(scores[r], a[1], b[2], b[3]);
            }
        }
    }

    // Turns dot products into scores in units of log2(e), -inf where the query does not see the key.
    __device__ __forceinline__ void score(float (&scores)[kRowTiles][4], int32_t first_key) const {
        if (transform_.has_softcap) {
            Softmax::for_each_score(scores, [&](float& score, int, int) { score = transform_(score); });
        } else {
            Softmax::for_each_score(scores, [&](float& score, int, int) { score *= transform_.inner; });
        }
        const int32_t end = first_key + kBlockKeys;
        if (end > work_.prefix_len && (first_key < full_begin_ || end > full_end_)) {
            const Visibility see = work_.template visibility<Config>(p_);
            Softmax::for_each_score(scores, [&](float& score, int r, int e) {
                const int key = first_key + Softmax::key_of(lane(), e);
                if (!see.visible(q_pos_[r][e % 2], key)) score = -INFINITY;
            });
        }
    }

    __device__ __forceinline__ void multiply_p_v(const uint32_t (&weights)[kRowTiles][2],
                                                 const unsigned char* v) {
        const int lane = this->lane();
        const uint32_t a_from = address(v, lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) {
            uint32_t a[4];
            ptx::ldmatrix_x4_trans(a, advance(a_from, 16 * d, Config::kKeyBlockBytes));
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r)
                ptx::mma_m16n8k16<Number>(softmax_.out[r][d], a, weights[r][0], weights[r][1]);
        }
    }

    __device__ void store_lse(int row, const SoftmaxState& state) const {
        const int32_t token = work_.first_token + row / plan_.heads;
        if (token < work_.seqlen_q) p_.lse[work_.lse_place(p_, token, row % plan_.heads)] = state.lse();
    }

    const AttentionParams& p_;
    const Sm90Launch& plan_;
    Sm90Shared<Config>& shared_;
    const ScoreTransform transform_;
    const float out_scale_;
    const Sm90Work& work_;
    const int q_slot_;
    int thread_, warp_;              // the thread and the warp among those of the consumers
    int32_t full_begin_, full_end_;  // every row sees the keys from full_begin_ up to full_end_
    int32_t q_pos_[kRowTiles][2];
    Softmax softmax_;
    uint32_t queries_[kRowTiles][kQueries][4];
};

}  // namespace octavo::cuda
