// The consumers. Each warpgroup owns 64 keys, whose dK and dV stay in its registers. One step computes:
//
//     S^T = K Q^T and dP^T = V dO^T, with the statistics of queries added by a product      (SS)
//     P = exp2(S^T), dS = P * dP^T, of which dS also goes to shared memory
//     dQ of the step before = dS^T K, from the dS of all warpgroups                         (SS)
//     dV += P dO and dK += dS Q, from registers as they lie                                 (RS)
#pragma once

#include "cuda/ptx/exp2.h"
#include "cuda/sm90_backward/alibi.cuh"
#include "cuda/sm90_backward/dropout.cuh"
#include "cuda/sm90_backward/kept_steps.cuh"
#include "cuda/sm90_backward/key_rows.cuh"
#include "cuda/sm90_backward/softcap.cuh"

namespace octavo::cuda {

template <class T, class Config>
class Sm90BackwardConsumer : Sm90KeyRows<T, Config> {
    using Base = Sm90KeyRows<T, Config>;
    using Base::first_gradient, Base::store_gradients_of_16;
    using Base::kScores, Base::kPairs, Base::kSums, Base::kDqSums;
    using Base::p_, Base::plan_, Base::work_, Base::shared_, Base::group_, Base::at_;
    using Base::row, Base::lane, Base::arrive, Base::add_product, Base::is_masked, Base::mask;

  public:
    using Base::Base;

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
        // The slot of the step before. It is computed each time, since no register is free to keep it.
        __device__ DsSlot before() const {
            return slot > 0 ? DsSlot{slot - 1, parity} : DsSlot{Config::kDsSlots - 1, parity ^ 1};
        }
    };

    // The positions in the rings of slots, which go on from one tile of keys to the next.
    struct Rings {
        int32_t step = 0;
        DsSlot ds;
    };

    __device__ __forceinline__ void run(Rings& rings) {
        float dk[kSums], dv[kSums];
#pragma unroll
        for (int i = 0; i < kSums; ++i) dk[i] = dv[i] = 0.0f;
        // These waits are not part of the loop, where each instruction costs time.
        ptx::mbarrier_wait(&shared_.k_full, at_.parity());
        ptx::mbarrier_wait(&shared_.v_full, at_.parity());
        this->wait_for_place();
        if (num_steps() > 0) {
            this->clear_unseen_keys();
            walk(dk, dv, rings);
        } else {
            arrive(&shared_.keys_empty);
            if (Config::kAlibi && p_.dalibi_slopes)
                leave_no_slope_gradients<Config>(p_, plan_, work_, group_);
        }
        this->sync_consumers();  // no warpgroup reads tiles of dS any more
        this->put(shared_.dv_out(), dv, p_.out_scale);
        this->put(shared_.dk_out(), dk, p_.softmax_scale * p_.out_scale);
        this->hand_over();
    }

  private:
    using ProductOfQueries = ptx::Wgmma<T, Config::kDqColumns>;
    using Step = std::conditional_t<
        Config::kBlocks, Sm90KeptWalk<Config>,
        std::conditional_t<Config::kOrdered, Sm90TurnStep<Config>, Sm90BackwardStep<Config>>>;

    __device__ Step first_step(int32_t index) const {
        if constexpr (Config::kBlocks) {
            return Step(shared_, index);
        } else {
            return Step(work_, index);
        }
    }
    // The number of steps, or where a mask hides blocks, whether there are some.
    __device__ __forceinline__ int32_t num_steps() const {
        if constexpr (Config::kBlocks) {
            return shared_.kept.any[at_.slot()];
        } else {
            return work_.num_steps;
        }
    }

