#include "checks/attention_arguments.h"
#include "checks/cache_codes.h"
#include "checks/check.h"
#include "checks/checks.h"
#include "checks/key_transform.h"
#include "cuda/plan.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <iterator>

namespace octavo {
namespace {

// Checks and sets the arrays that have a row for each query: q and the results.
template <class Args>
void set_queries(const Checker& check, AttentionParams& p, const Args& args, const Layout& q_layout) {
    check.length("seqlen_q * group_size", int64_t{p.seqlen_q} * p.group_size());  // rows of one KV head
    check.output("out", args.out, q_layout.ndim, q_layout.axes);
    check_like_out(check, p, "out", args.out, args.q);
    check.dtype("out", args.out, args.q.dtype, " like q");

    auto set_strides = [&](const TensorView& t, int64_t& batch, int64_t& token, int64_t& head) {
        const RowStrides strides = row_strides(t, q_layout);
        batch = strides.batch;
        token = strides.token;
        head = strides.head;
    };
    p.q = args.q.data;
    set_strides(args.q, p.q_batch_stride, p.q_token_stride, p.q_head_stride);
    p.out = args.out.data;
    set_strides(args.out, p.out_batch_stride, p.out_token_stride, p.out_head_stride);
    if (!args.lse) return;
    const TensorView& lse = *args.lse;
    check.lse("lse", lse, "q", args.q);
    check.writable("lse", lse);
    p.lse = static_cast<float*>(lse.data);
    set_strides(lse, p.lse_batch_stride, p.lse_token_stride, p.lse_head_stride);
}

// An array on a GPU is not read: kernels ignore a phi that is not finite, since no maximum lies near it.
template <class Args>
void set_softmax_phi(const Checker& check, AttentionParams& p, const Args& args) {
    if (args.softmax_phi) {
        if (args.softmax_phi_array)
            fail<ValueError>(p.op, "softmax_phi must be a number or an array (softmax_phi_array), not both");
        p.softmax_phi = static_cast<float>(*args.softmax_phi);
        if (!std::isfinite(p.softmax_phi))
            fail<ValueError>(p.op, "softmax_phi must be finite in float32; got ", *args.softmax_phi);
        p.has_softmax_phi = 1;
    }
    if (!args.softmax_phi_array) return;
    const TensorView& phi = *args.softmax_phi_array;
    check.dtype("softmax_phi", phi, DType::float32, "");
    check.data("softmax_phi", phi, 1, "[num_q_heads]");
    check.equal("num_q_heads", "softmax_phi", phi.shape[0], "q", p.num_q_heads);
    p.has_softmax_phi = 1;
    p.softmax_phi_of_heads = static_cast<const float*>(phi.data);
    if (p.device.type != DeviceType::cpu) return;
    for (int32_t h = 0; h < p.num_q_heads; ++h) {
        if (std::isfinite(p.softmax_phi_of_heads[h])) continue;
        fail<ValueError>(p.op, "softmax_phi[", h, "] must be finite; got ", p.softmax_phi_of_heads[h]);
    }
}

// Checks that results do not lie where other threads may still read: in q, in what both operators take
// besides, or in the `others`. Only a row's own queries, which its result may replace, have all been read
// when the result is written.
template <class Args>
void check_results_apart(const Checker& check, const Args& args, std::initializer_list<NamedInput> others) {
    auto check_one = [&](const char* name, const TensorView& result) {
        check.apart(name, result, others);
        check.apart(name, result,
                    {{"cu_seqlens_q", args.cu_seqlens_q},
                     {"prefix_lens", args.prefix_lens},
                     {"bidirectional_ranges", args.bidirectional_ranges},
                     {"alibi_slopes", args.alibi_slopes},
                     {"sinks", args.sinks},
                     {"softmax_phi", args.softmax_phi_array}});
    };
    check_one("out", args.out);
    if (!same_elements(args.out, args.q)) check.apart("out", args.out, "q", args.q);
    if (!args.lse) return;
    check.apart("lse", *args.lse, "q", args.q);
    check_one("lse", *args.lse);
    check.apart("lse", *args.lse, "out", args.out);
}

void set_tree_mask(const Checker& check, AttentionParams& p, const PagedAttentionArgs& args) {
    if (!args.tree_mask) return;
    const TensorView& words = *args.tree_mask;
    if (words.dtype == DType::int64) {
        check.data("tree_mask", words, 1, "[total_q] of int64");
    } else {
        check.dtype("tree_mask", words, DType::int32, ", or int64 [total_q]");
        check.data("tree_mask", words, 2, "[total_q, 2] of int32");
        if (words.shape[1] != 2 || (words.shape[0] > 1 && words.strides[0] != 2)) {
            fail<ValueError>(p.op, "tree_mask of int32 must be [total_q, 2] in C order; got ",
                             words.shape_string());
        }
    }
    check.equal("total_q", "tree_mask", words.shape[0], "q", args.q.shape[0]);
    if (!args.causal) {
        fail<ValueError>(p.op, "tree_mask needs causal: it hides keys that a causal query would see");
    }
    if (args.bidirectional_ranges) fail<ValueError>(p.op, "tree_mask cannot go with bidirectional_ranges");
    p.has_tree_mask = true;
    p.tree_mask = static_cast<const uint32_t*>(words.data);
}

void set_chosen_pages(const Checker& check, AttentionParams& p, const PagedAttentionArgs& args) {
    if (!args.chosen_pages) return;
    const TensorView& lists = *args.chosen_pages;
    const bool has_heads = lists.ndim == 3;
    const char* const axes = "[batch, num_chosen] or [batch, num_kv_heads, num_chosen]";
    p.chosen_pages.lists = check.index("chosen_pages", lists, has_heads ? 3 : 2, axes);
    const int last = lists.ndim - 1;
    check.equal("batch", "chosen_pages", lists.shape[0], "page_table", p.batch);
    if (has_heads) check.equal("num_kv_heads", "chosen_pages", lists.shape[1], "k_pages", p.num_kv_heads);
    if (lists.shape[last] < 1) {
        fail<ValueError>(p.op, "chosen_pages must have room for at least one page; its shape is ",
                         lists.shape_string());
    }
    auto refuse = [&](const char* other) { fail<ValueError>(p.op, "chosen_pages cannot go with ", other); };
    if (args.prefix_lens) refuse("prefix_lens");
    if (args.bidirectional_ranges) refuse("bidirectional_ranges");
    if (args.attention_chunk > 0) refuse("attention_chunk");
    if (args.tree_mask) refuse("tree_mask");
    if (args.shared_prefix_len > 0) refuse("shared_prefix_len");
    if (args.num_splits) refuse("num_splits");
    p.chosen_pages.batch_stride = stride_of(lists, 0);
    p.chosen_pages.head_stride = has_heads ? stride_of(lists, 1) : 0;
    p.chosen_pages.has_lists_of_heads = has_heads;
    p.chosen_pages.num_chosen = static_cast<int32_t>(std::min<int64_t>(lists.shape[last], INT32_MAX));
}

// Checks and sets shared_prefix_len. The pages of the prefix are read once for all sequences, so that every
// query has to see all of their keys.
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
    if (p.attention_chunk.divisor > 0) refuse("cannot go with attention_chunk");
    if (p.window_left >= 0) refuse("needs window_left -1 (unbounded); got ", p.window_left);
    if (p.alibi_slopes) refuse("cannot go with alibi_slopes");
    if (args.bidirectional_ranges) refuse("cannot go with bidirectional_ranges");
    if (p.batch_invariant) refuse("cannot go with batch_invariant, as all queries share its work");
    check.length("shared_prefix_len", length);
    check.length("total_q * group_size", p.total_q * p.group_size());
    p.shared_prefix_len = static_cast<int32_t>(length);
    if (p.device.type != DeviceType::cpu || p.batch == 0) return;

