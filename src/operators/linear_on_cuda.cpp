#include "operators/linear_on_cuda.h"

#include "common/fail.h"

namespace octavo::cuda {

void linear(const LinearParams& p, void*) {
    fail<DeviceError>("linear",
                      "there is no CUDA kernel for it yet, and C++ and C have no other; the arrays are on ",
                      to_string(p.device));
}

Explanation explain(const LinearParams& p, const Gpu&) {
    Explanation text;
    text.kernel = "matmul of the arrays' library<" + to_string(p.dtype) + ">";
    text.summary =
        "torch.nn.functional.linear, cupy.matmul or jax.numpy.matmul, then bias, activation and residual";
    text.file = "python/octavo/_linear_on_cuda.py";
    text.plan = {{"dtype", to_string(p.dtype)}, {"kernel", std::string("library")}};
    text.why_not = {{"CUDA kernels", "Octavo has none for linear yet"},
                    {"cpu_linear", "the device is a GPU"}};
    return text;
}

}  // namespace octavo::cuda
