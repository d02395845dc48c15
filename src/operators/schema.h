// Every operator and its arguments, described once. The functions of octavo._core and their descriptions for
// Python (bindings/operators.cpp), the calls from JAX programs (bindings/xla_operators.cpp) and the C
// functions (c/octavo.cpp) are derived from these lists. docs/developing.md says what else a new argument
// needs.
#pragma once

#include "checks/checks.h"

#include <octavo/attention.h>
#include <octavo/latent_attention.h>
#include <octavo/linear.h>
#include <octavo/octavo.h>
#include <octavo/paged_attention.h>
#include <octavo/rms_norm.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>

namespace octavo::schema {

// The dtypes that an array may have: data is float32, float16 or bfloat16, cache is that or one of 8 bits,
// scales is float32 or float16, integer is int32 or int64, words have 64 bits: int64 or uint64, or pairs of
// int32 or uint32, and Python makes them of bools, too; mask is bool or uint8, which the operators get as
// uint8. The checks go further.
enum class Accept : uint8_t { data, cache, scales, int32, float32, integer, words, mask };

// What the operator does to an array: reads it, writes to it in place, or writes a result to it.
enum class Access : uint8_t { read, write, result };

// Stands for the C struct of an operator whose C function takes its arrays one by one.
struct NoCArgs {};

// An array. View is TensorView, or std::optional<TensorView> for one that may be left out; LikeView is the
// View of the array that a result is like.
template <class Args, class View, class CArgs, class LikeView = TensorView>
struct ArrayArgument {
    static constexpr bool kIsArray = true;
    static constexpr bool kIsRequired = std::is_same_v<View, TensorView>;
    static_assert(kIsRequired || std::is_same_v<View, std::optional<TensorView>>);

    const char* name;
    View Args::* member;
    octavo_tensor CArgs::* c_member;
    Access access;
    Accept accept;
    const char* in_place_of =
        nullptr;  // a number; Python has one parameter for both, the number or the array
    // A result has the shape and dtype of `like`, or one float32 for each of its rows. Python returns it
    // where the keyword `asked_by` says so or, if that is null, where `like` is given.
    LikeView Args::* like = nullptr;
    bool one_a_row = false;
    const char* asked_by = nullptr;
    int64_t (*width)(const Args&) = nullptr;  // the length of its last axis, if it is not that of `like`

    constexpr bool is_result() const { return access == Access::result; }
    constexpr bool is_asked() const { return asked_by != nullptr; }
};

template <class T>
struct WithoutOptional {
    using Type = T;
};
template <class T>
struct WithoutOptional<std::optional<T>> {
    using Type = T;
};

// A number, a bool or one of several names (of dtypes, of activations), with the default of the C++ struct. A
// std::optional has no value by default; `c_none` in the C struct means the same.
template <class Args, class T, class CArgs, class C>
struct ScalarArgument {
    using Value = T;                                   // of the C++ struct
    using CValue = C;                                  // of the C struct
    using Number = typename WithoutOptional<T>::Type;  // bool, int64_t, double, float, DType or Activation
    static constexpr bool kIsArray = false;
    static constexpr bool kIsRequired = false;
    static constexpr bool kIsOptional = !std::is_same_v<Value, Number>;

    const char* name;
    Value Args::* member;
    CValue CArgs::* c_member;
    CValue c_none;

