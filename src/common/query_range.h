// Which queries see some of a run of keys.
#pragma once

#include "common/visibility.h"

#include <cstdint>

namespace octavo {

// A run of queries [begin, end) of a sequence; outside it, no query sees a key of [k_begin, k_end), which
// must not be empty.
struct QueryRange {
    int32_t begin, end;

    // `See` is Visibility, or has ranges too.
    template <class See>
    OCTAVO_HD QueryRange(const See& see, int32_t seqlen_q, int32_t k_begin, int32_t k_end)
        : begin(0), end(seqlen_q) {
        if (k_begin < see.prefix_len) return;
        const int64_t q_begin = int64_t{see.seqlen_k} - seqlen_q;  // the position of the first query
        if (see.window_right >= 0) begin = within(k_begin - see.window_right - q_begin, seqlen_q);
        if (see.window_left >= 0) end = within(int64_t{k_end} + see.window_left - q_begin, seqlen_q);
        if (see.has_chunks()) end = lesser(end, within(see.chunk_end(k_end - 1) - q_begin, seqlen_q));
        if constexpr (See::kHasRanges) {
            begin = within(see.first_query(k_begin, q_begin + begin) - q_begin, seqlen_q);
            end = within(see.queries_end(k_end - 1, q_begin + end) - q_begin, seqlen_q);
        }
    }

    // The run of queries that each see every one of these keys.
    OCTAVO_HD static QueryRange that_see_all(const Visibility& see, int32_t seqlen_q, int32_t k_begin,
                                             int32_t k_end) {
        if (k_end > see.seqlen_k) return {0, 0};
        if (k_end <= see.prefix_len) return {0, seqlen_q};
        const int64_t q_begin = int64_t{see.seqlen_k} - seqlen_q;
        QueryRange range{0, seqlen_q};
        if (see.window_right >= 0) range.begin = within(k_end - 1 - see.window_right - q_begin, seqlen_q);
        if (see.window_left >= 0)
            range.end = within(int64_t{k_begin} + see.window_left + 1 - q_begin, seqlen_q);
        if (see.has_chunks())
            range.end = lesser(range.end, within(see.chunk_end(k_begin) - q_begin, seqlen_q));
        return range;
    }

  private:
    OCTAVO_HD QueryRange(int32_t begin, int32_t end) : begin(begin), end(end) {}
    OCTAVO_HD static int32_t lesser(int32_t a, int32_t b) { return a < b ? a : b; }
    OCTAVO_HD static int32_t within(int64_t i, int32_t seqlen_q) {
        return i < 0 ? 0 : i > seqlen_q ? seqlen_q : static_cast<int32_t>(i);
    }
};

}  // namespace octavo
