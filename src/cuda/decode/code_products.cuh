// The products of a warp with a block of codes, by mma.sync in float16: S^T = K Q^T and O^T = V^T P^T. Page:
// docs/kernels/quantised_decode.md.
//
// No element is ever scaled. The scale of a key multiplies its scores. The logarithm of a value's scale is
// added to its scores, so that the weight, exp2(score - max), enters the product with the scale in it; in the
// sum of weights a factor takes it out again. Offsets of codes (and minima of int4) belong to a key or value
// as a whole: they are multiplied by the sum of the queries' elements, or by the sum of weights.
//
// A lane is lane 4 g + t, as mma.sync numbers them. A product over dims may take the dims in any order, if Q
// has the same, and the dims of O^T may be in any order that is known when they are stored. So codes enter in
// the order in which ldmatrix loads them:
//
//     K, 8 bits   a register holds dims 4t .. 4t + 3 of a chunk of 16, of key g
//     K, 4 bits   dims 8t .. 8t + 7 of a chunk of 32
//     V, 8 bits   transposed in units of two bytes: dims 2g, 2g + 1 of keys 2t, 2t + 1
//     V, 4 bits   dims 4g .. 4g + 3 of keys 2t, 2t + 1
#pragma once

#include "common/float_bits.h"
#include "common/score.h"
#include "cuda/decode/rows.cuh"
#include "cuda/decode/scales.cuh"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/tile/code_pairs.cuh"
#include "cuda/tile/transposed_softmax.cuh"
#include "cuda/types.h"
#include "cuda/warp.cuh"

namespace octavo::cuda {

template <class Config>
class CodeProducts {
    static constexpr int kRowTiles = Config::kRowTiles, kDimTiles = Config::kHeadDim / 16;
    static constexpr int kSteps = Config::kBlockKeys / kStepKeys;
    static constexpr DType kKeys = type_of_keys(Config::kCodes), kValues = type_of_values(Config::kCodes);
    static constexpr bool kHasMinima = kKeys == DType::int4;
    // Whether codes of keys have an offset or a minimum, which is multiplied by the sum of a row's elements.
    static constexpr bool kHasSums = kKeys == DType::int8 || kHasMinima;

  public:
    using Weight = float16;
    // Whether values have an offset or a minimum, for which a sum of weights of its own is needed.
    static constexpr bool kHasOffset = kValues == DType::int8 || kValues == DType::int4;
    using Softmax = TransposedSoftmax<kRowTiles, kDimTiles, kSteps, kHasOffset, Config::kFourRows>;
    static constexpr int kLaneKeys = Softmax::kLaneKeys;
    using Scores = float[kRowTiles][Softmax::kLaneScores];  // this lane's, of 16 keys

    __device__ CodeProducts() {
        const int lane = threadIdx.x % 32;
        a_ = KeyRows<Config>::offset(lane % 16, lane / 16);
        a_transposed_ = ValueRows<Config>::offset(lane % 16, lane / 16);
        pin_in_register(a_);
        pin_in_register(a_transposed_);
    }

