// The consumers of a cluster of two CTAs, each with a tile of 128 keys, for long calls. Each warpgroup owns
// 64 keys, whose dK and dV stay in its registers. One step computes in each CTA:
//
//     S^T = K Q^T and dP^T = V dO^T, with the statistics of queries added by a product      (SS)
//     P = exp2(S^T), dS = P * dP^T, which goes to shared memory of both CTAs
//     half of the columns of dQ of the step before = dS^T K over the keys of both CTAs      (SS)
//     dV += P dO and dK += dS Q, from registers as they lie                                 (RS)
//
// So dQ is added to its sums in global memory half as often as by CTAs alone, which costs long calls a tenth
// of their time. Both CTAs walk the same queries, and each loads half of their columns for both. The
// warpgroups compute dQ of every other step each.
#pragma once

#include "cuda/ptx/cluster.h"
#include "cuda/ptx/exp2.h"
#include "cuda/sm90_backward/key_rows.cuh"

namespace octavo::cuda {

template <class T, class Config>
class Sm90ClusterConsumer : Sm90KeyRows<T, Config> {
    using Base = Sm90KeyRows<T, Config>;
    using Base::arrive, Base::add_product, Base::is_masked, Base::mask, Base::lane, Base::warp;
    using Base::kScores, Base::kPairs, Base::kSums;
    using Base::p_, Base::plan_, Base::work_, Base::shared_, Base::group_, Base::at_;

  public:
    using Base::Base;

    struct Rings {};  // a cluster has one tile of keys

    __device__ __forceinline__ void run(Rings&) {
        float dk[kSums], dv[kSums];
#pragma unroll
        for (int i = 0; i < kSums; ++i) dk[i] = dv[i] = 0.0f;
        ptx::mbarrier_wait(&shared_.k_full, at_.parity());
        ptx::mbarrier_wait(&shared_.v_full, at_.parity());
        if (work_.num_steps > 0) {
            clear_unseen_keys();
            if (group_ == 0) {
                walk<0>(dk, dv);
            } else {
                walk<1>(dk, dv);
            }
        }
        this->sync_consumers();  // no warpgroup reads K and V any more
        this->put(shared_.dv_out(), dv, p_.out_scale);
        this->put(shared_.dk_out(), dk, p_.softmax_scale * p_.out_scale);
        this->hand_over();
    }

  private:
    static_assert(Config::kCtas == 2 && Config::kStages == 2 && Config::kConsumers == 2 &&
                  Config::kQueries == 64 && Config::kDsSlots == 2 && Config::kBlockColumns == 64);
    static constexpr int kDqColumns = Config::kHeadDim / Config::kCtas, kDqSums = kDqColumns / 2;
    using ProductOfQueries = ptx::Wgmma<T, kDqColumns>;
    using Step = Sm90BackwardStep<Config>;

    // The slot of dS of a step, and the parity of the phase that fills it.
    __device__ static uint32_t slot_of(int32_t step) { return static_cast<uint32_t>(step) % 2; }
    __device__ static uint32_t parity_of(int32_t step) { return static_cast<uint32_t>(step) / 2 % 2; }

    // A step of each parity after the other, so that which of them has a product for dQ is known to the
    // compiler: behind a branch, ptxas would run the products one after the other.
    template <int kGroup>
    __device__ __forceinline__ void walk(float (&dk)[kSums], float (&dv)[kSums]) {
        int32_t dq_before = -1;  // where dQ of the step before goes
        Step step(work_, 0);
#pragma unroll 1
        while (step.is_left()) {
            take_step<kGroup == 1, 0>(dk, dv, step, dq_before);
            if (!step.is_left()) break;
            take_step<kGroup == 0, 1>(dk, dv, step, dq_before);
        }
        const int32_t last = step.index - 1;
        if (last % 2 != kGroup) return;
        float dq[kDqSums];
        ptx::mbarrier_wait(&shared_.ds_full[slot_of(last)], parity_of(last));
        ptx::wgmma_fence();
        multiply_ds_k(dq, shared_, slot_of(last));
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(dq);
        add(dq, dq_before);
    }