    __device__ __forceinline__ void walk(float (&dk)[kSums], float (&dv)[kSums], Rings& rings) {
        Step step = first_step(rings.step);
        DsSlot at = rings.ds;
        int32_t dq_before = -1;  // where dQ of the step before goes
        [[maybe_unused]] SlopeGradient<Config> slope_gradient;
        if (Config::kTurns && group_ == 1) pass_turn();
#pragma unroll 1
        while (step.is_left()) {
            const bool is_first = dq_before < 0;
            // The slots that descriptors name.
            const uint32_t stage = ptx::uniform(step.stage());
            const int slot_before = ptx::uniform(at.before().slot);
            float scores[kScores], products[kScores];
            ptx::mbarrier_wait(&shared_.q_full[step.stage()], step.parity());
            if constexpr (Config::kBlocks) {
                step.read();
                if (!step.keeps_any(group_)) {
                    pass_by(step, at, dq_before);
                    dq_before = step.place(plan_, work_, group_);
                    at.advance();
                    step.advance(work_);
                    continue;
                }
            }
            if (Config::kTurns) wait_for_turn();
            this->template multiply<!Config::kSoftcap>(scores, shared_.k, shared_.q[stage],
                                                       shared_.lse[stage]);
            ptx::mbarrier_wait(&shared_.dout_full[step.stage()], step.parity());
            this->template multiply<!Config::kDropout>(products, shared_.v, shared_.dout[stage],
                                                       shared_.delta[stage]);
            [[maybe_unused]] DroppedWeights<Config> dropped;
            if constexpr (Config::kDropout) dropped.read(shared_, step, row());
            ptx::wgmma_wait<1>();
            ptx::wgmma_results(scores);
            uint32_t weights[kPairs], gradients[kPairs];
            if constexpr (Config::kSoftcap) {
                weigh_capped<T, Config>(weights, gradients, scores, p_, shared_.lse[stage]);
            } else {
                const float bias = bias_between<Config>(p_, work_, this->key_tile(), step);
                if constexpr (Config::kSymmetric)
                    bend_bias<Config>(scores, p_, work_, this->key_tile(), step, row());
#pragma unroll
                for (int j = 0; j < kScores; ++j)
                    scores[j] = ptx::exp2_approx(Config::kAlibi ? fmaf(scores[j], plan_.scale_log2, bias)
                                                                : scores[j] * plan_.scale_log2);
            }
            const bool masked = is_masked(step);
            auto wait_for_products = [&] {
                ptx::wgmma_wait<0>();
                ptx::wgmma_results(products);
                if (Config::kTurns) pass_turn();
            };
            auto wait_for_ds = [&] { ptx::mbarrier_wait(&shared_.ds_empty[at.slot], at.parity ^ 1); };
            if constexpr (Config::kSoftcap) {
                wait_for_products();
                multiply_capped<T, Config>(gradients, scores, products);
                if (masked) this->mask_pairs(step, weights, gradients);
            } else {
                // The exponentials are to run under the products. ptxas would move the wait in front of them,
                // if it were not behind a branch that needs them.
                if (masked) {
                    wait_for_products();
                    mask(step, [&](int j, bool sees_even, bool sees_odd) {
                        scores[2 * j] = sees_even ? scores[2 * j] : 0.0f;
                        products[2 * j] = sees_even ? products[2 * j] : 0.0f;
                        scores[2 * j + 1] = sees_odd ? scores[2 * j + 1] : 0.0f;
                        products[2 * j + 1] = sees_odd ? products[2 * j + 1] : 0.0f;
                    });
                } else {
                    wait_for_products();
                }
                if constexpr (Config::kDropout) {
                    // Each part of dS goes at once, so that registers last for the statistics of others.
                    wait_for_ds();
                    const uint32_t ds = first_gradient(shared_.ds_slot(at.slot));
                    dropped.template drop<T>(gradients, weights, scores, products, shared_.delta[stage],
                                             [&](int j) { store_gradients_of_16(gradients, j, ds); });
                } else {
#pragma unroll
                    for (int j = 0; j < kPairs; ++j) {
                        gradients[j] =
                            pack<T>(scores[2 * j] * products[2 * j], scores[2 * j + 1] * products[2 * j + 1]);
                        weights[j] = pack<T>(scores[2 * j], scores[2 * j + 1]);
                    }
                }
            }
            // With 128 queries a tile, plain calls take 1 to 3 % more time with this.
            if constexpr (Config::kQueries == 64 || Config::kBlocks || Config::kSoftcap || Config::kDropout) {
                ptx::wgmma_operands(weights);
                ptx::wgmma_operands(gradients);
            }
            if constexpr (Config::kAlibi) {
                if (p_.dalibi_slopes)
                    slope_gradient.add(scores, products, p_, plan_, work_, this->key_tile(), step, row());
            }
            if constexpr (!Config::kDropout) {
                wait_for_ds();
                this->store_gradients(gradients, shared_.ds_slot(at.slot));
            }
            ptx::fence_proxy_async();
            arrive(&shared_.ds_full[at.slot]);

            // dQ is computed a step late, so that no warpgroup waits for another's dS. The first step
            // multiplies whatever lies in the slot and drops the result. The product cannot be left out
            // there: behind a branch, ptxas would run the products one after the other.
            const DsSlot before = at.before();
            float dq[kDqSums];
            if (!is_first) ptx::mbarrier_wait(&shared_.ds_full[before.slot], before.parity);
            ptx::wgmma_fence();
            multiply_ds_k(dq, shared_.ds_slot(slot_before), step);
            ptx::wgmma_commit();
            add_product(dv, weights, shared_.dout[stage]);
            add_product(dk, gradients, shared_.q[stage]);
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();
            ptx::wgmma_results(dq);
            if (!is_first) {
                arrive(&shared_.ds_empty[before.slot]);
                add_in_turn(dq, dq_before, step);
            }
            ptx::wgmma_wait<0>();
            ptx::wgmma_results(dk);
            ptx::wgmma_results(dv);
            arrive(&shared_.q_empty[step.stage()]);
            dq_before = step.place(plan_, work_, group_);
            at.advance();
            step.advance(work_);
        }
        if (Config::kTurns && group_ == 0) wait_for_turn();
        const DsSlot before = at.before();
        float dq[kDqSums];
        compute_dq(dq, step, before);
        arrive(&shared_.keys_empty);
        arrive(&shared_.ds_empty[before.slot]);
        add_in_turn(dq, dq_before, step);
        rings = {step.index, at};
    }

