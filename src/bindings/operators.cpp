// The operators: import the arrays, call, hand over the results.
#include <octavo/attention.h>
#include <octavo/paged_attention.h>

#include "bindings/bindings.h"
#include "bindings/import_array.h"
#include "bindings/make_array.h"
#include "bindings/scalars.h"

namespace octavo::bindings {
namespace {

std::optional<float> optional_scale(const char* op, const char* name, nb::handle value) {
    const std::optional<double> scale = optional_float(op, name, value);
    if (!scale) return std::nullopt;
    return static_cast<float>(*scale);
}

// What attention and paged_attention do once their inputs are imported.
template <class Args>
nb::object run_with_results(Call& call, Args& args, nb::handle given_out, bool return_lse,
                            void (*op)(const Args&)) {
    ResultArray out(call, "out", given_out, args.q.ndim, args.q.dtype);
    args.out = out.view();
    std::optional<ResultArray> lse;
    if (return_lse) {
        lse.emplace(call, "lse", nb::none(), args.q.ndim - 1, DType::float32);
        args.lse = lse->view();
    }
    args.stream = call.stream();
    call.run([&] { op(args); });
    if (!lse) return out.finish();
    return nb::make_tuple(out.finish(), lse->finish());
}

nb::object attention(nb::handle q, nb::handle k, nb::handle v, nb::handle cu_seqlens_q,
                     nb::handle cu_seqlens_k, nb::handle max_seqlen_q, nb::handle max_seqlen_k,
                     nb::handle softmax_scale, nb::handle causal, nb::handle window_left,
                     nb::handle window_right, nb::handle softcap, nb::handle alibi_slopes,
                     nb::handle prefix_lens, nb::handle dropout_p, nb::handle dropout_seed,
                     nb::handle dropout_offset, nb::handle return_lse, nb::handle out, nb::handle stream) {
    constexpr const char* op = "attention";
    Call call(op, stream);
    AttentionArgs args;
    args.q = call.input("q", q);
    args.k = call.input("k", k);
    args.v = call.input("v", v);
    args.cu_seqlens_q = call.optional_input("cu_seqlens_q", cu_seqlens_q, Accept::int32);
    args.cu_seqlens_k = call.optional_input("cu_seqlens_k", cu_seqlens_k, Accept::int32);
    args.prefix_lens = call.optional_input("prefix_lens", prefix_lens, Accept::int32);
    args.alibi_slopes = call.optional_input("alibi_slopes", alibi_slopes, Accept::float32);
    args.max_seqlen_q = optional_int(op, "max_seqlen_q", max_seqlen_q);
    args.max_seqlen_k = optional_int(op, "max_seqlen_k", max_seqlen_k);
    args.softmax_scale = optional_float(op, "softmax_scale", softmax_scale);
    args.causal = bool_argument(op, "causal", causal);
    args.window_left = int_argument(op, "window_left", window_left);
    args.window_right = int_argument(op, "window_right", window_right);
    args.softcap = float_argument(op, "softcap", softcap);
    args.dropout_p = float_argument(op, "dropout_p", dropout_p);
    args.dropout_seed = optional_int(op, "dropout_seed", dropout_seed);
    args.dropout_offset = int_argument(op, "dropout_offset", dropout_offset);
    return run_with_results(call, args, out, bool_argument(op, "return_lse", return_lse), &octavo::attention);
}

nb::object paged_attention(nb::handle q, nb::handle k_pages, nb::handle v_pages, nb::handle page_table,
                           nb::handle seq_lens, nb::handle cu_seqlens_q, nb::handle max_seqlen_q,
                           nb::handle softmax_scale, nb::handle causal, nb::handle window_left,
                           nb::handle softcap, nb::handle alibi_slopes, nb::handle prefix_lens,
                           nb::handle k_scale, nb::handle v_scale, nb::handle num_splits,
                           nb::handle batch_invariant, nb::handle shared_prefix_len, nb::handle return_lse,
                           nb::handle out, nb::handle stream) {
    constexpr const char* op = "paged_attention";
    Call call(op, stream);
    PagedAttentionArgs args;
    args.q = call.input("q", q);
    args.k_pages = call.input("k_pages", k_pages);
    args.v_pages = call.input("v_pages", v_pages);
    args.page_table = call.input("page_table", page_table, Accept::int32);
    args.seq_lens = call.input("seq_lens", seq_lens, Accept::int32);
    args.cu_seqlens_q = call.optional_input("cu_seqlens_q", cu_seqlens_q, Accept::int32);
    args.prefix_lens = call.optional_input("prefix_lens", prefix_lens, Accept::int32);
    args.alibi_slopes = call.optional_input("alibi_slopes", alibi_slopes, Accept::float32);
    args.max_seqlen_q = optional_int(op, "max_seqlen_q", max_seqlen_q);
    args.softmax_scale = optional_float(op, "softmax_scale", softmax_scale);
    args.causal = bool_argument(op, "causal", causal);
    args.window_left = int_argument(op, "window_left", window_left);
    args.softcap = float_argument(op, "softcap", softcap);
    args.k_scale = optional_scale(op, "k_scale", k_scale);
    args.v_scale = optional_scale(op, "v_scale", v_scale);
    args.num_splits = optional_int(op, "num_splits", num_splits);
    args.batch_invariant = bool_argument(op, "batch_invariant", batch_invariant);
    args.shared_prefix_len = int_argument(op, "shared_prefix_len", shared_prefix_len);
    return run_with_results(call, args, out, bool_argument(op, "return_lse", return_lse),
                            &octavo::paged_attention);
}

void append_kv(nb::handle k, nb::handle v, nb::handle k_pages, nb::handle v_pages, nb::handle page_table,
               nb::handle seq_lens, nb::handle cu_seqlens, nb::handle k_scale, nb::handle v_scale,
               nb::handle stream) {
    constexpr const char* op = "append_kv";
    Call call(op, stream);
    AppendKvArgs args;
    args.k = call.input("k", k);
    args.v = call.input("v", v);
    args.k_pages = call.output("k_pages", k_pages);
    args.v_pages = call.output("v_pages", v_pages);
    args.page_table = call.input("page_table", page_table, Accept::int32);
    args.seq_lens = call.input("seq_lens", seq_lens, Accept::int32);
    args.cu_seqlens = call.optional_input("cu_seqlens", cu_seqlens, Accept::int32);
    args.k_scale = optional_scale(op, "k_scale", k_scale);
    args.v_scale = optional_scale(op, "v_scale", v_scale);
    args.stream = call.stream();
    call.run([&] { octavo::append_kv(args); });
}

void copy_pages(nb::handle k_pages, nb::handle v_pages, nb::handle copies, nb::handle to_k_pages,
                nb::handle to_v_pages, nb::handle stream) {
    Call call("copy_pages", stream);
    CopyPagesArgs args;
    if (to_k_pages.is_none() && to_v_pages.is_none()) {
        args.k_pages = call.output("k_pages", k_pages);
        args.v_pages = call.output("v_pages", v_pages);
    } else {
        args.k_pages = call.input_or_host("k_pages", k_pages);
        args.v_pages = call.input_or_host("v_pages", v_pages);
        if (!to_k_pages.is_none()) args.to_k_pages = call.output_or_host("to_k_pages", to_k_pages);
        if (!to_v_pages.is_none()) args.to_v_pages = call.output_or_host("to_v_pages", to_v_pages);
    }
    args.copies = call.input("copies", copies, Accept::int32);
    args.stream = call.stream();
    call.run([&] { octavo::copy_pages(args); });
}

nb::tuple merge_states(nb::handle out_a, nb::handle lse_a, nb::handle out_b, nb::handle lse_b,
                       nb::handle stream) {
    Call call("merge_states", stream);
    MergeStatesArgs args;
    args.out_a = call.input("out_a", out_a);
    args.lse_a = call.input("lse_a", lse_a, Accept::float32);
    args.out_b = call.input("out_b", out_b);
    args.lse_b = call.input("lse_b", lse_b, Accept::float32);
    ResultArray out(call, "out", nb::none(), args.out_a.ndim, args.out_a.dtype);
    ResultArray lse(call, "lse", nb::none(), args.out_a.ndim - 1, DType::float32);
    args.out = out.view();
    args.lse = lse.view();
    args.stream = call.stream();
    call.run([&] { octavo::merge_states(args); });
    return nb::make_tuple(out.finish(), lse.finish());
}

void check_page_table(nb::handle page_table, nb::handle seq_lens, nb::handle num_pages, nb::handle page_size,
                      nb::handle stream) {
    constexpr const char* op = "check_page_table";
    Call call(op, stream);
    const TensorView table = call.input("page_table", page_table, Accept::int32);
    const TensorView lengths = call.input("seq_lens", seq_lens, Accept::int32);
    const int64_t pages = int_argument(op, "num_pages", num_pages);
    const int64_t size = int_argument(op, "page_size", page_size);
    call.run([&] { octavo::check_page_table(table, lengths, pages, size, call.stream()); });
}

// Takes its arguments by position only. Any of them may be None here; the operator says which may not.
template <class Return, class... Args>
void define(nb::module_& m, const char* name, Return (*function)(Args...), const char* signature) {
    m.def(name, function, nb::sig((std::string("def ") + name + signature).c_str()),
          (static_cast<void>(sizeof(Args)), nb::arg().none())...);
}

}  // namespace

// The signatures are written out, with names, types and defaults, in octavo/_attention.py and
// octavo/_paged_attention.py.
void bind_operators(nb::module_& m) {
    constexpr const char* returns_out =
        "(q: octavo._types.Array, *rest: object) -> octavo._types.Array | tuple[octavo._types.Array, "
        "octavo._types.Array]";
    define(m, "attention", &attention, returns_out);
    define(m, "paged_attention", &paged_attention, returns_out);
    define(m, "merge_states", &merge_states,
           "(out_a: octavo._types.Array, *rest: object) -> tuple[octavo._types.Array, octavo._types.Array]");
    define(m, "append_kv", &append_kv, "(*args: object) -> None");
    define(m, "copy_pages", &copy_pages, "(*args: object) -> None");
    define(m, "check_page_table", &check_page_table, "(*args: object) -> None");
}

}  // namespace octavo::bindings
