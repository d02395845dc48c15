// One warp's softmax and accumulators over its part of an item, in the fragments of mma.sync.
//
// S = Q K^T. The order of the dims inside the product is free as long as Q is permuted like K, so both are
// read by the pattern of Block::k, whose words are operand b as they stand. O^T = V^T P^T. The accumulators
// of S are operand b as they stand; operand a pairs the dims of two keys by byte permutation.
#pragma once

#include "common/online_softmax.h"
#include "common/score.h"
#include "cuda/decode/block.cuh"
#include "cuda/ptx/exp2.h"
#include "cuda/ptx/mma.h"
#include "cuda/tile/softmax.cuh"
#include "cuda/types.h"

namespace octavo::cuda {

// A row of an item: a query token of a query head.
struct DecodeRow {
    int32_t token, head;
    bool valid;

    __device__ DecodeRow(const SequenceSlice& seq, const FastDivide& group_size, int32_t kv_head, int32_t row)
        : token(group_size.quotient(row)),
          head(kv_head * static_cast<int32_t>(group_size.divisor) + row -
               token * static_cast<int32_t>(group_size.divisor)),
          valid(token < seq.seqlen_q) {}
};

// What a warp leaves of an item that others work on too. Weights are exp2(score - max).
template <class Config>
struct DecodePiece {
    float out[Config::kRows][Config::kHeadDim];  // sums of weighted values
    float max[Config::kRows];
    float sum[Config::kRows];  // of the weights
    Item item;                 // begin is -1 if there is no piece
};

template <class T, class Config>
class ItemState {
  public:
    static constexpr int kRowTiles = Config::kRowTiles;
    static constexpr int kKChunks = Config::kKChunks, kVChunks = Config::kVChunks;

    __device__ ItemState(const ForwardParams& p, const FastDivide& group_size)
        : p_(p), group_size_(group_size), transform_(ScoreTransform::make(p.softmax_scale, p.softcap)) {}

