// The works of a CTA of sm90_latent, one behind the other, and what becomes of the rows of each.
#pragma once

#include "cuda/latent/earlier_runs.cuh"
#include "cuda/latent/parameters.h"
#include "cuda/latent/schedule.cuh"
#include "cuda/partial_words.cuh"
#include "cuda/ptx/warpgroup.h"
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
        int32_t place;  // of the run among those of the sequence
        bool is_end;    // whether the sequence ends here
    };

    // All threads of the CTA construct it together, and wait for each other. The CTAs of a run, one for each
    // tile of rows, are neighbours. cta: grid_index's.
    __device__ Sm90LatentSegments(const LatentAttentionParams& p, const LatentLaunch& launch,
                                  Sm90LatentShared& shared, int32_t cta)
        : p_(p),
          launch_(launch),
          cta_(cta),
          schedule_(p, shared.schedule, launch.tiles_per_sequence.quotient(cta_),
                    launch.tiles_per_sequence.quotient(static_cast<int32_t>(gridDim.x))) {}

    __device__ bool is_empty() const { return schedule_.is_empty(); }

    // Only the number of the current sequence stays in a register.
    template <class F>
    __device__ void for_each(F f) const {
        LatentSegment segment = schedule_.last();
#pragma unroll 1
        while (true) {
            const int32_t b = segment.sequence, row_tile = launch_.tiles_per_sequence.remainder(cta_);
            const Work work{Sm90LatentWork::of_segment(p_, launch_, segment, row_tile),
                            schedule_.place_of(segment), segment.end == segment.count};
            if (ptx::uniform(work.has_rows())) f(work);
            if (ptx::uniform(schedule_.is_first(b))) break;
            segment = schedule_.before(b);
        }
    }

    template <class Rows>
    __device__ void finish(Rows& rows, const Work& work) const {
        if (!ptx::uniform(Rows::has_rows(work))) return;
        auto words_of = [&](int32_t back) {
            const int32_t cta = cta_ - back * static_cast<int32_t>(launch_.tiles_per_sequence.divisor);
            return launch_.partial.words + int64_t{cta} * kSm90LatentPartialWords;
        };
        add_earlier_runs<kSm90LatentFanIn>(rows, work.place, work.is_end, words_of);
        if (work.is_end)
            rows.store(p_, launch_, work);
        else
            rows.push(words_of(0));
    }

  private:
    const LatentAttentionParams& p_;
    const LatentLaunch& launch_;
    int32_t cta_;
    Sm90LatentSchedule schedule_;
};

}  // namespace octavo::cuda
