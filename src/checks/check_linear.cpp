#include "checks/check.h"
#include "checks/checks.h"
#include "params/linear_norm.h"

#include <cmath>

namespace octavo {
namespace {

constexpr int kMaxAxes = TensorView::kMaxDims - 1;

// The shape [..., N] for x [..., K].
TensorView shape_of_out(const TensorView& x, int64_t width) {
    TensorView out = x;
    out.shape[out.ndim - 1] = width;
    return out;
}

void check_like_out(const Checker& check, const char* name, const TensorView& t, const LinearArgs& args,
                    int64_t width) {
    const TensorView wanted = shape_of_out(args.x, width);
    check.dtype(name, t, args.x.dtype, " like x");
    check.data(name, t, wanted.ndim, "[..., N], as many axes as x");
    if (t.shape == wanted.shape) return;
    fail<ValueError>(check.op(), name,
                     " must have the leading axes of x and the width of w: ", wanted.shape_string(), "; got ",
                     t.shape_string());
}

// Sets the leading axes, joined where no array has gaps between them, and the strides of each array.
void merge_axes(LinearParams& p, const LinearArgs& args) {
    struct Array {
        const TensorView* view;
        LinearRows* rows;
    };
    const Array arrays[] = {{&args.x, &p.x_rows},
                            {&args.out, &p.out_rows},
                            {args.residual ? &*args.residual : nullptr, &p.residual_rows}};
    p.num_axes = 0;
    for (int axis = 0; axis < args.x.ndim - 1; ++axis) {
        const int64_t length = args.x.shape[axis];
        if (length == 1) continue;
        bool continues = p.num_axes > 0;  // the axis before it
        for (const auto& [view, rows] : arrays) {
            if (view && continues) continues = rows->strides[p.num_axes - 1] == length * view->strides[axis];
        }
        if (!continues) p.axes[p.num_axes++] = 1;
        p.axes[p.num_axes - 1] *= length;
        for (const auto& [view, rows] : arrays) {
            if (view) rows->strides[p.num_axes - 1] = view->strides[axis];
        }
    }
}

void check_norm(const Checker& check, const LinearArgs& args, LinearParams& p) {
    if (!args.norm_weight) return;
    const TensorView& weight = *args.norm_weight;
    p.norm_weight_dtype = weight.dtype;
    if (weight.dtype != DType::float32) {
        check.dtype("norm_weight", weight, p.dtype,
                    p.dtype == DType::float32 ? " like x" : " like x, or float32");
    }
    check.data("norm_weight", weight, 1, "[K]");
    check.equal("K", "norm_weight", weight.shape[0], "x", p.depth);
    p.norm_weight = weight.data;
    p.norm_eps = static_cast<float>(args.norm_eps);
    if (!std::isfinite(p.norm_eps) || p.norm_eps < 0.0f)
        fail<ValueError>(check.op(), "norm_eps must be finite and at least 0; got ", args.norm_eps);
    check.apart("out", args.out, "norm_weight", weight);
    const int32_t num_axes = NormAxes::of(p).count;
    if (num_axes > kMaxNormAxes) {
        fail<ValueError>(check.op(), "x must have at most ", kMaxNormAxes,
                         " leading axes that do not lie behind one another where norm_weight is given; got ",
                         num_axes, " of them in ", args.x.shape_string());
    }
}

bool is_activation(Activation activation) {
    switch (activation) {
        case Activation::silu:
        case Activation::gelu:
        case Activation::silu_gate: return true;
    }
    return false;
}

void check_plan(const char* op, const LinearPlan& plan, const LinearParams& p) {
    if (p.device.type == DeviceType::cpu)
        fail<ValueError>(op, "plan is for arrays on a GPU; x is on the CPU, where one kernel computes all");
    if (plan.dtype != p.dtype) {
        fail<ValueError>(op, "plan must be for the dtype of x (", to_string(p.dtype), "); it is for ",
                         to_string(plan.dtype));
    }
    if (p.batch_invariant && plan.kernel == LinearKernel::library) {
        fail<ValueError>(op,
                         "plan must not hand over to the library with batch_invariant, since its order of "
                         "addition may depend on the number of rows");
    }
}

}  // namespace

int64_t linear_width(const LinearArgs& args) {
    if (args.w.ndim != 2) return 0;
    return args.activation == Activation::silu_gate ? args.w.shape[0] / 2 : args.w.shape[0];
}

LinearParams check_linear(const LinearArgs& args) { return check_linear_for("linear", args); }

LinearParams check_linear_for(const char* op, const LinearArgs& args) {
    LinearParams p{};
    p.device = args.x.device;
    p.dtype = args.x.dtype;
    p.w_dtype = args.w.dtype;
    p.activation = args.activation;
    p.static_weight = args.static_weight;
    p.batch_invariant = args.batch_invariant;
    const Checker check(op, p.device);
    if (args.activation && !is_activation(*args.activation)) {
        fail<ValueError>(op, "activation must be silu, gelu or silu_gate; got ",
                         static_cast<int>(*args.activation));
    }
    if (args.x.ndim < 1) {
        fail<ValueError>(op, "x must have shape [..., K] with up to ", kMaxAxes, " leading axes; got ",
                         args.x.shape_string());
    }
    check.float_dtype("x", args.x);
    check.data("x", args.x, args.x.ndim, "[..., K]");
    check.float_dtype("w", args.w);
    if (p.w_dtype != p.dtype && (p.dtype != DType::float32)) check.dtype("w", args.w, p.dtype, " like x");
    check.data("w", args.w, 2, p.is_gated() ? "[2 F, K]" : "[N, K]");
    p.depth = args.x.shape[args.x.ndim - 1];
    check.equal("K", "w", args.w.shape[1], "x", p.depth);
    const int64_t w_rows = args.w.shape[0];
    check.length("K", p.depth);
    check.length("N", w_rows);
    if (p.is_gated() && w_rows % 2 != 0) {
        fail<ValueError>(op, "w must have an even number of rows with activation silu_gate; got ", w_rows);
    }
    p.width = linear_width(args);
    p.w_stride = stride_of(args.w, 0);
    if (args.bias) {
        check.dtype("bias", *args.bias, p.dtype, " like x");
        check.data("bias", *args.bias, 1, p.is_gated() ? "[2 F]" : "[N]");
        check.equal("N", "bias", args.bias->shape[0], "w", w_rows);
        p.bias = args.bias->data;
    }
    if (args.residual) {
        check_like_out(check, "residual", *args.residual, args, p.width);
        p.residual = args.residual->data;
    }
    check_like_out(check, "out", args.out, args, p.width);
    check.writable("out", args.out);
    check.apart("out", args.out, "x", args.x);
    check.apart("out", args.out, "w", args.w);
    if (args.bias) check.apart("out", args.out, "bias", *args.bias);
    if (args.residual && !same_elements(args.out, *args.residual))
        check.apart("out", args.out, "residual", *args.residual);

    p.num_rows = 1;
    for (int axis = 0; axis < args.x.ndim - 1; ++axis) {
        p.num_rows *= args.x.shape[axis];
        check.length("the number of rows of x", p.num_rows);
    }
    merge_axes(p, args);
    check_norm(check, args, p);
    if (args.plan) check_plan(op, *args.plan, p);
    p.plan = args.plan;
    p.x = args.x.data;
    p.w = args.w.data;
    p.out = args.out.data;
    return p;
}

std::string why_no_cuda_kernel(const LinearParams& p) {
    if (p.w_dtype != p.dtype)
        return "w must be " + to_string(p.dtype) + " like x on a GPU; got " + to_string(p.w_dtype);
    if (p.dtype == DType::float32) return "its CUDA kernels multiply float16 and bfloat16; x is float32";
    if (p.num_axes > 1) {
        return "its CUDA kernels want the rows of x, of residual and of out one stride apart each; the "
               "leading "
               "axes of x do not lie behind one another";
    }
    return {};
}

std::string why_refused_on_cuda(const LinearParams& p) {
    const std::string why = why_no_cuda_kernel(p);
    if (why.empty() || p.w_dtype != p.dtype) return why;
    if (p.batch_invariant) {
        return "batch_invariant=True needs a kernel of Octavo's, since the arrays' own library may add up in "
               "an "
               "order that depends on the number of rows: " +
               why;
    }
    return {};
}

}  // namespace octavo
