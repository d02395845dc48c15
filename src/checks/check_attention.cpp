#include "checks/cache_codes.h"
#include "checks/check.h"
#include "checks/checks.h"
#include "checks/key_transform.h"
#include "common/score.h"
#include "cuda/plan.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

namespace octavo {
namespace {

constexpr const char* kDenseQ = "[batch, seqlen_q, num_q_heads, head_dim]";
constexpr const char* kDenseK = "[batch, seqlen_k, num_kv_heads, head_dim]";
constexpr const char* kPackedQ = "[total_q, num_q_heads, head_dim]";
constexpr const char* kPackedK = "[total_k, num_kv_heads, head_dim]";
constexpr const char* kDecodeQ = "[batch, num_q_heads, head_dim]";

int32_t check_window(const char* op, const char* name, int64_t window) {
    if (window < -1) fail<ValueError>(op, name, " must be -1 (unbounded) or at least 0; got ", window);
    return window > kMaxLength ? -1 : static_cast<int32_t>(window);
}

// What to say where the heads would fit if they were axis 1, as in PyTorch's own attention.
const char* swapped_axes_hint(const TensorView& q, const TensorView& k) {
    // Axis 1: of dense q the tokens, of paged q the heads. Packed k has three axes.
    if (k.ndim != 4 || k.shape[1] < 1 || q.shape[1] < 2 || q.shape[1] % k.shape[1] != 0) return "";
    const bool is_dense = q.ndim == 4;
    return is_dense ? "; are heads and tokens in the right order? q, k and v are [batch, seqlen, heads, "
                      "head_dim]: otherwise swap their axes 1 and 2"
                    : "; are heads and slots in the right order? k_pages and v_pages are [num_pages, "
                      "page_size, num_kv_heads, head_dim]: otherwise swap their axes 1 and 2";
}

void set_heads(const Checker& check, AttentionParams& p, const char* k_name, const TensorView& q,
               const TensorView& k) {
    const int64_t num_q_heads = q.shape[q.ndim - 2], num_kv_heads = k.shape[k.ndim - 2];
    const int64_t head_dim = q.shape[q.ndim - 1];
    check.equal("head_dim", k_name, numbers_in(p.k_dtype, k.shape[k.ndim - 1]), "q", head_dim);
    if (head_dim < 8 || head_dim > kMaxHeadDim || head_dim % 8 != 0) {
        fail<ValueError>(check.op(), "head_dim (", head_dim, ") must be a multiple of 8 from 8 to ",
                         kMaxHeadDim);
    }
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
    p.head_dim = static_cast<int32_t>(head_dim);
}

// What attention and paged_attention share: the queries' side, masks and biases. `packed` says whether the
// leading axis of q counts tokens of all sequences.
template <class Args>
void set_queries_and_masks(const Checker& check, AttentionParams& p, const Args& args, int q_ndim,
                           const char* q_axes) {
    const char* op = check.op();
    const bool has_batch_axis = q_ndim == 4;
    check.length("seqlen_q * group_size", int64_t{p.seqlen_q} * p.group_size());  // rows of one KV head
    check.output("out", args.out, q_ndim, q_axes);
    check.same_shape("out", args.out, "q", args.q);
    check.dtype("out", args.out, args.q.dtype, " like q");

    const int token_axis = has_batch_axis ? 1 : 0;
    auto set_strides = [&](const TensorView& t, int64_t& batch, int64_t& token, int64_t& head) {
        batch = stride_of(t, 0);  // one token a sequence: the batch axis; packed: unused
        token = stride_of(t, token_axis);
        head = stride_of(t, token_axis + 1);
    };
    p.q = args.q.data;
    set_strides(args.q, p.q_batch_stride, p.q_token_stride, p.q_head_stride);
    p.out = args.out.data;
    set_strides(args.out, p.out_batch_stride, p.out_token_stride, p.out_head_stride);
    if (args.lse) {
        const TensorView& lse = *args.lse;
        check.lse("lse", lse, "q", args.q);
        check.writable("lse", lse);
        p.lse = static_cast<float*>(lse.data);
        set_strides(lse, p.lse_batch_stride, p.lse_token_stride, p.lse_head_stride);
    }
    if (args.prefix_lens) {
        check.index("prefix_lens", *args.prefix_lens, 1, "[batch]");
        check.equal("batch", "prefix_lens", args.prefix_lens->shape[0], "q", p.batch);
        p.prefix_lens = static_cast<const int32_t*>(args.prefix_lens->data);
        if (p.device.type == DeviceType::cpu) {
            for (int32_t b = 0; b < p.batch; ++b) {
                if (p.prefix_lens[b] < 0) {
                    fail<ValueError>(op, "prefix_lens[", b, "] must be at least 0; got ", p.prefix_lens[b]);
                }
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

    const double scale = args.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(p.head_dim)));
    if (!std::isfinite(scale)) fail<ValueError>(op, "softmax_scale must be finite; got ", scale);
    if (!(args.softcap >= 0.0) || !std::isfinite(args.softcap)) {
        fail<ValueError>(op, "softcap must be 0 (none) or positive; got ", args.softcap);
    }
    p.softmax_scale = static_cast<float>(scale);
    p.softcap = static_cast<float>(args.softcap);
    p.window_left = check_window(op, "window_left", args.window_left);
    p.window_right = args.causal ? 0 : -1;
    p.out_scale = 1.0f;
}

// Results may not lie where other threads still read. Only the queries that a row's result replaces have all
// been read by then.
template <class Args>
void check_results_apart(const Checker& check, const Args& args, const char* k_name, const TensorView& k,
                         const char* v_name, const TensorView& v) {
    check.apart("out", args.out, k_name, k);
    check.apart("out", args.out, v_name, v);
    if (!same_elements(args.out, args.q)) check.apart("out", args.out, "q", args.q);
    if (!args.lse) return;
    check.apart("lse", *args.lse, "q", args.q);
    check.apart("lse", *args.lse, k_name, k);
    check.apart("lse", *args.lse, v_name, v);
    check.apart("lse", *args.lse, "out", args.out);
}

// What the scores are multiplied by must survive in float32, and a cap must not round to none.
void check_score(const AttentionParams& p, const char* scale_name, double softcap) {
    const ScoreTransform transform = ScoreTransform::make(p.softmax_scale, p.softcap);
    if (std::isfinite(transform.inner) && std::isfinite(transform.outer) &&
        transform.has_softcap == (softcap > 0.0))
        return;
    fail<ValueError>(p.op, scale_name, " (", p.softmax_scale, ") and softcap (", softcap,
                     ") must neither overflow nor vanish in float32");
}

int32_t check_max_seqlen(const Checker& check, const char* name, std::optional<int64_t> bound,
                         int64_t total) {
    if (!bound) return static_cast<int32_t>(total);
    check.length(name, *bound);
    return static_cast<int32_t>(*bound < total ? *bound : total);
}

// cu_seqlens [batch + 1] over `total` tokens; on the CPU its values too, and that none exceeds `max_seqlen`.
const int32_t* set_cu_seqlens(const Checker& check, const char* name, const TensorView& cu_seqlens,
                              int64_t batch, int64_t total, const char* max_name, int64_t max_seqlen) {
    check.index(name, cu_seqlens, 1, "[batch + 1]");
    if (cu_seqlens.shape[0] != batch + 1) {
        fail<ValueError>(check.op(), name, " must have batch + 1 = ", batch + 1, " entries; got ",
                         cu_seqlens.shape[0]);
    }
    const auto* values = static_cast<const int32_t*>(cu_seqlens.data);
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

// Dropout's arguments; `p` has its out_scale already.
void set_dropout(AttentionParams& p, const AttentionArgs& args) {
    if (!(args.dropout_p >= 0.0 && args.dropout_p < 1.0)) {
        fail<ValueError>(p.op, "dropout_p must lie in [0, 1); got ", args.dropout_p);
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
    p.out_scale *= static_cast<float>(1.0 / (1.0 - args.dropout_p));
}

// The pages of the prefix are read once for all sequences, so that every query has to see them whole.
void set_shared_prefix(const Checker& check, AttentionParams& p, const PagedAttentionArgs& args) {
    const int64_t length = args.shared_prefix_len;
    const int64_t num_shared = length / p.page_size, max_pages = args.page_table.shape[1];
    auto refuse = [&](const auto&... parts) {
        fail<ValueError>(p.op, "shared_prefix_len (", length, ") ", parts...);
    };
    if (length == 0) return;
    if (length < 0) refuse("must be at least 0");
    if (length % p.page_size != 0) refuse("must be a multiple of page_size (", p.page_size, ")");
    if (num_shared > max_pages)
        refuse("must be at most max_pages * page_size (", max_pages * p.page_size, ")");
    if (p.window_left >= 0) refuse("needs window_left -1 (unbounded); got ", p.window_left);
    if (p.alibi_slopes) refuse("cannot go with alibi_slopes");
    if (p.batch_invariant) refuse("cannot go with batch_invariant, as all queries share its work");
    check.length("shared_prefix_len", length);
    check.length("total_q * group_size", p.total_q * p.group_size());
    p.shared_prefix_len = static_cast<int32_t>(length);
    if (p.device.type != DeviceType::cpu || p.batch == 0) return;

    check_pages_in_host(p.op, p.page_table, p.page_table_stride, &p.shared_prefix_len, 1, max_pages,
                        p.page_size, p.num_pages);
    for (int32_t b = 0; b < p.batch; ++b) {
        const int32_t num_queries = p.cu_seqlens_q ? p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b] : 1;
        if (p.seq_lens[b] == 0 || num_queries == 0) continue;  // padding
        if (p.seq_lens[b] - num_queries < length) {
            refuse("must be at most every length less the sequence's queries; sequence ", b, " has length ",
                   p.seq_lens[b], " and ", num_queries, " queries");
        }
        for (int64_t i = 0; i < num_shared; ++i) {
            const int32_t page = p.page_table[b * p.page_table_stride + i];
            if (page == p.page_table[i]) continue;
            refuse("needs the same pages in every row of page_table; page_table[", b, ", ", i, "] is ", page,
                   ", page_table[0, ", i, "] is ", p.page_table[i]);
        }
    }
}

}  // namespace

std::string why_no_cuda_kernel(const AttentionParams& p) {
    const auto& types = cuda::kAttentionTypes;
    if (std::find(std::begin(types), std::end(types), p.dtype) != std::end(types)) return {};
    std::string names;
    for (DType dtype : types) names += (names.empty() ? "" : " and ") + to_string(dtype);
    return "no CUDA kernel for " + to_string(p.dtype) + ", head_dim " + std::to_string(p.head_dim) +
           "; there are some for " + names + ", head_dim up to " + std::to_string(kMaxHeadDim);
}

AttentionParams check_attention(const AttentionArgs& args) {
    AttentionParams p{};
    p.op = "attention";
    p.device = args.q.device;
    p.dtype = args.q.dtype;
    const Checker check(p.op, p.device);
    const bool packed = args.cu_seqlens_q.has_value();
    if (packed != args.cu_seqlens_k.has_value()) {
        fail<ValueError>(p.op, "cu_seqlens_q and cu_seqlens_k must be given together; only cu_seqlens_",
                         packed ? "q" : "k", " was");
    }
    const int ndim = packed ? 3 : 4;
    const char* q_axes = packed ? kPackedQ : kDenseQ;
    const char* k_axes = packed ? kPackedK : kDenseK;
    check.float_dtype("q", args.q);
    check.data("q", args.q, ndim, q_axes);
    check.data("k", args.k, ndim, k_axes);
    check.data("v", args.v, ndim, k_axes);
    check.dtype("k", args.k, args.q.dtype, " like q");
    check.dtype("v", args.v, args.q.dtype, " like q");
    p.k_dtype = p.v_dtype = args.k.dtype;
    check.same_shape("v", args.v, "k", args.k);
    set_heads(check, p, "k", args.q, args.k);

    p.k = args.k.data;
    p.v = args.v.data;
    p.k_outer_stride = stride_of(args.k, 0);
    p.v_outer_stride = stride_of(args.v, 0);
    p.k_token_stride = stride_of(args.k, ndim - 3);
    p.v_token_stride = stride_of(args.v, ndim - 3);
    p.k_head_stride = stride_of(args.k, ndim - 2);
    p.v_head_stride = stride_of(args.v, ndim - 2);
    if (packed) {
        const int64_t batch = args.cu_seqlens_q->ndim == 1 ? args.cu_seqlens_q->shape[0] - 1 : 0;
        if (batch < 0) fail<ValueError>(p.op, "cu_seqlens_q must have batch + 1 entries, at least 1; got 0");
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
    set_queries_and_masks(check, p, args, ndim, q_axes);
    check_results_apart(check, args, "k", args.k, "v", args.v);
    const int32_t window_right = check_window(p.op, "window_right", args.window_right);
    if (!args.causal) p.window_right = window_right;
    check_score(p, "softmax_scale", args.softcap);
    set_dropout(p, args);
    require_kernel(p.op, p);
    return p;
}

PagedAttentionParams check_paged_attention(const PagedAttentionArgs& args) {
    PagedAttentionParams p{};
    p.op = "paged_attention";
    p.device = args.q.device;
    p.dtype = args.q.dtype;
    const Checker check(p.op, p.device);
    const char* q_axes = args.cu_seqlens_q ? kPackedQ : kDecodeQ;
    check.float_dtype("q", args.q);
    check.data("q", args.q, 3, q_axes);
    check.data("k_pages", args.k_pages, 4, kPages);
    check.data("v_pages", args.v_pages, 4, kPages);
    check.cache_dtype("k_pages", args.k_pages, "q", args.q);
    const CacheArrays cache{"k_pages", args.k_pages, "v_pages", args.v_pages};
    const StoredDtypes stored = stored_dtypes(check, cache, args.kv_dtype);
    p.k_dtype = stored.k;
    p.v_dtype = stored.v;
    check_same_cache_shape(check, cache, stored);
    set_heads(check, p, "k_pages", args.q, args.k_pages);
    const ScaleArguments k_given{"k_pages",          "k_scale",  args.k_scale,
                                 args.k_scale_array, "k_scales", args.k_scales};
    const ScaleArguments v_given{"v_pages",          "v_scale",  args.v_scale,
                                 args.v_scale_array, "v_scales", args.v_scales};
    const CheckedScales k_scales = check_scales(check, k_given, stored.k, args.k_pages);
    const CheckedScales v_scales = check_scales(check, v_given, stored.v, args.v_pages);
    check.index("page_table", args.page_table, 2, "[batch, max_pages]");
    check.index("seq_lens", args.seq_lens, 1, "[batch]");

    const int64_t num_pages = args.k_pages.shape[0], page_size = args.k_pages.shape[1];
    const int64_t batch = args.page_table.shape[0], max_pages = args.page_table.shape[1];
    if (page_size < 1) fail<ValueError>(p.op, "page_size (", page_size, ") must be at least 1");
    check.length("page_size", page_size);
    check.length("batch", batch);
    check.length("max_pages", max_pages);
    check.equal("batch", "seq_lens", args.seq_lens.shape[0], "page_table", batch);
    p.batch = static_cast<int32_t>(batch);
    p.page_size = static_cast<int32_t>(page_size);
    p.num_pages = num_pages;
    const int64_t capacity = max_pages * page_size;
    p.seqlen_k = static_cast<int32_t>(capacity < kMaxLength ? capacity : kMaxLength);
    p.k = args.k_pages.data;
    p.v = args.v_pages.data;
    p.k_outer_stride = stride_of(args.k_pages, 0);
    p.v_outer_stride = stride_of(args.v_pages, 0);
    p.k_token_stride = stride_of(args.k_pages, 1);
    p.v_token_stride = stride_of(args.v_pages, 1);
    p.k_head_stride = stride_of(args.k_pages, 2);
    p.v_head_stride = stride_of(args.v_pages, 2);
    p.page_table = static_cast<const int32_t*>(args.page_table.data);
    p.page_table_stride = stride_of(args.page_table, 0);
    p.seq_lens = static_cast<const int32_t*>(args.seq_lens.data);

    p.total_q = args.q.shape[0];
    check.length("total_q", p.total_q);
    if (args.cu_seqlens_q) {
        p.seqlen_q = check_max_seqlen(check, "max_seqlen_q", args.max_seqlen_q, p.total_q);
        if (args.batch_invariant) {  // kernels are chosen by it: it must not depend on the batch's total
            if (!args.max_seqlen_q)
                fail<ValueError>(p.op, "batch_invariant needs max_seqlen_q with packed queries");
            p.seqlen_q = static_cast<int32_t>(*args.max_seqlen_q);
        }
        p.cu_seqlens_q = set_cu_seqlens(check, "cu_seqlens_q", *args.cu_seqlens_q, batch, p.total_q,
                                        "max_seqlen_q", p.seqlen_q);
    } else {
        if (args.max_seqlen_q) {
            fail<ValueError>(p.op, "max_seqlen_q belongs to packed queries; give cu_seqlens_q too");
        }
        check.equal("batch", "q", p.total_q, "page_table", batch);
        p.seqlen_q = 1;
    }
    set_queries_and_masks(check, p, args, 3, q_axes);
    check_results_apart(check, args, "k_pages", args.k_pages, "v_pages", args.v_pages);
    for (const ScaleArguments* given : {&k_given, &v_given}) {
        for (const auto& [name, array] :
             {std::pair(given->name, &given->array), std::pair(given->per_token_name, &given->per_token)}) {
            if (!*array) continue;
            check.apart("out", args.out, name, **array);
            if (args.lse) check.apart("lse", *args.lse, name, **array);
        }
    }
    const KeyTransformArguments transform = KeyTransformArguments::of(args);
    p.key_transform = check_key_transform(check, transform, stored.k, p.num_kv_heads, p.head_dim);
    for (const auto& [name, array] : transform.arrays()) {
        if (!*array) continue;
        check.apart("out", args.out, name, **array);
        if (args.lse) check.apart("lse", *args.lse, name, **array);
    }
    if (transform.offset && args.softcap > 0.0) {
        fail<ValueError>(p.op, "k_channel_offset cannot go with softcap (", args.softcap,
                         "), under which scores that are all shifted alike have other weights");
    }
    p.query_scale = p.softmax_scale;
    if (!std::isfinite(k_scales.number))
        fail<ValueError>(p.op, "k_scale must be finite; got ", k_scales.number);
    if (!std::isfinite(v_scales.number))
        fail<ValueError>(p.op, "v_scale must be finite; got ", v_scales.number);
    p.softmax_scale *= k_scales.number;
    p.out_scale = v_scales.number;
    p.k_scales = args.k_scale_array ? k_scales.in_memory : k_scales.of_each_token;
    p.v_scales = args.v_scale_array ? v_scales.in_memory : v_scales.of_each_token;
    check_score(p, "softmax_scale * k_scale", args.softcap);
    p.batch_invariant = args.batch_invariant;
    if (args.num_splits) {
        constexpr int64_t kMaxSplits = 1024;
        if (*args.num_splits < 1 || *args.num_splits > kMaxSplits) {
            fail<ValueError>(p.op, "num_splits must lie in [1, ", kMaxSplits, "]; got ", *args.num_splits);
        }
        p.num_splits = static_cast<int32_t>(*args.num_splits);
    }
    if (p.device.type == DeviceType::cpu) {
        check_pages_in_host(p.op, p.page_table, p.page_table_stride, p.seq_lens, batch, max_pages, page_size,
                            num_pages);
        check_new_tokens_in_host(p.op, p.seq_lens, p.cu_seqlens_q, batch);
    }
    set_shared_prefix(check, p, args);
    require_kernel(p.op, p);
    return p;
}

}  // namespace octavo
