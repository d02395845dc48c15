// Tree masks: among the newest keys of a sequence, those that came with its queries, a tree mask says which a
// query sees (EAGLE, Li et al. 2024, arXiv:2401.15077; Medusa, Cai et al. 2024, arXiv:2401.10774). The other
// masks may hide more.
#pragma once

#include "common/macros.h"

#include <cstdint>

namespace octavo {

// The number of bits in a query's word; a sequence with more queries has no tree mask.
constexpr int32_t kMaxTreeTokens = 64;

// Which of the 64 keys from `first_key` on a word hides, one bit each. Bit j of the word belongs to key begin
// + j; keys before `begin`, or before `prefix_len`, are not hidden.
OCTAVO_HD uint64_t hidden_by_tree(uint64_t word, int32_t begin, int32_t prefix_len, int32_t first_key) {
    uint64_t hidden = ~word;
    const int32_t in_prefix = prefix_len - begin, shift = first_key - begin;
    if (in_prefix > 0) hidden = in_prefix < 64 ? hidden >> in_prefix << in_prefix : 0;
    if (shift >= 0) return shift < 64 ? hidden >> shift : 0;
    return shift > -64 ? hidden << -shift : 0;
}

}  // namespace octavo