    constexpr bool is_result() const { return false; }
    constexpr bool is_asked() const { return false; }
};

template <Accept accept = Accept::data, class Args, class View, class CArgs = NoCArgs>
constexpr auto input(const char* name, View Args::* member, octavo_tensor CArgs::* c_member = nullptr) {
    return ArrayArgument<Args, View, CArgs>{name, member, c_member, Access::read, accept};
}

// An array that may be given in place of a number, whose name its own name begins with. It is read when the
// operator runs.
template <Accept accept, class Args, class CArgs>
constexpr auto input_in_place_of(const char* number, const char* name,
                                 std::optional<TensorView> Args::* member, octavo_tensor CArgs::* c_member) {
    return ArrayArgument<Args, std::optional<TensorView>, CArgs>{name,         member, c_member,
                                                                 Access::read, accept, number};
}

template <Accept accept = Accept::data, class Args, class View, class CArgs = NoCArgs>
constexpr auto written(const char* name, View Args::* member, octavo_tensor CArgs::* c_member = nullptr) {
    return ArrayArgument<Args, View, CArgs>{name, member, c_member, Access::write, accept};
}

template <Accept accept = Accept::data, class Args, class View, class LikeView, class CArgs = NoCArgs>
constexpr auto result(const char* name, View Args::* member, LikeView Args::* like,
                      octavo_tensor CArgs::* c_member = nullptr, const char* asked_by = nullptr) {
    return ArrayArgument<Args, View, CArgs, LikeView>{name,    member, c_member, Access::result, accept,
                                                      nullptr, like,   false,    asked_by};
}

// A result with one float32 for each row of `like`: that array's shape without its last axis.
template <class Args, class View, class LikeView, class CArgs = NoCArgs>
constexpr auto row_result(const char* name, View Args::* member, LikeView Args::* like,
                          octavo_tensor CArgs::* c_member = nullptr, const char* asked_by = nullptr) {
    return ArrayArgument<Args, View, CArgs, LikeView>{
        name, member, c_member, Access::result, Accept::float32, nullptr, like, true, asked_by};
}

// A result like `like`, but with a length of its own for the last axis.
template <class Args, class View, class LikeView, class CArgs>
constexpr auto result_of_width(const char* name, View Args::* member, LikeView Args::* like,
                               octavo_tensor CArgs::* c_member, int64_t (*width)(const Args&)) {
    return ArrayArgument<Args, View, CArgs, LikeView>{name,    member, c_member, Access::result, Accept::data,
                                                      nullptr, like,   false,    nullptr,        width};
}

template <class Args, class Value, class CArgs, class CValue>
constexpr auto scalar(const char* name, Value Args::* member, CValue CArgs::* c_member) {
    using Scalar = ScalarArgument<Args, Value, CArgs, CValue>;
    static_assert(!Scalar::kIsOptional, "which value in the C struct means that there is none?");
    return Scalar{name, member, c_member, {}};
}

template <class Args, class Value, class CArgs, class CValue>
constexpr auto scalar(const char* name, std::optional<Value> Args::* member, CValue CArgs::* c_member,
                      std::common_type_t<CValue> c_none) {
    return ScalarArgument<Args, std::optional<Value>, CArgs, CValue>{name, member, c_member, c_none};
}

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// The operators. Their arguments stand in the order of the parameters in Python, results at the end. A new
// one comes behind all others: code that torch.compile keeps on disk calls torch.ops.octavo by position.
// clang-format off

struct Attention {
    using Args = AttentionArgs;
    using CArgs = octavo_attention_args;
    static constexpr const char* kName = "attention";
    static constexpr auto kCheck = &check_attention;
    static constexpr auto kRun = &octavo::attention;
    static constexpr auto kArguments = std::tuple(
        input("q", &Args::q, &CArgs::q),
        input("k", &Args::k, &CArgs::k),
        input("v", &Args::v, &CArgs::v),
        input<Accept::integer>("cu_seqlens_q", &Args::cu_seqlens_q, &CArgs::cu_seqlens_q),
        input<Accept::integer>("cu_seqlens_k", &Args::cu_seqlens_k, &CArgs::cu_seqlens_k),
        scalar("max_seqlen_q", &Args::max_seqlen_q, &CArgs::max_seqlen_q, -1),
        scalar("max_seqlen_k", &Args::max_seqlen_k, &CArgs::max_seqlen_k, -1),
        scalar("softmax_scale", &Args::softmax_scale, &CArgs::softmax_scale, kNan),
        scalar("causal", &Args::causal, &CArgs::causal),
        scalar("window_left", &Args::window_left, &CArgs::window_left),
        scalar("window_right", &Args::window_right, &CArgs::window_right),
        scalar("softcap", &Args::softcap, &CArgs::softcap),
        input<Accept::float32>("alibi_slopes", &Args::alibi_slopes, &CArgs::alibi_slopes),
        input<Accept::integer>("prefix_lens", &Args::prefix_lens, &CArgs::prefix_lens),
        scalar("dropout_p", &Args::dropout_p, &CArgs::dropout_p),
        scalar("dropout_seed", &Args::dropout_seed, &CArgs::dropout_seed, -1),
        scalar("dropout_offset", &Args::dropout_offset, &CArgs::dropout_offset),
        input<Accept::float32>("sinks", &Args::sinks, &CArgs::sinks),
        scalar("softmax_phi", &Args::softmax_phi, &CArgs::softmax_phi, kNan),
        input_in_place_of<Accept::float32>("softmax_phi", "softmax_phi_array", &Args::softmax_phi_array, &CArgs::softmax_phi_array),
        scalar("attention_chunk", &Args::attention_chunk, &CArgs::attention_chunk),
        input<Accept::mask>("block_mask", &Args::block_mask, &CArgs::block_mask),
        scalar("block_size", &Args::block_size, &CArgs::block_size),
        scalar("alibi_symmetric", &Args::alibi_symmetric, &CArgs::alibi_symmetric),
        input<Accept::integer>("bidirectional_ranges", &Args::bidirectional_ranges, &CArgs::bidirectional_ranges),
        scalar("ranges_keep_window_left", &Args::ranges_keep_window_left, &CArgs::ranges_keep_window_left),
        result_of_width("out", &Args::out, &Args::q, &CArgs::out, &attention_width),
        row_result("lse", &Args::lse, &Args::q, &CArgs::lse, "return_lse"));
};

struct PagedAttention {
    using Args = PagedAttentionArgs;
    using CArgs = octavo_paged_attention_args;
    static constexpr const char* kName = "paged_attention";
    static constexpr auto kCheck = &check_paged_attention;
    static constexpr auto kRun = &octavo::paged_attention;
    static constexpr auto kArguments = std::tuple(
        input("q", &Args::q, &CArgs::q),
        input<Accept::cache>("k_pages", &Args::k_pages, &CArgs::k_pages),
        input<Accept::cache>("v_pages", &Args::v_pages, &CArgs::v_pages),
        input<Accept::integer>("page_table", &Args::page_table, &CArgs::page_table),
        input<Accept::integer>("seq_lens", &Args::seq_lens, &CArgs::seq_lens),
        input<Accept::integer>("cu_seqlens_q", &Args::cu_seqlens_q, &CArgs::cu_seqlens_q),
        scalar("max_seqlen_q", &Args::max_seqlen_q, &CArgs::max_seqlen_q, -1),
        scalar("softmax_scale", &Args::softmax_scale, &CArgs::softmax_scale, kNan),
        scalar("causal", &Args::causal, &CArgs::causal),
        scalar("window_left", &Args::window_left, &CArgs::window_left),
        scalar("softcap", &Args::softcap, &CArgs::softcap),
        input<Accept::float32>("alibi_slopes", &Args::alibi_slopes, &CArgs::alibi_slopes),
        input<Accept::integer>("prefix_lens", &Args::prefix_lens, &CArgs::prefix_lens),
        scalar("k_scale", &Args::k_scale, &CArgs::k_scale, 1),
        scalar("v_scale", &Args::v_scale, &CArgs::v_scale, 1),
        scalar("num_splits", &Args::num_splits, &CArgs::num_splits, -1),
        scalar("batch_invariant", &Args::batch_invariant, &CArgs::batch_invariant),
        scalar("shared_prefix_len", &Args::shared_prefix_len, &CArgs::shared_prefix_len),
        input<Accept::scales>("k_scales", &Args::k_scales, &CArgs::k_scales),
        input<Accept::scales>("v_scales", &Args::v_scales, &CArgs::v_scales),
        scalar("kv_dtype", &Args::kv_dtype, &CArgs::kv_dtype, -1),
        input_in_place_of<Accept::float32>("k_scale", "k_scale_array", &Args::k_scale_array, &CArgs::k_scale_array),
        input_in_place_of<Accept::float32>("v_scale", "v_scale_array", &Args::v_scale_array, &CArgs::v_scale_array),
        input<Accept::float32>("k_channel_offset", &Args::k_channel_offset, &CArgs::k_channel_offset),
        input<Accept::float32>("k_channel_scale", &Args::k_channel_scale, &CArgs::k_channel_scale),
        scalar("rotate_keys", &Args::rotate_keys, &CArgs::rotate_keys),
        input<Accept::float32>("sinks", &Args::sinks, &CArgs::sinks),
        scalar("softmax_phi", &Args::softmax_phi, &CArgs::softmax_phi, kNan),
        input_in_place_of<Accept::float32>("softmax_phi", "softmax_phi_array", &Args::softmax_phi_array, &CArgs::softmax_phi_array),
        scalar("window_right", &Args::window_right, &CArgs::window_right),
        scalar("attention_chunk", &Args::attention_chunk, &CArgs::attention_chunk),
        input<Accept::words>("tree_mask", &Args::tree_mask, &CArgs::tree_mask),
        input<Accept::integer>("chosen_pages", &Args::chosen_pages, &CArgs::chosen_pages),
        scalar("alibi_symmetric", &Args::alibi_symmetric, &CArgs::alibi_symmetric),
        input<Accept::integer>("bidirectional_ranges", &Args::bidirectional_ranges, &CArgs::bidirectional_ranges),
        scalar("ranges_keep_window_left", &Args::ranges_keep_window_left, &CArgs::ranges_keep_window_left),
        scalar("static_past", &Args::static_past, &CArgs::static_past),
        result_of_width("out", &Args::out, &Args::q, &CArgs::out, &paged_attention_width),
        row_result("lse", &Args::lse, &Args::q, &CArgs::lse, "return_lse"));
};

struct AppendKv {
    using Args = AppendKvArgs;
    using CArgs = octavo_append_kv_args;
    static constexpr const char* kName = "append_kv";
    static constexpr auto kCheck = &check_append_kv;
    static constexpr auto kRun = &octavo::append_kv;
    static constexpr auto kArguments = std::tuple(
        input("k", &Args::k, &CArgs::k),
        input("v", &Args::v, &CArgs::v),
        written<Accept::cache>("k_pages", &Args::k_pages, &CArgs::k_pages),
        written<Accept::cache>("v_pages", &Args::v_pages, &CArgs::v_pages),
        input<Accept::integer>("page_table", &Args::page_table, &CArgs::page_table),
        input<Accept::integer>("seq_lens", &Args::seq_lens, &CArgs::seq_lens),
        input<Accept::integer>("cu_seqlens", &Args::cu_seqlens, &CArgs::cu_seqlens),
        scalar("k_scale", &Args::k_scale, &CArgs::k_scale, 1),
        scalar("v_scale", &Args::v_scale, &CArgs::v_scale, 1),
        written<Accept::scales>("k_scales", &Args::k_scales, &CArgs::k_scales),
        written<Accept::scales>("v_scales", &Args::v_scales, &CArgs::v_scales),
        scalar("kv_dtype", &Args::kv_dtype, &CArgs::kv_dtype, -1),
        input_in_place_of<Accept::float32>("k_scale", "k_scale_array", &Args::k_scale_array, &CArgs::k_scale_array),
        input_in_place_of<Accept::float32>("v_scale", "v_scale_array", &Args::v_scale_array, &CArgs::v_scale_array),
        input<Accept::float32>("k_channel_offset", &Args::k_channel_offset, &CArgs::k_channel_offset),
        input<Accept::float32>("k_channel_scale", &Args::k_channel_scale, &CArgs::k_channel_scale),
        scalar("rotate_keys", &Args::rotate_keys, &CArgs::rotate_keys),
        input("rotary_cos", &Args::rotary_cos, &CArgs::rotary_cos),
        input("rotary_sin", &Args::rotary_sin, &CArgs::rotary_sin),
        scalar("rotary_interleaved", &Args::rotary_interleaved, &CArgs::rotary_interleaved),
        input("q", &Args::q, &CArgs::q),
        input<Accept::integer>("slot_mapping", &Args::slot_mapping, &CArgs::slot_mapping),
        scalar("static_tables", &Args::static_tables, &CArgs::static_tables),
        result("q_out", &Args::q_out, &Args::q, &CArgs::q_out));
};

// Writes to the second cache where it is given, and to the first one otherwise.
struct CopyPages {
    using Args = CopyPagesArgs;
    using CArgs = octavo_copy_pages_args;
    static constexpr const char* kName = "copy_pages";
    static constexpr auto kCheck = &check_copy_pages;
    static constexpr auto kRun = &octavo::copy_pages;
    static constexpr auto kArguments = std::tuple(
        written<Accept::cache>("k_pages", &Args::k_pages, &CArgs::k_pages),
        written<Accept::cache>("v_pages", &Args::v_pages, &CArgs::v_pages),
        input<Accept::integer>("copies", &Args::copies, &CArgs::copies),
        written<Accept::cache>("to_k_pages", &Args::to_k_pages, &CArgs::to_k_pages),
        written<Accept::cache>("to_v_pages", &Args::to_v_pages, &CArgs::to_v_pages),
        written<Accept::scales>("k_scales", &Args::k_scales, &CArgs::k_scales),
        written<Accept::scales>("v_scales", &Args::v_scales, &CArgs::v_scales),
        written<Accept::scales>("to_k_scales", &Args::to_k_scales, &CArgs::to_k_scales),
        written<Accept::scales>("to_v_scales", &Args::to_v_scales, &CArgs::to_v_scales));
};

struct MergeStates {
    using Args = MergeStatesArgs;
    static constexpr const char* kName = "merge_states";
    static constexpr auto kCheck = &check_merge_states;
    static constexpr auto kRun = &octavo::merge_states;
    static constexpr auto kArguments = std::tuple(
        input("out_a", &Args::out_a),
        input<Accept::float32>("lse_a", &Args::lse_a),
        input("out_b", &Args::out_b),
        input<Accept::float32>("lse_b", &Args::lse_b),
        result("out", &Args::out, &Args::out_a),
        row_result("lse", &Args::lse, &Args::out_a));
};

struct AttentionBackward {
    using Args = AttentionBackwardArgs;
    using CArgs = octavo_attention_backward_args;
    static constexpr const char* kName = "attention_backward";
    static constexpr auto kCheck = &check_attention_backward;
    static constexpr auto kRun = &octavo::attention_backward;
    static constexpr auto kArguments = std::tuple(
        input("dout", &Args::dout, &CArgs::dout),
        input("q", &Args::q, &CArgs::q),
        input("k", &Args::k, &CArgs::k),
        input("v", &Args::v, &CArgs::v),
        input("out", &Args::out, &CArgs::out),
        input<Accept::float32>("lse", &Args::lse, &CArgs::lse),
        input<Accept::float32>("dlse", &Args::dlse, &CArgs::dlse),
        input<Accept::integer>("cu_seqlens_q", &Args::cu_seqlens_q, &CArgs::cu_seqlens_q),
        input<Accept::integer>("cu_seqlens_k", &Args::cu_seqlens_k, &CArgs::cu_seqlens_k),
        scalar("max_seqlen_q", &Args::max_seqlen_q, &CArgs::max_seqlen_q, -1),
        scalar("max_seqlen_k", &Args::max_seqlen_k, &CArgs::max_seqlen_k, -1),
        scalar("softmax_scale", &Args::softmax_scale, &CArgs::softmax_scale, kNan),
        scalar("causal", &Args::causal, &CArgs::causal),
        scalar("window_left", &Args::window_left, &CArgs::window_left),
        scalar("window_right", &Args::window_right, &CArgs::window_right),
        scalar("softcap", &Args::softcap, &CArgs::softcap),
        input<Accept::float32>("alibi_slopes", &Args::alibi_slopes, &CArgs::alibi_slopes),
        input<Accept::integer>("prefix_lens", &Args::prefix_lens, &CArgs::prefix_lens),
        scalar("dropout_p", &Args::dropout_p, &CArgs::dropout_p),
        scalar("dropout_seed", &Args::dropout_seed, &CArgs::dropout_seed, -1),
        scalar("dropout_offset", &Args::dropout_offset, &CArgs::dropout_offset),
        scalar("deterministic", &Args::deterministic, &CArgs::deterministic),
        input<Accept::float32>("sinks", &Args::sinks, &CArgs::sinks),
        scalar("attention_chunk", &Args::attention_chunk, &CArgs::attention_chunk),
        input<Accept::mask>("block_mask", &Args::block_mask, &CArgs::block_mask),
        scalar("block_size", &Args::block_size, &CArgs::block_size),
        scalar("alibi_symmetric", &Args::alibi_symmetric, &CArgs::alibi_symmetric),
        input<Accept::integer>("bidirectional_ranges", &Args::bidirectional_ranges, &CArgs::bidirectional_ranges),
        scalar("ranges_keep_window_left", &Args::ranges_keep_window_left, &CArgs::ranges_keep_window_left),
        result("dq", &Args::dq, &Args::q, &CArgs::dq),
        result("dk", &Args::dk, &Args::k, &CArgs::dk),
        result("dv", &Args::dv, &Args::v, &CArgs::dv),
        result<Accept::float32>("dalibi_slopes", &Args::dalibi_slopes, &Args::alibi_slopes, &CArgs::dalibi_slopes, "return_dalibi"),
        result<Accept::float32>("dsinks", &Args::dsinks, &Args::sinks, &CArgs::dsinks, "return_dsinks"));
};

struct Linear {
    using Args = LinearArgs;
    using CArgs = octavo_linear_args;
    static constexpr const char* kName = "linear";
    static constexpr auto kCheck = &check_linear;
    static constexpr auto kRun = &octavo::linear;
    static constexpr auto kArguments = std::tuple(
        input("x", &Args::x, &CArgs::x),
        input("w", &Args::w, &CArgs::w),
        input("bias", &Args::bias, &CArgs::bias),
        scalar("activation", &Args::activation, &CArgs::activation, -1),
        input("residual", &Args::residual, &CArgs::residual),
        scalar("static_weight", &Args::static_weight, &CArgs::static_weight),
        scalar("batch_invariant", &Args::batch_invariant, &CArgs::batch_invariant),
        input("norm_weight", &Args::norm_weight, &CArgs::norm_weight),
        scalar("norm_eps", &Args::norm_eps, &CArgs::norm_eps),
        result_of_width("out", &Args::out, &Args::x, &CArgs::out, &linear_width));
};

struct RmsNorm {
    using Args = RmsNormArgs;
    using CArgs = octavo_rms_norm_args;
    static constexpr const char* kName = "rms_norm";
    static constexpr auto kCheck = &check_rms_norm;
    static constexpr auto kRun = &octavo::rms_norm;
    static constexpr auto kArguments = std::tuple(
        input("x", &Args::x, &CArgs::x),
        input("weight", &Args::weight, &CArgs::weight),
        scalar("eps", &Args::eps, &CArgs::eps),
        input("residual", &Args::residual, &CArgs::residual),
        result("out", &Args::out, &Args::x, &CArgs::out),
        result("residual_out", &Args::residual_out, &Args::residual, &CArgs::residual_out));
};

struct LatentAttention {
    using Args = LatentAttentionArgs;
    using CArgs = octavo_latent_attention_args;
    static constexpr const char* kName = "latent_attention";
    static constexpr auto kCheck = &check_latent_attention;
    static constexpr auto kRun = &octavo::latent_attention;
    static constexpr auto kArguments = std::tuple(
        input("q", &Args::q, &CArgs::q),
        input<Accept::cache>("kv_pages", &Args::kv_pages, &CArgs::kv_pages),
        input<Accept::integer>("page_table", &Args::page_table, &CArgs::page_table),
        input<Accept::integer>("seq_lens", &Args::seq_lens, &CArgs::seq_lens),
        scalar("v_dim", &Args::v_dim, &CArgs::v_dim),
        input<Accept::integer>("cu_seqlens_q", &Args::cu_seqlens_q, &CArgs::cu_seqlens_q),
        scalar("max_seqlen_q", &Args::max_seqlen_q, &CArgs::max_seqlen_q, -1),
        scalar("softmax_scale", &Args::softmax_scale, &CArgs::softmax_scale, kNan),
        scalar("causal", &Args::causal, &CArgs::causal),
        scalar("kv_scale", &Args::kv_scale, &CArgs::kv_scale, 1),
        scalar("num_splits", &Args::num_splits, &CArgs::num_splits, -1),
        result_of_width("out", &Args::out, &Args::q, &CArgs::out, &latent_attention_width),
        row_result("lse", &Args::lse, &Args::q, &CArgs::lse, "return_lse"));
};

// clang-format on

// Calls visit(Operator{}) with each operator.
template <class Visit>
void for_each_operator(const Visit& visit) {
    visit(Attention{});
    visit(PagedAttention{});
    visit(AppendKv{});
    visit(CopyPages{});
    visit(MergeStates{});
    visit(AttentionBackward{});
    visit(Linear{});
    visit(RmsNorm{});
    visit(LatentAttention{});
}

// Calls visit(argument) with each argument of an operator.
template <class Operator, class Visit>
void for_each_argument(const Visit& visit) {
    std::apply([&](const auto&... argument) { (visit(argument), ...); }, Operator::kArguments);
}

template <class Operator>
constexpr size_t kNumArguments = std::tuple_size_v<decltype(Operator::kArguments)>;

// The number of arguments for which the predicate holds.
template <class Operator, class Predicate>
constexpr size_t count(const Predicate& holds) {
    return std::apply([&](const auto&... argument) { return (size_t{0} + ... + (holds(argument) ? 1 : 0)); },
                      Operator::kArguments);
}

}  // namespace octavo::schema
