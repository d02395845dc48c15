// One warp's softmax and accumulators over its blocks of an item (tile/transposed_softmax.cuh).
#pragma once

#include "common/online_softmax.h"
#include "common/score.h"
#include "cuda/decode/code_products.cuh"
#include "cuda/decode/item.cuh"
#include "cuda/decode/output.cuh"
#include "cuda/decode/products.cuh"
#include "cuda/ptx/load_shared.h"
#include "cuda/ptx/movmatrix.h"

#include <type_traits>

namespace octavo::cuda {

// The partial result that a warp leaves of an item that others work on too. Weights are exp2(score - max).
template <class Config>
struct WarpPartial {
    float out[Config::kRows]
             [Config::kWarpPartialRow];  // sums of weighted values; padded against bank conflicts
    float2 states[Config::kRows];        // the maximum of the scores, and the sum of the weights
};

// One warp's attention over its blocks of an item. `Sequences` knows the batch's sequences: slice(i).
// kFromZero: see TransposedSoftmax. kChosen: keys are numbered in chosen pages, and `Sequences` knows their
// positions.
template <class T, class Config, class Sequences, bool kFromZero = false, bool kChosen = false>
class WarpAttention {
    static constexpr int kRowTiles = Config::kRowTiles, kDimTiles = Config::kHeadDim / 16;
    static constexpr int kSteps = Config::kBlockKeys / kStepKeys;
    using Products = std::conditional_t<Config::kHasCodes, CodeProducts<Config>, Products<T, Config>>;
    using Softmax = typename Products::Softmax;

  public:
    __device__ WarpAttention(const AttentionParams& p, const FastDivide& group_size, const CodeLayout& layout,
                             const Sequences& sequences)
        : p_(p),
          group_size_(group_size),
          layout_(layout),
          sequences_(sequences),
          transform_(ScoreTransform::make(p.softmax_scale, p.softcap)) {}

    // Begins an item. The rows of `q` may still be in flight. Call reset() before the first block.
    __device__ void begin(const Item& item, QueryRows<Config> q) {
        item_ = item;
        q_ = q;
        seq_ = sequences_.slice(item.sequence);
        seq_.see.attention_chunk = {};  // all_visible_end_ takes it into account
        // Without a window, a prefix and the keys that all queries see follow each other.
        all_visible_end_ = p_.window_left >= 0 ? -chunk_begin()
                                               : max(seq_.see.window_end(seq_.q_pos(0)), seq_.see.prefix_len);
        if constexpr (kChosen) all_visible_end_ = p_.window_left >= 0 ? 0 : sequences_.seen_by_all();
        if (!kChosen && p_.is_tree(seq_.seqlen_q))
            all_visible_end_ = min(all_visible_end_, max(seq_.q_pos(0), seq_.see.prefix_len));
        Softmax::for_each_row([&](int r, int i) {
            const DecodeRow row(seq_, group_size_, item.kv_head, row_of(r, i));
            q_pos_[r][i] = seq_.q_pos(row.token);
        });
    }

    __device__ void reset() { softmax_.reset(); }

    // Call it when the rows of queries have arrived.
    __device__ void load_queries() {
        if constexpr (Config::kHasCodes)
            products_.load_queries(q_, p_.dtype == DType::bfloat16, transform_.inner);
    }

    // Adds the block that begins with key `first_key`. `scales`: the place of the scales of its codes.
    __device__ void add(KeyRows<Config> k, ValueRows<Config> v, uint32_t scales, int32_t first_key) {
        BlockWeights weights;
        add_keys(weights, k, scales, first_key);
        add_values(weights, v);
    }

