// The consumers of a cluster of two CTAs, each with a tile of 64 keys, whose dK and dV take the registers of
// two warpgroups. One step computes in each CTA:
//
//     weights     S^T = K Q^T, P = exp2(S^T)              dV += P dO
//                                      | P, by shared memory
//     gradients   dP^T = V dO^T, dS = P * dP^T            dK += dS Q
//                                      | dS, by shared memory, to both CTAs
//     both        half of the columns of dQ of an earlier step, dS^T K over the keys of both CTAs
//
// So dQ is summed in global memory as rarely as if a CTA had all of these keys. Both CTAs walk the same
// queries, and each loads half of their columns for both.
#pragma once

#include "cuda/ptx/cluster.h"
#include "cuda/ptx/exp2.h"
#include "cuda/ptx/load_shared.h"
#include "cuda/sm90_backward/key_rows.cuh"

namespace octavo::cuda {

template <class T, class Config>
class Sm90PairConsumer : Sm90KeyRows<T, Config> {
    using Base = Sm90KeyRows<T, Config>;
    using Base::arrive, Base::add_product, Base::is_masked, Base::mask, Base::lane, Base::warp;
    using Base::kScores, Base::kPairs, Base::kSums, Base::kDqSums;
    using Base::p_, Base::plan_, Base::work_, Base::shared_, Base::group_, Base::at_;

  public:
    using Base::Base;

    struct Rings {};  // a cluster has one tile of keys

    __device__ __forceinline__ void run(Rings&) {
        float sums[kSums];
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
        ptx::mbarrier_wait(&shared_.k_full, at_.parity());
        ptx::mbarrier_wait(&shared_.v_full, at_.parity());
        if (work_.num_steps > 0) clear_unseen_keys();
        if (group_ == 0) {
            walk_weights(sums);
            this->sync_consumers();  // no warpgroup reads K and V any more
            this->put(shared_.dv_out(), sums, p_.out_scale);
        } else {
            walk_gradients(sums);
            this->sync_consumers();
            this->put(shared_.dk_out(), sums, p_.softmax_scale * p_.out_scale);
        }
        this->hand_over();
    }

  private:
    static_assert(Config::kCtas == 2 && Config::kQueries == 64 && Config::kDsSlots == 3);
    using ProductOfQueries = ptx::Wgmma<T, Config::kDqColumns>;
    using Step = Sm90BackwardStep<Config>;

    // The steps whose dQ this warpgroup has not computed yet: dQ is kLag steps late. The warpgroup with the
    // weights is ahead of the other one, and so its dQ is later.
    template <int kLag>
    struct LateSteps {
        int32_t count = 0;  // of all steps so far
        int32_t places[kLag];
        int slot = 0;  // of the first one's dS, and the parity of the phase that fills it
        uint32_t parity = 0;

        __device__ bool any() const { return count >= kLag; }
        __device__ void advance() {
            if (++slot == Config::kDsSlots) {
                slot = 0;
                parity ^= 1;
            }
        }
        __device__ void push(int32_t place) {
#pragma unroll
            for (int i = 0; i < kLag - 1; ++i) places[i] = places[i + 1];
            places[kLag - 1] = place;
            ++count;
        }
    };

    __device__ __forceinline__ void walk_weights(float (&dv)[kSums]) {
        LateSteps<2> late;
        Step step(work_, 0);
#pragma unroll 1
        for (; step.is_left(); step.advance(work_)) {
            float scores[kScores];
            ptx::mbarrier_wait(&shared_.q_full[step.stage()], step.parity());
            this->template multiply<true>(scores, shared_.k, shared_.q[step.stage()],
                                          shared_.lse[step.stage()]);
            ptx::wgmma_wait<0>();
            ptx::wgmma_results(scores);
#pragma unroll
            for (int j = 0; j < kScores; ++j) scores[j] = ptx::exp2_approx(scores[j] * plan_.scale_log2);
            if (is_masked(step)) {
                mask(step, [&](int j, bool sees_even, bool sees_odd) {
                    scores[2 * j] = sees_even ? scores[2 * j] : 0.0f;
                    scores[2 * j + 1] = sees_odd ? scores[2 * j + 1] : 0.0f;
                });
            }
            uint32_t weights[kPairs];
#pragma unroll
            for (int j = 0; j < kPairs; ++j) weights[j] = pack<T>(scores[2 * j], scores[2 * j + 1]);
            // Weights go to the lane of the other warpgroup that has the same elements. They use the slots of
            // Q in turn.
            ptx::mbarrier_wait(&shared_.weights_empty[step.stage()], step.parity() ^ 1);
            uint4* const to = shared_.weights[step.stage()] + threadIdx.x % 128;
#pragma unroll
            for (int j = 0; j < kPairs; j += 4)
                to[j / 4 * 128] = make_uint4(weights[j], weights[j + 1], weights[j + 2], weights[j + 3]);
            arrive(&shared_.weights_full[step.stage()]);
            ptx::mbarrier_wait(&shared_.dout_full[step.stage()], step.parity());
            finish_step(dv, weights, shared_.dout[step.stage()], step, late);
        }
        finish_late_steps(late);
    }

