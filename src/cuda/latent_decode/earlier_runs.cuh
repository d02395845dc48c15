// How the partial results of a sequence that several runs share come together (latent/schedule.cuh): in a
// tree of sums.
//
//     place    0   1   2   3   4   5   6   7   8   9        fan-in 4; run 9 has the sequence's end
//              |___|___|__ |   |___|___|__ |   |   |
//                         sum             sum  |   |
//                          |_______________|___|__ |
#pragma once

#include <cstdint>

namespace octavo::cuda {

// Adds to `rows` what the runs before it have pushed and this run has to add. `place`: of this run among
// those of the sequence; words_of(n): where the n-th run before this one pushes. Every kFanIn-th run adds up
// the runs behind the last such one, and pushes the sum. The run with the sequence's end adds these sums and
// the results behind the last of them.
template <int kFanIn, class Rows, class WordsOf>
__device__ void add_earlier_runs(Rows& rows, int32_t place, bool is_end, WordsOf words_of) {
    if (place == 0 || (!is_end && place % kFanIn != kFanIn - 1)) return;
    const int32_t sums = is_end ? place / kFanIn : 0, singles = place % kFanIn;
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
        const int32_t first = turn == 0 ? place + 1 - kFanIn : singles, step = turn == 0 ? kFanIn : 1;
        rows.add_pushed(turn == 0 ? sums : singles, [&](int32_t i) { return words_of(first - i * step); });
    }
}

}  // namespace octavo::cuda
