#include "checks/attention_arguments.h"
#include "checks/check.h"
#include "checks/checks.h"
#include "common/score.h"

#include <cmath>

namespace octavo {
namespace {

constexpr const char* kOp = "latent_attention";
constexpr int64_t kMaxSplits = 1024;

// Checks and sets the axes of q, and the width of keys and values.
void set_shapes(const Checker& check, LatentAttentionParams& p, const LatentAttentionArgs& args) {
    const TensorView& pages = args.kv_pages;
    const bool has_head_axis = pages.ndim == 4;
    check.float_dtype("q", args.q);
    check.data("q", args.q, 3,
               args.cu_seqlens_q ? "[total_q, num_q_heads, qk_dim]" : "[batch, num_q_heads, qk_dim]");
    check.data("kv_pages", pages, has_head_axis ? 4 : 3, "[num_pages, page_size, qk_dim]");
    if (has_head_axis && pages.shape[2] != 1) {
        fail<ValueError>(kOp, "kv_pages must have one head, which all query heads share; got ",
                         pages.shape[2]);
    }
    if (pages.dtype != args.q.dtype && pages.dtype != DType::float8_e4m3fn) {
        fail<TypeError>(kOp, "kv_pages must be ", to_string(args.q.dtype), " like q, or float8_e4m3fn; got ",
                        to_string(pages.dtype));
    }
    const int64_t num_q_heads = args.q.shape[1], qk_dim = args.q.shape[2];
    check.equal("qk_dim", "kv_pages", pages.shape[pages.ndim - 1], "q", qk_dim);
    if (qk_dim < 8 || qk_dim > kMaxLatentDim || qk_dim % 8 != 0)
        fail<ValueError>(kOp, "qk_dim (", qk_dim, ") must be a multiple of 8 from 8 to ", kMaxLatentDim);
    if (args.v_dim < 8 || args.v_dim > qk_dim || args.v_dim % 8 != 0)
        fail<ValueError>(kOp, "v_dim (", args.v_dim, ") must be a multiple of 8 from 8 to qk_dim (", qk_dim,
                         ")");
    if (num_q_heads < 1) fail<ValueError>(kOp, "num_q_heads (", num_q_heads, ") must be at least 1");
    check.length("num_q_heads", num_q_heads);
    if (pages.shape[1] < 1) fail<ValueError>(kOp, "page_size (", pages.shape[1], ") must be at least 1");
    check.length("page_size", pages.shape[1]);
    p.kv_dtype = pages.dtype;
    p.num_q_heads = static_cast<int32_t>(num_q_heads);
    p.qk_dim = static_cast<int32_t>(qk_dim);
    p.v_dim = static_cast<int32_t>(args.v_dim);
    p.page_size = static_cast<int32_t>(pages.shape[1]);
    p.num_pages = pages.shape[0];
    p.kv = pages.data;
    p.kv_page_stride = stride_of(pages, 0);
    p.kv_slot_stride = stride_of(pages, 1);
    p.q = args.q.data;
    p.q_token_stride = stride_of(args.q, 0);
    p.q_head_stride = stride_of(args.q, 1);
}

// Checks and sets tables, lengths and where the queries of each sequence begin.
void set_sequences(const Checker& check, LatentAttentionParams& p, const LatentAttentionArgs& args) {
    p.page_table = check.index("page_table", args.page_table, 2, "[batch, max_pages]");
    p.seq_lens = check.index("seq_lens", args.seq_lens, 1, "[batch]");
    const int64_t batch = args.page_table.shape[0], max_pages = args.page_table.shape[1];
    check.length("batch", batch);
    check.length("max_pages", max_pages);
    check.equal("batch", "seq_lens", args.seq_lens.shape[0], "page_table", batch);
    p.page_table_stride = stride_of(args.page_table, 0);
    p.batch = static_cast<int32_t>(batch);
    const int64_t capacity = max_pages * p.page_size;
    p.seqlen_k = static_cast<int32_t>(capacity < kMaxLength ? capacity : kMaxLength);
    p.total_q = args.q.shape[0];
    check.length("total_q", p.total_q);
    if (args.cu_seqlens_q) {
        p.seqlen_q = check_max_seqlen(check, "max_seqlen_q", args.max_seqlen_q, p.total_q);
        p.cu_seqlens_q = set_cu_seqlens(check, "cu_seqlens_q", *args.cu_seqlens_q, batch, p.total_q,
                                        "max_seqlen_q", p.seqlen_q);
    } else {
        if (args.max_seqlen_q)
            fail<ValueError>(kOp, "max_seqlen_q belongs to packed queries; give cu_seqlens_q too");
        check.row_each("q", p.total_q, batch, "cu_seqlens_q");
        p.seqlen_q = 1;
    }
    check.length("seqlen_q * num_q_heads", int64_t{p.seqlen_q} * p.num_q_heads);
    if (p.device.type != DeviceType::cpu) return;
    check_pages_in_host(kOp, p.page_table, p.page_table_stride, p.seq_lens, batch, max_pages, p.page_size,
                        p.num_pages);
    check_new_tokens_in_host(kOp, p.seq_lens, p.cu_seqlens_q, batch);
}

void set_results(const Checker& check, LatentAttentionParams& p, const LatentAttentionArgs& args) {
    check.dtype("out", args.out, p.dtype, " like q");
    check.shape("out", args.out,
                args.cu_seqlens_q ? "[total_q, num_q_heads, v_dim]" : "[batch, num_q_heads, v_dim]",
                {p.total_q, p.num_q_heads, p.v_dim});
    check.output("out", args.out, 3, "[total_q, num_q_heads, v_dim]");
    auto check_apart = [&](const char* name, const TensorView& result) {
        check.apart(name, result,
                    {{"q", args.q},
                     {"kv_pages", args.kv_pages},
                     {"page_table", args.page_table},
                     {"seq_lens", args.seq_lens},
                     {"cu_seqlens_q", args.cu_seqlens_q}});
    };
    check_apart("out", args.out);
    p.out = args.out.data;
    p.out_token_stride = stride_of(args.out, 0);
    p.out_head_stride = stride_of(args.out, 1);
    if (!args.lse) return;
    check.lse("lse", *args.lse, "q", args.q);
    check.writable("lse", *args.lse);
    check_apart("lse", *args.lse);
    check.apart("lse", *args.lse, "out", args.out);
    p.lse = static_cast<float*>(args.lse->data);
    p.lse_token_stride = stride_of(*args.lse, 0);
    p.lse_head_stride = stride_of(*args.lse, 1);
}

void set_scales(LatentAttentionParams& p, const LatentAttentionArgs& args) {
    if (!args.softmax_scale) {
        fail<TypeError>(kOp, "softmax_scale must be given: that of the heads before the absorption, such as ",
                        "1 / sqrt(192) for keys of 128 + 64; it does not follow from qk_dim (", p.qk_dim,
                        ")");
    }
    const float kv_scale = args.kv_scale.value_or(1.0f);
    if (!std::isfinite(kv_scale) || kv_scale <= 0.0f)
        fail<ValueError>(kOp, "kv_scale must be finite and greater than 0; got ", kv_scale);
    p.out_scale = kv_scale;
    p.softmax_scale = static_cast<float>(*args.softmax_scale * kv_scale);
    if (!std::isfinite(p.softmax_scale * kLog2e))
        fail<ValueError>(kOp, "softmax_scale (", *args.softmax_scale, ") times kv_scale (", kv_scale,
                         ") must be finite in float32");
}

}  // namespace

int64_t latent_attention_width(const LatentAttentionArgs& args) {
    return args.v_dim < 0 || args.v_dim > kMaxLatentDim ? 0 : args.v_dim;
}

std::string why_no_cuda_kernel(const LatentAttentionParams& p) {
    if (p.dtype == DType::float32) return "no CUDA kernel for float32; it has float16 and bfloat16";
    if (p.qk_dim == 576 && p.v_dim == 512) return {};
    return "no CUDA kernel for qk_dim " + std::to_string(p.qk_dim) + " and v_dim " + std::to_string(p.v_dim) +
           "; it has 576 and 512";
}

LatentAttentionParams check_latent_attention(const LatentAttentionArgs& args) {
    LatentAttentionParams p{};
    p.device = args.q.device;
    p.dtype = args.q.dtype;
    const Checker check(kOp, p.device);
    set_shapes(check, p, args);
    set_sequences(check, p, args);
    set_results(check, p, args);
    set_scales(p, args);
    p.causal = args.causal;
    if (args.num_splits) {
        if (*args.num_splits < 1 || *args.num_splits > kMaxSplits)
            fail<ValueError>(kOp, "num_splits must lie in [1, ", kMaxSplits, "]; got ", *args.num_splits);
        p.num_splits = static_cast<int32_t>(*args.num_splits);
    }
    require_kernel(kOp, p);
    return p;
}

}  // namespace octavo