    __device__ __forceinline__ void walk_gradients(float (&dk)[kSums]) {
        LateSteps<1> late;
        int slot = 0;  // where dS goes, and the parity of the phase that fills it
        uint32_t parity = 0;
        Step step(work_, 0);
#pragma unroll 1
        for (; step.is_left(); step.advance(work_)) {
            float products[kScores];
            ptx::mbarrier_wait(&shared_.dout_full[step.stage()], step.parity());
            this->template multiply<true>(products, shared_.v, shared_.dout[step.stage()],
                                          shared_.delta[step.stage()]);
            ptx::wgmma_wait<0>();
            ptx::wgmma_results(products);
            uint32_t gradients[kPairs];
            ptx::mbarrier_wait(&shared_.weights_full[step.stage()], step.parity());
            const uint4* const from = shared_.weights[step.stage()] + threadIdx.x % 128;
#pragma unroll
            for (int j = 0; j < kPairs; j += 4) {
                const uint4 weights = from[j / 4 * 128];
                const uint32_t pairs[4] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const float2 weight = unpack<T>(pairs[k]);
                    gradients[j + k] =
                        pack<T>(weight.x * products[2 * (j + k)], weight.y * products[2 * (j + k) + 1]);
                }
            }
            arrive(&shared_.weights_empty[step.stage()]);
            if (is_masked(step)) {  // products with keys that are not seen may be anything
                mask(step, [&](int j, bool sees_even, bool sees_odd) {
                    gradients[j] &= (sees_even ? 0xffffu : 0u) | (sees_odd ? 0xffff0000u : 0u);
                });
            }
            ptx::mbarrier_wait(&shared_.ds_empty[slot], parity ^ 1);
            send_gradients(gradients, slot);
            if (++slot == Config::kDsSlots) {
                slot = 0;
                parity ^= 1;
            }
            ptx::mbarrier_wait(&shared_.q_full[step.stage()], step.parity());
            finish_step(dk, gradients, shared_.q[step.stage()], step, late);
        }
        finish_late_steps(late);
    }

    // sums += a times a tile of Q or dO, beside dQ of an earlier step. The first steps have none: they
    // multiply whatever lies in the slot and drop the result. The product cannot be left out there: behind a
    // branch, ptxas would run the products one after the other.
    template <int kLag>
    __device__ __forceinline__ void finish_step(float (&sums)[kSums], const uint32_t (&a)[kPairs],
                                                const unsigned char* queries, const Step& step,
                                                LateSteps<kLag>& late) const {
        float dq[kDqSums];
        if (late.any()) ptx::mbarrier_wait(&shared_.ds_full[late.slot], late.parity);
        ptx::wgmma_fence();
        multiply_ds_k(dq, late.slot);
        ptx::wgmma_commit();
        add_product(sums, a, queries);
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        ptx::wgmma_results(dq);
        if (late.any()) {
            arrive_in_cluster(&shared_.ds_empty[late.slot]);
            add(dq, late.places[0]);
            late.advance();
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(sums);
        arrive_in_cluster(&shared_.q_empty[step.stage()]);
        late.push(step.place(plan_, work_, group_));
    }

    template <int kLag>
    __device__ __forceinline__ void finish_late_steps(LateSteps<kLag>& late) const {
#pragma unroll
        for (int i = 0; i < kLag; ++i) {
            if (i < kLag - late.count) continue;  // there were fewer steps
            float dq[kDqSums];
            ptx::mbarrier_wait(&shared_.ds_full[late.slot], late.parity);
            ptx::wgmma_fence();
            multiply_ds_k(dq, late.slot);
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
            ptx::wgmma_results(dq);
            add(dq, late.places[i]);
            late.advance();
        }
    }

    // Adds this warpgroup's columns of dQ to their sums.
    __device__ __forceinline__ void add(const float (&dq)[kDqSums], int32_t place) const {
        const int part = rank() * Config::kConsumers + group_;
        this->add_to_sums(dq, this->sums_of(place) + part * Base::kPartSums);
    }
    __device__ static int rank() { return static_cast<int>(ptx::cluster_rank()); }

    // Computes this warpgroup's columns of dQ: a block of 32 of those of the CTA, and half of the last one.
    __device__ __forceinline__ void multiply_ds_k(float (&dq)[kDqSums], int slot) const {
        const uint32_t ds = ptx::shared_address(shared_.ds_slot(slot));
        const int block = group_ * Config::kKeyBlockBytes;
        const uint32_t last_block = 2 * Config::kKeyBlockBytes - block + group_ * (Config::kRowBytes / 2);
        const uint32_t keys[2] = {
            ptx::shared_address(shared_.k) + rank() * (Config::kOtherKeyBlocks * Config::kKeyBlockBytes),
            ptx::shared_address(shared_.other_keys())};
#pragma unroll
        for (int other = 0; other < 2; ++other) {
            const uint64_t a =
                ptx::wgmma_descriptor(ds + other * Config::kDsBlockBytes, Config::kDsBlockBytes);
            const uint64_t b = Base::descriptor(keys[other] + block, last_block);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                ProductOfQueries::ss_transposed(dq, a + i * 16 * Config::kDsRowBytes / 16,
                                                b + i * 16 * Config::kRowBytes / 16, other + i != 0);
            }
        }
    }

