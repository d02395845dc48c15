// The consumers where dQ has a kernel of its own (query_gradients.cuh). Each warpgroup owns 64 keys, whose dK
// and dV stay in its registers, and needs nothing from the other one. One step computes:
//
//     S^T = K Q^T and dP^T = V dO^T, with the statistics of queries added by a product      (SS)
//     P = exp2(S^T), dS = P * dP^T
//     dV += P dO and dK += dS Q, from registers as they lie                                 (RS)
#pragma once

#include "cuda/ptx/exp2.h"
#include "cuda/sm90_backward/key_rows.cuh"

namespace octavo::cuda {

template <class T, class Config>
class Sm90KeyConsumer : Sm90KeyRows<T, Config> {
    using Base = Sm90KeyRows<T, Config>;
    using Base::arrive, Base::add_product, Base::is_masked, Base::mask;
    using Base::kScores, Base::kPairs, Base::kSums;
    using Base::p_, Base::work_, Base::shared_, Base::plan_, Base::at_;

  public:
    using Base::Base;

    struct Rings {
        int32_t step = 0;
    };

    __device__ __forceinline__ void run(Rings& rings) {
        float dk[kSums], dv[kSums];
#pragma unroll
        for (int i = 0; i < kSums; ++i) dk[i] = dv[i] = 0.0f;
        ptx::mbarrier_wait(&shared_.k_full, at_.parity());
        ptx::mbarrier_wait(&shared_.v_full, at_.parity());
        if (work_.num_steps > 0) this->clear_unseen_keys();
        walk(dk, dv, rings);
        arrive(&shared_.keys_empty);
        this->wait_for_place();
        this->put(shared_.dv_out(), dv, p_.out_scale);
        this->put(shared_.dk_out(), dk, p_.softmax_scale * p_.out_scale);
        this->hand_over();
    }

  private:
    __device__ __forceinline__ void walk(float (&dk)[kSums], float (&dv)[kSums], Rings& rings) {
        Sm90BackwardStep<Config> step(work_, rings.step);
#pragma unroll 1
        for (; step.is_left(); step.advance(work_)) {
            const uint32_t stage = ptx::uniform(step.stage());
            float scores[kScores], products[kScores];
            ptx::mbarrier_wait(&shared_.q_full[step.stage()], step.parity());
            this->template multiply<true>(scores, shared_.k, shared_.q[stage], shared_.lse[stage]);
            ptx::mbarrier_wait(&shared_.dout_full[step.stage()], step.parity());
            this->template multiply<true>(products, shared_.v, shared_.dout[stage], shared_.delta[stage]);
            ptx::wgmma_wait<1>();
            ptx::wgmma_results(scores);
#pragma unroll
            for (int j = 0; j < kScores; ++j) scores[j] = ptx::exp2_approx(scores[j] * plan_.scale_log2);
            // This branch keeps the exponentials before the wait for the products: ptxas moves the wait up,
            // but not past a branch.
            const bool masked = is_masked(step);
            if (masked) {
                mask(step, [&](int j, bool sees_even, bool sees_odd) {
                    scores[2 * j] = sees_even ? scores[2 * j] : 0.0f;
                    scores[2 * j + 1] = sees_odd ? scores[2 * j + 1] : 0.0f;
                });
            }
            ptx::wgmma_wait<0>();
            ptx::wgmma_results(products);
            uint32_t weights[kPairs], gradients[kPairs];
#pragma unroll
            for (int j = 0; j < kPairs; ++j) {
                gradients[j] =
                    pack<T>(scores[2 * j] * products[2 * j], scores[2 * j + 1] * products[2 * j + 1]);
                weights[j] = pack<T>(scores[2 * j], scores[2 * j + 1]);
            }
            if (masked) {  // products with keys that are not seen may be anything
                mask(step, [&](int j, bool sees_even, bool sees_odd) {
                    gradients[j] &= (sees_even ? 0xffffu : 0u) | (sees_odd ? 0xffff0000u : 0u);
                });
            }
            ptx::wgmma_operands(weights);
            ptx::wgmma_operands(gradients);
            ptx::wgmma_fence();
            add_product(dv, weights, shared_.dout[stage]);
            add_product(dk, gradients, shared_.q[stage]);
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
            ptx::wgmma_results(dk);
            ptx::wgmma_results(dv);
            arrive(&shared_.q_empty[step.stage()]);
        }
        rings.step = step.index;
    }
};

}  // namespace octavo::cuda
