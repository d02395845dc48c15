// Attention forward, checked: plain data for both backends. Strides count elements; the last axis has
// stride 1 throughout.
#pragma once

#include "common/block_mask.h"
#include "common/dropout.h"
#include "common/fast_divide.h"
#include "common/macros.h"
#include "common/tree_mask.h"
#include "common/visibility.h"
#include "params/bidirectional_ranges.h"
#include "params/cache_scales.h"
#include "params/chosen_pages.h"
#include "params/index_array.h"

#include <octavo/tensor.h>

#include <cstdint>

namespace octavo {

constexpr int32_t kMaxHeadDim = 512;
// The largest head dims of a cache of codes, and of gradients, on a GPU.
constexpr int32_t kMaxCudaCodeHeadDim = 256, kMaxCudaGradientHeadDim = 256;

struct AttentionParams {
    DType dtype;    // the dtype of q and out
    DType k_dtype;  // the dtype of k: that of q, or codes, which only pages hold; likewise v_dtype
    DType v_dtype;
    Device device;

    const void* q;  // [batch, seqlen_q, num_q_heads, head_dim]; packed: [total_q, num_q_heads, head_dim]
    int64_t q_batch_stride, q_token_stride, q_head_stride;
    void* out;  // like q, but head_dim_v long
    int64_t out_batch_stride, out_token_stride, out_head_stride;
    float* lse;  // like q without head_dim; may be null
    int64_t lse_batch_stride, lse_token_stride, lse_head_stride;

    // Dense: [batch, seqlen_k, num_kv_heads, head_dim], outer = batch. Packed: [total_k, ...], outer unused.
    // Paged: [num_pages, page_size, num_kv_heads, head_dim], outer = page.
    const void* k;
    int64_t k_outer_stride, k_token_stride, k_head_stride;
    const void* v;  // like k, but head_dim_v long
    int64_t v_outer_stride, v_token_stride, v_head_stride;

    IndexArray cu_seqlens_q;  // [batch + 1]; null: every sequence has seqlen_q queries
    IndexArray cu_seqlens_k;  // [batch + 1]; null unless packed
    IndexArray page_table;    // [batch, max_pages]; null unless paged
    int64_t page_table_stride;
    // [batch]; null unless paged. Paged without it: total_k keys, cut into sequences of seqlen_k.
    IndexArray seq_lens;
    IndexArray prefix_lens;      // [batch]; may be null
    const float* alibi_slopes;   // [num_q_heads], or [batch, num_q_heads]; may be null
    int64_t alibi_batch_stride;  // 0 when shared by the batch
    const float* sinks;          // [num_q_heads]; may be null

    int64_t num_pages;  // 0 unless paged

    int64_t total_q;  // queries over all sequences
    int32_t total_k;  // keys over all sequences, where they are paged and seq_lens is null
    int32_t batch;
    int32_t seqlen_q;  // of every sequence; packed: the bound max_seqlen_q
    int32_t seqlen_k;  // of every sequence; packed: the bound max_seqlen_k; paged: max_pages * page_size
    int32_t num_q_heads, num_kv_heads, head_dim;
    int32_t page_size;
    // The first keys of every sequence, whole pages, lie in the first sequence's pages; 0: none do.
    int32_t shared_prefix_len;
    // How many first keys of every sequence another launch reads: seq_lens and prefix_lens count them, but
    // page_table begins behind them.
    int32_t num_skipped_keys;
    int32_t window_left, window_right;  // -1: unbounded; causal: window_right = 0
    float softmax_scale;                // k_scale included
    float softcap;                      // 0: none
    int32_t has_softmax_phi;            // whether there is one: see below
    int32_t has_head_numbers;           // whether alibi_slopes, softmax_phi_of_heads or tree_mask is given
    float out_scale;                    // v_scale, or 1 / (1 - dropout_p)
    int32_t head_dim_v;                 // of v and out
    bool batch_invariant;               // bits must follow from the sequence alone, as without splits
    bool static_past;                   // what earlier kernels may still write: see PagedAttentionArgs
    FastDivide attention_chunk;         // see Visibility
    bool has_tree_mask;                 // see tree_mask
    bool alibi_symmetric;               // only where some query may see a key past its own position
    CacheScales k_scales, v_scales;     // beside softmax_scale and out_scale
    // Fields that decoding never or rarely reads come last: see prefetch_params.
    const float* softmax_phi_of_heads;  // [num_q_heads]; null: softmax_phi holds for all
    float softmax_phi;                  // the unified maximum, in units of scores
    Dropout dropout;                    // drops softmax weights; the LSE does not depend on it
    const uint32_t* tree_mask;          // [total_q, 2]: a word for each query, its lower half first; or null
    const char* op;                     // "attention" or "paged_attention", for messages
    BlockMask block_mask;               // dense and packed attention only
    int32_t num_splits;                 // runs of keys for each row; 0: the backend chooses
    ChosenPages chosen_pages;           // paged attention only
    BidirectionalRanges ranges;         // null also where they change nothing
    // Which sequences of a packed batch a launch serves, by their numbers of queries; most_queries = 0: all.
    // The launches that an ExpandedPlan has look at it; sm80_attention and split-KV over 16 bits do not.
    int32_t fewest_queries, most_queries;

