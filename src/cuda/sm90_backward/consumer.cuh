// The consumers: each warpgroup owns 64 keys, whose dK and dV stay in its registers. Of each step:
//
//     S^T = K Q^T and dP^T = V dO^T, with the statistics of queries added by a product      (SS)
//     P = exp2(S^T), dS = P * dP^T, of which dS also goes to shared memory
//     dQ of the step before = dS^T K, from the dS of all warpgroups                         (SS)
//     dV += P dO and dK += dS Q, from registers as they lie                                 (RS)
#pragma once

#include "common/score.h"
#include "cuda/ptx/exp2.h"
#include "cuda/ptx/reduce.h"
#include "cuda/ptx/stmatrix.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90_backward/shared.cuh"
#include "cuda/types.h"

namespace octavo::cuda {

template <class T, class Config>
class Sm90BackwardConsumer {
  public:
    __device__ Sm90BackwardConsumer(const AttentionBackwardParams& p, const Sm90BackwardLaunch& plan,
                                    const Sm90BackwardWork<Config>& work, Sm90BackwardShared<Config>& shared,
                                    int group)
        : p_(p), plan_(plan), work_(work), shared_(shared), group_(group) {}

    __device__ __forceinline__ void run() {
        float dk[kSums], dv[kSums];
#pragma unroll
        for (int i = 0; i < kSums; ++i) dk[i] = dv[i] = 0.0f;
        ptx::mbarrier_wait(&shared_.keys_full, 0);
        if (work_.num_steps > 0) {
            clear_unseen_keys();
            walk(dk, dv);
        }
        store(dk, dv);
    }

  private:
    static constexpr int kScores = Config::kQueries / 2;
    static constexpr int kPairs = Config::kQueries / 4;  // registers, two 16-bit numbers each
    static constexpr int kSums = Config::kHeadDim / 2;
    using ProductOfKeys = ptx::Wgmma<T, Config::kQueries>;
    using ProductOfTerms = ptx::Wgmma<bfloat16, Config::kQueries>;
    using ProductOfSums = ptx::Wgmma<T, Config::kHeadDim>;
    using ProductOfQueries = ptx::Wgmma<T, 64>;

    __device__ static int lane() { return threadIdx.x % 32; }
    __device__ static int warp() { return threadIdx.x % 128 / 32; }

    // A slot of dS, and the parity of the phase that fills it.
    struct DsSlot {
        int slot = 0;
        uint32_t parity = 0;
        __device__ void advance() {
            if (++slot == Config::kDsSlots) {
                slot = 0;
                parity ^= 1;
            }
        }
    };

