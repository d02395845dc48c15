// One warp's softmax and accumulators over its part of an item, in the fragments of mma.sync.
//
// S^T = K Q^T, keys on the 16-wide side and rows on the 8-wide side, then O^T = V^T P^T: eight rows, whatever
// the group, waste nothing. An 8 x 8 transposition turns the accumulators of S^T into operand b of the second
// product.
#pragma once

#include "common/online_softmax.h"
#include "common/score.h"
#include "cuda/decode/block.cuh"
#include "cuda/decode/fold.cuh"
#include "cuda/ptx/exp2.h"
#include "cuda/ptx/load_shared.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/movmatrix.h"
#include "cuda/types.h"

namespace octavo::cuda {

// What a warp leaves of an item that others work on too. Weights are exp2(score - max).
template <class Config>
struct DecodePiece {
    float out[Config::kRows][Config::kPartialRow];  // sums of weighted values; padded against bank conflicts
    float max[Config::kRows];
    float sum[Config::kRows];  // of the weights
};

// `Sequences` tells of the batch's sequences: slice(i). kCommonMaximum: where the scores of the first block
// allow, weights are relative to zero, so that most sums over some keys add up as they are (the unified
// maximum of FlashDecoding++, Hong et al. 2024).
template <class T, class Config, class Sequences = Schedule<Config::kThreads>, bool kCommonMaximum = false>
class ItemState {
  public:
    __device__ ItemState(const ForwardParams& p, const FastDivide& group_size, const Sequences& sequences)
        : p_(p),
          group_size_(group_size),
          sequences_(sequences),
          transform_(ScoreTransform::make(p.softmax_scale, p.softcap)) {}

    // The rows of `q` may still be on their way. reset() before the first block.
    __device__ void begin(const Item& item, Rows<Config> q) {
        item_ = item;
        q_ = q;
        seq_ = sequences_.slice(item.sequence);
        tiles_ = key_blocks(seq_);
        for_each_row([&](int r, int i) {
            const DecodeRow row(seq_, group_size_, item.kv_head, row_of(r, i));
            q_pos_[r][i] = seq_.q_pos(row.token);
        });
    }

    __device__ void reset() {
        for_each_row([&](int r, int i) {
            max_[r][i] = -INFINITY;
            sum_[r][i] = 0.0f;
        });
        for_each_out([](float& out, int, int, int) { out = 0.0f; });
    }

    // Block `index` of the item.
    __device__ void add(Rows<Config> k, Rows<Config> v, int32_t index) {
        if (tiles_.count == 0) return;
        BlockWeights weights;
        add_keys(weights, k, index);
        add_values(weights, v);
    }

    // The same in two steps.
    using BlockWeights = uint32_t[Config::kRowTiles][2];  // of the block's keys, in T: operand b of P V
    __device__ void add_keys(BlockWeights& weights, Rows<Config> k, int32_t index) {
        float scores[kRowTiles][4];
        multiply_q_k(scores, k);
        score(scores, tiles_.start(index));
        softmax(weights, scores);
    }
    __device__ void add_values(const BlockWeights& weights, Rows<Config> v) { multiply_p_v(weights, v); }

    // After the last block, before what follows.
    __device__ void sum_over_keys() {
        for_each_row([&](int r, int i) { sum_[r][i] = over_keys(sum_[r][i]); });
    }

