#include "checks/attention_arguments.h"
#include "checks/check.h"
#include "checks/checks.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

namespace octavo {
namespace {

// Checks and sets the arrays of the forward call that have a row for each query: q and the results, which are
// only read here.
void set_queries(const Checker& check, AttentionBackwardParams& p, const AttentionBackwardArgs& args,
                 const Layout& q_layout) {
    check.length("seqlen_q * group_size", int64_t{p.seqlen_q} * p.group_size());  // rows of one KV head
    auto set_strides = [&](const TensorView& t, int64_t& batch, int64_t& token, int64_t& head) {
        const RowStrides strides = row_strides(t, q_layout);
        batch = strides.batch;
        token = strides.token;
        head = strides.head;
    };
    auto check_result = [&](const char* name, const TensorView& t) {
        check.data(name, t, q_layout.ndim, q_layout.axes);
        check_like_out(check, p, name, t, args.q);
        check.dtype(name, t, args.q.dtype, " like q");
    };
    p.q = args.q.data;
    set_strides(args.q, p.q_batch_stride, p.q_token_stride, p.q_head_stride);
    check_result("out", args.out);
    p.out = args.out.data;
    set_strides(args.out, p.out_batch_stride, p.out_token_stride, p.out_head_stride);
    check_result("dout", args.dout);
    p.dout = args.dout.data;
    set_strides(args.dout, p.dout_strides.batch, p.dout_strides.token, p.dout_strides.head);
    check.lse("lse", args.lse, "q", args.q);
    p.lse = static_cast<float*>(args.lse.data);
    set_strides(args.lse, p.lse_batch_stride, p.lse_token_stride, p.lse_head_stride);
    if (!args.dlse) return;
    check.lse("dlse", *args.dlse, "q", args.q);
    p.dlse = static_cast<const float*>(args.dlse->data);
    set_strides(*args.dlse, p.dlse_strides.batch, p.dlse_strides.token, p.dlse_strides.head);
}

// Checks and sets the gradient of an array of this layout.
void set_gradient(const Checker& check, const char* name, const TensorView& gradient, const char* of_name,
                  const TensorView& of, const Layout& layout, void*& data, GradientStrides& strides) {
    check.output(name, gradient, layout.ndim, layout.axes);
    check.same_shape(name, gradient, of_name, of);
    check.dtype(name, gradient, of.dtype, (std::string(" like ") + of_name).c_str());
    const RowStrides found = row_strides(gradient, layout);
    data = gradient.data;
    strides = {layout.ndim == 4 ? found.batch : 0, found.token, found.head};
}

void set_gradient_of_slopes(const Checker& check, AttentionBackwardParams& p,
                            const AttentionBackwardArgs& args) {
    if (!args.dalibi_slopes) return;
    if (!args.alibi_slopes)
        fail<ValueError>(p.op, "dalibi_slopes (return_dalibi) needs alibi_slopes; got none");
    const TensorView& slopes = *args.alibi_slopes;
    const TensorView& gradient = *args.dalibi_slopes;
    check.dtype("dalibi_slopes", gradient, DType::float32, "");
    check.output("dalibi_slopes", gradient, slopes.ndim, "[num_q_heads] or [batch, num_q_heads]");
    check.same_shape("dalibi_slopes", gradient, "alibi_slopes", slopes);
    const bool per_batch = slopes.ndim == 2;
    if (per_batch && gradient.shape[0] > 1 && gradient.strides[0] != p.num_q_heads) {
        fail<ValueError>(p.op, "dalibi_slopes must be in C order; got strides ", gradient.strides_string());
    }
    p.dalibi_slopes = static_cast<float*>(gradient.data);
    p.dalibi_batch_stride = per_batch ? p.num_q_heads : 0;
}

void set_gradient_of_sinks(const Checker& check, AttentionBackwardParams& p,
                           const AttentionBackwardArgs& args) {
    if (!args.dsinks) return;
    if (!args.sinks) fail<ValueError>(p.op, "dsinks (return_dsinks) needs sinks; got none");
    check.dtype("dsinks", *args.dsinks, DType::float32, "");
    check.output("dsinks", *args.dsinks, 1, "[num_q_heads]");
    check.same_shape("dsinks", *args.dsinks, "sinks", *args.sinks);
    p.dsinks = static_cast<float*>(args.dsinks->data);
}

// Checks that no gradient lies where other threads may still read or write, in an input or in another
// gradient. Gradients may be views of one array, such as the gradient of an array that holds q, k and v.
void check_gradients_apart(const Checker& check, const AttentionBackwardArgs& args) {
    using Named = std::pair<const char*, const TensorView*>;
    auto given = [](const std::optional<TensorView>& array) { return array ? &*array : nullptr; };
    const Named gradients[] = {{"dq", &args.dq},
                               {"dk", &args.dk},
                               {"dv", &args.dv},
                               {"dalibi_slopes", given(args.dalibi_slopes)},
                               {"dsinks", given(args.dsinks)}};
    const Named inputs[] = {{"dout", &args.dout},
                            {"q", &args.q},
                            {"k", &args.k},
                            {"v", &args.v},
                            {"out", &args.out},
                            {"lse", &args.lse},
                            {"dlse", given(args.dlse)},
                            {"cu_seqlens_q", given(args.cu_seqlens_q)},
                            {"cu_seqlens_k", given(args.cu_seqlens_k)},
                            {"prefix_lens", given(args.prefix_lens)},
                            {"bidirectional_ranges", given(args.bidirectional_ranges)},
                            {"block_mask", given(args.block_mask)},
                            {"alibi_slopes", given(args.alibi_slopes)},
                            {"sinks", given(args.sinks)}};
    for (const auto& [name, gradient] : gradients) {
        if (!gradient) continue;
        for (const auto& [input_name, input] : inputs) {
            if (input) check.apart(name, *gradient, input_name, *input);
        }
        for (const auto& [other_name, other] : gradients) {
            if (other == gradient) break;
            if (other) check.no_shared_elements(name, *gradient, other_name, *other);
        }
    }
}

}  // namespace

std::string why_no_cuda_kernel(const AttentionBackwardParams& p) {
    const int32_t head_dim = std::max(p.head_dim, p.head_dim_v);
    if (head_dim > kMaxCudaGradientHeadDim) {
        return "no CUDA kernel for gradients of head_dim " + std::to_string(head_dim) + "; it may be up to " +
               std::to_string(kMaxCudaGradientHeadDim);
    }
    return why_no_cuda_kernel(static_cast<const AttentionParams&>(p));
}

AttentionBackwardParams check_attention_backward(const AttentionBackwardArgs& args) {
    AttentionBackwardParams p{};
    p.op = "attention_backward";
    p.device = args.dout.device;
    p.dtype = args.q.dtype;
    p.deterministic = args.deterministic;
    const Checker check(p.op, p.device);
    set_dense_or_packed(check, p, args);
    const bool packed = args.cu_seqlens_q.has_value();
    if (packed) p.total_k = static_cast<int32_t>(args.k.shape[0]);
    const Layout q_layout = dense_or_packed_q(packed), k_layout = dense_or_packed_k(packed);
    set_queries(check, p, args, q_layout);
    set_masks(check, p, args);
    set_block_mask(check, p, args);
    set_gradient(check, "dq", args.dq, "q", args.q, q_layout, p.dq, p.dq_strides);
    set_gradient(check, "dk", args.dk, "k", args.k, k_layout, p.dk, p.dk_strides);
    set_gradient(check, "dv", args.dv, "v", args.v, k_layout, p.dv, p.dv_strides);
    set_gradient_of_slopes(check, p, args);
    set_gradient_of_sinks(check, p, args);
    check_gradients_apart(check, args);
    set_score_and_dropout(p, args);
    require_kernel(p.op, p);
    return p;
}

}  // namespace octavo