    // A step none of whose queries looks at this warpgroup's keys: its dS is zero. This warpgroup need not
    // wait for dO, for which the other one waits before the step's slots are free again.
    __device__ __forceinline__ void pass_by(const Step& step, const DsSlot& at, int32_t dq_before) const {
        ptx::mbarrier_wait(&shared_.ds_empty[at.slot], at.parity ^ 1);
        constexpr uint32_t kZeros[kPairs] = {};
        this->store_gradients(kZeros, shared_.ds_slot(at.slot));
        ptx::fence_proxy_async();
        arrive(&shared_.ds_full[at.slot]);
        if (dq_before >= 0) {
            const DsSlot before = at.before();
            float dq[kDqSums];
            compute_dq(dq, step, before);
            arrive(&shared_.ds_empty[before.slot]);
            add(dq, dq_before);
        }
        arrive(&shared_.q_empty[step.stage()]);
    }

    // Computes dQ of the step before.
    __device__ __forceinline__ void compute_dq(float (&dq)[kDqSums], const Step& step,
                                               const DsSlot& before) const {
        ptx::mbarrier_wait(&shared_.ds_full[before.slot], before.parity);
        ptx::wgmma_fence();
        multiply_ds_k(dq, shared_.ds_slot(before.slot), step);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(dq);
    }

    // Turns of the two warpgroups at issuing scores and products.
    __device__ void wait_for_turn() const { ptx::named_barrier_sync(1 + group_, 256); }
    __device__ void pass_turn() const { ptx::named_barrier_arrive(2 - group_, 256); }

    // Computes this warpgroup's part of dQ: half of the columns at head dims 128 and 96, half of the rows
    // at 64. At 96, where tiles are three blocks of 32 columns, it has a block, and half of the last one.
    // Keys at which no query of the step looks may be NaN, and their dS, zero, meets the others instead.
    __device__ __forceinline__ void multiply_ds_k(float (&dq)[kDqSums], const unsigned char* ds,
                                                  const Step& step) const {
        constexpr bool kByRows = Config::kDqByRows,
                       kHalfBlocks = Config::kDqColumns % Config::kBlockColumns != 0;
        const uint64_t a = ptx::wgmma_descriptor(
            ptx::shared_address(ds) + (kByRows ? group_ * Config::kDsBlockBytes : 0), Config::kDsBlockBytes);
        const uint64_t b = Base::descriptor(
            ptx::shared_address(shared_.k) + (kByRows ? 0 : group_ * Config::kKeyBlockBytes),
            kHalfBlocks
                ? 2 * Config::kKeyBlockBytes - group_ * (Config::kKeyBlockBytes - Config::kRowBytes / 2)
                : Config::kKeyBlockBytes);
        constexpr int kDsStep = 16 * Config::kDsRowBytes / 16, kKeyStep = 16 * Config::kRowBytes / 16;
#pragma unroll
        for (int group = 0; group < Config::kConsumers; ++group) {
            const uint64_t keys = b + (step.kept_any_before(group) ? group : 1 - group) * 4 * kKeyStep;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                ProductOfQueries::ss_transposed(dq, a + (4 * group + i) * kDsStep, keys + i * kKeyStep,
                                                group + i != 0);
            }
        }
    }

    // Adds dQ of the step before.
    __device__ __forceinline__ void add_in_turn(const float (&dq)[kDqSums], int32_t place,
                                                const Step& step) const {
        if constexpr (Config::kOrdered)
            ptx::mbarrier_wait(&shared_.turns.come[group_], turn_parity(step.index - 1));
        add(dq, place);
        if constexpr (Config::kOrdered) arrive(&shared_.turns.added[group_]);
    }

    __device__ __forceinline__ void add(const float (&dq)[kDqSums], int32_t place) const {
        this->add_to_sums(dq, this->sums_of(place) + (Config::kParts > 1 ? 0 : group_ * Base::kPartSums));
    }
};

}  // namespace octavo::cuda