    // The same in two steps, add_keys() and add_values().
    using Scores = float[kRowTiles][Softmax::kLaneScores];
    using BlockWeights = uint32_t[kSteps][kRowTiles][2];  // weights of the block's keys: operand b of P V
    __device__ void add_keys(BlockWeights& weights, KeyRows<Config> k, uint32_t scales, int32_t first_key) {
        using Weight = typename Products::Weight;
        Scores scores[kSteps];
        if constexpr (Config::kHasCodes) {
            typename Products::KeyTerms terms[kSteps];
            Products::load_terms(terms, layout_, scales);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) products_.multiply_q_k(scores[step], q_, k, step);
            products_.transform(scores, transform_, terms);
            see(scores, first_key);
            softmax_.template weigh<Weight, kFromZero>(
                weights, scores,
                [&](float weight, float rounded, int step, int r, int e) {
                    float& sum = softmax_.sum[r][e % 2];
                    sum = fmaf(weight, terms[step].inverse_scale[e / 2], sum);
                    Products::add_offset(softmax_, rounded, terms[step], r, e);
                },
                Unified{*this});
        } else {
            products_.multiply_q_k(scores[0], q_, k, 0);
            products_.transform(scores[0], transform_);
            see(scores, first_key);
            softmax_.template weigh<Weight, kFromZero>(
                weights, scores,
                [&](float weight, float, int, int r, int e) { softmax_.sum[r][e % 2] += weight; },
                Unified{*this});
        }
    }
    __device__ void add_values(const BlockWeights& weights, ValueRows<Config> v) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            products_.multiply_p_v(softmax_.out, weights[step], v, step);
    }

    // Call it once, after the last block and before store() or leave(): turns sums over this lane's keys into
    // sums over all keys, and sums of codes into sums of values.
    __device__ void finish() {
        Softmax::for_each_row([&](int r, int i) { softmax_.sum_over_keys(r, i); });
        if constexpr (Config::kHasCodes) Products::finish(softmax_);
    }

    // Writes the item's rows, if this warp has worked on the whole item.
    __device__ void store() {
        const SequenceSlice seq = sequences_.slice(item_.sequence);  // not kept in registers all along
        const int lane = threadIdx.x % 32;
        Softmax::for_each_row([&](int r, int i) {
            SoftmaxState state{softmax_.max[r][i], softmax_.sum[r][i]};
            const DecodeRow row(seq, group_size_, item_.kv_head, row_of(r, i));
            float factor = p_.out_scale;
            if (OCTAVO_RARE(p_.sinks != nullptr)) factor *= state.add_sink(p_.sinks[row.head] * kLog2e);
            softmax_.sum[r][i] = state.inverse_sum() * factor;
            if (p_.lse && lane / 4 == 0 && row.valid) {
                p_.lse[seq.lse_begin + row.token * p_.lse_token_stride + row.head * p_.lse_head_stride] =
                    state.lse();
            }
        });
        softmax_.for_each_out([&](float& out, int r, int, int i) { out *= softmax_.sum[r][i]; });
        if constexpr (Config::kHasCodes) {
            for_each_pair([&](int r, int i, int dim, float low, float high) {
                const DecodeRow row(seq, group_size_, item_.kv_head, row_of(r, i));
                T* const target = static_cast<T*>(p_.out) + seq.out_begin + row.token * p_.out_token_stride +
                                  row.head * p_.out_head_stride;
                if (row.valid && dim < p_.head_dim_v)
                    *reinterpret_cast<uint32_t*>(target + dim) = pack_output<T>(p_.dtype, low, high);
            });
        } else {
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
                const DecodeRow row(seq, group_size_, item_.kv_head, 8 * r + lane / 4);
                T* const target = static_cast<T*>(p_.out) + seq.out_begin + row.token * p_.out_token_stride +
                                  row.head * p_.out_head_stride + 2 * (lane % 4);
#pragma unroll
                for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const uint32_t pair = ptx::transpose_8x8(pack_output<T>(
                            p_.dtype, softmax_.out[r][d][2 * half], softmax_.out[r][d][2 * half + 1]));
                        const int dim = 16 * d + 8 * half;
                        if (row.valid && dim < p_.head_dim_v)
                            *reinterpret_cast<uint32_t*>(target + dim) = pair;
                    }
                }
            }
        }
    }

    // Leaves this warp's partial result for those who combine them, if others work on the item too.
    __device__ void leave(WarpPartial<Config>& partial) {
        const int lane = threadIdx.x % 32;
        Softmax::for_each_row([&](int r, int i) {
            if (lane / 4 == 0) {
                partial.states[row_of(r, i)] = {softmax_.max[r][i], softmax_.sum[r][i]};
            }
        });
        if constexpr (Config::kHasCodes) {
            for_each_pair([&](int r, int i, int dim, float low, float high) {
                *reinterpret_cast<float2*>(&partial.out[row_of(r, i)][dim]) = {low, high};
            });
        } else {
            softmax_.for_each_out(
                [&](float& out, int r, int dim, int i) { partial.out[row_of(r, i)][dim + lane / 4] = out; });
        }
    }

  private:
    // softmax_phi, which is looked at when a maximum has to be raised, as at the first block.
    struct Unified {
        const WarpAttention& own;

        __device__ bool given() const { return own.p_.has_softmax_phi; }
        __device__ float operator()(float max, int r, int i) const {
            const float phi = own.p_.softmax_phi_of_heads
                                  ? ptx::load_shared_float(phi_address<Config>(own.q_, row_of(r, i)))
                                  : own.p_.softmax_phi;
            constexpr bool kWide = std::is_same_v<typename Products::Weight, bfloat16>;
            return (kWide ? UnifiedMax::of_wide(phi) : UnifiedMax::of_float16(phi))(max);
        }
    };

    // Where the chunk of the item's one query begins; 0 without chunks.
    __device__ int32_t chunk_begin() const {
        if (p_.attention_chunk.divisor == 0) return 0;
        const int32_t last = max(seq_.see.seqlen_k - 1, 0);
        return last - p_.attention_chunk.remainder(last);
    }

    __device__ static int row_of(int r, int i) { return Softmax::row_of(threadIdx.x % 32, r, i); }
    __device__ static int key_of(int e) { return Softmax::key_of(threadIdx.x % 32, e); }

    // Calls body(r, i, dim, out of dim, out of dim + 1), for codes, whose accumulators belong to neighbouring
    // dims.
    template <class Body>
    __device__ void for_each_pair(Body body) const {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
            for (int d = 0; d < Softmax::kOwnDimTiles; ++d) {
                const auto& out = softmax_.out[r][d];
                const int dim = Products::dim_of(threadIdx.x % 32, d);
                body(r, 0, dim, out[0], out[2]);
                body(r, 1, dim, out[1], out[3]);
            }
        }
    }

    // Applies what depends on positions: ALiBi, and -inf where the query does not see the key.
    __device__ void see(Scores (&scores)[kSteps], int32_t first_key) const {
        if constexpr (kChosen) return see_chosen(scores, first_key);
        if (OCTAVO_RARE(p_.alibi_slopes != nullptr)) {
            float slope_log2[kRowTiles][2];
            Softmax::for_each_row([&](int r, int i) {
                slope_log2[r][i] = ptx::load_shared_float(slope_address<Config>(q_, row_of(r, i))) * kLog2e;
            });
            for_each_score(scores, first_key, [&](float& score, int r, int e, int32_t key) {
                score += alibi_bias(slope_log2[r][e % 2], q_pos_[r][e % 2], key);
            });
        }
        if (OCTAVO_RARE(first_key + Config::kBlockKeys > all_visible_end_)) {
            const int32_t first_q_pos = seq_.q_pos(0), last_q_pos = seq_.see.seqlen_k - 1;
            if (p_.is_tree(seq_.seqlen_q)) see_tree(scores, first_key);
            const bool in_chunk = first_key + all_visible_end_ >= 0;
            if (in_chunk &&
                KeyTiles::all_visible(seq_.see, first_q_pos, last_q_pos, first_key, Config::kBlockKeys))
                return;
            for_each_score(scores, first_key, [&](float& score, int r, int e, int32_t key) {
                const bool before_chunk = key >= seq_.see.prefix_len && key + all_visible_end_ < 0;
                if (before_chunk || !seq_.see.visible(q_pos_[r][e % 2], key)) score = -INFINITY;
            });
        }
    }
    // The same for chosen pages, where the positions of keys are looked up.
    __device__ __forceinline__ void see_chosen(Scores (&scores)[kSteps], int32_t first_key) const {
        const bool has_alibi = p_.alibi_slopes != nullptr;
        const bool is_masked = first_key + Config::kBlockKeys > all_visible_end_;
        if (!OCTAVO_RARE(has_alibi || is_masked)) return;
        float slope_log2[kRowTiles][2];
        Softmax::for_each_row([&](int r, int i) {
            slope_log2[r][i] =
                has_alibi ? ptx::load_shared_float(slope_address<Config>(q_, row_of(r, i))) * kLog2e : 0.0f;
        });
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int32_t first = first_key + step * kStepKeys;
            const int32_t positions[2] = {sequences_.position(first + key_of(0)),
                                          sequences_.position(first + key_of(2))};
            Softmax::for_each_score(scores[step], [&](float& score, int r, int e) {
                const int32_t position = positions[e / 2];
                if (has_alibi) score += alibi_bias(slope_log2[r][e % 2], q_pos_[r][e % 2], position);
                if (!seq_.see.visible(q_pos_[r][e % 2], position)) score = -INFINITY;
            });
        }
    }
    // Sets scores to -inf where the tree mask hides the key.
    __device__ __forceinline__ void see_tree(Scores (&scores)[kSteps], int32_t first_key) const {
        const int32_t begin = seq_.q_pos(0), first = max(begin, seq_.see.prefix_len);
        for_each_score(scores, first_key, [&](float& score, int r, int e, int32_t key) {
            const uint32_t word = ptx::load_shared_4(tree_word_address<Config>(q_, row_of(r, e % 2)));
            if (key >= first && !(word >> static_cast<uint32_t>(key - begin) % 32 & 1)) score = -INFINITY;
        });
    }
    // Calls body(score, r, e, key).
    template <class Body>
    __device__ static void for_each_score(Scores (&scores)[kSteps], int32_t first_key, Body body) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            Softmax::for_each_score(scores[step], [&](float& score, int r, int e) {
                body(score, r, e, first_key + step * kStepKeys + key_of(e));
            });
        }
    }

    const AttentionParams& p_;
    const FastDivide& group_size_;
    const CodeLayout& layout_;
    const Sequences& sequences_;
    ScoreTransform transform_;
    Item item_;
    Products products_;
    QueryRows<Config> q_;
    SequenceSlice seq_;
    // Keys before it are visible to all queries. With a window it is the negative of a key: keys before that
    // one, except for those of the prefix, are hidden from all.
    int32_t all_visible_end_;
    int32_t q_pos_[kRowTiles][2];
    Softmax softmax_;
};

}  // namespace octavo::cuda