    OCTAVO_HD int32_t group_size() const { return num_q_heads / num_kv_heads; }
    OCTAVO_HD bool paged() const { return static_cast<bool>(page_table); }
    OCTAVO_HD float softmax_phi_of(int32_t head) const {
        return softmax_phi_of_heads ? softmax_phi_of_heads[head] : softmax_phi;
    }
    // The first token of sequence b in an array of all queries.
    OCTAVO_HD int64_t first_token(int32_t b) const {
        return cu_seqlens_q ? cu_seqlens_q[b] : int64_t{b} * seqlen_q;
    }
    // How many queries of sequence b, in a packed batch, the launch serves: all or none.
    OCTAVO_HD int32_t served_queries(int32_t b) const {
        const int32_t queries = cu_seqlens_q[b + 1] - cu_seqlens_q[b];
        const bool all = most_queries == 0 || (queries >= fewest_queries && queries <= most_queries);
        return all ? queries : 0;
    }
    // Whether a sequence with this many queries has a tree mask.
    OCTAVO_HD bool is_tree(int32_t num_queries) const {
        return OCTAVO_RARE(has_tree_mask) && num_queries <= kMaxTreeTokens;
    }
    // The word of a query, counted over all sequences.
    OCTAVO_HD uint64_t tree_word(int64_t token) const {
        return uint64_t{tree_mask[2 * token + 1]} << 32 | tree_mask[2 * token];
    }
};

// Where the arrays of one sequence of the batch begin, and which keys its queries see. `See` is Visibility,
// or RangedVisibility for calls with bidirectional ranges.
template <class See>
struct SequenceSliceOf {
    int64_t q_begin;  // its first query, in elements from q; likewise out_begin and lse_begin
    int64_t out_begin;
    int64_t lse_begin;
    int64_t k_begin;  // its first key, in elements from k; 0 when paged; likewise v_begin
    int64_t v_begin;
    int32_t seqlen_q;
    See see;

    OCTAVO_HD int32_t q_pos(int32_t i) const { return see.seqlen_k - seqlen_q + i; }

    // Not more than page_table has room for, whatever seq_lens says: there are no pages behind that.
    OCTAVO_HD static int32_t seqlen_k(const AttentionParams& p, int32_t b) {
        if (p.seq_lens) {
            const int32_t length = behind_skipped(p, p.seq_lens[b]);
            return length < p.seqlen_k ? length : p.seqlen_k;
        }
        if (p.cu_seqlens_k) return p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b];
        if (!p.paged()) return p.seqlen_k;
        const int32_t left = p.total_k - b * p.seqlen_k;
        return left < p.seqlen_k ? left : p.seqlen_k;
    }

    // How many first keys every query sees, in a sequence of seqlen_k keys.
    OCTAVO_HD static int32_t prefix_len(const AttentionParams& p, int32_t b, int32_t seqlen_k) {
        if (!OCTAVO_RARE(p.prefix_lens)) return 0;
        const int32_t prefix_len = behind_skipped(p, p.prefix_lens[b]);
        return prefix_len < seqlen_k ? prefix_len : seqlen_k;
    }

    OCTAVO_HD static SequenceSliceOf make(const AttentionParams& p, int32_t b) {
        return make(p, b, seqlen_k(p, b));
    }

    // The same where seqlen_k(p, b) is known.
    OCTAVO_HD static SequenceSliceOf make(const AttentionParams& p, int32_t b, int32_t seqlen_k) {
        SequenceSliceOf s{};
        if (OCTAVO_RARE(p.cu_seqlens_q)) {
            int64_t first = p.cu_seqlens_q[b];
            s.q_begin = first * p.q_token_stride;
            s.out_begin = first * p.out_token_stride;
            s.lse_begin = first * p.lse_token_stride;
            s.seqlen_q = p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b];
        } else {
            s.q_begin = b * p.q_batch_stride;
            s.out_begin = b * p.out_batch_stride;
            s.lse_begin = b * p.lse_batch_stride;
            s.seqlen_q = p.seqlen_q;
        }
        if (p.cu_seqlens_k) {
            int64_t first = p.cu_seqlens_k[b];
            s.k_begin = first * p.k_token_stride;
            s.v_begin = first * p.v_token_stride;
        } else if (!p.paged()) {
            s.k_begin = b * p.k_outer_stride;
            s.v_begin = b * p.v_outer_stride;
        }
        Visibility& see = s.see;
        see = {seqlen_k, prefix_len(p, b, seqlen_k), p.window_left, p.window_right, p.attention_chunk};
        set_ranges(s.see, p, b);
        return s;
    }

  private:
    OCTAVO_HD static void set_ranges(Visibility&, const AttentionParams&, int32_t) {}
    OCTAVO_HD static void set_ranges(RangedVisibility& see, const AttentionParams& p, int32_t b) {
        if (!p.ranges) return;
        see.bounds = p.ranges.of_sequence(b);
        see.count = p.ranges.count;
        see.keep_window_left = p.ranges.keep_window_left;
    }
    OCTAVO_HD static int32_t behind_skipped(const AttentionParams& p, int32_t length) {
        return length > p.num_skipped_keys ? length - p.num_skipped_keys : 0;
    }
};
using SequenceSlice = SequenceSliceOf<Visibility>;
using RangedSlice = SequenceSliceOf<RangedVisibility>;

}  // namespace octavo
