// Attention over dense and packed arrays, its gradients, and the merge of partial results.
#pragma once

#include <octavo/error.h>
#include <octavo/tensor.h>

#include <cstdint>
#include <optional>

namespace octavo {

// softmax(softcap(scale * q k^T) + ALiBi, masked) v, tiled with an online softmax (FlashAttention,
// Dao et al. 2022, arXiv:2205.14135).
//
// Dense:  q [batch, seqlen_q, num_q_heads, head_dim], k and v [batch, seqlen_k, num_kv_heads, head_dim].
// Packed: q [total_q, num_q_heads, head_dim], k and v [total_k, num_kv_heads, head_dim], with
//         cu_seqlens_q and cu_seqlens_k, int32 or int64 [batch + 1]: where each sequence starts. Rows
//         past the last token, cu_seqlens_q[batch], are padding: nothing is computed for them, out and lse
//         stay as they are there, and gradients are 0.
//
// Positions are absolute and bottom-right aligned: query i of n sits at seqlen_k - n + i. Key j is visible
// to the query at position p if p - window_left <= j <= p + window_right (-1: unbounded; causal:
// window_right is 0), or if j < prefix_lens[batch]. With attention_chunk = n > 0, which needs causal, windows
// begin no earlier than the chunk of n positions that p is in, p / n * n, as in Llama 4. The queries whose
// positions lie in one of bidirectional_ranges see all keys of that range as well. Keys visible to no query
// of a sequence are never read.
struct AttentionArgs {
    // float32, float16 or bfloat16, on a GPU one of the latter. head_dim: a multiple of 8 up to 512; that of
    // v may be another.
    TensorView q, k, v;
    // Like q, with the head_dim of v. Either exactly q (same address and strides), or memory that overlaps no
    // other array of the call. The memory of lse overlaps no other array either.
    TensorView out;
    std::optional<TensorView> lse;  // float32, the shape of q without its last axis; natural logarithm
    std::optional<TensorView> cu_seqlens_q;
    std::optional<TensorView> cu_seqlens_k;
    std::optional<TensorView> prefix_lens;  // int32, int64 [batch]: first tokens, visible to every query
    // Ranges of keys that see each other in both directions, such as those of an image: int32 or int64
    // [batch, num_ranges, 2] in C order, the position of the first key and the position behind the last.
    // Those of a sequence ascend, and have no key in common; ranges without keys, which end where they begin,
    // such as [0, 0], fill the rows up. On the CPU that is checked; on a GPU other ranges give unspecified
    // results. What lies past the last key is cut off. Not with block_mask.
    std::optional<TensorView> bidirectional_ranges;
    // Whether window_left and attention_chunk go on hiding a range's earlier keys: then its queries see later
    // keys alone more. Otherwise they see all of the range, whatever the window.
    bool ranges_keep_window_left = false;
    // Block-sparse attention (section 3.3 of the first paper): uint8 [1 or num_q_heads, query blocks, key
    // blocks], or with a batch axis before these. A block is block_size queries x block_size keys, counted
    // from the first query and the first key of each sequence, and of packed ones each uses the first rows
    // and columns: ceil(max_seqlen / block_size) of them suffice for all. Where it is 0, no query of the
    // block sees a key of it, whatever the other masks say, prefix_lens included.
    std::optional<TensorView> block_mask;
    int64_t block_size = 128;                // 64 or 128
    std::optional<TensorView> alibi_slopes;  // float32 [num_q_heads] or [batch, num_q_heads]
    // Whether ALiBi adds -slope * |p - j| to the score of key j at position p, as encoders have it, and not
    // -slope * (p - j). The two differ for keys past p alone.
    bool alibi_symmetric = false;
    std::optional<int64_t> max_seqlen_q;  // bounds for packed arrays; a tighter bound starts fewer blocks
    std::optional<int64_t> max_seqlen_k;
    std::optional<double> softmax_scale;  // default 1 / sqrt(head_dim)
    bool causal = false;
    int64_t window_left = -1;
    int64_t window_right = -1;
    int64_t attention_chunk = 0;
    double softcap = 0.0;  // 0: none; else softcap * tanh(score / softcap)
    // Dropout: each softmax weight becomes 0 with probability dropout_p (kept to within 2^-17), else it is
    // multiplied by 1 / (1 - dropout_p); the LSE stays as it was. Below 2^-17 nothing is dropped, and nothing
    // multiplied. The mask depends on seed, offset, and the weight's sequence, head, query and key alone, not
    // on layout or device. Head h of sequence b draws the mask number offset + b * num_q_heads + h of this
    // seed: advance the offset by batch * num_q_heads from call to call. Neither may be negative.
    double dropout_p = 0.0;               // 0 <= dropout_p < 1 - 2^-17
    std::optional<int64_t> dropout_seed;  // needed if dropout_p > 0
    int64_t dropout_offset = 0;
    // Attention sinks (Xiao et al. 2023, arXiv:2309.17453), learned as in gpt-oss (OpenAI 2025,
    // arXiv:2508.10925): float32 [num_q_heads], a logit for each head that joins the sum of exponentials of
    // each of its queries and weighs no value. It is not scaled, capped or masked, and the LSE includes it: a
    // query that sees no key has output 0 and LSE sinks[head]. -inf is none; NaN and inf spoil the results of
    // their head.
    std::optional<TensorView> sinks;
    // The unified maximum of FlashDecoding++ (Hong et al. 2024, arXiv:2311.01282), in units of scaled scores,
    // after softcap and biases: finite, of all heads, or float32 [num_q_heads]. Where the maximum of a row
    // lies near it, it takes that maximum's place; any other row is computed as without it. The result is the
    // same, but for rounding.
    std::optional<double> softmax_phi;
    std::optional<TensorView> softmax_phi_array;  // instead; read
    void* stream = nullptr;                       // cudaStream_t; ignored on the CPU
};

void attention(const AttentionArgs& args);

// The gradients of a scalar with respect to q, k, v, alibi_slopes and sinks of attention(), from those with
// respect to its results. The softmax weights are computed again from the log-sum-exp (FlashAttention, Dao et
// al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691), so that memory grows with the lengths, not with
// their product.
//
// What attention() takes as well is as in its call, dropout included, and means the same; `out` and `lse` are
// its results. A query that sees no key gets a gradient of 0 and adds nothing to others, and so does a key
// that no query sees. On a GPU q and dout of such a query have to be finite for that.
struct AttentionBackwardArgs {
    TensorView dout;               // like out: the gradient with respect to it
    TensorView q, k, v, out, lse;  // on a GPU of head dims up to 256
    // Written: like q, k and v. No element of theirs is in the memory of one another or of an input; they may
    // be views of one array.
    TensorView dq, dk, dv;
    std::optional<TensorView> dlse;           // like lse: the gradient with respect to it; none: zeros
    std::optional<TensorView> dalibi_slopes;  // like alibi_slopes, in C order; written
    std::optional<TensorView> dsinks;         // like sinks; written
    std::optional<TensorView> cu_seqlens_q;
    std::optional<TensorView> cu_seqlens_k;
    std::optional<TensorView> prefix_lens;
    std::optional<TensorView> bidirectional_ranges;
    bool ranges_keep_window_left = false;
    std::optional<TensorView> block_mask;
    int64_t block_size = 128;
    std::optional<TensorView> alibi_slopes;
    bool alibi_symmetric = false;
    std::optional<int64_t> max_seqlen_q;
    std::optional<int64_t> max_seqlen_k;
    std::optional<double> softmax_scale;
    bool causal = false;
    int64_t window_left = -1;
    int64_t window_right = -1;
    int64_t attention_chunk = 0;
    double softcap = 0.0;
    double dropout_p = 0.0;
    std::optional<int64_t> dropout_seed;
    int64_t dropout_offset = 0;
    bool deterministic = false;  // the same bits at every call; on the CPU they always are
    std::optional<TensorView> sinks;
    void* stream = nullptr;  // cudaStream_t; ignored on the CPU
};

void attention_backward(const AttentionBackwardArgs& args);

// The exact result over two disjoint sets of keys from the results over each (FlashAttention's
// log-sum-exp merge). out_* [..., head_dim], lse_* float32 [...]. `out` may be out_a or out_b, and `lse`
// lse_a or lse_b; otherwise the memory from a result's first element to its last must not overlap that of an
// input or of the other result. Sinks must have joined one of the results only.
struct MergeStatesArgs {
    TensorView out_a, lse_a, out_b, lse_b;
    TensorView out, lse;
    void* stream = nullptr;
};

void merge_states(const MergeStatesArgs& args);

}  // namespace octavo