    // Loads the queries, which must have arrived, into registers: as float16, each row multiplied by a power
    // of two that brings its largest element near 2^10 (some are multiplied by 16 more, and stay below 2^15).
    __device__ void load_queries(QueryRows<Config> q, bool is_bfloat16, float inner) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
            uint32_t words[kQueryWords];
            load_row(words, q, (8 * r + lane / 4) % Config::kRows);
            // Without their signs, numbers of either dtype are in the order of their bits.
            uint32_t largest = 0;
#pragma unroll
            for (uint32_t word : words) largest = __vmaxu2(largest, word & 0x7fff7fffu);
            largest = max(largest & 0xffffu, largest >> 16);
            largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
            const float magnitude = is_bfloat16 ? unpack<bfloat16>(largest).x : unpack<float16>(largest).x;
            const int32_t exponent = max(static_cast<int32_t>(__float_as_uint(magnitude) >> 23), 27) - 127;
            const float factor = power_of_two(10 - exponent);
            if (is_bfloat16) {
                scale<bfloat16>(words, factor);
            } else {
                scale<float16>(words, factor);
            }
            arrange(queries_[r], words);
            const float inverse = power_of_two(exponent - 10) * inner;
            float sums[4] = {};  // sums[i]: of the elements of row_of(lane, 0, i)
            if constexpr (kHasSums) add_up(sums, queries_[r]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int from = 4 * Softmax::row_of(lane, 0, i);  // a lane that has loaded this row
                const float row_inverse = __shfl_sync(~0u, inverse, from);
                if constexpr (kKeys == DType::int4) {
                    factors_[r][i] = CodePairs<kKeys>::kUpperUnit * row_inverse;
                    offsets_[r][i] = sums[i] * row_inverse;
                } else {
                    factors_[r][i] = CodePairs<kKeys>::kUnit * row_inverse;
                    offsets_[r][i] = -CodePairs<kKeys>::kOffset / CodePairs<kKeys>::kUnit * sums[i];
                }
            }
        }
    }

    // Multiplies the queries by the codes of 16 keys, from key 16 `step` on.
    __device__ void multiply_q_k(Scores& scores, QueryRows<Config>, KeyRows<Config> k, int step) const {
        float products[kRowTiles][4], odd[kRowTiles][4];  // two chains of products
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                products[r][e] = kKeys == DType::int8 ? offsets_[r][e % 2] : 0.0f;
                odd[r][e] = 0.0f;
            }
        }
        auto multiply = [&](const uint32_t (&a)[4], int word, bool is_odd) {
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
                ptx::mma_m16n8k16<float16>(kRowTiles == 1 && is_odd ? odd[r] : products[r], a,
                                           queries_[r][word], queries_[r][word + 1]);
            }
        };
        const uint32_t rows = k.address + 16 * kStepKeys * Config::kKeyChunks * step + a_;
#pragma unroll
        for (int chunk = 0; chunk < Config::kKeyChunks; chunk += 2) {
            uint32_t x[4];  // one chunk of keys 0 to 7 and of keys 8 to 15, then the next chunk of both
            ptx::ldmatrix_x4(x, KeyRows<Config>::advance(rows, chunk));
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                if constexpr (kKeys == DType::int4) {
                    uint32_t low[4], high[4];
                    CodePairs<kKeys>::split(x[2 * c], low);
                    CodePairs<kKeys>::split(x[2 * c + 1], high);
                    multiply({low[0], high[0], low[1], high[1]}, 4 * (chunk + c), false);
                    multiply({low[2], high[2], low[3], high[3]}, 4 * (chunk + c) + 2, true);
                } else {
                    uint32_t a[4];
                    CodePairs<kKeys>::split(x[2 * c], a[0], a[2]);
                    CodePairs<kKeys>::split(x[2 * c + 1], a[1], a[3]);
                    multiply(a, 2 * (chunk + c), c == 1);
                }
            }
        }
        if (kRowTiles == 1) {
#pragma unroll
            for (int e = 0; e < 4; ++e) products[0][e] += odd[0][e];
        }
        Softmax::take(scores, products);
    }

    // The factors and terms that follow from the scales of this lane's keys and of their values.
    struct KeyTerms {
        float scale[kLaneKeys], minimum[kLaneKeys];             // of the key
        float log2_scale[kLaneKeys], inverse_scale[kLaneKeys];  // of the value
        float minimum_by_scale[kLaneKeys];
    };
    __device__ static void load_terms(KeyTerms (&terms)[kSteps], const CodeLayout& layout, uint32_t scales) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (has_scales<Config>(layout)) {
                const auto words = StepScales<kLaneKeys>::load(scales, step);
#pragma unroll
                for (int i = 0; i < kLaneKeys; ++i) set_terms(terms[step], i, words.keys[i], words.values[i]);
            } else {
                terms[step] = {};
#pragma unroll
                for (int i = 0; i < kLaneKeys; ++i)
                    terms[step].scale[i] = terms[step].inverse_scale[i] = 1.0f;
            }
        }
    }

    // Turns products of codes into scores in units of log2(e), without the terms that depend on positions.
    __device__ void transform(Scores (&scores)[kSteps], const ScoreTransform& transform,
                              const KeyTerms (&terms)[kSteps]) const {
        const bool has_softcap = transform.has_softcap;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            Softmax::for_each_score(scores[step], [&](float& score, int r, int e) {
                const int key = e / 2, row = e % 2;
                float start = has_softcap ? 0.0f : terms[step].log2_scale[key];
                if constexpr (kHasMinima) start = fmaf(terms[step].minimum[key], offsets_[r][row], start);
                score = fmaf(score, terms[step].scale[key] * factors_[r][row], start);
            });
        }
        if (OCTAVO_RARE(has_softcap)) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                Softmax::for_each_score(scores[step], [&](float& score, int, int e) {
                    score = transform.outer * ScoreTransform::tanh(score) + terms[step].log2_scale[e / 2];
                });
            }
        }
    }

    // Adds to the softmax's weighted offsets. It uses the rounded weight that the product with V takes, so
    // that a value's offset cancels exactly, whatever the rounding of its weight.
    __device__ static void add_offset(Softmax& softmax, float weight, const KeyTerms& terms, int r, int e) {
        if constexpr (kValues == DType::int4) {
            float& offset = softmax.offset[r][e % 2];
            offset = fmaf(weight, terms.minimum_by_scale[e / 2], offset);
        } else if constexpr (kHasOffset) {
            softmax.offset[r][e % 2] += weight;
        }
    }

    __device__ void multiply_p_v(float (&out)[kRowTiles][kDimTiles][4],
                                 const uint32_t (&weights)[kRowTiles][2], ValueRows<Config> v,
                                 int step) const {
        auto multiply = [&](const uint32_t (&a)[4], int d) {
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r)
                ptx::mma_m16n8k16<float16>(out[r][d], a, weights[r][0], weights[r][1]);
        };
        const uint32_t rows = v.address + 16 * kStepKeys * Config::kValueChunks * step + a_transposed_;
