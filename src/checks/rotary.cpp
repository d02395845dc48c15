#include "checks/rotary.h"

#include <optional>

namespace octavo {
namespace {

constexpr const char* kTable = "[max_positions, rotary_dim / 2]";

void check_tables(const Checker& check, const TensorView& cos, const TensorView& sin, DType k_dtype,
                  int64_t head_dim) {
    if (cos.dtype != DType::float32) {
        check.dtype("rotary_cos", cos, k_dtype,
                    k_dtype == DType::float32 ? " like k" : " like k, or float32");
    }
    check.data("rotary_cos", cos, 2, kTable);
    if (cos.shape[1] < 1 || 2 * cos.shape[1] > head_dim) {
        fail<ValueError>(check.op(), "rotary_cos must have shape ", kTable,
                         " with rotary_dim from 2 to head_dim (", head_dim, "); got ", cos.shape_string());
    }
    check.length("max_positions", cos.shape[0]);
    check.dtype("rotary_sin", sin, cos.dtype, " like rotary_cos");
    check.data("rotary_sin", sin, 2, kTable);
    check.same_shape("rotary_sin", sin, "rotary_cos", cos);
}

void check_queries(const Checker& check, const AppendKvArgs& args) {
    const TensorView &q = *args.q, &q_out = *args.q_out;
    const bool packed = args.cu_seqlens.has_value();
    const char* axes = packed ? "[total, num_q_heads, head_dim]" : "[batch, num_q_heads, head_dim]";
    check.data("q", q, 3, axes);
    check.dtype("q", q, args.k.dtype, " like k");
    check.equal(packed ? "total" : "batch", "q", q.shape[0], "k", args.k.shape[0]);
    check.length("num_q_heads", q.shape[1]);
    check.equal("head_dim", "q", q.shape[2], "k", args.k.shape[2]);
    check.output("q_out", q_out, 3, axes);
    check.dtype("q_out", q_out, q.dtype, " like q");
    check.same_shape("q_out", q_out, "q", q);
    if (!same_elements(q_out, q)) check.apart("q_out", q_out, "q", q);
    check.no_shared_elements("q_out", q_out, "k", args.k);
    check.no_shared_elements("q_out", q_out, "v", args.v);
    check.apart("q_out", q_out, "rotary_cos", *args.rotary_cos);
    check.apart("q_out", q_out, "rotary_sin", *args.rotary_sin);
}

// Checks that the cache, which is written, lies apart from what is read, and from q_out.
void check_apart_from_cache(const Checker& check, const AppendKvArgs& args) {
    auto check_one = [&](const char* name, const std::optional<TensorView>& array) {
        if (!array) return;
        check.apart(name, *array, "k_pages", args.k_pages);
        check.apart(name, *array, "v_pages", args.v_pages);
        if (args.k_scales) check.apart(name, *array, "k_scales", *args.k_scales);
        if (args.v_scales) check.apart(name, *array, "v_scales", *args.v_scales);
    };
    check_one("rotary_cos", args.rotary_cos);
    check_one("rotary_sin", args.rotary_sin);
    check_one("q", args.q);
    check_one("q_out", args.q_out);
}

}  // namespace

void check_rotary(const Checker& check, const AppendKvArgs& args, AppendKvParams& p) {
    const char* op = check.op();
    if (args.rotary_cos.has_value() != args.rotary_sin.has_value()) {
        fail<ValueError>(op, "rotary_cos and rotary_sin must be given together; got only ",
                         args.rotary_cos ? "rotary_cos" : "rotary_sin");
    }
    if (args.q_out && !args.q) fail<ValueError>(op, "q_out needs q, whose rotated copy it gets; got none");
    if (args.q && !args.q_out) fail<ValueError>(op, "q and q_out must be given together; got only q");
    if (!args.rotary_cos) {
        if (args.q) fail<ValueError>(op, "q needs rotary_cos and rotary_sin, which rotate it; got none");
        if (args.rotary_interleaved)
            fail<ValueError>(op, "rotary_interleaved needs rotary_cos and rotary_sin; got none");
        return;
    }
    const TensorView &cos = *args.rotary_cos, &sin = *args.rotary_sin;
    check_tables(check, cos, sin, args.k.dtype, args.k.shape[2]);
    p.rotary = {cos.dtype,
                cos.data,
                sin.data,
                stride_of(cos, 0),
                stride_of(sin, 0),
                static_cast<int32_t>(cos.shape[0]),
                static_cast<int32_t>(2 * cos.shape[1]),
                args.rotary_interleaved};
    if (args.q) {
        check_queries(check, args);
        p.q = args.q->data;
        p.q_token_stride = stride_of(*args.q, 0);
        p.q_head_stride = stride_of(*args.q, 1);
        p.q_out = args.q_out->data;
        p.q_out_token_stride = stride_of(*args.q_out, 0);
        p.q_out_head_stride = stride_of(*args.q_out, 1);
        p.num_q_heads = static_cast<int32_t>(args.q->shape[1]);
    }
    check_apart_from_cache(check, args);
}

void check_positions_in_host(const char* op, const AppendKvParams& p) {
    if (!p.has_rotary()) return;
    for (int32_t b = 0; b < p.batch; ++b) {
        const bool has_tokens = !p.cu_seqlens || p.cu_seqlens[b + 1] > p.cu_seqlens[b];
        if (!has_tokens || p.seq_lens[b] <= p.rotary.max_positions) continue;
        fail<ValueError>(op, "seq_lens[", b, "] (", p.seq_lens[b],
                         ") must be at most the number of rows of rotary_cos, max_positions (",
                         p.rotary.max_positions, ")");
    }
}

}  // namespace octavo
