#include "checks/check.h"
#include "checks/checks.h"

#include <cmath>

namespace octavo {
namespace {

// Checks the place of a result, which may be that of an input.
void check_place(const Checker& check, const RmsNormArgs& args, const char* name, const TensorView& result) {
    auto check_input = [&](const char* input_name, const TensorView& input) {
        if (!same_elements(result, input)) check.apart(name, result, input_name, input);
    };
    check_input("x", args.x);
    if (args.residual) check_input("residual", *args.residual);
    check.apart(name, result, "weight", args.weight);
}

// Joins the axes `outer` and `outer + 1` into one where no array has gaps between them.
void join_axes(RmsNormParams& p, int outer) {
    const int inner = outer + 1;
    int64_t (*const all_strides[])[3] = {&p.x_strides, &p.residual_strides, &p.out_strides,
                                         &p.residual_out_strides};
    if (p.shape[outer] > 1 && p.shape[inner] > 1) {
        for (const auto* strides : all_strides) {
            if ((*strides)[outer] != (*strides)[inner] * p.shape[inner]) return;
        }
    } else if (p.shape[inner] == 1) {
        for (auto* strides : all_strides) (*strides)[inner] = (*strides)[outer];
    }
    p.shape[inner] *= p.shape[outer];
    p.shape[outer] = 1;
}

}  // namespace

RmsNormParams check_rms_norm(const RmsNormArgs& args) {
    constexpr const char* op = "rms_norm";
    constexpr const char* axes = "[..., dim] with at most three leading axes";
    RmsNormParams p{};
    p.device = args.x.device;
    p.dtype = args.x.dtype;
    const Checker check(op, p.device);
    const int ndim = args.x.ndim;
    if (ndim < 1 || ndim > 4)
        fail<ValueError>(op, "x must have shape ", axes, "; got ", args.x.shape_string());
    check.float_dtype("x", args.x);
    check.data("x", args.x, ndim, axes);
    const int64_t dim = args.x.shape[ndim - 1];
    check.length("dim", dim);
    p.dim = static_cast<int32_t>(dim);
    p.weight_dtype = args.weight.dtype;
    if (p.weight_dtype != DType::float32) {
        check.dtype("weight", args.weight, p.dtype,
                    p.dtype == DType::float32 ? " like x" : " like x, or float32");
    }
    check.data("weight", args.weight, 1, "[dim]");
    check.equal("dim", "weight", args.weight.shape[0], "x", dim);
    p.eps = static_cast<float>(args.eps);
    if (!std::isfinite(p.eps) || p.eps < 0.0f)
        fail<ValueError>(op, "eps must be finite and at least 0; got ", args.eps);
    if (args.residual.has_value() != args.residual_out.has_value()) {
        fail<ValueError>(op, "residual and residual_out must be given together; got only ",
                         args.residual ? "residual" : "residual_out");
    }

    const int pad = 4 - ndim;
    int64_t num_rows = 1;
    for (int i = 0; i < 3; ++i) {
        p.shape[i] = i < pad ? 1 : args.x.shape[i - pad];
        check.length("every axis of x", p.shape[i]);
        num_rows *= p.shape[i];
        check.length("the number of rows of x", num_rows);
    }
    auto set_strides = [&](const TensorView& t, int64_t (&strides)[3]) {
        for (int i = 0; i < 3; ++i) strides[i] = i < pad ? 0 : stride_of(t, i - pad);
    };
    auto check_like_x = [&](const char* name, const TensorView& t) {
        check.data(name, t, ndim, axes);
        check.dtype(name, t, p.dtype, " like x");
        check.same_shape(name, t, "x", args.x);
    };
    p.x = args.x.data;
    set_strides(args.x, p.x_strides);
    p.weight = args.weight.data;
    if (args.residual) {
        check_like_x("residual", *args.residual);
        p.residual = args.residual->data;
        set_strides(*args.residual, p.residual_strides);
    }
    check_like_x("out", args.out);
    check.writable("out", args.out);
    check_place(check, args, "out", args.out);
    p.out = args.out.data;
    set_strides(args.out, p.out_strides);
    if (args.residual_out) {
        check_like_x("residual_out", *args.residual_out);
        check.writable("residual_out", *args.residual_out);
        check_place(check, args, "residual_out", *args.residual_out);
        check.no_shared_elements("residual_out", *args.residual_out, "out", args.out);
        p.residual_out = args.residual_out->data;
        set_strides(*args.residual_out, p.residual_out_strides);
    }
    join_axes(p, 0);
    join_axes(p, 1);
    join_axes(p, 0);
    return p;
}

}  // namespace octavo