    // Writes dS of this CTA's keys to a slot, and each warp's rows to the same slot of the other CTA.
    __device__ __forceinline__ void send_gradients(const uint32_t (&gradients)[kPairs], int slot) const {
        unsigned char* const own = shared_.ds_slot(slot);
        this->store_gradients(gradients, own);
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane() != 0) return;
        constexpr uint32_t kWarpBytes = 16 * Config::kDsRowBytes;
        const uint32_t from = ptx::shared_address(own) + warp() * kWarpBytes, other = rank() ^ 1;
        const uint32_t full = ptx::shared_address(&shared_.ds_full[slot]);
        ptx::bulk_copy_cluster(ptx::cluster_address(from + Config::kDsBlockBytes, other), from, kWarpBytes,
                               ptx::cluster_address(full, other));
        // The other CTA's warps send as many bytes.
        ptx::mbarrier_arrive_expect(&shared_.ds_full[slot], kWarpBytes);
    }

    // Arrives at this barrier of both CTAs.
    __device__ static void arrive_in_cluster(uint64_t* barrier) {
        __syncwarp();
        if (lane() < Config::kCtas)
            ptx::mbarrier_arrive_cluster(ptx::cluster_address(ptx::shared_address(barrier), lane()));
    }

    // Clears keys of the cluster that are not there, or that no query of the sequence sees: a NaN there would
    // spoil products with gradients of zero.
    __device__ __forceinline__ void clear_unseen_keys() const {
        const Visibility& see = work_.seq.see;
        const KeyTiles seen(see, work_.seq.q_pos(0), work_.seq.q_pos(work_.seq.seqlen_q - 1), Config::kKeys);
        const int32_t first_key = min(work_.first_key, work_.first_other_key()),
                      last = first_key + Config::kKeys * Config::kCtas;
        const bool all =
            last <= see.seqlen_k &&
            (last <= seen.prefix_end || (first_key >= seen.window_begin && last <= seen.window_end));
        if (all) return;
        for (int row = threadIdx.x / 32 - 4; row < Config::kKeys * Config::kCtas;
             row += 4 * Config::kConsumers) {
            const bool needed = row < work_.cluster_keys && seen.needed(first_key + row);
            if (needed || 4 * lane() >= Config::kRowBytes) continue;
            const int place = row % Config::kKeys * Config::kRowBytes + 4 * lane();
            const bool own = row / Config::kKeys == rank();
#pragma unroll
            for (int block = 0; block < Config::kColumnBlocks; ++block) {
                auto clear = [&](unsigned char* tile) {
                    *reinterpret_cast<uint32_t*>(tile + block * Config::kKeyBlockBytes + place) = 0;
                };
                if (own) {
                    clear(shared_.k);
                    clear(shared_.v);
                } else if (block < Config::kOtherKeyBlocks) {
                    clear(shared_.other_keys());
                }
            }
        }
        ptx::fence_proxy_async();
        this->sync_consumers();
    }
};

}  // namespace octavo::cuda
