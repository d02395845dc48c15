// The consumers of a cluster of two CTAs, each with a tile of 64 keys, whose dK and dV take the registers of
// two warpgroups. One step computes in each CTA:
//
//     weights     S^T = K Q^T, P = exp2(S^T)              dV += P dO
//                                      | P, by shared memory
//     gradients   dP^T = V dO^T, dS = P * dP^T            dK += dS Q
//                                      | dS, by shared memory, to both CTAs
//                 half of the columns of dQ of the step before, dS^T K over the keys of both CTAs
//
// So dQ is summed in global memory as rarely as if a CTA had all of these keys. Both CTAs walk the same
// queries, and each loads half of their columns for both. K and V are operands of the first products in
// registers, which halves what these read from shared memory, and makes room there for a third tile of
// queries.
#pragma once

#include "cuda/ptx/cluster.h"
#include "cuda/ptx/exp2.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/load_shared.h"
#include "cuda/sm90_backward/key_rows.cuh"

namespace octavo::cuda {

template <class T, class Config>
class Sm90PairConsumer : Sm90KeyRows<T, Config> {
    using Base = Sm90KeyRows<T, Config>;
    using Base::arrive, Base::add_product, Base::is_masked, Base::mask, Base::lane, Base::warp;
    using Base::kScores, Base::kPairs, Base::kSums;
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
        if (work_.num_steps > 0) {
            clear_unseen_keys();
            uint32_t keys[kKeyRegisters];
            read_rows(keys, group_ == 0 ? shared_.k_rows() : shared_.v_rows());
            arrive_in_cluster(&shared_.q_empty[Config::kStages - 1]);
            if (group_ == 0) {
                walk_weights(sums, keys);
            } else {
                walk_gradients(sums, keys);
            }
        }
        this->sync_consumers();  // no warpgroup reads Q and dO any more
        if (group_ == 0) {
            this->put(shared_.dv_out(), sums, p_.out_scale);
        } else {
            this->put(shared_.dk_out(), sums, p_.softmax_scale * p_.out_scale);
        }
        this->hand_over();
    }

  private:
    static_assert(Config::kCtas == 2 && Config::kQueries == 64 && Config::kDsSlots == 2);
    static constexpr int kDqColumns = Config::kHeadDim / Config::kCtas, kDqSums = kDqColumns / 2;
    using ProductOfQueries = ptx::Wgmma<T, kDqColumns>;
    using Step = Sm90BackwardStep<Config>;
    static constexpr int kKeyRegisters = Config::kHeadDim / 4;  // two 16-bit numbers each

    // A slot of weights or of dS, and the parity of the phase that fills it.
    struct Slot {
        uint32_t index, parity;
        __device__ explicit Slot(const Step& step)
            : index(static_cast<uint32_t>(step.index) % 2),
              parity(static_cast<uint32_t>(step.index) / 2 % 2) {}
        __device__ Slot before() const { return {index ^ 1, index == 0 ? parity ^ 1 : parity}; }

      private:
        __device__ Slot(uint32_t index, uint32_t parity) : index(index), parity(parity) {}
    };
    static_assert(Config::kWeightSlots == 2);

    // Reads this warp's rows of K or V, as an operand of products lies in registers.
    __device__ __forceinline__ void read_rows(uint32_t (&keys)[kKeyRegisters],
                                              const unsigned char* tile) const {
#pragma unroll
        for (int i = 0; i < Config::kHeadDim / 16; ++i) {
            const int column = (i % 2 * 2 + lane() / 16) ^ (lane() % 8 / 2);  // 16 bytes wide, swizzled
            uint32_t matrices[4];
            ptx::ldmatrix_x4(matrices, ptx::shared_address(tile) + i / 2 * Config::kKeyBlockBytes +
                                           this->matrix_row() * Config::kRowBytes + 16 * column);
#pragma unroll
            for (int j = 0; j < 4; ++j) keys[4 * i + j] = matrices[j];
        }
    }
    static_assert(Config::kRowBytes == 64);

    // Multiplies this warpgroup's rows of K or V by a tile of Q or dO, and adds the terms of each query.
    __device__ __forceinline__ void multiply(float (&results)[kScores], const uint32_t (&keys)[kKeyRegisters],
                                             const unsigned char* queries,
                                             const BfloatTerms* statistics) const {
        const uint64_t b = Base::descriptor(ptx::shared_address(queries), 0);
        ptx::wgmma_fence();
        this->multiply_terms(results, statistics);
#pragma unroll
        for (int i = 0; i < Config::kHeadDim / 16; ++i) {
            Base::ProductOfKeys::rs_keys(results, &keys[4 * i],
                                         b + (i / 2 * Config::kQueryBlockBytes + i % 2 * 32) / 16, true);
        }
        ptx::wgmma_commit();
    }