    __device__ __forceinline__ void walk(float (&dk)[kSums], float (&dv)[kSums]) {
        Sm90BackwardStep<Config> step(work_);
        DsSlot at, before;
        float* dq_before = nullptr;
        const float scale_log2 = p_.softmax_scale * kLog2e;
        if (Config::kTurns && group_ == 1) pass_turn();
#pragma unroll 1
        for (int32_t i = 0; i < work_.num_steps; ++i) {
            float scores[kScores], products[kScores];
            ptx::mbarrier_wait(&shared_.q_full[step.stage], step.parity);
            if (Config::kTurns) wait_for_turn();
            multiply(scores, shared_.k, shared_.q[step.stage], shared_.lse[step.stage]);
            ptx::mbarrier_wait(&shared_.dout_full[step.stage], step.parity);
            multiply(products, shared_.v, shared_.dout[step.stage], shared_.delta[step.stage]);
            ptx::wgmma_wait<1>();
            ptx::wgmma_results(scores);
#pragma unroll
            for (int j = 0; j < kScores; ++j) scores[j] = ptx::exp2_approx(scores[j] * scale_log2);
            if (Config::kHeld) {
                // ptxas would move the wait for the products before the exponentials, but not past a branch.
                ptx::wgmma_results(scores);
                if (i >= Config::kDsSlots) ptx::mbarrier_wait(&shared_.ds_empty[at.slot], at.parity ^ 1);
            }
            ptx::wgmma_wait<0>();
            ptx::wgmma_results(products);
            if (Config::kTurns) pass_turn();
            uint32_t weights[kPairs], gradients[kPairs];
            if (is_masked(step.tile)) mask(scores, products, step.tile);
#pragma unroll
            for (int j = 0; j < kPairs; ++j) {
                gradients[j] =
                    pack<T>(scores[2 * j] * products[2 * j], scores[2 * j + 1] * products[2 * j + 1]);
                weights[j] = pack<T>(scores[2 * j], scores[2 * j + 1]);
            }
            if (!Config::kHeld && i >= Config::kDsSlots)
                ptx::mbarrier_wait(&shared_.ds_empty[at.slot], at.parity ^ 1);
            store_gradients(gradients, shared_.ds[at.slot]);
            ptx::fence_proxy_async();
            arrive(&shared_.ds_full[at.slot]);

            // dQ a step late, so that no warpgroup waits for another's dS. Of the first step, the product of
            // whatever lies there is dropped: behind a branch, products would run one after the other.
            float dq[32];
            if (i > 0) ptx::mbarrier_wait(&shared_.ds_full[before.slot], before.parity);
            ptx::wgmma_fence();
            multiply_ds_k(dq, shared_.ds[before.slot]);
            ptx::wgmma_commit();
            add_product(dv, weights, shared_.dout[step.stage]);
            add_product(dk, gradients, shared_.q[step.stage]);
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();
            ptx::wgmma_results(dq);
            if (i > 0) {
                arrive(&shared_.ds_empty[before.slot]);
                add(dq, dq_before);
            }
            ptx::wgmma_wait<0>();
            ptx::wgmma_results(dk);
            ptx::wgmma_results(dv);
            arrive(&shared_.q_empty[step.stage]);
            dq_before =
                plan_.dq + (step.head * plan_.num_rows + work_.workspace_row + step.tile * Config::kQueries) *
                               Config::kHeadDim;
            before = at;
            at.advance();
            step.advance(work_);
        }
        if (Config::kTurns && group_ == 0) wait_for_turn();
        float dq[32];
        ptx::mbarrier_wait(&shared_.ds_full[before.slot], before.parity);
        ptx::wgmma_fence();
        multiply_ds_k(dq, shared_.ds[before.slot]);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(dq);
        add(dq, dq_before);
    }

    // Lane 0 arrives for the warp.
    __device__ static void arrive(uint64_t* barrier) {
        __syncwarp();
        if (lane() == 0) ptx::mbarrier_arrive(barrier);
    }
    // Of two warpgroups.
    __device__ void wait_for_turn() const { ptx::named_barrier_sync(1 + group_, 256); }
    __device__ void pass_turn() const { ptx::named_barrier_arrive(2 - group_, 256); }

    // Products of this warpgroup's rows of K or V with a tile of Q or dO, and the terms of each query.
    __device__ __forceinline__ void multiply(float (&results)[kScores], const unsigned char* keys,
                                             const unsigned char* queries, const BfloatTerms* terms) const {
        // Ones in the columns of the terms, 0 to 2, in all rows.
        const int pair = lane() % 4;
        const uint32_t one = pair == 0 ? 0x3f803f80u : pair == 1 ? 0x3f80u : 0u;
        const uint32_t ones[4] = {one, one, 0, 0};
        const uint64_t a =
            ptx::wgmma_descriptor(ptx::shared_address(keys) + group_ * 64 * Config::kRowBytes, 0);
        const uint64_t b = ptx::wgmma_descriptor(ptx::shared_address(queries), 0);
        ptx::wgmma_fence();
        ProductOfTerms::rs_first(results, ones, ptx::wgmma_descriptor_plain(ptx::shared_address(terms)));
#pragma unroll
        for (int step = 0; step < Config::kHeadDim / 16; ++step) {
            const int block = step / 4, offset = step % 4 * 32;
            ProductOfKeys::ss(results, a + (block * Config::kKeyBlockBytes + offset) / 16,
                              b + (block * Config::kQueryBlockBytes + offset) / 16, true);
        }
        ptx::wgmma_commit();
    }

