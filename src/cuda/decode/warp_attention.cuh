// One warp's softmax and accumulators over its blocks of an item (tile/transposed_softmax.cuh).
#pragma once

#include "common/online_softmax.h"
#include "common/score.h"
#include "cuda/decode/copy.cuh"
#include "cuda/ptx/load_shared.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/movmatrix.h"
#include "cuda/tile/transposed_softmax.cuh"
#include "cuda/types.h"

namespace octavo::cuda {

// What a warp leaves of an item that others work on too. Weights are exp2(score - max).
template <class Config>
struct WarpPartial {
    float out[Config::kRows]
             [Config::kWarpPartialRow];  // sums of weighted values; padded against bank conflicts
    float max[Config::kRows];
    float sum[Config::kRows];  // of the weights
};

// `Sequences` tells of the batch's sequences: slice(i). kFromZero: see TransposedSoftmax.
template <class T, class Config, class Sequences, bool kFromZero = false>
class WarpAttention {
    static constexpr int kRowTiles = Config::kRowTiles, kDimTiles = Config::kHeadDim / 16;
    using Softmax = TransposedSoftmax<kRowTiles, kDimTiles>;

  public:
    __device__ WarpAttention(const AttentionParams& p, const FastDivide& group_size,
                             const Sequences& sequences)
        : p_(p),
          group_size_(group_size),
          sequences_(sequences),
          transform_(ScoreTransform::make(p.softmax_scale, p.softcap)) {}

    // The rows of `q` may still be on their way. reset() before the first block.
    __device__ void begin(const Item& item, Rows<Config> q) {
        item_ = item;
        q_ = q;
        seq_ = sequences_.slice(item.sequence);
        // Without a window, a prefix and the keys that all queries see follow each other.
        all_visible_end_ =
            p_.window_left >= 0 ? INT32_MIN : max(seq_.see.window_end(seq_.q_pos(0)), seq_.see.prefix_len);
        Softmax::for_each_row([&](int r, int i) {
            const DecodeRow row(seq_, group_size_, item.kv_head, row_of(r, i));
            q_pos_[r][i] = seq_.q_pos(row.token);
        });
    }

    __device__ void reset() { softmax_.reset(); }

    // The block that begins with key `first_key`.
    __device__ void add(Rows<Config> k, Rows<Config> v, int32_t first_key) {
        BlockWeights weights;
        add_keys(weights, k, first_key);
        add_values(weights, v);
    }

    // The same in two steps.
    using BlockWeights = uint32_t[kRowTiles][2];  // of the block's keys, in T: operand b of P V
    __device__ void add_keys(BlockWeights& weights, Rows<Config> k, int32_t first_key) {
        float scores[kRowTiles][4];
        multiply_q_k(scores, k);
        score(scores, first_key);
        softmax_.template weigh<T, kFromZero>(weights, scores);
    }
    __device__ void add_values(const BlockWeights& weights, Rows<Config> v) { multiply_p_v(weights, v); }

    // After the last block, before what follows.
    __device__ void sum_over_keys() {
        Softmax::for_each_row([&](int r, int i) { softmax_.sum_over_keys(r, i); });
    }

