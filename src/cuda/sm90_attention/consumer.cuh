// The consumers: each warpgroup owns 64 rows of the row tile, whose scores, weights and result stay in its
// registers.
#pragma once

#include "common/score.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/reciprocal.h"
#include "cuda/ptx/stmatrix.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90_attention/few_rows.cuh"
#include "cuda/sm90_attention/passed_tiles.cuh"
#include "cuda/sm90_attention/rows.cuh"
#include "cuda/sm90_attention/shared.cuh"
#include "cuda/sm90_attention/softmax.cuh"
#include "cuda/sm90_attention/splits.cuh"
#include "cuda/tile/dropout.cuh"
#include "cuda/types.h"

namespace octavo::cuda {

// Named barriers: number 1 + w gives warpgroup w its turn at the tensor cores, and number 1 + kConsumers + w
// makes its own threads wait for one another.
template <class Config>
__device__ __forceinline__ void wait_for_turn(int group) {
    if constexpr (Config::kTakesTurns) ptx::named_barrier_sync(1 + group, 256);
}
template <class Config>
__device__ __forceinline__ void pass_turn(int group) {
    if constexpr (Config::kTakesTurns)
        ptx::named_barrier_arrive(group + 1 == Config::kConsumers ? 1 : 2 + group, 256);
}

// One consumer warpgroup: run() works through all row tiles of its CTA.
template <class T, class Config>
class Sm90Consumer {
  public:
    __device__ Sm90Consumer(const AttentionParams& p, const Sm90Launch& plan, Sm90Shared<Config>& shared,
                            int group)
        : p_(p),
          plan_(plan),
          shared_(shared),
          group_(group),
          block_(tile_block<Config>(group)),
          places_(plan) {}

