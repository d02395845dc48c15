// The operators for JAX programs: handlers that XLA calls, and the check of their arguments at trace time.
// Who names their arrays and options: python/octavo/_jax_call.py.
#include <octavo/attention.h>
#include <octavo/paged_attention.h>

#include "bindings/bindings.h"
#include "bindings/xla_call.h"
#include "checks/checks.h"
#include "cuda/backend.h"

#include <new>

namespace octavo::bindings {
namespace {

std::optional<float> scale_option(const XlaCall& call, const char* name) {
    const std::optional<double> scale = call.option<double>(name);
    if (!scale) return std::nullopt;
    return static_cast<float>(*scale);
}

struct Attention {
    static constexpr const char* kName = "attention";
    static constexpr auto kRun = &octavo::attention;
    static constexpr auto kCheck = &check_attention;

    static AttentionArgs arguments(const XlaCall& call) {
        AttentionArgs args;
        args.q = call.array("q");
        args.k = call.array("k");
        args.v = call.array("v");
        args.out = call.array("out");
        args.lse = call.optional_array("lse", Accept::float32);
        args.cu_seqlens_q = call.optional_array("cu_seqlens_q", Accept::int32);
        args.cu_seqlens_k = call.optional_array("cu_seqlens_k", Accept::int32);
        args.prefix_lens = call.optional_array("prefix_lens", Accept::int32);
        args.alibi_slopes = call.optional_array("alibi_slopes", Accept::float32);
        args.max_seqlen_q = call.option<int64_t>("max_seqlen_q");
        args.max_seqlen_k = call.option<int64_t>("max_seqlen_k");
        args.softmax_scale = call.option<double>("softmax_scale");
        args.causal = call.option<bool>("causal").value_or(args.causal);
        args.window_left = call.option<int64_t>("window_left").value_or(args.window_left);
        args.window_right = call.option<int64_t>("window_right").value_or(args.window_right);
        args.softcap = call.option<double>("softcap").value_or(args.softcap);
        args.dropout_p = call.option<double>("dropout_p").value_or(args.dropout_p);
        args.dropout_seed = call.option<int64_t>("dropout_seed");
        args.dropout_offset = call.option<int64_t>("dropout_offset").value_or(args.dropout_offset);
        return args;
    }
};

struct PagedAttention {
    static constexpr const char* kName = "paged_attention";
    static constexpr auto kRun = &octavo::paged_attention;
    static constexpr auto kCheck = &check_paged_attention;

    static PagedAttentionArgs arguments(const XlaCall& call) {
        PagedAttentionArgs args;
        args.q = call.array("q");
        args.k_pages = call.array("k_pages");
        args.v_pages = call.array("v_pages");
        args.page_table = call.array("page_table", Accept::int32);
        args.seq_lens = call.array("seq_lens", Accept::int32);
        args.out = call.array("out");
        args.lse = call.optional_array("lse", Accept::float32);
        args.cu_seqlens_q = call.optional_array("cu_seqlens_q", Accept::int32);
        args.prefix_lens = call.optional_array("prefix_lens", Accept::int32);
        args.alibi_slopes = call.optional_array("alibi_slopes", Accept::float32);
        args.max_seqlen_q = call.option<int64_t>("max_seqlen_q");
        args.softmax_scale = call.option<double>("softmax_scale");
        args.causal = call.option<bool>("causal").value_or(args.causal);
        args.window_left = call.option<int64_t>("window_left").value_or(args.window_left);
        args.softcap = call.option<double>("softcap").value_or(args.softcap);
        args.k_scale = scale_option(call, "k_scale");
        args.v_scale = scale_option(call, "v_scale");
        args.num_splits = call.option<int64_t>("num_splits");
        args.batch_invariant = call.option<bool>("batch_invariant").value_or(args.batch_invariant);
        args.shared_prefix_len = call.option<int64_t>("shared_prefix_len").value_or(args.shared_prefix_len);
        return args;
    }
};

struct AppendKv {
    static constexpr const char* kName = "append_kv";
    static constexpr auto kRun = &octavo::append_kv;
    static constexpr auto kCheck = &check_append_kv;

    static AppendKvArgs arguments(const XlaCall& call) {
        AppendKvArgs args;
        args.k = call.array("k");
        args.v = call.array("v");
        args.k_pages = call.array("k_pages");
        args.v_pages = call.array("v_pages");
        args.page_table = call.array("page_table", Accept::int32);
        args.seq_lens = call.array("seq_lens", Accept::int32);
        args.cu_seqlens = call.optional_array("cu_seqlens", Accept::int32);
        args.k_scale = scale_option(call, "k_scale");
        args.v_scale = scale_option(call, "v_scale");
        return args;
    }
};

struct CopyPages {
    static constexpr const char* kName = "copy_pages";
    static constexpr auto kRun = &octavo::copy_pages;
    static constexpr auto kCheck = &check_copy_pages;

