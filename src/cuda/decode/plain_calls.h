// Decode calls without options, for which the kernels over codes have instances of their own.
#pragma once

#include "cuda/codes.h"
#include "params/attention_params.h"

namespace octavo::cuda {

// Whether there are such instances; the stream-K kernel has them for four rows alone. Over 16 bits, reads
// hide what options cost; head dim 256 has none so far.
constexpr bool has_plain_calls(int head_dim, Codes codes) { return codes != Codes::none && head_dim <= 128; }

// Whether plain calls whose items have up to four rows have others. Over float8, whose codes have less to be
// computed for each key, they would gain nothing.
constexpr bool has_four_rows(int row_tiles, Codes codes) {
    return row_tiles == 1 && codes != Codes::e4m3 && codes != Codes::e5m2;
}

// Whether a call has none of the options that KnownParams leaves out, and serves all sequences. (Chunks come
// with a window, and numbers of heads with ALiBi, softmax_phi or a tree mask.)
inline bool is_plain(const AttentionParams& p) {
    return p.window_left < 0 && p.softcap == 0.0f && !p.prefix_lens && !p.alibi_slopes && !p.sinks &&
           !p.has_softmax_phi && !p.has_tree_mask && p.most_queries == 0;
}

// The parameters of a plain call, of which the compiler knows what is not given: it leaves out all code for
// it. Otherwise, an option that is not given costs what it takes to see that, in each block of keys.
template <bool kPlain>
struct KnownParams {
    const AttentionParams& params;
    OCTAVO_HD explicit KnownParams(const AttentionParams& p) : params(p) {}
};
template <>
struct KnownParams<true> {
    AttentionParams params;
    OCTAVO_HD explicit KnownParams(const AttentionParams& p) : params(p) {
        params.window_left = -1;
        params.attention_chunk = {};
        params.softcap = 0.0f;
        params.prefix_lens = {};
        params.alibi_slopes = params.sinks = params.softmax_phi_of_heads = nullptr;
        params.tree_mask = nullptr;
        params.has_softmax_phi = params.has_head_numbers = 0;
        params.has_tree_mask = false;
        params.most_queries = 0;
    }
};

}  // namespace octavo::cuda
