// The consumers where dK and dV of 64 keys take the registers of two warpgroups: one has dV, the other dK.
// One step computes:
//
//     weights     S^T = K Q^T, P = exp2(S^T)              dV += P dO
//                                      | P, by shared memory
//     gradients   dP^T = V dO^T, dS = P * dP^T            dK += dS Q
//
// dQ has a kernel of its own (query_gradients.cuh).
#pragma once

#include "cuda/ptx/exp2.h"
#include "cuda/ptx/load_shared.h"
#include "cuda/sm90_backward/key_rows.cuh"

namespace octavo::cuda {

template <class T, class Config>
class Sm90RoleConsumer : Sm90KeyRows<T, Config> {
    using Base = Sm90KeyRows<T, Config>;
    using Base::arrive, Base::add_product, Base::is_masked, Base::mask;
    using Base::kScores, Base::kPairs, Base::kSums;
    using Base::p_, Base::plan_, Base::work_, Base::shared_, Base::group_, Base::at_;

  public:
    using Base::Base;

    struct Rings {};  // a CTA has one tile of keys

    __device__ __forceinline__ void run(Rings&) {
        float sums[kSums];
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
        ptx::mbarrier_wait(&shared_.k_full, at_.parity());
        ptx::mbarrier_wait(&shared_.v_full, at_.parity());
        if (work_.num_steps > 0) this->clear_unseen_keys();
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
    __device__ __forceinline__ void walk_weights(float (&dv)[kSums]) {
        Sm90BackwardStep<Config> step(work_, 0);
#pragma unroll 1
        for (; step.is_left(); step.advance(work_)) {
            const uint32_t stage = ptx::uniform(step.stage());
            float scores[kScores];
            ptx::mbarrier_wait(&shared_.q_full[step.stage()], step.parity());
            this->template multiply<true>(scores, shared_.k, shared_.q[stage], shared_.lse[stage]);
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
            uint4* const to = shared_.weights[stage] + threadIdx.x % 128;
#pragma unroll
            for (int j = 0; j < kPairs; j += 4)
                to[j / 4 * 128] = make_uint4(weights[j], weights[j + 1], weights[j + 2], weights[j + 3]);
            arrive(&shared_.weights_full[step.stage()]);
            ptx::mbarrier_wait(&shared_.dout_full[step.stage()], step.parity());
            ptx::wgmma_fence();
            add_product(dv, weights, shared_.dout[stage]);
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
            ptx::wgmma_results(dv);
            arrive(&shared_.q_empty[step.stage()]);
        }
    }

    __device__ __forceinline__ void walk_gradients(float (&dk)[kSums]) {
        Sm90BackwardStep<Config> step(work_, 0);
#pragma unroll 1
        for (; step.is_left(); step.advance(work_)) {
            const uint32_t stage = ptx::uniform(step.stage());
            float products[kScores];
            ptx::mbarrier_wait(&shared_.dout_full[step.stage()], step.parity());
            this->template multiply<true>(products, shared_.v, shared_.dout[stage], shared_.delta[stage]);
            ptx::wgmma_wait<0>();
            ptx::wgmma_results(products);
            uint32_t gradients[kPairs];
            ptx::mbarrier_wait(&shared_.weights_full[step.stage()], step.parity());
            const uint4* const from = shared_.weights[stage] + threadIdx.x % 128;
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
            ptx::mbarrier_wait(&shared_.q_full[step.stage()], step.parity());
            ptx::wgmma_fence();
            add_product(dk, gradients, shared_.q[stage]);
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
            ptx::wgmma_results(dk);
            arrive(&shared_.q_empty[step.stage()]);
        }
    }
};

}  // namespace octavo::cuda