#pragma unroll
        for (int chunk = 0; chunk < Config::kValueChunks; chunk += 2) {
            uint32_t x[4];
            ptx::ldmatrix_x4_trans(x, ValueRows<Config>::advance(rows, chunk));
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                if constexpr (kValues == DType::int4) {
                    uint32_t low[4], high[4];
                    CodePairs<kValues>::split(x[2 * c], low);
                    CodePairs<kValues>::split(x[2 * c + 1], high);
                    multiply({low[0], low[1], high[0], high[1]}, 2 * (chunk + c));
                    multiply({low[2], low[3], high[2], high[3]}, 2 * (chunk + c) + 1);
                } else {
                    uint32_t a[4];
                    CodePairs<kValues>::split_alternating(x[2 * c], a[0], a[1]);
                    CodePairs<kValues>::split_alternating(x[2 * c + 1], a[2], a[3]);
                    multiply(a, chunk + c);
                }
            }
        }
    }

    // The dim of out[r][d][0] behind finish(); the dim of out[r][d][e] is e / 2 further.
    __device__ static int dim_of(int lane, int d) {
        d = Softmax::dim_tile_of(lane, d);
        if (kValues == DType::int4) return d / 2 * 32 + lane / 4 * 4 + d % 2 * 2;
        return 16 * d + lane / 4 * 2;
    }

    // Call it after the last block: turns sums of weighted codes into sums of weighted values.
    __device__ static void finish(Softmax& softmax) {
        softmax.sum_out_over_keys();
        if constexpr (kHasOffset) {
            Softmax::for_each_row([&](int r, int i) { softmax.sum_offset_over_keys(r, i); });
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
                for (int d = 0; d < Softmax::kOwnDimTiles; ++d) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        float& out = softmax.out[r][d][e];
                        const float offset = softmax.offset[r][e % 2];
                        if constexpr (kValues == DType::int4) {
                            using Pairs = CodePairs<kValues>;
                            out = fmaf(out, e < 2 ? Pairs::kUnit : Pairs::kUpperUnit, offset);
                        } else {
                            using Pairs = CodePairs<kValues>;
                            out = fmaf(out, Pairs::kUnit, -Pairs::kOffset * offset);
                        }
                    }
                }
            }
        }
    }

  private:
    static constexpr int kQueryWords = Config::kHeadDim / 8;  // a lane's quarter of a row
    // Smaller scales of values, down to zero, count as this one, whose inverse still fits into float32.
    static constexpr float kLeastValueScale = 0x1p-80f;

    // The larger of x and least, or NaN if x is NaN.
    __device__ static float at_least(float x, float least) {
        float larger;
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(least));
        return larger;
    }

    // Sets the terms of key and value i from the words of their scales.
    __device__ static void set_terms(KeyTerms& terms, int i, uint32_t key, uint32_t value) {
        if constexpr (kKeys == DType::int4) {
            const float2 pair = unpack<float16>(key);
            terms.scale[i] = pair.x;
            terms.minimum[i] = pair.y;
        } else {
            terms.scale[i] = __uint_as_float(key);
        }
        float scale = __uint_as_float(value), minimum = 0.0f;
        if constexpr (kValues == DType::int4) {
            const float2 pair = unpack<float16>(value);
            scale = pair.x;
            minimum = pair.y;
        }
        scale = at_least(scale, kLeastValueScale);
        asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(terms.log2_scale[i]) : "f"(scale));
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(terms.inverse_scale[i]) : "f"(scale));
        terms.minimum_by_scale[i] = minimum * terms.inverse_scale[i];
    }

    // Makes float16 of the numbers of type X, each multiplied by `factor`.
    template <class X>
    __device__ static void scale(uint32_t (&words)[kQueryWords], float factor) {
#pragma unroll
        for (uint32_t& word : words) {
            const float2 pair = unpack<X>(word);
            word = pack<float16>(pair.x * factor, pair.y * factor);
        }
    }
    // Adds up the elements of each row by a product with ones, or with sixteenths where arrange() has
    // multiplied by 16.
    __device__ static void add_up(float (&sums)[4], const uint32_t (&queries)[kQueryWords]) {
        constexpr uint32_t kOnes = 0x3c003c00, kSixteenths = 0x2c002c00;
        constexpr uint32_t kFirst = kKeys == DType::int4 ? kSixteenths : kOnes;
#pragma unroll
        for (int i = 0; i < kQueryWords; i += 2) {
            ptx::mma_m16n8k16<float16>(sums, {kFirst, kFirst, kOnes, kOnes}, queries[i], queries[i + 1]);
        }
    }

    // Loads this lane's dims of a row, in their order.
    __device__ static void load_row(uint32_t (&words)[kQueryWords], QueryRows<Config> q, int row) {
        const int t = threadIdx.x % 4;
        auto chunk = [&](int i) { return q.address + QueryRows<Config>::offset(row, i); };
        if constexpr (kKeys == DType::int4) {
#pragma unroll
            for (int c = 0; c < Config::kHeadDim / 32; ++c) {
                const uint4 x = ptx::load_shared_16(chunk(4 * c + t));
                words[4 * c] = x.x, words[4 * c + 1] = x.y, words[4 * c + 2] = x.z, words[4 * c + 3] = x.w;
            }
        } else {
#pragma unroll
            for (int c = 0; c < Config::kHeadDim / 16; ++c) {
                const uint2 x = ptx::load_shared_8(chunk(2 * c + t / 2) + 8 * (t % 2));
                words[2 * c] = x.x, words[2 * c + 1] = x.y;
            }
        }
    }
    // Arranges words as operands b, whose dims are in the same order as those of keys. For int4 the first of
    // two words is multiplied by 16, which makes up for the smaller unit of its codes.
    __device__ static void arrange(uint32_t (&operands)[kQueryWords], const uint32_t (&words)[kQueryWords]) {
        constexpr uint32_t kLowHalves = 0x5410, kHighHalves = 0x7632;
#pragma unroll
        for (int i = 0; i < kQueryWords; i += kKeys == DType::int4 ? 4 : 2) {
            if constexpr (kKeys == DType::int4) {
                operands[i] = times_16(select_bytes<kLowHalves>(words[i], words[i + 2]));
                operands[i + 1] = select_bytes<kHighHalves>(words[i], words[i + 2]);
                operands[i + 2] = times_16(select_bytes<kLowHalves>(words[i + 1], words[i + 3]));
                operands[i + 3] = select_bytes<kHighHalves>(words[i + 1], words[i + 3]);
            } else if constexpr (CodePairs<kKeys>::kAlternates) {
                operands[i] = select_bytes<kLowHalves>(words[i], words[i + 1]);
                operands[i + 1] = select_bytes<kHighHalves>(words[i], words[i + 1]);
            } else {
                operands[i] = words[i];
                operands[i + 1] = words[i + 1];
            }
        }
    }
    __device__ static uint32_t times_16(uint32_t word) {
        const float2 pair = unpack<float16>(word);
        return pack<float16>(16.0f * pair.x, 16.0f * pair.y);
    }

    uint32_t a_, a_transposed_;  // the places from which this lane reads operands
    uint32_t queries_[kRowTiles][kQueryWords];
    float factors_[kRowTiles][2];  // for products of codes: unit x the row's power of two x the softmax scale
    float offsets_[kRowTiles][2];  // int8: what products start from; int4: the factor of a key's minimum
};

}  // namespace octavo::cuda
