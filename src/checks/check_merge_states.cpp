#include "checks/check.h"
#include "checks/checks.h"

namespace octavo {
namespace {

// Checks the places of the results. Each may be that of an input, whose rows are read before theirs are
// written.
void check_places(const Checker& check, const MergeStatesArgs& args) {
    auto check_input = [&](const char* name, const TensorView& result, const char* input_name,
                           const TensorView& input) {
        if (!same_elements(result, input)) check.apart(name, result, input_name, input);
    };
    check_input("out", args.out, "out_a", args.out_a);
    check_input("out", args.out, "out_b", args.out_b);
    check_input("lse", args.lse, "lse_a", args.lse_a);
    check_input("lse", args.lse, "lse_b", args.lse_b);
    check.apart("out", args.out, "lse_a", args.lse_a);
    check.apart("out", args.out, "lse_b", args.lse_b);
    check.apart("lse", args.lse, "out_a", args.out_a);
    check.apart("lse", args.lse, "out_b", args.out_b);
    check.apart("lse", args.lse, "out", args.out);
}

}  // namespace

MergeStatesParams check_merge_states(const MergeStatesArgs& args) {
    constexpr const char* op = "merge_states";
    constexpr const char* axes = "[..., head_dim] with one to three leading axes";
    MergeStatesParams p{};
    p.device = args.out_a.device;
    p.dtype = args.out_a.dtype;
    const Checker check(op, p.device);
    const int ndim = args.out_a.ndim;
    if (ndim < 2 || ndim > 4) {
        fail<ValueError>(op, "out_a must have shape ", axes, "; got ", args.out_a.shape_string());
    }
    check.float_dtype("out_a", args.out_a);
    check.data("out_a", args.out_a, ndim, axes);
    check.length("head_dim", args.out_a.shape[ndim - 1]);
    p.head_dim = static_cast<int32_t>(args.out_a.shape[ndim - 1]);

    const int pad = 4 - ndim;
    for (int i = 0; i < 3; ++i) p.shape[i] = i < pad ? 1 : args.out_a.shape[i - pad];
    auto set_strides = [&](const TensorView& t, int64_t (&strides)[3]) {
        for (int i = 0; i < 3; ++i) strides[i] = i < pad ? 0 : stride_of(t, i - pad);
    };
    set_strides(args.out_a, p.out_a_strides);
    check.lse("lse_a", args.lse_a, "out_a", args.out_a);
    set_strides(args.lse_a, p.lse_a_strides);
    check.data("out_b", args.out_b, ndim, axes);
    check.dtype("out_b", args.out_b, p.dtype, " like out_a");
    check.same_shape("out_b", args.out_b, "out_a", args.out_a);
    set_strides(args.out_b, p.out_b_strides);
    check.lse("lse_b", args.lse_b, "out_a", args.out_a);
    set_strides(args.lse_b, p.lse_b_strides);
    check.output("out", args.out, ndim, axes);
    check.dtype("out", args.out, p.dtype, " like out_a");
    check.same_shape("out", args.out, "out_a", args.out_a);
    set_strides(args.out, p.out_strides);
    check.lse("lse", args.lse, "out_a", args.out_a);
    check.writable("lse", args.lse);
    set_strides(args.lse, p.lse_strides);
    check_places(check, args);
    p.out_a = args.out_a.data;
    p.lse_a = static_cast<const float*>(args.lse_a.data);
    p.out_b = args.out_b.data;
    p.lse_b = static_cast<const float*>(args.lse_b.data);
    p.out = args.out.data;
    p.lse = static_cast<float*>(args.lse.data);
    return p;
}

}  // namespace octavo