    static CopyPagesArgs arguments(const XlaCall& call) {
        CopyPagesArgs args;
        args.k_pages = call.array("k_pages");
        args.v_pages = call.array("v_pages");
        args.copies = call.array("copies", Accept::int32);
        return args;
    }
};

struct MergeStates {
    static constexpr const char* kName = "merge_states";
    static constexpr auto kRun = &octavo::merge_states;
    static constexpr auto kCheck = &check_merge_states;

    static MergeStatesArgs arguments(const XlaCall& call) {
        MergeStatesArgs args;
        args.out_a = call.array("out_a");
        args.lse_a = call.array("lse_a", Accept::float32);
        args.out_b = call.array("out_b");
        args.lse_b = call.array("lse_b", Accept::float32);
        args.out = call.array("out");
        args.lse = call.array("lse", Accept::float32);
        return args;
    }
};

// Calls visit(Operator{}) with each.
template <class Visit>
void for_each_operator(const Visit& visit) {
    visit(Attention{});
    visit(PagedAttention{});
    visit(AppendKv{});
    visit(CopyPages{});
    visit(MergeStates{});
}

// XLA may capture the handlers into CUDA graphs, and does so again whenever a buffer has moved: a call
// launches what shapes and attributes say, and a graph owns the workspace of its kernels (cuda/workspace.h).
void describe(const xla::MetadataExtension& extension) {
    extension.metadata->version.major = xla::kMajorVersion;
    extension.metadata->version.minor = xla::kMinorVersion;
    extension.metadata->traits = xla::kCommandBufferCompatible;
}

xla::Error* make_error(const xla::CallFrame& frame, xla::ErrorCode code, const char* message) {
    xla::MakeError error{{sizeof(xla::MakeError), nullptr}, message, code};
    return frame.api->make_error(&error);
}

// XLA calls it without Python's lock, from any thread.
template <class Operator, DeviceType kDevice>
xla::Error* handle(xla::CallFrame* frame) {
    for (const xla::Extension* it = frame->header.extensions; it; it = it->next) {
        if (it->kind != xla::kMetadataExtension) continue;
        describe(*reinterpret_cast<const xla::MetadataExtension*>(it));
        return nullptr;
    }
    try {
        void* stream = nullptr;
        Device device{kDevice, 0};
        if (kDevice == DeviceType::cuda) {
            xla::GetStream get{{sizeof(xla::GetStream), nullptr}, frame->context, nullptr};
            if (xla::Error* error = frame->api->get_stream(&get)) return error;
            stream = get.stream;
            // XLA makes a program's device current while it runs; a captured stream does not tell its own.
            device.index = cuda::current_device();
        }
        auto args = Operator::arguments(XlaCall(Operator::kName, *frame, device));
        args.stream = stream;
        Operator::kRun(args);
        return nullptr;
    } catch (const DeviceError& error) {
        return make_error(*frame, xla::kInternal, error.what());
    } catch (const Error& error) {
        return make_error(*frame, xla::kInvalidArgument, error.what());
    } catch (const std::bad_alloc&) {
        return make_error(*frame, xla::kResourceExhausted, "out of memory");
    } catch (const std::exception& error) {
        return make_error(*frame, xla::kUnknown, error.what());
    }
}

nb::dict xla_handlers() {
    nb::dict handlers;
    for_each_operator([&](auto op) {
        using Operator = decltype(op);
        auto capsule = [](xla::Error* (*handler)(xla::CallFrame*)) {
            return nb::capsule(reinterpret_cast<const void*>(handler));
        };
        handlers[Operator::kName] = nb::make_tuple(capsule(&handle<Operator, DeviceType::cpu>),
                                                   capsule(&handle<Operator, DeviceType::cuda>));
    });
    return handlers;
}

void check_xla_call(nb::str name, nb::list arrays, nb::dict options) {
    for_each_operator([&](auto op) {
        using Operator = decltype(op);
        if (!name.equal(nb::str(Operator::kName))) return;
        Operator::kCheck(Operator::arguments(XlaCall(Operator::kName, arrays, options)));
    });
}

}  // namespace

void bind_xla_operators(nb::module_& m) {
    m.def("xla_handlers", &xla_handlers, nb::sig("def xla_handlers() -> dict[str, tuple[object, object]]"),
          "For each operator the capsules of its handlers for the platforms cpu and CUDA.");
    m.def(
        "check_xla_call", &check_xla_call, nb::arg("op"), nb::arg("arrays"), nb::arg("options"),
        nb::sig("def check_xla_call(op: str, arrays: list[tuple[str, str, tuple[int, ...]]], options: "
                "dict[str, bool | int | float]) -> None"),
        "Raise what the operator's handler would, as far as shapes, dtypes and options tell. The arrays are "
        "(name, dtype, shape), the results among them.");
}

}  // namespace octavo::bindings