    __device__ __forceinline__ void run() {
        ScoreTransform transform = ScoreTransform::make(p_.softmax_scale, p_.softcap);
        float scale = transform.has_softcap ? 1.0f : transform.inner;
        const bool add_alibi = Config::kAlibi && !(Config::kAlibiProduct && !transform.has_softcap);
        if (group_ == Config::kConsumers - 1) pass_turn<Config>(group_);

        Sm90Work work = take_work<Config>(shared_, work_ring_);
        while (work.batch >= 0) {
            const bool few_rows = is_few_rows<Config>(work.rows<Config>(plan_));
            set_scales(transform, scale, q_ring_, few_rows ? 0 : group_);
            if (few_rows) {
                work_through_few_rows(work, transform);
                work = take_work<Config>(shared_, work_ring_);
                continue;
            }
            float scores[kScores], out[kOut], factor[2];
            uint32_t weights[kWeights];
            auto tiles = key_tiles<Config>(p_, plan_, work, own_block());
            Rows rows(p_, plan_, work, block_, places_, scale);
            if constexpr (Config::kTree) rows.full_end = min(rows.full_end, work.tree_begin(p_));
            Sm90Softmax softmax(scale);
            if constexpr (Config::kAlibiProduct) lay_out_slopes(work, scale);
            int32_t tile = first_tile(tiles);
            ptx::mbarrier_wait(&shared_.q_full[q_ring_.slot][group_], q_ring_.parity);
            while (tile >= 0 && !rows.see_any(tiles.start(tile), Config::kKeys)) {
                skip_tile();
                tile = next_tile(tiles, tile);
            }
#pragma unroll
            for (int i = 0; i < kOut; ++i) out[i] = 0.0f;
            if (tile < 0) {
                if (Config::kFewRowTiles > 0 && tiles.count == 0) keep_step();
                float out_scale[2];
                finish(work, rows, softmax, out_scale);
                passed_.free(shared_, k_ring_, v_ring_);
                store(work, out, out_scale);
                work = take_work<Config>(shared_, work_ring_);
                continue;
            }

            float out_scale[2];
            Sm90Work next;
            // Before many tiles are passed over, the overlapping products end; the row tile goes on from
            // here.
            do {
                passed_.free(shared_, k_ring_, v_ring_);
                DropoutMask<2, Config::kKeys / 8> kept;
                if constexpr (Config::kDropout) draw(kept, work, tiles.start(tile));
                wait_for_tile(shared_.k_full, k_ring_);
                wait_for_turn<Config>(group_);
                multiply_q_k(scores, q_ring_.slot);
                pass_turn<Config>(group_);
                ptx::wgmma_wait<0>();
                ptx::wgmma_results(scores);
                release_slot<Config>(shared_.k_empty, k_ring_);
                score_tile<Config::kKeys>(scores, transform, add_alibi, rows, tiles.start(tile));
                if constexpr (Config::kTree) hide_by_tree(scores, rows, work, tiles.start(tile));
                const bool rescale =
                    apply_softmax(softmax, scores, rows, tiles.start(tile), add_alibi, factor);
                if (Config::kOwnTiles && rescale) {  // at first, `out` is zero
#pragma unroll
                    for (int i = 0; i < kOut; ++i) out[i] *= factor[i / 2 % 2];
                }
                pack_weights(scores, kept, weights);
                tile = next_tile(tiles, tile);

                // The scores of one tile are computed together with the product of V and the weights of the
                // tile before. Tiles are visited from the last to the first; where row tiles are chained, the
                // loop then goes on with the last tile of the next row tile.
                while (true) {
                    const bool boundary = tile < 0;
                    if (Config::kOwnTiles && !boundary && passed_.too_many()) break;
                    Ring<Config::kQSlots> q_ring = q_ring_;
                    if (boundary) {
                        finish(work, rows, softmax, out_scale);
                        if (Config::kOwnTiles) break;
                        next = take_work<Config>(shared_, work_ring_);
                        if (!Config::kChained || next.batch < 0) break;
                        // The combination of splits takes the registers that the next scores would have.
                        if (Config::kSplits && work.is_split()) break;
                        if (is_few_rows<Config>(next.rows<Config>(plan_))) break;
                        tiles = key_tiles<Config>(p_, plan_, next, own_block());
                        tile = first_tile(tiles);
                        Ring<Config::kQSlots> next_ring = q_ring_;
                        next_ring.advance();
                        set_scales(transform, scale, next_ring, group_);
                        rows = Rows(p_, plan_, next, block_, places_, scale);
                        if constexpr (Config::kTree) rows.full_end = min(rows.full_end, next.tree_begin(p_));
                        if (tile < 0 || !rows.see_any(tiles.start(tile), Config::kKeys)) break;
                        work = next;
                        softmax = Sm90Softmax(scale);
                        q_ring.advance();
                        ptx::mbarrier_wait(&shared_.q_full[q_ring.slot][group_], q_ring.parity);
                    }
                    if constexpr (Config::kDropout) draw(kept, work, tiles.start(tile));
                    const int32_t passed = passed_.free_keys(shared_, k_ring_);
                    wait_for_tile(shared_.k_full, k_ring_);
                    wait_for_turn<Config>(group_);
                    multiply_q_k(scores, q_ring.slot);
                    wait_for_tile(shared_.v_full, v_ring_);
                    multiply_p_v(weights, out);
                    pass_turn<Config>(group_);
                    ptx::wgmma_wait<1>();
                    ptx::wgmma_results(scores);
                    release_slot<Config>(shared_.k_empty, k_ring_);
                    score_tile<Config::kKeys>(scores, transform, add_alibi, rows, tiles.start(tile));
                    if constexpr (Config::kTree) hide_by_tree(scores, rows, work, tiles.start(tile));
                    const bool rescale =
                        apply_softmax(softmax, scores, rows, tiles.start(tile), add_alibi, factor);
                    // The exponentials are to run under the product with V. ptxas would move the wait for
                    // that product in front of them (3 to 5 % slower on an H200), if it were not behind a
                    // branch: so each branch has a wait of its own.
                    ptx::wgmma_results(softmax.sum);
                    if (boundary) {
                        end_p_v(out);
                        store<false>(work, out, out_scale);
#pragma unroll
                        for (int i = 0; i < kOut; ++i) out[i] = 0.0f;
                    } else {
                        if (rescale) {
                            wait_for_p_v(out);
#pragma unroll
                            for (int i = 0; i < kOut; ++i) out[i] *= factor[i / 2 % 2];
                        } else {
                            wait_for_p_v(out);
                        }
                        release_slot<Config>(shared_.v_empty, v_ring_);
                    }
                    passed_.free_values(shared_, v_ring_, passed);
                    pack_weights(scores, kept, weights);
                    tile = next_tile(tiles, tile);
                }
                wait_for_tile(shared_.v_full, v_ring_);
                multiply_p_v(weights, out);
                end_p_v(out);
            } while (Config::kOwnTiles && tile >= 0);
            passed_.free(shared_, k_ring_, v_ring_);
            store(work, out, out_scale);
            // With kOwnTiles not before: the producer hands out the next row tile when it has loaded all
            // tiles of this one, for which it needs the slots of those at the end that were passed over.
            work = Config::kOwnTiles ? take_work<Config>(shared_, work_ring_) : next;
        }
    }