    // This warpgroup's 64 x 64 of dQ: columns of the head dim, or at 64 rows of the tile.
    __device__ __forceinline__ void multiply_ds_k(float (&dq)[32], const unsigned char* ds) const {
        constexpr bool kByRows = Config::kHeadDim == 64;
        const uint64_t a =
            ptx::wgmma_descriptor(ptx::shared_address(ds) + (kByRows ? group_ * Config::kKeyBlockBytes : 0),
                                  Config::kKeyBlockBytes);
        const uint64_t b = ptx::wgmma_descriptor(
            ptx::shared_address(shared_.k) + (kByRows ? 0 : group_ * Config::kKeyBlockBytes),
            Config::kKeyBlockBytes);
#pragma unroll
        for (int step = 0; step < Config::kKeys / 16; ++step) {
            ProductOfQueries::ss_transposed(dq, a + step * 16 * Config::kRowBytes / 16,
                                            b + step * 16 * Config::kRowBytes / 16, step != 0);
        }
    }

    // sums += a times a tile of Q or dO.
    __device__ __forceinline__ void add_product(float (&sums)[kSums], const uint32_t (&a)[kPairs],
                                                const unsigned char* queries) const {
        const uint64_t b = ptx::wgmma_descriptor(ptx::shared_address(queries), Config::kQueryBlockBytes);
#pragma unroll
        for (int step = 0; step < Config::kQueries / 16; ++step)
            ProductOfSums::rs(sums, &a[4 * step], b + step * 16 * Config::kRowBytes / 16);
    }

    __device__ __forceinline__ void store_gradients(const uint32_t (&gradients)[kPairs],
                                                    unsigned char* ds) const {
        const int row = group_ * 64 + warp() * 16 + lane() % 16;
#pragma unroll
        for (int i = 0; i < Config::kQueries / 16; ++i) {
            const int column = (i % 4 * 2 + lane() / 16) ^ (lane() % 8);  // 16 bytes wide, swizzled
            ptx::stmatrix_x4(ds + i / 4 * Config::kKeyBlockBytes + row * Config::kRowBytes + 16 * column,
                             gradients[4 * i], gradients[4 * i + 1], gradients[4 * i + 2],
                             gradients[4 * i + 3]);
        }
    }

