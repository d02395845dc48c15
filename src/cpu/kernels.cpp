#include "cpu/kernels.h"

#include "cpu/isa.h"

namespace octavo::cpu {

const Kernels& kernels() {
    switch (isa()) {
#if defined(__x86_64__)
        case Isa::avx512_bf16: return avx512_bf16::kKernels;
        case Isa::avx512: return avx512::kKernels;
        case Isa::avx2: return avx2::kKernels;
#endif
        default: return baseline::kKernels;
    }
}

}  // namespace octavo::cpu
