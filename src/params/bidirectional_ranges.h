// Ranges of keys inside which queries see in both directions, such as the tokens of an image in a text (Gemma
// 3, PaliGemma).
#pragma once

#include "common/macros.h"
#include "common/visibility.h"
#include "params/index_array.h"

#include <cstdint>

namespace octavo {

// Of every sequence of a batch. Ranges of a sequence ascend and have no key in common; those without keys,
// which fill a row up, may lie anywhere.
struct BidirectionalRanges {
    IndexArray bounds;      // [batch, count, 2]: positions of the first key, and behind the last; or null
    int32_t count;          // of each sequence
    bool keep_window_left;  // whether windows and chunks hide earlier keys of a range as ever

    OCTAVO_HD explicit operator bool() const { return static_cast<bool>(bounds); }
    OCTAVO_HD IndexArray of_sequence(int32_t batch) const { return bounds.from(int64_t{2} * count * batch); }
    BidirectionalRanges from_sequence(int32_t batch) const {
        return {of_sequence(batch), count, keep_window_left};
    }
};

// The ranges of a sequence.
struct RangeList {
    IndexArray bounds;  // [count, 2]; or null
    int32_t count;

    struct Range {
        int32_t begin, end;

        OCTAVO_HD bool holds(int32_t pos) const { return begin <= pos && pos < end; }
        OCTAVO_HD Range from_first_key() const { return {begin < 0 ? 0 : begin, end}; }
    };
    // The range that a position is in. Where there is none, it begins behind all keys, and ends before them.
    OCTAVO_HD Range range_of(int32_t pos) const {
        if (!bounds) return {INT32_MAX, 0};
        for (int32_t i = 0; i < count; ++i) {
            const Range range{bounds[2 * i], bounds[2 * i + 1]};
            if (range.holds(pos)) return range.from_first_key();
        }
        return {INT32_MAX, 0};
    }
};

// Visibility with ranges, which `Ranges` finds: a RangeList, or what is one besides. As a query lies in its
// own window and in its range, it still sees one run of keys beside the prefix, and neither end of that falls
// where q_pos rises.
template <class Ranges>
struct RangedVisibilityOf : Visibility, Ranges {
    using Range = RangeList::Range;
    using Ranges::range_of;
    static constexpr bool kHasRanges = true;
    bool keep_window_left;

    OCTAVO_HD int32_t window_begin(int32_t q_pos) const {
        const int32_t begin = Visibility::window_begin(q_pos);
        if (keep_window_left || begin == 0) return begin;
        const Range range = range_of(q_pos);
        return range.begin < begin ? range.begin : begin;
    }
    OCTAVO_HD int32_t window_end(int32_t q_pos) const {
        const int32_t end = Visibility::window_end(q_pos);
        if (end == seqlen_k) return end;
        const Range range = range_of(q_pos);
        const int32_t range_end = range.end < seqlen_k ? range.end : seqlen_k;
        return range_end > end ? range_end : end;
    }
    OCTAVO_HD bool visible(int32_t q_pos, int32_t k_pos) const {
        return k_pos < prefix_len || (k_pos >= window_begin(q_pos) && k_pos < window_end(q_pos));
    }

    // The positions of the first query that sees a key from `k_pos` on, and behind the last that sees one up
    // to it, where without ranges they are `q_pos`.
    OCTAVO_HD int64_t first_query(int32_t k_pos, int64_t q_pos) const {
        const Range range = range_of(k_pos);
        return range.begin < q_pos ? range.begin : q_pos;
    }
    OCTAVO_HD int64_t queries_end(int32_t k_pos, int64_t q_pos) const {
        if (keep_window_left) return q_pos;
        const Range range = range_of(k_pos);
        return range.end > q_pos ? range.end : q_pos;
    }
};
using RangedVisibility = RangedVisibilityOf<RangeList>;

}  // namespace octavo
