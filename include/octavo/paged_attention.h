// Attention over a paged KV cache, and what keeps the cache (PagedAttention, Kwon et al. 2023,
// arXiv:2309.06180).
//
// k_pages, v_pages: [num_pages, page_size, num_kv_heads, head_dim], any strides with a unit last one. The
// head_dim of v_pages, and so that of v and of the result, may be another one.
// page_table: int32 or int64 [batch, max_pages]; entries past a sequence's last page are never used.
// seq_lens: int32 or int64 [batch]; slots past a sequence's length are never used, whatever they hold.
// Pages have the dtype of the queries and new tokens, or hold codes of 8 or 4 bits, both pages the same, or
// k_pages int8 and v_pages int4:
//   int8, float8_e4m3fn, float8_e5m2: value = scale x code. Either with static scales, k_scale and v_scale
//     (k_scale_array and v_scale_array: float32 [1] or [num_kv_heads], read when the operator runs), which
//     are at least 2^-126, or with one for each token and KV head, k_scales and v_scales: float32 [num_pages,
//     page_size, num_kv_heads], any strides, which append_kv writes and paged_attention reads. float8 has 1
//     by default, int8 none.
//   int4: value = scale x code + minimum. Pages of uint8, their last axis head_dim / 2, the even dim in the
//     lower half of its byte; k_scales and v_scales float16 [num_pages, page_size, num_kv_heads, 2]: scale
//     and minimum, a unit last stride and aligned to 4 bytes.
// kv_dtype says what pages of uint8 hold, and is needed there: float8_e4m3fn, float8_e5m2 or int4.
//
// Keys may be transformed before they become codes, so that these lose less: k_channel_offset is subtracted
// from them, they are divided by k_channel_scale, at least 2^-126, both float32 [num_kv_heads, head_dim], and
// then rotated by a Hadamard matrix where rotate_keys is set (of the size of the largest power of two that
// divides head_dim, a block of the row at a time). paged_attention takes the same arguments, and its results
// are those over the keys as they were. Its queries are multiplied by k_channel_scale and rotated, and then
// get their own dtype again: of float16, they must be at most 65504 in magnitude by then. A larger number
// becomes infinite, and the results of its query NaN; smaller scales or bfloat16 avoid that. k_channel_offset
// cannot be combined with softcap.
#pragma once

#include <octavo/error.h>
#include <octavo/tensor.h>

#include <cstdint>
#include <optional>

