// The works of a CTA of sm90_latent, one behind the other, and what becomes of the rows of each.
#pragma once

#include "cuda/latent/parameters.h"
#include "cuda/latent/schedule.cuh"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm90_latent/partials.cuh"
#include "cuda/sm90_latent/rows.cuh"
#include "cuda/sm90_latent/shared.cuh"

#include <cstdint>

namespace octavo::cuda {

// The one work of a CTA of a grid of splits.
class Sm90LatentSplit {
  public:
    __device__ Sm90LatentSplit(const LatentAttentionParams& p, const LatentLaunch& launch,
                               Sm90LatentShared& shared)
        : p_(p), launch_(launch), shared_(shared), work_(Sm90LatentWork::of_split(p, launch)) {}

    __device__ bool is_empty() const { return !work_.has_rows(); }

    template <class F>
    __device__ void for_each(F f) const {
        f(work_);
    }

    template <class Rows>
    __device__ void finish(Rows& rows, const Sm90LatentWork& work) const {
        if (launch_.cluster > 1 && !rows.combine_with_peer(shared_, work)) return;
        if (launch_.num_partials > 1)
            rows.store_partial(p_, launch_, work);
        else
            rows.store(p_, launch_, work);
    }

  private:
    const LatentAttentionParams& p_;
    const LatentLaunch& launch_;
    Sm90LatentShared& shared_;
    const Sm90LatentWork work_;
};

// The segments of the CTA's run.
class Sm90LatentSegments {
  public:
    struct Work : Sm90LatentWork {
        bool is_begin, is_end;  // whether the sequence begins, or ends, here
    };

    // All threads of the CTA construct it together, and wait for each other. The CTAs of a run, one for each
    // tile of rows, are neighbours.
    __device__ Sm90LatentSegments(const LatentAttentionParams& p, const LatentLaunch& launch,
                                  Sm90LatentShared& shared)
        : p_(p),
          launch_(launch),
          schedule_(p, shared.schedule, launch.tiles_per_sequence.quotient(cta()),
                    launch.tiles_per_sequence.quotient(static_cast<int32_t>(gridDim.x))) {}

    __device__ bool is_empty() const { return schedule_.is_empty(); }

    // Only the number of the current sequence stays in a register.
    template <class F>
    __device__ void for_each(F f) const {
        LatentSegment segment = schedule_.last();
#pragma unroll 1
        while (true) {
            const int32_t b = segment.sequence, row_tile = launch_.tiles_per_sequence.remainder(cta());
            const Work work{Sm90LatentWork::of_segment(p_, launch_, segment, row_tile), segment.begin == 0,
                            segment.end == segment.count};
            if (ptx::uniform(work.has_rows())) f(work);
            if (ptx::uniform(schedule_.is_first(b))) break;
            segment = schedule_.before(b);
        }
    }

    template <class Rows>
    __device__ void finish(Rows& rows, const Work& work) const {
        if (ptx::uniform(work.is_end)) note_runs(work);
        if (!ptx::uniform(Rows::has_rows(work))) return;
        if (ptx::uniform(work.is_begin && work.is_end))
            rows.store(p_, launch_, work);
        else
            rows.leave(Sm90LatentSlot::of(launch_, cta(), !work.is_begin));
    }

  private:
    __device__ static int32_t cta() { return static_cast<int32_t>(blockIdx.x); }

    // Says which CTAs have a part of this tile of rows, whose sequence ends here. All threads find it out, as
    // the compiler takes what follows a branch of one thread that divides for divergent, the products too.
    __device__ void note_runs(const Work& work) const {
        const auto tiles = static_cast<int32_t>(launch_.tiles_per_sequence.divisor);
        const int32_t place = schedule_.place_of(work.b, work.begin_tile / 2);
        LatentRuns* const to = launch_.runs + work.b * tiles + launch_.tiles_per_sequence.remainder(cta());
        if (threadIdx.x == 0) *to = {cta() - place * tiles, place + 1};
    }

    const LatentAttentionParams& p_;
    const LatentLaunch& launch_;
    Sm90LatentSchedule schedule_;
};

}  // namespace octavo::cuda