  private:
    static constexpr int kScores = Config::kKeys / 2;
    static constexpr int kWeights = Config::kKeys / 4;  // registers, two weights each
    static constexpr int kOut = Config::kValueDim / 2;
    using Rows = Sm90Rows<Config>;
    using Number = typename ProductType<T>::Type;
    using ProductQK = ptx::Wgmma<Number, Config::kKeys>;
    using ProductPV = ptx::Wgmma<Number, Config::kValueDim>;

    // The warpgroups together work through a row tile of few rows.
    __device__ __forceinline__ void work_through_few_rows(const Sm90Work& work,
                                                          const ScoreTransform& transform) {
        if constexpr (Config::kFewRowTiles > 0) {
            for (int group = 0; group < Config::kConsumers; ++group)
                ptx::mbarrier_wait(&shared_.q_full[q_ring_.slot][group], q_ring_.parity);
            auto run = [&](auto rows) {
                rows.add_tiles(k_ring_, v_ring_);
                rows.finish();
            };
            if (Config::kFewRowTiles == 1 || work.rows<Config>(plan_) <= 8) {
                run(PrefillFewRows<T, Config, 1>(p_, plan_, shared_, transform, result_scale(), work,
                                                 q_ring_.slot));
            } else {
                run(PrefillFewRows<T, Config, Config::kFewRowTiles>(p_, plan_, shared_, transform,
                                                                    result_scale(), work, q_ring_.slot));
            }
            q_ring_.advance();
        }
    }

    // Over codes: reads the factors that this warpgroup's scores and results have yet to be multiplied by.
    __device__ __forceinline__ void set_scales(ScoreTransform& transform, float& scale,
                                               const Ring<Config::kQSlots>& ring, int group) {
        if constexpr (std::is_same_v<T, AnyFloat16>) {
            ptx::mbarrier_wait(&shared_.q_full[ring.slot][group], ring.parity);
            const float2 scales = shared_.query_scales.scales[ring.slot][group];
            // Never zero, even if queries or scales are: the softmax and ALiBi divide by it.
            constexpr float kLeast = 0x1p-100f;
            const float inner = ScoreTransform::make(p_.softmax_scale, p_.softcap).inner * scales.x;
            transform.inner = inner < kLeast ? kLeast : inner;
            if (!transform.has_softcap) scale = transform.inner;
            value_scale_ = scales.y;
        }
    }
    __device__ __forceinline__ float result_scale() const {
        return std::is_same_v<T, AnyFloat16> ? p_.out_scale * value_scale_ : p_.out_scale;
    }

    // The tiles that this warpgroup multiplies, one after the other; -1 behind the last.
    template <class Tiles>
    __device__ __forceinline__ int32_t first_tile(Tiles& tiles) {
        if constexpr (Config::kOwnTiles)
            return tiles.next_own(passed_.count);
        else
            return tiles.last();
    }
    template <class Tiles>
    __device__ __forceinline__ int32_t next_tile(Tiles& tiles, int32_t tile) {
        if constexpr (Config::kOwnTiles)
            return tiles.next_own(passed_.count);
        else
            return tiles.before(tile);
    }
    // The warpgroup's block of queries in the row tile.
    __device__ __forceinline__ int own_block() const {
        if constexpr (Config::kOwnTiles)
            return block_ * Config::kGroupRows / Config::kBlockSize;
        else
            return 0;
    }