    // The whole item is done: writes its rows.
    __device__ void store() {
        const SequenceSlice seq = sequences_.slice(item_.sequence);  // not kept in registers all along
        const int lane = threadIdx.x % 32;
        Softmax::for_each_row([&](int r, int i) {
            const SoftmaxState state{softmax_.max[r][i], softmax_.sum[r][i]};
            softmax_.sum[r][i] = state.inverse_sum() * p_.out_scale;
            const DecodeRow row(seq, group_size_, item_.kv_head, row_of(r, i));
            if (p_.lse && lane / 4 == 0 && row.valid) {
                p_.lse[seq.lse_begin + row.token * p_.lse_token_stride + row.head * p_.lse_head_stride] =
                    state.lse();
            }
        });
        softmax_.for_each_out([&](float& out, int r, int, int i) { out *= softmax_.sum[r][i]; });
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
            const DecodeRow row(seq, group_size_, item_.kv_head, 8 * r + lane / 4);
            T* const target = static_cast<T*>(p_.out) + seq.out_begin + row.token * p_.out_token_stride +
                              row.head * p_.out_head_stride + 2 * (lane % 4);
#pragma unroll
            for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t pair = ptx::transpose_8x8(
                        pack<T>(softmax_.out[r][d][2 * half], softmax_.out[r][d][2 * half + 1]));
                    const int dim = 16 * d + 8 * half;
                    if (row.valid && dim < p_.head_dim) *reinterpret_cast<uint32_t*>(target + dim) = pair;
                }
            }
        }
    }

    // Others work on the item too: leaves this warp's partial result for those who combine them.
    __device__ void leave(WarpPartial<Config>& partial) {
        const int lane = threadIdx.x % 32;
        Softmax::for_each_row([&](int r, int i) {
            if (lane / 4 == 0) {
                partial.max[row_of(r, i)] = softmax_.max[r][i];
                partial.sum[row_of(r, i)] = softmax_.sum[r][i];
            }
        });
        softmax_.for_each_out(
            [&](float& out, int r, int dim, int i) { partial.out[row_of(r, i)][dim + lane / 4] = out; });
    }

  private:
    __device__ static int row_of(int r, int i) { return Softmax::row_of(threadIdx.x % 32, r, i); }
    __device__ static int key_of(int e) { return Softmax::key_of(threadIdx.x % 32, e); }

    __device__ void multiply_q_k(float (&scores)[kRowTiles][4], Rows<Config> k) const {
        float odd[kRowTiles][4];  // a second chain of products
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[r][e] = odd[r][e] = 0.0f;
        }
#pragma unroll
        for (int j = 0; j < kDimTiles; j += 2) {
            uint32_t a[2][4];
            operands_.load_a(a[0], k, j);
            operands_.load_a(a[1], k, j + 1);
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
                uint32_t b[4];
                operands_.load_b(b, q_, r, j / 2);
                ptx::mma_m16n8k16<T>(scores[r], a[0], b[0], b[1]);
                ptx::mma_m16n8k16<T>(kRowTiles == 1 ? odd[r] : scores[r], a[1], b[2], b[3]);
            }
        }
        if (kRowTiles == 1) {
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[0][e] += odd[0][e];
        }
    }

    // From dot products to scores in units of log2(e), -inf where the query does not see the key.
    __device__ void score(float (&scores)[kRowTiles][4], int32_t first_key) const {
        if (OCTAVO_RARE(transform_.has_softcap)) {
            Softmax::for_each_score(scores, [&](float& score, int, int) { score = transform_(score); });
        } else {
            Softmax::for_each_score(scores, [&](float& score, int, int) { score *= transform_.inner; });
        }
        if (OCTAVO_RARE(p_.alibi_slopes != nullptr)) {
            float slope_log2[kRowTiles][2];
            Softmax::for_each_row([&](int r, int i) {
                slope_log2[r][i] = ptx::load_shared_float(slope_address(q_, row_of(r, i))) * kLog2e;
            });
            Softmax::for_each_score(scores, [&](float& score, int r, int e) {
                score += alibi_bias(slope_log2[r][e % 2], q_pos_[r][e % 2], first_key + key_of(e));
            });
        }
        if (OCTAVO_RARE(first_key + kBlockKeys > all_visible_end_)) {
            const int32_t first_q_pos = seq_.q_pos(0), last_q_pos = seq_.see.seqlen_k - 1;
            if (KeyTiles::all_visible(seq_.see, first_q_pos, last_q_pos, first_key, kBlockKeys)) return;
            Softmax::for_each_score(scores, [&](float& score, int r, int e) {
                if (!seq_.see.visible(q_pos_[r][e % 2], first_key + key_of(e))) score = -INFINITY;
            });
        }
    }

    __device__ void multiply_p_v(const BlockWeights& weights, Rows<Config> v) {
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) {
            uint32_t a[4];
            operands_.load_a_transposed(a, v, d);
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
                ptx::mma_m16n8k16<T>(softmax_.out[r][d], a, weights[r][0], weights[r][1]);
            }
        }
    }

    const AttentionParams& p_;
    const FastDivide& group_size_;
    const Sequences& sequences_;
    ScoreTransform transform_;
    Item item_;
    Operands<Config> operands_;
    Rows<Config> q_;
    SequenceSlice seq_;
    int32_t all_visible_end_;  // the keys before it are visible to all queries; none with a window
    int32_t q_pos_[kRowTiles][2];
    Softmax softmax_;
};

}  // namespace octavo::cuda
