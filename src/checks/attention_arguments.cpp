#include "checks/attention_arguments.h"

#include "checks/cache_codes.h"
#include "common/score.h"

#include <octavo/attention.h>
#include <octavo/paged_attention.h>

#include <algorithm>
#include <cmath>
#include <string>

namespace octavo {
namespace {

int32_t check_window(const char* op, const char* name, int64_t window) {
    if (window < -1) fail<ValueError>(op, name, " must be -1 (unbounded) or at least 0; got ", window);
    return window >= kMaxLength ? -1 : static_cast<int32_t>(window);  // positions are less far apart
}

// A query sees keys of its own chunk alone, so that window_left may be bounded as well.
void set_attention_chunk(const char* op, AttentionParams& p, int64_t chunk) {
    if (chunk < 0) fail<ValueError>(op, "attention_chunk must be 0 (none) or positive; got ", chunk);
    if (chunk == 0) return;
    if (p.window_right != 0) fail<ValueError>(op, "attention_chunk (", chunk, ") needs causal");
    const auto divisor = static_cast<int32_t>(std::min(chunk, kMaxLength));
    p.attention_chunk = FastDivide::by(divisor);
    p.window_left = p.window_left < 0 ? divisor - 1 : std::min(p.window_left, divisor - 1);
}

// The end of a message about heads that do not fit but would if they were axis 1, as in PyTorch's own
// attention.
const char* swapped_axes_hint(const TensorView& q, const TensorView& k) {
    // Axis 1 is the tokens of a dense q, or the heads of a paged one. Packed k has three axes.
    if (k.ndim != 4 || k.shape[1] < 1 || q.shape[1] < 2 || q.shape[1] % k.shape[1] != 0) return "";
    const bool is_dense = q.ndim == 4;
    return is_dense ? "; are heads and tokens in the right order? q, k and v are [batch, seqlen, heads, "
                      "head_dim]: otherwise swap their axes 1 and 2"
                    : "; are heads and slots in the right order? k_pages and v_pages are [num_pages, "
                      "page_size, num_kv_heads, head_dim]: otherwise swap their axes 1 and 2";
}

// Checks and sets dropout's arguments; out_scale must have been set.
template <class Args>
void set_dropout(AttentionParams& p, const Args& args) {
    if (!(args.dropout_p >= 0.0 && args.dropout_p < Dropout::kLimit)) {
        fail<ValueError>(p.op, "dropout_p must lie in [0, 1 - 2^-17); got ", args.dropout_p);
    }
    if (args.dropout_seed && *args.dropout_seed < 0)
        fail<ValueError>(p.op, "dropout_seed must be at least 0; got ", *args.dropout_seed);
    if (args.dropout_offset < 0)
        fail<ValueError>(p.op, "dropout_offset must be at least 0; got ", args.dropout_offset);
    if (args.dropout_p == 0.0) return;
    if (!args.dropout_seed)
        fail<ValueError>(p.op, "dropout_p (", args.dropout_p, ") needs a dropout_seed; got none");
    p.dropout = Dropout::make(args.dropout_p, static_cast<uint64_t>(*args.dropout_seed),
                              static_cast<uint64_t>(args.dropout_offset));
    // A probability that rounds to 0 drops no weight, and so multiplies none either: gradients do neither.
    if (p.dropout.any()) p.out_scale *= static_cast<float>(1.0 / (1.0 - args.dropout_p));
}

// There are as many values as keys, in as many heads; only their head dim may differ.
void set_values(const Checker& check, AttentionParams& p, const TensorView& k, const TensorView& v) {
    const int last = k.ndim - 1;
    if (!std::equal(k.shape.begin(), k.shape.begin() + last, v.shape.begin())) {
        fail<ValueError>(p.op, "v must have the shape of k ", k.shape_string(), ", but for head_dim; got ",
                         v.shape_string());
    }
    set_value_dim(check, p, "v", v.shape[last]);
}

}  // namespace

void check_like_out(const Checker& check, const AttentionParams& p, const char* name, const TensorView& t,
                    const TensorView& q) {
    if (p.head_dim_v == p.head_dim) return check.same_shape(name, t, "q", q);
    TensorView like = q;
    like.shape[q.ndim - 1] = p.head_dim_v;
    const bool has_pages = p.page_size > 0;  // unlike paged(), also where the table is empty
    check.same_shape(name, t, has_pages ? "q with the head_dim of v_pages" : "q with the head_dim of v",
                     like);
}

Layout dense_or_packed_q(bool packed) {
    return packed ? Layout{3, "[total_q, num_q_heads, head_dim]"}
                  : Layout{4, "[batch, seqlen_q, num_q_heads, head_dim]"};
}

Layout dense_or_packed_k(bool packed) {
    return packed ? Layout{3, "[total_k, num_kv_heads, head_dim]"}
                  : Layout{4, "[batch, seqlen_k, num_kv_heads, head_dim]"};
}

RowStrides row_strides(const TensorView& t, const Layout& layout) {
    const int token_axis = layout.ndim == 4 ? 1 : 0;
    // Without a batch axis, axis 0 holds one token per sequence, or packed tokens, whose batch stride nobody
    // uses.
    return {stride_of(t, 0), stride_of(t, token_axis), stride_of(t, token_axis + 1)};
}

void check_head_dim(const char* op, const char* name, int64_t head_dim) {
    if (head_dim >= 8 && head_dim <= kMaxHeadDim && head_dim % 8 == 0) return;
    fail<ValueError>(op, name, " (", head_dim, ") must be a multiple of 8 from 8 to ", kMaxHeadDim);
}

void set_heads(const Checker& check, AttentionParams& p, const char* k_name, const TensorView& q,
               const TensorView& k) {
    const int64_t num_q_heads = q.shape[q.ndim - 2], num_kv_heads = k.shape[k.ndim - 2];
    const int64_t head_dim = q.shape[q.ndim - 1];
    check.equal("head_dim", k_name, numbers_in(p.k_dtype, k.shape[k.ndim - 1]), "q", head_dim);
    check_head_dim(check.op(), "head_dim", head_dim);
    if (num_kv_heads < 1)
        fail<ValueError>(check.op(), "num_kv_heads (", num_kv_heads, ") must be at least 1");
    if (num_q_heads < 1) fail<ValueError>(check.op(), "num_q_heads (", num_q_heads, ") must be at least 1");
    if (num_q_heads % num_kv_heads != 0) {
        fail<ValueError>(check.op(), "num_q_heads (", num_q_heads, ") must be a multiple of num_kv_heads (",
                         num_kv_heads, ")", swapped_axes_hint(q, k));
    }
    check.length("num_q_heads", num_q_heads);
    p.num_q_heads = static_cast<int32_t>(num_q_heads);
    p.num_kv_heads = static_cast<int32_t>(num_kv_heads);
    p.head_dim = p.head_dim_v = static_cast<int32_t>(head_dim);
}

void set_value_dim(const Checker& check, AttentionParams& p, const char* v_name, int64_t head_dim_v) {
    check_head_dim(check.op(), (std::string("head_dim of ") + v_name).c_str(), head_dim_v);
    p.head_dim_v = static_cast<int32_t>(head_dim_v);
}

int32_t check_max_seqlen(const Checker& check, const char* name, std::optional<int64_t> bound,
                         int64_t total) {
    if (!bound) return static_cast<int32_t>(total);
    check.length(name, *bound);
    return static_cast<int32_t>(*bound < total ? *bound : total);
}

IndexArray set_cu_seqlens(const Checker& check, const char* name, const TensorView& cu_seqlens, int64_t batch,
                          int64_t total, const char* max_name, int64_t max_seqlen) {
    const IndexArray values = check.index(name, cu_seqlens, 1, "[batch + 1]");
    if (cu_seqlens.shape[0] != batch + 1) {
        fail<ValueError>(check.op(), name, " must have batch + 1 = ", batch + 1, " entries; got ",
                         cu_seqlens.shape[0]);
    }
    if (cu_seqlens.device.type == DeviceType::cpu) {
        check_cu_seqlens(check.op(), name, values, batch, total);
        for (int64_t b = 0; b < batch; ++b) {
            if (values[b + 1] - values[b] > max_seqlen) {
                fail<ValueError>(check.op(), max_name, " (", max_seqlen,
                                 ") must be at least every length in ", name, "; sequence ", b, " has ",
                                 values[b + 1] - values[b]);
            }
        }
    }
    return values;
}

template <class Args>
void set_dense_or_packed(const Checker& check, AttentionParams& p, const Args& args) {
    const bool packed = args.cu_seqlens_q.has_value();
    if (packed != args.cu_seqlens_k.has_value()) {
        fail<ValueError>(p.op, "cu_seqlens_q and cu_seqlens_k must be given together; only cu_seqlens_",
                         packed ? "q" : "k", " was");
    }
    const Layout q_layout = dense_or_packed_q(packed), k_layout = dense_or_packed_k(packed);
    const int ndim = k_layout.ndim;
    check.float_dtype("q", args.q);
    check.data("q", args.q, q_layout.ndim, q_layout.axes);
    check.data("k", args.k, ndim, k_layout.axes);
    check.data("v", args.v, ndim, k_layout.axes);
    check.dtype("k", args.k, args.q.dtype, " like q");
    check.dtype("v", args.v, args.q.dtype, " like q");
    p.k_dtype = p.v_dtype = args.k.dtype;
    set_heads(check, p, "k", args.q, args.k);
    set_values(check, p, args.k, args.v);

    p.k = args.k.data;
    p.v = args.v.data;
    p.k_outer_stride = stride_of(args.k, 0);
    p.v_outer_stride = stride_of(args.v, 0);
    p.k_token_stride = stride_of(args.k, ndim - 3);
    p.v_token_stride = stride_of(args.v, ndim - 3);
    p.k_head_stride = stride_of(args.k, ndim - 2);
    p.v_head_stride = stride_of(args.v, ndim - 2);
    if (packed) {
        const int64_t num_offsets = args.cu_seqlens_q->ndim == 1 ? args.cu_seqlens_q->shape[0] : 1;
        if (num_offsets < 1) {
            fail<ValueError>(p.op, "cu_seqlens_q must have batch + 1 entries, at least 1; got ", num_offsets);
        }
        const int64_t batch = num_offsets - 1;
        check.length("total_q", args.q.shape[0]);
        check.length("total_k", args.k.shape[0]);
        check.length("batch", batch);
        p.batch = static_cast<int32_t>(batch);
        p.total_q = args.q.shape[0];
        p.seqlen_q = check_max_seqlen(check, "max_seqlen_q", args.max_seqlen_q, p.total_q);
        p.seqlen_k = check_max_seqlen(check, "max_seqlen_k", args.max_seqlen_k, args.k.shape[0]);
        p.cu_seqlens_q = set_cu_seqlens(check, "cu_seqlens_q", *args.cu_seqlens_q, batch, p.total_q,
                                        "max_seqlen_q", p.seqlen_q);
        p.cu_seqlens_k = set_cu_seqlens(check, "cu_seqlens_k", *args.cu_seqlens_k, batch, args.k.shape[0],
                                        "max_seqlen_k", p.seqlen_k);
    } else {
        if (args.max_seqlen_q || args.max_seqlen_k) {
            fail<ValueError>(p.op, "max_seqlen_", args.max_seqlen_q ? "q" : "k",
                             " belongs to packed arrays; give cu_seqlens_q and cu_seqlens_k too");
        }
        check.equal("batch", "k", args.k.shape[0], "q", args.q.shape[0]);
        check.length("batch", args.q.shape[0]);
        check.length("seqlen_q", args.q.shape[1]);
        check.length("seqlen_k", args.k.shape[1]);
        p.batch = static_cast<int32_t>(args.q.shape[0]);
        p.seqlen_q = static_cast<int32_t>(args.q.shape[1]);
        p.seqlen_k = static_cast<int32_t>(args.k.shape[1]);
        p.total_q = args.q.shape[0] * args.q.shape[1];
    }
}

// That ranges do not end before they begin, and that those of each sequence ascend, and do not overlap.
void check_ranges_in_host(const char* op, const BidirectionalRanges& ranges, int32_t batch) {
    for (int32_t b = 0; b < batch; ++b) {
        const IndexArray bounds = ranges.of_sequence(b);
        int64_t last_end = 0;
        for (int32_t i = 0; i < ranges.count; ++i) {
            const int64_t begin = bounds.whole(2 * i), end = bounds.whole(2 * i + 1);
            auto refuse = [&](const auto&... parts) {
                fail<ValueError>(op, "bidirectional_ranges[", b, ", ", i, "], [", begin, ", ", end, "), ",
                                 parts...);
            };
            if (end > INT32_MAX) refuse("must end below 2^31");
            if (end < begin)
                refuse(
                    "must not end before it begins; a range is its first position, and the one behind its "
                    "last");
            if (begin == end) {  // without keys, unless its lower 32 bits say something else
                if (begin < INT32_MIN) refuse("must have bounds that fit into int32");
                continue;
            }
            if (begin < 0) refuse("must not begin before 0");
            if (begin < last_end)
                refuse("must begin at or behind the end of the range before it, ", last_end);
            last_end = end;
        }
    }
}

// Behind the windows, which say whether ranges change anything.
template <class Args>
void set_ranges(const Checker& check, AttentionParams& p, const Args& args) {
    if (args.ranges_keep_window_left && !args.bidirectional_ranges)
        fail<ValueError>(p.op, "ranges_keep_window_left needs bidirectional_ranges; got none");
    if (!args.bidirectional_ranges) return;
    const TensorView& given = *args.bidirectional_ranges;
    BidirectionalRanges ranges{};
    ranges.bounds = check.index("bidirectional_ranges", given, 3, "[batch, num_ranges, 2]");
    check.equal("batch", "bidirectional_ranges", given.shape[0], "q", p.batch);
    if (given.shape[2] != 2) {
        fail<ValueError>(p.op, "bidirectional_ranges must have shape [batch, num_ranges, 2]; got ",
                         given.shape_string());
    }
    const int64_t count = given.shape[1];
    check.length("num_ranges", count, kMaxLength / 2);  // bounds of a sequence are numbered in 32 bits
    const bool has_gaps =
        (count > 1 && given.strides[1] != 2) || (p.batch > 1 && given.strides[0] != 2 * count);
    if (has_gaps && given.size() > 0) {
        fail<ValueError>(p.op, "bidirectional_ranges must be in C order; got strides ",
                         given.strides_string());
    }
    ranges.count = static_cast<int32_t>(count);
    ranges.keep_window_left = args.ranges_keep_window_left;
    if (p.device.type == DeviceType::cpu) check_ranges_in_host(p.op, ranges, p.batch);
    // Without a window, and for the last key's query, there is nothing that a range would still show. That a
    // sequence has one query, at the last key, counts over pages alone.
    const bool hides_later = p.window_right >= 0 && !(p.paged() && p.seqlen_q <= 1);
    const bool hides_earlier = p.window_left >= 0 && !ranges.keep_window_left;
    if (count > 0 && (hides_later || hides_earlier)) p.ranges = ranges;
}

template <class Args>
void set_masks(const Checker& check, AttentionParams& p, const Args& args) {
    const char* op = check.op();
    if (args.prefix_lens) {
        p.prefix_lens = check.index("prefix_lens", *args.prefix_lens, 1, "[batch]");
        check.equal("batch", "prefix_lens", args.prefix_lens->shape[0], "q", p.batch);
        if (p.device.type == DeviceType::cpu) {
            for (int32_t b = 0; b < p.batch; ++b) {
                const int64_t length = p.prefix_lens.whole(b);
                if (length < 0) fail<ValueError>(op, "prefix_lens[", b, "] must be at least 0; got ", length);
                if (length > INT32_MAX)
                    fail<ValueError>(op, "prefix_lens[", b, "] must be below 2^31; got ", length);
            }
        }
    }
    if (args.alibi_slopes) {
        const TensorView& slopes = *args.alibi_slopes;
        check.dtype("alibi_slopes", slopes, DType::float32, "");
        const bool per_batch = slopes.ndim == 2;
        check.data("alibi_slopes", slopes, per_batch ? 2 : 1, "[num_q_heads] or [batch, num_q_heads]");
        check.equal("num_q_heads", "alibi_slopes", slopes.shape[slopes.ndim - 1], "q", p.num_q_heads);
        if (per_batch) check.equal("batch", "alibi_slopes", slopes.shape[0], "q", p.batch);
        p.alibi_slopes = static_cast<const float*>(slopes.data);
        p.alibi_batch_stride = per_batch ? stride_of(slopes, 0) : 0;
    }
    if (args.sinks) {
        check.dtype("sinks", *args.sinks, DType::float32, "");
        check.data("sinks", *args.sinks, 1, "[num_q_heads]");
        check.equal("num_q_heads", "sinks", args.sinks->shape[0], "q", p.num_q_heads);
        p.sinks = static_cast<const float*>(args.sinks->data);
    }

    const double scale = args.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(p.head_dim)));
    p.softmax_scale = static_cast<float>(scale);
    if (!std::isfinite(p.softmax_scale))
        fail<ValueError>(op, "softmax_scale must be finite in float32; got ", scale);
    if (!(args.softcap >= 0.0) || !std::isfinite(args.softcap)) {
        fail<ValueError>(op, "softcap must be 0 (none) or positive; got ", args.softcap);
    }
    p.softcap = static_cast<float>(args.softcap);
    p.window_left = check_window(op, "window_left", args.window_left);
    const int32_t window_right = check_window(op, "window_right", args.window_right);
    p.window_right = args.causal ? 0 : window_right;
    set_attention_chunk(op, p, args.attention_chunk);
    if (args.alibi_symmetric && !args.alibi_slopes)
        fail<ValueError>(op, "alibi_symmetric needs alibi_slopes; got none");
    set_ranges(check, p, args);
    // Where no query sees a key past its own position, both biases are the same, and so are the kernels. Over
    // pages this includes calls with one query per sequence, which is at the last key. Elsewhere it does not:
    // there, the bound of a packed batch may be its total, on which the bits of a sequence must not depend.
    const bool sees_past = p.window_right != 0 || p.prefix_lens || p.ranges;
    p.alibi_symmetric = args.alibi_symmetric && sees_past && !(p.paged() && p.seqlen_q <= 1);
    p.out_scale = 1.0f;
}