    __device__ void begin(const Item& item) {
        const int lane = threadIdx.x % 32;
        item_ = item;
        seq_ = SequenceSlice::make(p_, item.sequence);
        tiles_ = key_blocks(seq_);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
            const DecodeRow row(seq_, group_size_, item.kv_head, 8 * r + lane / 4);
            const T* const source = static_cast<const T*>(p_.q) + seq_.q_begin +
                                    row.token * p_.q_token_stride + row.head * p_.q_head_stride +
                                    8 * (lane % 4);
#pragma unroll
            for (int j = 0; j < kKChunks; ++j) {
                const bool valid = row.valid && 32 * j + 8 * (lane % 4) < p_.head_dim;
                q_[r][j] = valid ? *reinterpret_cast<const uint4*>(source + 32 * j) : uint4{};
            }
            slope_log2_[r] = p_.alibi_slopes && row.valid
                                 ? p_.alibi_slopes[item.sequence * p_.alibi_batch_stride + row.head] * kLog2e
                                 : 0.0f;
            q_pos_[r] = seq_.q_pos(row.token);
            max_[r] = -INFINITY;
            sum_[r] = 0.0f;
#pragma unroll
            for (int c = 0; c < kVChunks; ++c) {
#pragma unroll
                for (int m = 0; m < 4; ++m) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) out_[r][c][m][i] = 0.0f;
                }
            }
        }
    }

    // Block `index` of the item.
    __device__ void add(const Block<Config>& block, int32_t index) {
        float scores[2][4];
        multiply_q_k(scores, block);
        score(scores, tiles_.start(index));
        uint32_t weights[kRowTiles][2];
        softmax(weights, scores);
        multiply_p_v(weights, block);
    }

    // The whole item is done: writes its rows.
    __device__ void store() {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
            const SoftmaxState state{max_[r], row_sum(sum_[r])};
            const float scale = state.inverse_sum() * p_.out_scale;
            const DecodeRow own_row(seq_, group_size_, item_.kv_head, 8 * r + lane / 4);
            if (p_.lse && lane % 4 == 0 && own_row.valid) {
                p_.lse[seq_.lse_begin + own_row.token * p_.lse_token_stride +
                       own_row.head * p_.lse_head_stride] = state.lse();
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float row_scale = of_out_row(scale, i);
                const DecodeRow row(seq_, group_size_, item_.kv_head, 8 * r + 2 * (lane % 4) + i);
                T* const target = static_cast<T*>(p_.out) + seq_.out_begin + row.token * p_.out_token_stride +
                                  row.head * p_.out_head_stride + 8 * (lane / 4);
#pragma unroll
                for (int c = 0; c < kVChunks; ++c) {
                    if (!row.valid || 64 * c + 8 * (lane / 4) >= p_.head_dim) break;
                    uint32_t words[4];
#pragma unroll
                    for (int m = 0; m < 4; ++m) {
                        words[m] =
                            pack<T>(value(r, i, c, 2 * m) * row_scale, value(r, i, c, 2 * m + 1) * row_scale);
                    }
                    *reinterpret_cast<uint4*>(target + 64 * c) =
                        make_uint4(words[0], words[1], words[2], words[3]);
                }
            }
        }
    }

    // Others work on the item too: leaves this warp's piece for the merge.
    __device__ void leave(DecodePiece<Config>& piece) {
        const int lane = threadIdx.x % 32;
        if (lane == 0) piece.item = item_;
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
            const float total = row_sum(sum_[r]);
            if (lane % 4 == 0) {
                piece.max[8 * r + lane / 4] = max_[r];
                piece.sum[8 * r + lane / 4] = total;
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float* const target = piece.out[8 * r + 2 * (lane % 4) + i] + 8 * (lane / 4);
#pragma unroll
                for (int c = 0; c < kVChunks; ++c) {
                    if (64 * c + 8 * (lane / 4) >= Config::kHeadDim) break;
#pragma unroll
                    for (int d = 0; d < 8; d += 4) {
                        *reinterpret_cast<float4*>(target + 64 * c + d) =
                            make_float4(value(r, i, c, d), value(r, i, c, d + 1), value(r, i, c, d + 2),
                                        value(r, i, c, d + 3));
                    }
                }
            }
        }
    }

  private:
    // scores[half of the block]: row lane / 4 in elements 0 and 1 (and eight further in 2 and 3), for keys
    // 8 half + 2 (lane % 4) and the next.
    __device__ void multiply_q_k(float (&scores)[2][4], const Block<Config>& block) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[i][e] = 0.0f;
        }