    // Takes a turn at the tensor cores without a product. Over row tiles without keys there would be no
    // turns, and one warpgroup could get ahead of another by as many row tiles as there are slots of queries.
    // In a row tile of few rows behind them, its wait for the first warpgroup's queries would then end before
    // they are there, since the phase before the slot's last one has the same parity.
    __device__ __forceinline__ void keep_step() {
        wait_for_turn<Config>(group_);
        pass_turn<Config>(group_);
    }
    // Keeps step with the other warpgroups over a tile that no row here sees.
    __device__ __forceinline__ void skip_tile() {
        keep_step();
        passed_.free(shared_, k_ring_, v_ring_);
        free_slot<Config>(shared_.k_full, shared_.k_empty, k_ring_);
        free_slot<Config>(shared_.v_full, shared_.v_empty, v_ring_);
    }

    // Waits until the next tile of K or V is there for a product.
    template <int kSize>
    __device__ __forceinline__ void wait_for_tile(uint64_t* full, const Ring<kSize>& ring) {
        ptx::mbarrier_wait(&full[ring.slot], ring.parity);
        if constexpr (Config::kConsumersFence) ptx::fence_proxy_async();
    }

    // The operand that holds the slopes of the rows. Zeros if there is a softcap, since the bias is added
    // behind that.
    __device__ __forceinline__ void lay_out_slopes(const Sm90Work& work, float scale) {
        const int32_t row = threadIdx.x % 128;
        if (row < Config::kGroupRows) {
            const int32_t head = work.first_head + row % plan_.heads;
            const float slope =
                p_.softcap > 0.0f
                    ? 0.0f
                    : p_.alibi_slopes[work.batch * p_.alibi_batch_stride + head] * kLog2e / scale;
            shared_.alibi.set_slope(group_, row, slope);
        }
        ptx::fence_proxy_async();
        ptx::named_barrier_sync(1 + Config::kConsumers + group_, 128);
    }

    // Starts scores = Q K^T, behind the product of PrefillAlibi where there is one.
    __device__ __forceinline__ void multiply_q_k(float (&scores)[kScores], int q_slot) {
        const uint64_t q = ptx::wgmma_descriptor(ptx::shared_address(shared_.q[q_slot][group_]), 0);
        const uint64_t k = ptx::wgmma_descriptor(ptx::shared_address(shared_.k[k_ring_.slot]), 0);
        ptx::wgmma_fence();
        if constexpr (Config::kAlibiProduct) {
            ptx::Wgmma<bfloat16, Config::kKeys>::ss(
                scores, ptx::wgmma_descriptor_plain(ptx::shared_address(shared_.alibi.slopes[group_])),
                ptx::wgmma_descriptor_plain(ptx::shared_address(shared_.alibi.columns)), false);
        }
#pragma unroll
        for (int step = 0; step < Config::kHeadDim / 16; ++step) {
            const int block = step / 4, offset = step % 4 * 32;
            ProductQK::ss(scores, q + (block * Config::kQBlockBytes + offset) / 16,
                          k + (block * Config::kKeyBlockBytes + offset) / 16,
                          Config::kAlibiProduct || step != 0);
        }
        ptx::wgmma_commit();
    }

    // Starts out += P V.
    __device__ __forceinline__ void multiply_p_v(const uint32_t (&weights)[kWeights], float (&out)[kOut]) {
        const uint64_t v =
            ptx::wgmma_descriptor(ptx::shared_address(shared_.v[v_ring_.slot]), Config::kKeyBlockBytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step) {
            ProductPV::rs(out, &weights[4 * step], v + step * 16 * Config::kRowBytes / 16);
        }
        ptx::wgmma_commit();
    }

    __device__ __forceinline__ static void wait_for_p_v(float (&out)[kOut]) {
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(out);
    }
    __device__ __forceinline__ void end_p_v(float (&out)[kOut]) {
        wait_for_p_v(out);
        release_slot<Config>(shared_.v_empty, v_ring_);
    }