    // To workspace, in the order of accumulators.
    __device__ __forceinline__ void add(const float (&dq)[32], float* tile) const {
        float* const to = tile + group_ * 64 * 64 + threadIdx.x % 128 * 4;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            ptx::add_to_global(to + i * 512, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }

    // Whether some query of the tile does not see some key of the CTA.
    __device__ bool is_masked(int32_t tile) const {
        const int32_t first = work_.seq.q_pos(tile * Config::kQueries);
        return work_.num_keys < Config::kKeys ||
               !KeyTiles::all_visible(work_.seq.see, first, first + Config::kQueries - 1, work_.first_key,
                                      Config::kKeys);
    }
    // Queries behind the last have no weight.
    __device__ __forceinline__ void mask(float (&scores)[kScores], float (&products)[kScores],
                                         int32_t tile) const {
        const Visibility& see = work_.seq.see;
        const int32_t first_q_pos = work_.seq.q_pos(tile * Config::kQueries) + 2 * (lane() % 4);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // The queries that see this thread's key, as columns from `begin` on.
            const int32_t key = work_.first_key + group_ * 64 + warp() * 16 + lane() / 4 + 8 * half;
            constexpr int32_t kMany = 1 << 20;  // columns
            int32_t begin = -kMany, end = kMany;
            if (key >= see.prefix_len) {
                if (see.window_right >= 0) begin = max(key - see.window_right - first_q_pos, -kMany);
                if (see.window_left >= 0) end = min(key + see.window_left + 1 - first_q_pos, kMany);
            }
            const uint32_t count = key < see.seqlen_k && begin < end ? end - begin : 0;
#pragma unroll
            for (int i = half * 2; i < kScores; i += 4) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const bool sees = static_cast<uint32_t>(2 * i - 4 * half + j - begin) < count;
                    scores[i + j] = sees ? scores[i + j] : 0.0f;
                    products[i + j] = sees ? products[i + j] : 0.0f;
                }
            }
        }
    }

    // Keys that no query of the sequence sees must not spoil products with gradients of zero.
    __device__ __forceinline__ void clear_unseen_keys() const {
        const Visibility& see = work_.seq.see;
        const KeyTiles seen(see, work_.seq.q_pos(0), work_.seq.q_pos(work_.seq.seqlen_q - 1), Config::kKeys);
        const int32_t last = work_.first_key + work_.num_keys;
        const bool all =
            last <= seen.prefix_end || (work_.first_key >= seen.window_begin && last <= seen.window_end);
        if (all) return;
        for (int row = threadIdx.x / 32 - 4; row < work_.num_keys; row += 4 * Config::kConsumers) {
            if (seen.needed(work_.first_key + row)) continue;
#pragma unroll
            for (int block = 0; block < Config::kColumnBlocks; ++block) {
                const int place = block * Config::kKeyBlockBytes + row * Config::kRowBytes + 4 * lane();
                *reinterpret_cast<uint32_t*>(shared_.k + place) = 0;
                *reinterpret_cast<uint32_t*>(shared_.v + place) = 0;
            }
        }
        ptx::fence_proxy_async();
        sync_consumers();
    }

    __device__ static void sync_consumers() { ptx::named_barrier_sync(3, 128 * Config::kConsumers); }

    // dK over K, dV over V, once no warpgroup reads them; the copy engine leaves out what lies behind the
    // last key.
    __device__ __forceinline__ void store(const float (&dk)[kSums], const float (&dv)[kSums]) const {
        sync_consumers();
        const int row = group_ * 64 + warp() * 16 + lane() % 16;
#pragma unroll
        for (int i = 0; i < Config::kHeadDim / 16; ++i) {
            const int column = (i % 4 * 2 + lane() / 16) ^ (lane() % 8);
            const int place = i / 4 * Config::kKeyBlockBytes + row * Config::kRowBytes + 16 * column;
            auto store = [&](unsigned char* tile, const float (&sums)[kSums], float scale) {
                auto pair = [&](int j) {
                    return pack<T>(sums[8 * i + j] * scale, sums[8 * i + j + 1] * scale);
                };
                ptx::stmatrix_x4(tile + place, pair(0), pair(2), pair(4), pair(6));
            };
            store(shared_.v, dv, 1.0f);
            store(shared_.k, dk, p_.softmax_scale);
        }
        ptx::fence_proxy_async();
        sync_consumers();
        if (threadIdx.x != 128) return;  // one of them
        const int32_t seqlen_k = work_.seq.see.seqlen_k, outer = p_.cu_seqlens_k ? 0 : work_.batch;
        const int32_t place = plan_.k_edge - seqlen_k + work_.first_key, shift = work_.k_begin + seqlen_k;
#pragma unroll
        for (int block = 0; block < Config::kColumnBlocks; ++block) {
            ptx::tma_store(&plan_.dv, shared_.v + block * Config::kKeyBlockBytes, 64 * block, work_.kv_head,
                           place, shift, outer);
            ptx::tma_store(&plan_.dk, shared_.k + block * Config::kKeyBlockBytes, 64 * block, work_.kv_head,
                           place, shift, outer);
        }
        ptx::tma_store_commit();
        ptx::tma_store_wait_read<0>();
    }

    const AttentionBackwardParams& p_;
    const Sm90BackwardLaunch& plan_;
    const Sm90BackwardWork<Config>& work_;
    Sm90BackwardShared<Config>& shared_;
    const int group_;
};

}  // namespace octavo::cuda
