// Operations of float32 that a compiler must not fuse, contract or approximate, so that all backends agree in
// every bit. The host's sources that use them are compiled without contraction (src/cpu/CMakeLists.txt).
#pragma once

#include "common/macros.h"

namespace octavo {

OCTAVO_HD float rounded_sum(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}

OCTAVO_HD float rounded_difference(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fsub_rn(a, b);
#else
    return a - b;
#endif
}

OCTAVO_HD float rounded_product(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

OCTAVO_HD float rounded_quotient(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

}  // namespace octavo