    check_pages_in_host(p.op, p.page_table, p.page_table_stride, {&p.shared_prefix_len}, 1, max_pages,
                        p.page_size, p.num_pages);
    for (int32_t b = 0; b < p.batch; ++b) {
        const int32_t num_queries = p.cu_seqlens_q ? p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b] : 1;
        if (p.seq_lens[b] == 0 || num_queries == 0) continue;  // padding
        if (p.seq_lens[b] - num_queries < length) {
            refuse("must not exceed the length of a sequence minus the number of its queries; for sequence ",
                   b, " that is ", p.seq_lens[b], " - ", num_queries, " = ", p.seq_lens[b] - num_queries);
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
    if (std::find(std::begin(types), std::end(types), p.dtype) != std::end(types)) {
        const int32_t head_dim = std::max(p.head_dim, p.head_dim_v);
        if (!is_code(p.k_dtype) || head_dim <= kMaxCudaCodeHeadDim) return {};
        return "no CUDA kernel reads codes of head_dim " + std::to_string(head_dim) + "; it may be up to " +
               std::to_string(kMaxCudaCodeHeadDim);
    }
    std::string names;
    for (DType dtype : types) names += (names.empty() ? "" : " and ") + to_string(dtype);
    return "no CUDA kernel for " + to_string(p.dtype) + ", head_dim " + std::to_string(p.head_dim) +
           "; there are some for " + names + ", head_dim up to " + std::to_string(kMaxHeadDim);
}

int64_t attention_width(const AttentionArgs& args) {
    return args.v.ndim > 0 ? args.v.shape[args.v.ndim - 1] : 0;
}

int64_t paged_attention_width(const PagedAttentionArgs& args) {
    if (args.v_pages.ndim < 1) return 0;
    const bool is_int4 = args.v_pages.dtype == DType::uint8 && args.kv_dtype == DType::int4;
    return numbers_in(is_int4 ? DType::int4 : args.v_pages.dtype, args.v_pages.shape[args.v_pages.ndim - 1]);
}

AttentionParams check_attention(const AttentionArgs& args) {
    AttentionParams p{};
    p.op = "attention";
    p.device = args.q.device;
    p.dtype = args.q.dtype;
    const Checker check(p.op, p.device);
    set_dense_or_packed(check, p, args);
    set_queries(check, p, args, dense_or_packed_q(args.cu_seqlens_q.has_value()));
    set_masks(check, p, args);
    set_block_mask(check, p, args);
    set_softmax_phi(check, p, args);
    check_results_apart(
        check, args,
        {{"k", args.k}, {"v", args.v}, {"cu_seqlens_k", args.cu_seqlens_k}, {"block_mask", args.block_mask}});
    set_score_and_dropout(p, args);
    require_kernel(p.op, p);
    return p;
}

PagedAttentionParams check_paged_attention(const PagedAttentionArgs& args) {
    PagedAttentionParams p{};
    p.op = "paged_attention";
    p.device = args.q.device;
    p.dtype = args.q.dtype;
    const Checker check(p.op, p.device);
    const Layout q_layout =
        args.cu_seqlens_q ? dense_or_packed_q(true) : Layout{3, "[batch, num_q_heads, head_dim]"};
    check.float_dtype("q", args.q);
    check.data("q", args.q, q_layout.ndim, q_layout.axes);
    check.data("k_pages", args.k_pages, 4, kPages);
    check.data("v_pages", args.v_pages, 4, kPages);
    check.cache_dtype("k_pages", args.k_pages, "q", args.q);
    const CacheArrays cache{"k_pages", args.k_pages, "v_pages", args.v_pages};
    const StoredDtypes stored = stored_dtypes(check, cache, args.kv_dtype);
    p.k_dtype = stored.k;
    p.v_dtype = stored.v;
    check_same_cache_shape(check, cache);
    set_heads(check, p, "k_pages", args.q, args.k_pages);
    set_value_dim(check, p, "v_pages", numbers_in(stored.v, args.v_pages.shape[3]));
    const ScaleArguments k_given{"k_pages",          "k_scale",  args.k_scale,
                                 args.k_scale_array, "k_scales", args.k_scales};
    const ScaleArguments v_given{"v_pages",          "v_scale",  args.v_scale,
                                 args.v_scale_array, "v_scales", args.v_scales};
    const CheckedScales k_scales = check_scales(check, k_given, stored.k, args.k_pages);
    const CheckedScales v_scales = check_scales(check, v_given, stored.v, args.v_pages);
    p.page_table = check.index("page_table", args.page_table, 2, "[batch, max_pages]");
    p.seq_lens = check.index("seq_lens", args.seq_lens, 1, "[batch]");

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
    p.page_table_stride = stride_of(args.page_table, 0);

    p.total_q = args.q.shape[0];
    check.length("total_q", p.total_q);
    if (args.cu_seqlens_q) {
        p.seqlen_q = check_max_seqlen(check, "max_seqlen_q", args.max_seqlen_q, p.total_q);
        if (args.batch_invariant && !args.max_seqlen_q)
            fail<ValueError>(p.op, "batch_invariant needs max_seqlen_q with packed queries");
        // Kernels are chosen by seqlen_q. Where a sequence's bits must not depend on the batch, it must not
        // be the batch's total.
        if (args.max_seqlen_q && (args.batch_invariant || args.chosen_pages))
            p.seqlen_q = static_cast<int32_t>(*args.max_seqlen_q);
        p.cu_seqlens_q = set_cu_seqlens(check, "cu_seqlens_q", *args.cu_seqlens_q, batch, p.total_q,
                                        "max_seqlen_q", p.seqlen_q);
        if (p.device.type == DeviceType::cpu) p.total_q = p.cu_seqlens_q[batch];  // leaves out padding
    } else {
        if (args.max_seqlen_q) {
            fail<ValueError>(p.op, "max_seqlen_q belongs to packed queries; give cu_seqlens_q too");
        }
        check.row_each("q", p.total_q, batch, "cu_seqlens_q");
        p.seqlen_q = 1;
    }
    set_queries(check, p, args, q_layout);
    set_masks(check, p, args);
    set_softmax_phi(check, p, args);
    set_tree_mask(check, p, args);
    set_chosen_pages(check, p, args);
    p.has_head_numbers = p.alibi_slopes || p.softmax_phi_of_heads || p.has_tree_mask;
    const KeyTransformArguments transform = KeyTransformArguments::of(args);
    p.key_transform = check_key_transform(check, transform, stored.k, p.num_kv_heads, p.head_dim);
    check_results_apart(check, args,
                        {{"k_pages", args.k_pages},
                         {"v_pages", args.v_pages},
                         {"page_table", args.page_table},
                         {"seq_lens", args.seq_lens},
                         {"k_scale", args.k_scale_array},
                         {"v_scale", args.v_scale_array},
                         {"k_scales", args.k_scales},
                         {"v_scales", args.v_scales},
                         {"k_channel_offset", args.k_channel_offset},
                         {"k_channel_scale", args.k_channel_scale},
                         {"tree_mask", args.tree_mask},
                         {"chosen_pages", args.chosen_pages}});
    if (transform.offset && args.softcap > 0.0) {
        fail<ValueError>(p.op, "k_channel_offset cannot go with softcap (", args.softcap,
                         "), under which scores that are all shifted alike have other weights");
    }
    p.query_scale = p.softmax_scale;
    p.softmax_scale *= k_scales.number;
    p.out_scale = v_scales.number;
    p.k_scales = args.k_scale_array ? k_scales.in_memory : k_scales.of_each_token;
    p.v_scales = args.v_scale_array ? v_scales.in_memory : v_scales.of_each_token;
    check_score(p, "softmax_scale * k_scale", args.softcap);
    p.batch_invariant = args.batch_invariant;
    p.static_past = args.static_past;
    if (args.num_splits) {
        constexpr int64_t kMaxSplits = 1024;
        if (*args.num_splits < 1 || *args.num_splits > kMaxSplits) {
            fail<ValueError>(p.op, "num_splits must lie in [1, ", kMaxSplits, "]; got ", *args.num_splits);
        }
        p.num_splits = static_cast<int32_t>(*args.num_splits);
    }
    if (p.device.type == DeviceType::cpu) {
        if (p.chosen_pages) {
            check_chosen_pages_in_host(p.op, p.chosen_pages, p.page_table, p.page_table_stride, p.seq_lens,
                                       batch, p.num_kv_heads, max_pages, page_size, num_pages);
        } else {
            check_pages_in_host(p.op, p.page_table, p.page_table_stride, p.seq_lens, batch, max_pages,
                                page_size, num_pages);
        }
        // Queries that see all keys need not be among them (cross attention).
        const bool sees_all = p.window_left < 0 && p.window_right < 0 && !p.alibi_slopes && !p.tree_mask;
        if (!sees_all) check_new_tokens_in_host(p.op, p.seq_lens, p.cu_seqlens_q, batch);
    }
    if (p.num_pages == 0 || max_pages == 0) p.chosen_pages = {};  // there is nothing to choose from
    p.chosen_pages.num_chosen = static_cast<int32_t>(std::min<int64_t>(p.chosen_pages.num_chosen, max_pages));
    set_shared_prefix(check, p, args);
    require_kernel(p.op, p);
    return p;
}

}  // namespace octavo
