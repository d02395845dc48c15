// The threads that the CPU operators share.
#pragma once

#include <cstdint>
#include <functional>

namespace octavo::cpu {

// Calls body(0) ... body(count - 1), each once, in any order, on the caller's thread and the pool's; returns
// when all have. May be called from several threads at once and from inside a body. The first exception
// that a body throws is thrown again here; bodies that have not begun by then may never run.
void parallel_for(int64_t count, const std::function<void(int64_t)>& body);

// The half-open pieces of [0, count) of at most `grain` each, as parallel_for.
template <class Body>
void parallel_for_ranges(int64_t count, int64_t grain, const Body& body) {
    parallel_for((count + grain - 1) / grain, [&](int64_t i) {
        int64_t begin = i * grain;
        body(begin, begin + grain < count ? begin + grain : count);
    });
}

// Refuses, in the name of set_num_threads(), a number of threads that cannot be set.
void check_num_threads(int64_t num_threads);

}  // namespace octavo::cpu
