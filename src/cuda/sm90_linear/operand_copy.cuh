// The ring of stages in shared memory through which w and x come to both kernels, and the thread that fills
// it.
#pragma once

#include "cuda/ptx/grid_dependency.h"
#include "cuda/ptx/l2_policy.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/tma.h"
#include "cuda/sm90_linear/parameters.h"
#include "cuda/sm90_linear/tiles.h"

namespace octavo::cuda {

// The start of a CTA's shared memory; the stages follow, then room for the sums that other CTAs of the
// cluster send.
struct alignas(1024) LinearBarriers {
    uint64_t full[kMaxLinearStages], empty[kMaxLinearStages];
    uint64_t landed;   // completes when all sums that the others send to this CTA have arrived
    uint64_t squares;  // likewise the sums of squares, where x is normalised,
    uint64_t factors;  // and when the factors that follow from them are there
};

__device__ __forceinline__ LinearBarriers& linear_barriers() {
    extern __shared__ __align__(1024) char shared[];
    return *reinterpret_cast<LinearBarriers*>(shared);
}
__device__ __forceinline__ char* linear_stages() {
    return reinterpret_cast<char*>(&linear_barriers()) + sizeof(LinearBarriers);
}

// This CTA's split of K, in steps.
struct StepRange {
    int32_t begin, end;

    __device__ __forceinline__ StepRange(const Sm90LinearLaunch& p, int32_t rank)
        : begin(rank * p.steps / p.splits), end((rank + 1) * p.steps / p.splits) {}
};

// Where a CTA is in the ring, and how often it has gone round.
struct RingPosition {
    int32_t stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance(int32_t stages) {
        if (++stage < stages) return;
        stage = 0;
        parity ^= 1;
    }
};

// One thread calls this. `landed_bytes`: how many bytes the other CTAs send.
__device__ __forceinline__ void init_linear_barriers(const Sm90LinearLaunch& p, uint32_t consumer_warps,
                                                     uint32_t landed_bytes) {
    LinearBarriers& barriers = linear_barriers();
    for (int32_t stage = 0; stage < p.stages; ++stage) {
        ptx::mbarrier_init(&barriers.full[stage], 1);
        ptx::mbarrier_init(&barriers.empty[stage], consumer_warps);
    }
    ptx::mbarrier_init(&barriers.landed, 1);
    ptx::mbarrier_init_fence();
    ptx::mbarrier_arrive_expect(&barriers.landed, landed_bytes);
}

// kNormPanels: of how many panels of a stage the weights of the norm are copied as well; 0: there is none.
template <int kWRows, int kXRows, int kNormPanels = 0>
class OperandCopy {
  public:
    // Copies every num_ctas-th tile from `tile` on.
    __device__ __forceinline__ OperandCopy(const Sm90LinearLaunch& p, StepRange range, int32_t tile,
                                           int32_t num_ctas)
        : p_(p), range_(range), num_ctas_(num_ctas) {
        begin(tile);
    }

    // Runs in one thread. The first weights are requested before the previous kernel has ended, if the caller
    // has promised that nothing still writes them.
    __device__ __forceinline__ void run() {
        if (range_.begin == range_.end) return;
        if (p_.static_weight) {
            const int32_t tile = tile_;
            fill_ring([&](int32_t stage) { copy_weights(stage); });
            begin(tile);
        }
        ptx::launch_dependents();
        ptx::wait_for_previous_grid();
        fill_ring([&](int32_t stage) {
            if (!p_.static_weight) copy_weights(stage);
            copy_x(stage);
        });
        RingPosition at;
        for (; tile_ < p_.num_tiles; next()) {
            ptx::mbarrier_wait(&linear_barriers().empty[at.stage], at.parity);
            copy_weights(at.stage);
            copy_x(at.stage);
            at.advance(p_.stages);
        }
    }

  private:
    template <class Copy>
    __device__ __forceinline__ void fill_ring(Copy copy) {
        for (int32_t stage = 0; stage < p_.stages && tile_ < p_.num_tiles; ++stage, next()) copy(stage);
    }

    __device__ __forceinline__ void begin(int32_t tile) {
        tile_ = tile;
        w_row_ = p_.first_column(tile / p_.x_tiles);
        x_row_ = tile % p_.x_tiles * kXRows;
        step_ = range_.begin;
    }
    __device__ __forceinline__ void next() {
        if (++step_ == range_.end) begin(tile_ + num_ctas_);
    }

    // Copies the weights of a stage; its barrier expects the bytes of x, too.
    __device__ __forceinline__ void copy_weights(int32_t stage) {
        ptx::mbarrier_arrive_expect(&linear_barriers().full[stage], p_.stage_bytes + kNormPanels * 128);
        copy(stage, &p_.w, p_.panels * kXRows * 128, kWRows, w_row_, ptx::kEvictFirst);
        if constexpr (kNormPanels > 0)
            copy_to(linear_stages() + p_.norm_offset + stage * kNormPanels * 128, stage, &p_.norm_weight, 1,
                    0, ptx::kEvictLast);
    }
    __device__ __forceinline__ void copy_x(int32_t stage) {
        copy(stage, &p_.x, 0, kXRows, x_row_, ptx::kEvictLast);
    }

    __device__ __forceinline__ void copy(int32_t stage, const CUtensorMap* map, int32_t offset, int32_t rows,
                                         int32_t first_row, uint64_t policy) {
        copy_to(linear_stages() + stage * p_.stage_bytes + offset, stage, map, rows, first_row, policy);
    }
    __device__ __forceinline__ void copy_to(char* to, int32_t stage, const CUtensorMap* map, int32_t rows,
                                            int32_t first_row, uint64_t policy) {
        uint64_t* const full = &linear_barriers().full[stage];
        const int32_t panel = step_ * p_.panels;
        if (p_.copies_stages) {
            ptx::tma_load(to, map, full, policy, 0, first_row, 0, panel, 0);
            return;
        }
#pragma unroll 1
        for (int32_t i = 0; i < p_.panels; ++i)
            ptx::tma_load(to + i * rows * 128, map, full, policy, (panel + i) * kPanelColumns, first_row, 0,
                          0, 0);
    }

    const Sm90LinearLaunch& p_;
    const StepRange range_;
    const int32_t num_ctas_;
    int32_t tile_, w_row_, x_row_, step_;
};

}  // namespace octavo::cuda