namespace octavo {

// q [batch, num_q_heads, head_dim]: one token a sequence; or packed [total_q, num_q_heads, head_dim] with
// cu_seqlens_q int32 or int64 [batch + 1]: any mix of decode, chunked prefill and speculative tokens. Rows of
// q past the last of them, cu_seqlens_q[batch], are padding: nothing is computed for them, and out and lse
// stay as they are. seq_lens counts the new tokens too: append first, then attend. A length is at least the
// number of queries, or 0 for padding, unless each query sees all keys, as in cross attention: not causal,
// without windows, alibi_slopes and tree_mask. The CPU checks that. Masks and positions as in AttentionArgs.
// On a GPU, do not change seq_lens until the call has finished: CTAs derive from it which other CTAs they
// wait for, and would hang.
struct PagedAttentionArgs {
    // q as in AttentionArgs. A GPU reads codes of head_dim up to 256.
    TensorView q, k_pages, v_pages, page_table, seq_lens;
    TensorView out;                 // like q, with the head_dim of v_pages; see AttentionArgs
    std::optional<TensorView> lse;  // float32, the shape of q without its last axis
    std::optional<TensorView> cu_seqlens_q;
    std::optional<TensorView> prefix_lens;  // int32 or int64 [batch]
    // int32 or int64 [batch, num_ranges, 2]; see AttentionArgs. Not with tree_mask, chosen_pages or
    // shared_prefix_len.
    std::optional<TensorView> bidirectional_ranges;
    bool ranges_keep_window_left = false;
    std::optional<TensorView> alibi_slopes;  // float32 [num_q_heads] or [batch, num_q_heads]
    bool alibi_symmetric = false;            // see AttentionArgs
    std::optional<int64_t> max_seqlen_q;
    std::optional<double> softmax_scale;
    bool causal = true;
    int64_t window_left = -1;
    int64_t window_right = -1;
    int64_t attention_chunk = 0;
    double softcap = 0.0;
    std::optional<float> k_scale;  // multiplies what is stored, per tensor
    std::optional<float> v_scale;
    std::optional<TensorView> k_scale_array, v_scale_array;  // instead: see above
    std::optional<TensorView> k_scales, v_scales;            // one for each token and KV head
    std::optional<DType> kv_dtype;                           // what pages of uint8 hold
    std::optional<TensorView> k_channel_offset, k_channel_scale;
    bool rotate_keys = false;
    std::optional<int64_t> num_splits;  // runs of keys worked on at once; default: chosen
    // A sequence's bits depend on the sequence alone, and on max_seqlen_q (which packed queries must give
    // then), not on its batch; on a GPU, of arrays that are contiguous or have strides that are positive
    // multiples of 16 bytes.
    bool batch_invariant = false;
    // The number of leading tokens that all sequences share, whole pages: those that the first row of
    // page_table names, which are then read once for all. A promise: the result is that of any other call.
    // Every query lies behind them, but a sequence may have length 0: padding, whose row names them, too, if
    // it is the first. Not with window_left, attention_chunk, bidirectional_ranges, alibi_slopes or
    // batch_invariant.
    int64_t shared_prefix_len = 0;
    std::optional<TensorView> sinks;              // float32 [num_q_heads]; see AttentionArgs
    std::optional<double> softmax_phi;            // the unified maximum: see AttentionArgs
    std::optional<TensorView> softmax_phi_array;  // float32 [num_q_heads]
    // A word of 64 bits for each row of q: int64 [total_q], or int32 [total_q, 2], the lower half first. Bit
    // j says whether the query sees the j-th of the keys that came with its sequence's queries, which are the
    // newest ones. The mask only hides: causal, which it needs, and window_left hold as ever. It hides
    // neither earlier keys nor those before prefix_lens. A sequence of more than 64 queries is plainly
    // causal: its words are not looked at. Positions, also those of alibi_slopes and window_left, stay places
    // in the sequence. On a GPU hidden keys and values have to be finite.
    std::optional<TensorView> tree_mask;
    // The pages that are read, of each sequence or of each of its KV heads: int32 or int64 [batch,
    // num_chosen] or [batch, num_kv_heads, num_chosen]. A page is named by its place in the sequence, its
    // column of page_table: positions stay what they are. Each list ascends, and -1 fills it up. What is not
    // chosen is not seen, and its entries of page_table are never used. On the CPU lists are checked; on a
    // GPU, where they are not, it takes up to 16 rows a KV head (queries of a sequence times query heads), 8
    // for head dims above 128. Not with prefix_lens, bidirectional_ranges, attention_chunk, tree_mask,
    // shared_prefix_len or num_splits.
    std::optional<TensorView> chosen_pages;
    // A promise for GPUs, with which a call may read old keys and values while the launch in front still
    // runs: no work under way on the stream writes to any array of the call, except for q and, in the pages,
    // each sequence's newest tokens, as many as it has queries, which no other sequence of the call sees. So
    // append_kv of these may be in front, but not copy_pages to pages that are read here.
    bool static_past = false;
    void* stream = nullptr;
};

void paged_attention(const PagedAttentionArgs& args);

// Writes each sequence's newest tokens to the end of its pages. k, v [batch, num_kv_heads, head_dim], each
// with the head_dim of its pages: one token a sequence; or packed [total, num_kv_heads, head_dim] with
// cu_seqlens int32 or int64 [batch + 1].
// seq_lens counts the new tokens. A sequence of length 0 is padding: nothing is written for it. Two tokens of
// one call must not go to one slot: sequences that share their last page need copy-on-write first. k and v
// must not overlap the pages in memory, and k_pages and v_pages must have no element in common. Packed rows
// past the last new token, cu_seqlens[batch], are padding, too.
//
// slot_mapping, int32 or int64 [total], says where each row of k and v goes instead of page_table, seq_lens
// and cu_seqlens: page * page_size + slot of the page, or a negative number for a row that is not stored. It
// cannot be combined with rotary_cos, which needs positions.
//
// With rotary_cos and rotary_sin, [max_positions, rotary_dim / 2], the first rotary_dim numbers of each key
// are rotated by its position (rotary embedding), in float32, before they are stored or transformed, and so
// are those of q, whose rotated copy goes to q_out: exactly q (same address and strides), or memory apart
// from it. Queries of padding are copied as they are. A position past the tables is refused on the CPU; on a
// GPU, where lengths are not looked at, what would be rotated there becomes NaN.
struct AppendKvArgs {
    TensorView k, v, k_pages, v_pages;
    std::optional<TensorView> page_table, seq_lens;  // both, or slot_mapping
    std::optional<TensorView> cu_seqlens;
    std::optional<float> k_scale;  // what is stored is the value divided by it
    std::optional<float> v_scale;
    std::optional<TensorView> k_scale_array, v_scale_array;  // instead; read
    std::optional<TensorView> k_scales, v_scales;            // instead; written
    std::optional<DType> kv_dtype;                           // what pages of uint8 hold
    std::optional<TensorView> k_channel_offset, k_channel_scale;
    bool rotate_keys = false;
    std::optional<TensorView> rotary_cos, rotary_sin;  // the dtype is that of k, or float32
    bool rotary_interleaved = false;                   // pairs (2 i, 2 i + 1); else (i, i + rotary_dim / 2)
    std::optional<TensorView> q, q_out;  // like k with num_q_heads heads: q is read, q_out written
    std::optional<TensorView> slot_mapping;
    // A promise for GPUs, with which a call may look up places and angles while the launch in front still
    // runs: no work under way on the stream writes to page_table, seq_lens, cu_seqlens, slot_mapping,
    // rotary_cos or rotary_sin.
    bool static_tables = false;
    void* stream = nullptr;
};

void append_kv(const AppendKvArgs& args);

// Copies whole pages inside the cache, or from it to another one. copies: int32 or int64 [n, 2], (from, to),
// rows at any stride; no page is both read and written, and none is written twice. Where k_pages and v_pages
// are written, they must have no element in common, unless rows of one are the same rows of the other or
// parts of them, as with latents.
//
// Caches may differ in their number of pages, and one of them may be in host memory while the other is on a
// GPU: then the GPU copies, the host memory must be pinned (cudaHostAlloc, cudaHostRegister), and the host
// may look at it or change it once the stream has come past the call. Scales of each token and KV head are
// copied with the pages that they belong to.
struct CopyPagesArgs {
    TensorView k_pages, v_pages;
    TensorView copies;                                 // on the GPU if either cache is
    std::optional<TensorView> to_k_pages, to_v_pages;  // the other cache; default: the same one
    std::optional<TensorView> k_scales, v_scales;
    std::optional<TensorView> to_k_scales, to_v_scales;  // those of the other cache
    void* stream = nullptr;
};

void copy_pages(const CopyPagesArgs& args);

// Throws ValueError if a length needs more pages than the table has columns, or more rows than the tables of
// a rotary embedding have (max_positions), or an entry in use lies outside [0, num_pages). The CPU operators
// check by themselves; for CUDA arrays this copies the table to the host and waits for it.
void check_page_table(const TensorView& page_table, const TensorView& seq_lens, int64_t num_pages,
                      int64_t page_size, void* stream = nullptr,
                      std::optional<int64_t> max_positions = std::nullopt);

}  // namespace octavo