#pragma unroll
        for (int j = 0; j < kKChunks; ++j) {
            const uint4 low = q_[0][j], high = kRowTiles == 2 ? q_[kRowTiles - 1][j] : uint4{};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint4 k = block.k(i, j);
                ptx::mma_m16n8k16<T>(scores[i], {low.x, high.x, low.y, high.y}, k.x, k.y);
                ptx::mma_m16n8k16<T>(scores[i], {low.z, high.z, low.w, high.w}, k.z, k.w);
            }
        }
    }

    // Calls body(score, row tile, key of the block) for the scores that this lane holds.
    template <class Body>
    __device__ static void for_each(float (&scores)[2][4], Body body) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int e = 0; e < 2; ++e) body(scores[i][2 * r + e], r, 8 * i + 2 * (threadIdx.x % 4) + e);
            }
        }
    }

    // From dot products to scores in units of log2(e), -inf where the query does not see the key.
    __device__ void score(float (&scores)[2][4], int32_t first_key) const {
        if (transform_.has_softcap) {
            for_each(scores, [&](float& score, int, int) { score = transform_(score); });
        } else {
            for_each(scores, [&](float& score, int, int) { score *= transform_.inner; });
        }
        if (p_.alibi_slopes) {
            for_each(scores, [&](float& score, int r, int key) {
                score += alibi_bias(slope_log2_[r], q_pos_[r], first_key + key);
            });
        }
        const int32_t first_q_pos = seq_.q_pos(0), last_q_pos = seq_.see.seqlen_k - 1;
        if (!KeyTiles::all_visible(seq_.see, first_q_pos, last_q_pos, first_key, kBlockKeys)) {
            for_each(scores, [&](float& score, int r, int key) {
                if (!seq_.see.visible(q_pos_[r], first_key + key)) score = -INFINITY;
            });
        }
    }

    // From scores to weights, rounded to T: operand b of the second product.
    __device__ void softmax(uint32_t (&weights)[kRowTiles][2], float (&scores)[2][4]) {
        // The maximum only has to keep weights from overflowing: it is raised when a score passes it by 2^8.
        constexpr float kSlackLog2 = 8.0f;
        float block_max[kRowTiles];
        bool raise = false;
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
            block_max[r] = fmaxf(fmaxf(scores[0][2 * r], scores[0][2 * r + 1]),
                                 fmaxf(scores[1][2 * r], scores[1][2 * r + 1]));
            raise = raise || block_max[r] > max_[r] + kSlackLog2;
        }
        if (__any_sync(~0u, raise)) {
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
                const float new_max = fmaxf(max_[r], row_max(block_max[r]));
                const float factor = new_max == -INFINITY ? 1.0f : ptx::exp2_approx(max_[r] - new_max);
                max_[r] = new_max;
                sum_[r] *= factor;
                rescale(r, factor);
            }
        }
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
            const float subtract = max_[r] == -INFINITY ? 0.0f : max_[r];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float first = ptx::exp2_approx(scores[i][2 * r] - subtract);
                const float second = ptx::exp2_approx(scores[i][2 * r + 1] - subtract);
                sum_[r] += first + second;
                weights[r][i] = pack<T>(first, second);
            }
        }
    }

    __device__ void multiply_p_v(const uint32_t (&weights)[kRowTiles][2], const Block<Config>& block) {
        constexpr uint32_t kLowHalves = 0x5410, kHighHalves = 0x7632;
#pragma unroll
        for (int c = 0; c < kVChunks; ++c) {
            uint32_t words[4][4];  // [key][pair of dims]
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint4 v = block.v(i, c);
                words[i][0] = v.x, words[i][1] = v.y, words[i][2] = v.z, words[i][3] = v.w;
            }
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const uint32_t a[4] = {__byte_perm(words[0][m], words[1][m], kLowHalves),
                                       __byte_perm(words[0][m], words[1][m], kHighHalves),
                                       __byte_perm(words[2][m], words[3][m], kLowHalves),
                                       __byte_perm(words[2][m], words[3][m], kHighHalves)};
#pragma unroll
                for (int r = 0; r < kRowTiles; ++r) {
                    ptx::mma_m16n8k16<T>(out_[r][c][m], a, weights[r][0], weights[r][1]);
                }
            }
        }
    }

    // A value of row lane / 4, as the lanes that hold the outputs of rows 2 (lane % 4) and the next need it.
    __device__ static float of_out_row(float x, int i) {
        return __shfl_sync(~0u, x, (2 * (threadIdx.x % 4) + i) * 4);
    }

    __device__ void rescale(int r, float factor) {
        const float first = of_out_row(factor, 0), second = of_out_row(factor, 1);
#pragma unroll
        for (int c = 0; c < kVChunks; ++c) {
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                out_[r][c][m][0] *= first;
                out_[r][c][m][1] *= second;
                out_[r][c][m][2] *= first;
                out_[r][c][m][3] *= second;
            }
        }
    }

    // Output of row 8 r + 2 (lane % 4) + i, dim 64 c + 8 (lane / 4) + d.
    __device__ float value(int r, int i, int c, int d) const { return out_[r][c][d / 2][2 * (d % 2) + i]; }

    const ForwardParams& p_;
    const FastDivide& group_size_;
    ScoreTransform transform_;
    Item item_;
    SequenceSlice seq_;
    KeyTiles tiles_{Visibility{}, 0, 0, kBlockKeys};
    uint4 q_[kRowTiles][kKChunks];  // row lane / 4 of each tile of rows, dims as in Block::k
    float slope_log2_[kRowTiles];
    int32_t q_pos_[kRowTiles];
    float max_[kRowTiles], sum_[kRowTiles];  // of row lane / 4; sum_: this lane's share
    float out_[kRowTiles][kVChunks][4][4];   // O^T, see value()
};

}  // namespace octavo::cuda