    // With kDq, it also computes dQ of the step before. The first step then multiplies whatever lies in the
    // slot and drops the result. kSlot is the step's slot of Q and dO, and of dS.
    template <bool kDq, int kSlot>
    __device__ __forceinline__ void take_step(float (&dk)[kSums], float (&dv)[kSums], Step& step,
                                              int32_t& dq_before) {
        const bool is_first = dq_before < 0;
        // The compiler shall not keep addresses from one step for the next: no registers are free.
        Sm90BackwardShared<Config>* here = &shared_;
        asm volatile("" : "+l"(here));
        Sm90BackwardShared<Config>& shared = *here;
        const uint32_t parity = parity_of(step.index);
        float scores[kScores], products[kScores];
        ptx::mbarrier_wait(&shared.q_full[kSlot], parity);
        this->template multiply<true>(scores, shared.k, shared.q[kSlot], shared.lse[kSlot]);
        ptx::mbarrier_wait(&shared.dout_full[kSlot], parity);
        this->template multiply<true>(products, shared.v, shared.dout[kSlot], shared.delta[kSlot]);
        ptx::wgmma_wait<1>();
        ptx::wgmma_results(scores);
#pragma unroll
        for (int j = 0; j < kScores; ++j) scores[j] = ptx::exp2_approx(scores[j] * plan_.scale_log2);
        const bool masked = is_masked(step);
        // ptxas would move the wait for the products before the exponentials, but not past a branch.
        ptx::wgmma_results(scores);
        ptx::mbarrier_wait(&shared.ds_empty[kSlot], parity ^ 1);
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(products);
        if (masked) {
            mask(step, [&](int j, bool sees_even, bool sees_odd) {
                scores[2 * j] = sees_even ? scores[2 * j] : 0.0f;
                products[2 * j] = sees_even ? products[2 * j] : 0.0f;
                scores[2 * j + 1] = sees_odd ? scores[2 * j + 1] : 0.0f;
                products[2 * j + 1] = sees_odd ? products[2 * j + 1] : 0.0f;
            });
        }
        uint32_t weights[kPairs], gradients[kPairs];
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            gradients[j] = pack<T>(scores[2 * j] * products[2 * j], scores[2 * j + 1] * products[2 * j + 1]);
            weights[j] = pack<T>(scores[2 * j], scores[2 * j + 1]);
        }
        // Without this, the compiler would pack weights between the products that take them, and ptxas would
        // run the products one after the other.
#pragma unroll
        for (int j = 0; j < kPairs; ++j) asm volatile("" : "+r"(weights[j]), "+r"(gradients[j]));
        send_gradients(gradients, shared, kSlot);
        if constexpr (kDq) {
            if (!is_first) ptx::mbarrier_wait(&shared.ds_full[1 - kSlot], parity_of(step.index - 1));
            float dq[kDqSums];
            ptx::wgmma_fence();
            multiply_ds_k(dq, shared, 1 - kSlot);
            ptx::wgmma_commit();
            add_product(dv, weights, shared.dout[kSlot]);
            add_product(dk, gradients, shared.q[kSlot]);
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();
            ptx::wgmma_results(dq);
            if (!is_first) {
                arrive_in_cluster(&shared.ds_empty[1 - kSlot]);
                add(dq, dq_before);
            }
        } else {
            ptx::wgmma_fence();
            add_product(dv, weights, shared.dout[kSlot]);
            add_product(dk, gradients, shared.q[kSlot]);
            ptx::wgmma_commit();
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(dk);
        ptx::wgmma_results(dv);
        arrive_in_cluster(&shared.q_empty[kSlot]);
        dq_before = step.place(plan_, work_, group_);
        step.advance(work_);
    }

    __device__ static int rank() { return static_cast<int>(ptx::cluster_rank()); }

    // Adds the columns of dQ that this CTA sums.
    __device__ __forceinline__ void add(const float (&dq)[kDqSums], int32_t place) const {
        this->add_to_sums(dq, this->sums_of(place) + rank() * (64 * kDqColumns));
    }

    // Computes these columns, from the keys of this CTA and of the other one.
    __device__ __forceinline__ void multiply_ds_k(float (&dq)[kDqSums], Sm90BackwardShared<Config>& shared,
                                                  uint32_t slot) const {
        const uint32_t ds = ptx::shared_address(shared.ds_slot(slot));
        const uint32_t own = ptx::shared_address(shared.k) + rank() * Config::kKeyBlockBytes;
#pragma unroll
        for (int other = 0; other < 2; ++other) {
            const uint64_t a =
                ptx::wgmma_descriptor(ds + other * Config::kDsBlockBytes, Config::kDsBlockBytes);
            const uint64_t b = Base::descriptor(other == 0 ? own : ptx::shared_address(shared.other_block),
                                                Config::kKeyBlockBytes);
#pragma unroll
            for (int i = 0; i < Config::kKeys / 16; ++i) {
                ProductOfQueries::ss_transposed(dq, a + i * 16 * Config::kDsRowBytes / 16,
                                                b + i * 16 * Config::kRowBytes / 16, other + i != 0);
            }
        }
    }

    // Writes dS of this CTA's keys to a slot, and each warp's rows to the same slot of the other CTA.
    __device__ __forceinline__ void send_gradients(const uint32_t (&gradients)[kPairs],
                                                   Sm90BackwardShared<Config>& shared, uint32_t slot) const {
        unsigned char* const own = shared.ds_slot(slot);
        this->store_gradients(gradients, own);
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane() != 0) return;
        constexpr uint32_t kWarpBytes = 16 * Config::kDsRowBytes;
        const uint32_t from = ptx::shared_address(own) + (4 * group_ + warp()) * kWarpBytes,
                       other = rank() ^ 1;
        const uint32_t full = ptx::shared_address(&shared.ds_full[slot]);
        ptx::bulk_copy_cluster(ptx::cluster_address(from + Config::kDsBlockBytes, other), from, kWarpBytes,
                               ptx::cluster_address(full, other));
        // The other CTA's warps send as many bytes.
        ptx::mbarrier_arrive_expect(&shared.ds_full[slot], kWarpBytes);
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
            if (needed) continue;
            const int place = row % Config::kKeys * Config::kRowBytes + 4 * lane();
            auto clear = [&](unsigned char* tile, int blocks) {
#pragma unroll
                for (int block = 0; block < blocks; ++block)
                    *reinterpret_cast<uint32_t*>(tile + block * Config::kKeyBlockBytes + place) = 0;
            };
            if (row / Config::kKeys == rank()) {
                clear(shared_.k, Config::kColumnBlocks);
                clear(shared_.v, Config::kColumnBlocks);
            } else {
                clear(shared_.other_block, Config::kOwnBlocks);
            }
        }
        ptx::fence_proxy_async();
        this->sync_consumers();
    }
};

}  // namespace octavo::cuda
