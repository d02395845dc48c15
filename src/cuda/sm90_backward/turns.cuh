// Turns, for sums of dQ whose bits are the same at every call: the sums of a tile of queries take the parts
// of the tiles of keys in one order, that of TurnOrder. For each warpgroup of consumers there is a warp that
// waits until its turn has come, and says when its part is added. Whom a CTA waits for has taken its tile of
// keys before, so that some CTA always goes on, however few of them run.
#pragma once

#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/release.h"
#include "cuda/sm90_backward/shared.cuh"
#include "cuda/sm90_backward/turns.h"

namespace octavo::cuda {

// One thread keeps the turns of a warpgroup for one tile of keys, whose first step is the `index`-th.
template <class Config>
__device__ __forceinline__ void keep_turns(const Sm90BackwardLaunch& plan,
                                           const Sm90BackwardWork<Config>& work, int group, int32_t index,
                                           Sm90BackwardShared<Config>& shared) {
    const int32_t own = work.first_key / Config::kKeys;
    const TurnBefore<Config::kKeys, Config::kQueries> before(work.seq.see, work.seq.seqlen_q, own,
                                                             work.rises);
#pragma unroll 1
    for (Sm90TurnStep<Config> step(work, index); step.is_left(); step.advance(work)) {
        int32_t* const turn = plan.turns + step.place(plan, work, 0) * Config::kConsumers + group;
        if (before.walks(step.tile)) {
            while (ptx::load_acquire(turn) != before.key_tile + 1) {
            }
        }
        ptx::mbarrier_arrive(&shared.turns.come[group]);
        ptx::mbarrier_wait(&shared.turns.added[group], turn_parity(step.index));
        ptx::store_release(turn, own + 1);
    }
}

}  // namespace octavo::cuda