    // Sets scores to -inf where the tree mask hides the key.
    __device__ __forceinline__ void hide_by_tree(float (&scores)[kScores], const Rows& rows,
                                                 const Sm90Work& work, int32_t first_key) const {
        if (first_key + Config::kKeys <= work.tree_begin(p_) || rows.see_all(first_key, Config::kKeys))
            return;
        const int32_t first_column = first_key + 2 * (threadIdx.x % 4);
        const int32_t first_token = work.first_token + block_ * plan_.tokens;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int32_t token = first_token + places_.token(half);
#pragma unroll
            for (int column = 0; column < Config::kKeys; column += 64) {
                const uint64_t hidden = work.hidden_by_tree(p_, token, first_column + column);
#pragma unroll
                for (int i = 2 * half; i < 32 && column / 2 + i < kScores; i += i % 2 ? 3 : 1) {
                    if (hidden >> (i / 4 * 8 + i % 2) & 1) scores[column / 2 + i] = -INFINITY;
                }
            }
        }
    }

    // Draws which weights of a tile dropout keeps.
    __device__ __forceinline__ void draw(DropoutMask<2, Config::kKeys / 8>& kept, const Sm90Work& work,
                                         int32_t first_key) {
        const uint64_t first_head = p_.dropout.head(work.batch, p_.num_q_heads, work.first_head);
        const int32_t first_token = work.first_token + block_ * plan_.tokens;
        kept.draw(p_.dropout, first_key, [&](int half) {
            return DropoutRow{first_head + places_.head(half), first_token + places_.token(half)};
        });
    }

    __device__ __forceinline__ void pack_weights(const float (&scores)[kScores],
                                                 const DropoutMask<2, Config::kKeys / 8>& kept,
                                                 uint32_t (&weights)[kWeights]) {
#pragma unroll
        for (int i = 0; i < kWeights; ++i) {
            weights[i] = pack<Number>(scores[2 * i], scores[2 * i + 1]);
            if constexpr (Config::kDropout) weights[i] = kept.apply(weights[i], i % 2, i / 2);
        }
    }