void check_score(const AttentionParams& p, const char* scale_name, double softcap) {
    const ScoreTransform transform = ScoreTransform::make(p.softmax_scale, p.softcap);
    if (std::isfinite(transform.inner) && std::isfinite(transform.outer) &&
        transform.has_softcap == (softcap > 0.0))
        return;
    fail<ValueError>(p.op, scale_name, " (", p.softmax_scale, ") and softcap (", softcap,
                     ") must neither overflow nor vanish in float32");
}

template <class Args>
void set_block_mask(const Checker& check, AttentionParams& p, const Args& args) {
    if (args.block_size != 64 && args.block_size != 128)
        fail<ValueError>(p.op, "block_size must be 64 or 128; got ", args.block_size);
    if (!args.block_mask) return;
    if (args.bidirectional_ranges) fail<ValueError>(p.op, "block_mask cannot go with bidirectional_ranges");
    const TensorView& mask = *args.block_mask;
    const bool has_batch = mask.ndim == 4;
    const char* const axes = "[heads, query blocks, key blocks] or [batch, heads, query blocks, key blocks]";
    if (mask.dtype != DType::uint8)
        fail<TypeError>(p.op, "block_mask must be bool or uint8; got ", to_string(mask.dtype));
    check.data("block_mask", mask, has_batch ? 4 : 3, axes);
    const int first = has_batch ? 1 : 0;  // the number of the axis of heads
    const int64_t heads = mask.shape[first];
    if (has_batch) check.equal("batch", "block_mask", mask.shape[0], "q", p.batch);
    if (heads != 1 && heads != p.num_q_heads) {
        fail<ValueError>(p.op, "block_mask must have 1 or num_q_heads (", p.num_q_heads, ") heads; got ",
                         heads);
    }
    auto check_blocks = [&](const char* of, int64_t blocks, int64_t length) {
        const int64_t wanted = (length + args.block_size - 1) / args.block_size;
        if (blocks == wanted) return;
        fail<ValueError>(p.op, "block_mask must have ", wanted, " blocks of ", of, ", ",
                         p.cu_seqlens_q ? "max_seqlen" : "seqlen", "_", of[0], " (", length,
                         ") / block_size (", args.block_size, ") rounded up; its shape is ",
                         mask.shape_string());
    };
    check_blocks("queries", mask.shape[first + 1], args.max_seqlen_q.value_or(p.seqlen_q));
    check_blocks("keys", mask.shape[first + 2], args.max_seqlen_k.value_or(p.seqlen_k));
    p.block_mask.data = static_cast<const uint8_t*>(mask.data);
    p.block_mask.batch_stride = has_batch ? stride_of(mask, 0) : 0;
    p.block_mask.head_stride = stride_of(mask, first);
    p.block_mask.row_stride = stride_of(mask, first + 1);
    p.block_mask.size = static_cast<int32_t>(args.block_size);
}

template <class Args>
void set_score_and_dropout(AttentionParams& p, const Args& args) {
    check_score(p, "softmax_scale", args.softcap);
    set_dropout(p, args);
}

template void set_dense_or_packed(const Checker&, AttentionParams&, const AttentionArgs&);
template void set_dense_or_packed(const Checker&, AttentionParams&, const AttentionBackwardArgs&);
template void set_masks(const Checker&, AttentionParams&, const AttentionArgs&);
template void set_masks(const Checker&, AttentionParams&, const PagedAttentionArgs&);
template void set_masks(const Checker&, AttentionParams&, const AttentionBackwardArgs&);
template void set_block_mask(const Checker&, AttentionParams&, const AttentionArgs&);
template void set_block_mask(const Checker&, AttentionParams&, const AttentionBackwardArgs&);
template void set_score_and_dropout(AttentionParams&, const AttentionArgs&);
template void set_score_and_dropout(AttentionParams&, const AttentionBackwardArgs&);

}  // namespace octavo