    // The whole item is done: writes its rows.
    __device__ void store() {
        const SequenceSlice seq = sequences_.slice(item_.sequence);  // not kept in registers all along
        const int lane = threadIdx.x % 32;
        for_each_row([&](int r, int i) {
            const SoftmaxState state{max_[r][i], sum_[r][i]};
            sum_[r][i] = state.inverse_sum() * p_.out_scale;
            const DecodeRow row(seq, group_size_, item_.kv_head, row_of(r, i));
            if (p_.lse && lane / 4 == 0 && row.valid) {
                p_.lse[seq.lse_begin + row.token * p_.lse_token_stride + row.head * p_.lse_head_stride] =
                    state.lse();
            }
        });
        for_each_out([&](float& out, int r, int, int i) { out *= sum_[r][i]; });
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
            const DecodeRow row(seq, group_size_, item_.kv_head, 8 * r + lane / 4);
            T* const target = static_cast<T*>(p_.out) + seq.out_begin + row.token * p_.out_token_stride +
                              row.head * p_.out_head_stride + 2 * (lane % 4);
#pragma unroll
            for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t pair =
                        ptx::transpose_8x8(pack<T>(out_[r][d][2 * half], out_[r][d][2 * half + 1]));
                    const int dim = 16 * d + 8 * half;
                    if (row.valid && dim < p_.head_dim) *reinterpret_cast<uint32_t*>(target + dim) = pair;
                }
            }
        }
    }

    // Others work on the item too: leaves this warp's piece for the merge.
    __device__ void leave(DecodePiece<Config>& piece) {
        const int lane = threadIdx.x % 32;
        for_each_row([&](int r, int i) {
            if (lane / 4 == 0) {
                piece.max[row_of(r, i)] = max_[r][i];
                piece.sum[row_of(r, i)] = sum_[r][i];
            }
        });
        for_each_out(
            [&](float& out, int r, int dim, int i) { piece.out[row_of(r, i)][dim + lane / 4] = out; });
    }

    // Adds this to what the same warp left in `piece` before.
    __device__ void add_to(const DecodePiece<Config>& piece) {
        const int lane = threadIdx.x % 32;
        for_each_row([&](int r, int i) {
            const FoldStep step = add_softmax(r, i, piece.max[row_of(r, i)], piece.sum[row_of(r, i)]);
            for_each_out_of(
                r, i, [&](float& out, int dim) { out = step(piece.out[row_of(r, i)][dim + lane / 4], out); });
        });
    }

    // The same in registers.
    struct Kept {
        float max[Config::kRowTiles][2], sum[Config::kRowTiles][2];
        float out[Config::kRowTiles][Config::kHeadDim / 16][4];
    };
    __device__ void leave(Kept& kept) const {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
            for (int i = 0; i < 2; ++i) kept.max[r][i] = max_[r][i], kept.sum[r][i] = sum_[r][i];
#pragma unroll
            for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
                for (int e = 0; e < 4; ++e) kept.out[r][d][e] = out_[r][d][e];
            }
        }
    }
    __device__ void add_to(const Kept& kept) {
        bool same_max = true;
        for_each_row([&](int r, int i) { same_max = same_max && kept.max[r][i] == max_[r][i]; });
        if (__all_sync(~0u, same_max)) {  // what FoldStep gives if both factors are one
            for_each_row([&](int r, int i) { sum_[r][i] += kept.sum[r][i]; });
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
                for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) out_[r][d][e] += kept.out[r][d][e];
                }
            }
            return;
        }
        for_each_row([&](int r, int i) {
            const FoldStep step = add_softmax(r, i, kept.max[r][i], kept.sum[r][i]);
#pragma unroll
            for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
                for (int e = i; e < 4; e += 2) out_[r][d][e] = step(kept.out[r][d][e], out_[r][d][e]);
            }
        });
    }

  private:
    static constexpr int kRowTiles = Config::kRowTiles, kDimTiles = Config::kHeadDim / 16;
    static constexpr float kSlackLog2 = 8.0f;

    // A lane has rows row_of(r, 0) and row_of(r, 1) of each tile r, and of S^T keys lane / 4 and eight
    // further: scores[r][e] is row row_of(r, e % 2), key lane / 4 + 8 (e / 2).
    __device__ static int row_of(int r, int i) { return 8 * r + 2 * (threadIdx.x % 4) + i; }

    template <class Body>
    __device__ static void for_each_row(Body body) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
            body(r, 0);
            body(r, 1);
        }
    }
    // Calls body(score, r, i, key of the block).
    template <class Body>
    __device__ static void for_each_score(float (&scores)[kRowTiles][4], Body body) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
            for (int e = 0; e < 4; ++e) body(scores[r][e], r, e % 2, threadIdx.x % 32 / 4 + 8 * (e / 2));
        }
    }
    // Calls body(out, r, dim, i): the output of row row_of(r, i), dim + lane / 4.
    template <class Body>
    __device__ void for_each_out(Body body) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
            for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
                for (int e = 0; e < 4; ++e) body(out_[r][d][e], r, 16 * d + 8 * (e / 2), e % 2);
            }
        }
    }
    // The same of one row: body(out, dim).
    template <class Body>
    __device__ void for_each_out_of(int r, int i, Body body) {
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) {
            body(out_[r][d][i], 16 * d);
            body(out_[r][d][i + 2], 16 * d + 8);
        }
    }
    // One row of add_to: the softmax.
    __device__ FoldStep add_softmax(int r, int i, float max, float sum) {
        SoftmaxState all{max, sum};
        const FoldStep step = FoldStep::add(all, {max_[r][i], sum_[r][i]});
        max_[r][i] = all.max;
        sum_[r][i] = all.sum;
        return step;
    }
    // Over the lanes that share rows.
    __device__ static float over_keys(float sum) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        return sum;
    }
    __device__ static float max_over_keys(float max) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
        return max;
    }

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
            for_each_score(scores, [&](float& score, int, int, int) { score = transform_(score); });
        } else {
            for_each_score(scores, [&](float& score, int, int, int) { score *= transform_.inner; });
        }
        if (OCTAVO_RARE(p_.alibi_slopes != nullptr)) {
            float slope_log2[kRowTiles][2];
            for_each_row([&](int r, int i) {
                slope_log2[r][i] = ptx::load_shared_float(slope_address(q_, row_of(r, i))) * kLog2e;
            });
            for_each_score(scores, [&](float& score, int r, int i, int key) {
                score += alibi_bias(slope_log2[r][i], q_pos_[r][i], first_key + key);
            });
        }
        const int32_t first_q_pos = seq_.q_pos(0), last_q_pos = seq_.see.seqlen_k - 1;
        if (OCTAVO_RARE(!KeyTiles::all_visible(seq_.see, first_q_pos, last_q_pos, first_key, kBlockKeys))) {
            for_each_score(scores, [&](float& score, int r, int i, int key) {
                if (!seq_.see.visible(q_pos_[r][i], first_key + key)) score = -INFINITY;
            });
        }
    }

    // Before the first block: whether zero will do for the maximum, which it then is. That is so if it is
    // within the slack of each row's.
    __device__ bool starts_from_zero(float (&scores)[kRowTiles][4]) {
        bool within = true;
        for_each_score(scores, [&](float& score, int, int, int) { within = within && score <= kSlackLog2; });
        for_each_row([&](int r, int i) {
            const bool near = fmaxf(scores[r][i], scores[r][i + 2]) >= -kSlackLog2;
            const uint32_t own_row = 0x11111111u << threadIdx.x % 4;
            within = (__ballot_sync(~0u, near) & own_row) != 0 && within && max_[r][i] == -INFINITY;
        });
        if (!__all_sync(~0u, within)) return false;
        for_each_row([&](int r, int i) { max_[r][i] = 0.0f; });
        return true;
    }

    // From scores to weights, rounded to T: operand b of the second product.
    __device__ void softmax(BlockWeights& weights, float (&scores)[kRowTiles][4]) {
        // The maximum only has to keep weights from overflowing: it is raised when a score passes it by 2^8.
        bool raise = false;
        for_each_score(scores, [&](float& score, int r, int i, int) {
            raise = raise || score > max_[r][i] + kSlackLog2;
        });
        if (__any_sync(~0u, raise) && !(kCommonMaximum && starts_from_zero(scores))) {
            for_each_row([&](int r, int i) {
                const float new_max = fmaxf(max_[r][i], max_over_keys(fmaxf(scores[r][i], scores[r][i + 2])));
                const float factor = new_max == -INFINITY ? 1.0f : ptx::exp2_approx(max_[r][i] - new_max);
                max_[r][i] = new_max;
                sum_[r][i] *= factor;
                for_each_out_of(r, i, [&](float& out, int) { out *= factor; });
            });
        }
        for_each_score(scores, [&](float& score, int r, int i, int) {
            score = ptx::exp2_approx(score - (max_[r][i] == -INFINITY ? 0.0f : max_[r][i]));
            sum_[r][i] += score;
        });
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
            weights[r][0] = ptx::transpose_8x8(pack<T>(scores[r][0], scores[r][1]));
            weights[r][1] = ptx::transpose_8x8(pack<T>(scores[r][2], scores[r][3]));
        }
    }

    __device__ void multiply_p_v(const BlockWeights& weights, Rows<Config> v) {
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) {
            uint32_t a[4];
            operands_.load_a_transposed(a, v, d);
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
                ptx::mma_m16n8k16<T>(out_[r][d], a, weights[r][0], weights[r][1]);
            }
        }
    }

    const ForwardParams& p_;
    const FastDivide& group_size_;
    const Sequences& sequences_;
    ScoreTransform transform_;
    Item item_;
    Operands<Config> operands_;
    Rows<Config> q_;
    SequenceSlice seq_;
    KeyTiles tiles_{Visibility{}, 0, 0, kBlockKeys};
    int32_t q_pos_[kRowTiles][2];
    float max_[kRowTiles][2], sum_[kRowTiles][2];  // sum_: this lane's share until sum_over_keys()
    float out_[kRowTiles][kDimTiles][4];           // O^T, see for_each_out
};

}  // namespace octavo::cuda