    // Once all weights are known: writes the LSE, and returns the factor by which the result has yet to be
    // multiplied. For a split, it writes the state of the rows to where the warpgroup that adds up the splits
    // finds it.
    __device__ __forceinline__ void finish(const Sm90Work& work, const Rows& rows, const Sm90Softmax& softmax,
                                           float (&out_scale)[2]) {
        if constexpr (Config::kShortEnds) {  // both rows side by side
            SoftmaxState states[2];
#pragma unroll
            for (int half = 0; half < 2; ++half)
                states[half] = {softmax.max_log2(half), row_sum(softmax.sum[half])};
            float factor[2] = {result_scale(), result_scale()};
            if (Config::kSinksAndChunks && OCTAVO_RARE(p_.sinks != nullptr)) {
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    factor[half] *= states[half].add_sink(sink(work, half, rows.row_bias[half]));
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float sum = states[half].sum;  // at least about 1, unless the row sees nothing
                out_scale[half] = (sum == 0.0f ? 0.0f : ptx::reciprocal_of_normal(sum)) * factor[half];
            }
            if (!writes_lse()) return;
#pragma unroll
            for (int half = 0; half < 2; ++half) write_lse(work, half, states[half], rows.row_bias[half]);
        } else {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const SoftmaxState state{softmax.max_log2(half), row_sum(softmax.sum[half])};
                if (Config::kSplits && work.is_split()) {
                    split(work).put_state(sm90_row(half), state);
                    out_scale[half] = 1.0f;
                } else {
                    finish_row(work, half, state, rows.row_bias[half], out_scale);
                }
            }
        }
    }
    // `row_bias`: what the scores lack, in units of log2(e).
    __device__ __forceinline__ void finish_row(const Sm90Work& work, int half, SoftmaxState state,
                                               float row_bias, float (&out_scale)[2]) {
        float factor = result_scale();
        if (Config::kSinksAndChunks && OCTAVO_RARE(p_.sinks != nullptr))
            factor *= state.add_sink(sink(work, half, row_bias));
        out_scale[half] = state.inverse_sum() * factor;
        if (writes_lse()) write_lse(work, half, state, row_bias);
    }
    // The sink of a row's head, in units of log2(e), as its scores are.
    __device__ __forceinline__ float sink(const Sm90Work& work, int half, float row_bias) const {
        return fmaf(p_.sinks[work.first_head + places_.head(half)], kLog2e, -row_bias);
    }
    __device__ __forceinline__ bool writes_lse() const { return p_.lse && threadIdx.x % 4 == 0; }
    __device__ __forceinline__ void write_lse(const Sm90Work& work, int half, const SoftmaxState& state,
                                              float row_bias) {
        const int32_t token = work.first_token + block_ * plan_.tokens + places_.token(half);
        if (sm90_row(half) >= plan_.heads * plan_.tokens || token >= work.seqlen_q) return;
        p_.lse[work.lse_place(p_, token, places_.head(half))] = state.lse() + row_bias * kLn2;
    }

    __device__ Sm90Split<Config> split(const Sm90Work& work) const {
        const int32_t tokens = work.seqlen_q - work.first_token - block_ * plan_.tokens;
        return {plan_, work, group_, plan_.heads * min(tokens, plan_.tokens)};
    }
    // For a split: the warpgroup that finishes last among the splits of its rows combines all of them. Notes
    // in `complete` whether the slot then holds a result.
    __device__ __forceinline__ void add_up(const Sm90Work& work, float (&out)[kOut], float (&out_scale)[2]) {
        uint32_t* const complete = &shared_.complete[q_ring_.slot][group_];
        if (!work.is_split()) {
            if (threadIdx.x % 128 == 0) *complete = true;
            return;
        }
        SoftmaxState states[2];
        const int32_t rows[2] = {sm90_row(0), sm90_row(1)};
        if (!split(work).add_up(out, rows, states, 1 + Config::kConsumers + group_, complete)) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) finish_row(work, half, states[half], 0.0f, out_scale);
    }

    // Puts the result into the slot of its queries, from where the storing warp sends it. A split that is not
    // the last to finish puts its partial result there too, though nobody reads it: with a branch around
    // this, ptxas keeps the rings out of the uniform registers. `kMaySplit`: whether `work` may be a split.
    template <bool kMaySplit = Config::kSplits>
    __device__ __forceinline__ void store(const Sm90Work& work, float (&out)[kOut], float (&out_scale)[2]) {
        if constexpr (kMaySplit)
            add_up(work, out, out_scale);
        else if (Config::kSplits && threadIdx.x % 128 == 0)
            shared_.complete[q_ring_.slot][group_] = true;
        const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
        // Every warp is done with the queries.
        ptx::named_barrier_sync(1 + Config::kConsumers + group_, 128);
        unsigned char* const slot = shared_.q[q_ring_.slot][group_];
#pragma unroll
        for (int i = 0; i < Config::kValueDim / 16; ++i) {
            auto pair = [&](int j) {
                return pack_output<T>(p_.dtype, out[8 * i + j] * out_scale[j / 2 % 2],
                                      out[8 * i + j + 1] * out_scale[j / 2 % 2]);
            };
            const int column = (i % 4 * 2 + lane / 16) ^ (lane % 8);  // 16 bytes wide, swizzled
            ptx::stmatrix_x4(slot + i / 4 * Config::kQBlockBytes +
                                 (16 * warp + lane % 16) * Config::kRowBytes + 16 * column,
                             pair(0), pair(2), pair(4), pair(6));
        }
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&shared_.out_full[q_ring_.slot][group_]);
        q_ring_.advance();
    }

    const AttentionParams& p_;
    const Sm90Launch& plan_;
    Sm90Shared<Config>& shared_;
    const int group_;  // the warpgroup's number in this CTA
    const int block_;  // its block of 64 rows in the row tile
    const Sm90RowPlaces<Config::kShortEnds> places_;
    Ring<Config::kQSlots> q_ring_;
    Ring<Config::kStages> k_ring_;
    Ring<Config::kVStages> v_ring_;
    Ring<kSm90WorkSlots> work_ring_;
    float value_scale_ = 1.0f;  // over codes
    PassedTiles<Config> passed_;
};

}  // namespace octavo::cuda