    __device__ __forceinline__ void walk_weights(float (&dv)[kSums], const uint32_t (&keys)[kKeyRegisters]) {
        Step step(work_, 0);
#pragma unroll 1
        for (; step.is_left(); step.advance(work_)) {
            const uint32_t stage = ptx::uniform(step.stage());
            float scores[kScores];
            ptx::mbarrier_wait(&shared_.q_full[step.stage()], step.parity());
            multiply(scores, keys, shared_.q[stage], shared_.lse[stage]);
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
            // Weights go to the lane of the other warpgroup that has the same elements.
            const Slot slot(step);
            ptx::mbarrier_wait(&shared_.weights_empty[slot.index], slot.parity ^ 1);
            uint4* const to = shared_.weights[slot.index] + threadIdx.x % 128;
#pragma unroll
            for (int j = 0; j < kPairs; j += 4)
                to[j / 4 * 128] = make_uint4(weights[j], weights[j + 1], weights[j + 2], weights[j + 3]);
            arrive(&shared_.weights_full[slot.index]);
            ptx::mbarrier_wait(&shared_.dout_full[step.stage()], step.parity());
            ptx::wgmma_fence();
            add_product(dv, weights, shared_.dout[stage]);
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
            ptx::wgmma_results(dv);
            arrive_in_cluster(&shared_.q_empty[step.stage()]);
        }
    }

    __device__ __forceinline__ void walk_gradients(float (&dk)[kSums],
                                                   const uint32_t (&values)[kKeyRegisters]) {
        int32_t dq_before = -1;  // where dQ of the step before goes
        Step step(work_, 0);
#pragma unroll 1
        for (; step.is_left(); step.advance(work_)) {
            const uint32_t stage = ptx::uniform(step.stage());
            const bool is_first = dq_before < 0;
            float products[kScores];
            ptx::mbarrier_wait(&shared_.dout_full[step.stage()], step.parity());
            multiply(products, values, shared_.dout[stage], shared_.delta[stage]);
            ptx::wgmma_wait<0>();
            ptx::wgmma_results(products);
            uint32_t gradients[kPairs];
            const Slot slot(step);
            ptx::mbarrier_wait(&shared_.weights_full[slot.index], slot.parity);
            const uint4* const from = shared_.weights[slot.index] + threadIdx.x % 128;
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
            arrive(&shared_.weights_empty[slot.index]);
            if (is_masked(step)) {  // products with keys that are not seen may be anything
                mask(step, [&](int j, bool sees_even, bool sees_odd) {
                    gradients[j] &= (sees_even ? 0xffffu : 0u) | (sees_odd ? 0xffff0000u : 0u);
                });
            }
            ptx::mbarrier_wait(&shared_.ds_empty[slot.index], slot.parity ^ 1);
            send_gradients(gradients, slot.index);
            ptx::mbarrier_wait(&shared_.q_full[step.stage()], step.parity());

            // dQ is computed a step late, so that no warpgroup waits for dS of the other CTA. The first step
            // multiplies whatever lies in the slot and drops the result. The product cannot be left out
            // there: behind a branch, ptxas would run the products one after the other.
            const Slot before = slot.before();
            const uint32_t slot_before = ptx::uniform(before.index);
            float dq[kDqSums];
            if (!is_first) ptx::mbarrier_wait(&shared_.ds_full[before.index], before.parity);
            ptx::wgmma_fence();
            multiply_ds_k(dq, slot_before);
            ptx::wgmma_commit();
            add_product(dk, gradients, shared_.q[stage]);
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();
            ptx::wgmma_results(dq);
            if (!is_first) {
                arrive_in_cluster(&shared_.ds_empty[before.index]);
                add(dq, dq_before);
            }
            ptx::wgmma_wait<0>();
            ptx::wgmma_results(dk);
            arrive_in_cluster(&shared_.q_empty[step.stage()]);
            dq_before = step.place(plan_, work_, group_);
        }
        const Slot last = Slot(step).before();
        float dq[kDqSums];
        ptx::mbarrier_wait(&shared_.ds_full[last.index], last.parity);
        ptx::wgmma_fence();
        multiply_ds_k(dq, last.index);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(dq);
        add(dq, dq_before);
    }

    __device__ static int rank() { return static_cast<int>(ptx::cluster_rank()); }

    // Adds the columns of dQ that this CTA sums.
    __device__ __forceinline__ void add(const float (&dq)[kDqSums], int32_t place) const {
        this->add_to_sums(dq, this->sums_of(place) + rank() * (64 * kDqColumns));
    }

    // Computes these columns.
    __device__ __forceinline__ void multiply_ds_k(float (&dq)[kDqSums], int slot) const {
        const uint32_t ds = ptx::shared_address(shared_.ds_slot(slot));
#pragma unroll
        for (int other = 0; other < 2; ++other) {
            const uint64_t a =
                ptx::wgmma_descriptor(ds + other * Config::kDsBlockBytes, Config::kDsBlockBytes);
            const uint64_t b =
                Base::descriptor(ptx::shared_address(other == 0 ? shared_.own_keys() : shared_.other_keys()),
                                 Config::kKeyBlockBytes);
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
            auto clear = [&](unsigned char* tile, int blocks) {
#pragma unroll
                for (int block = 0; block < blocks; ++block)
                    *reinterpret_cast<uint32_t*>(tile + block * Config::kKeyBlockBytes + place) = 0;
            };
            if (row / Config::kKeys == rank()) {
                clear(shared_.k_rows(), Config::kColumnBlocks);
                clear(shared_.v_rows(), Config::kColumnBlocks);
                clear(shared_.own_keys(), Config::kOwnBlocks);
            } else {
                clear(shared_.other_keys(), Config::kOwnBlocks);
            }
        }
        ptx::fence_proxy_async();
        this->sync_consumers();
    }
};

}  // namespace octavo::cuda
