#include "cpu/kernels.h"

#include "cpu/isa.h"

#include <octavo/error.h>

#include <string>

namespace octavo::cpu {

const Kernels& kernels() {
#if defined(OCTAVO_CPU_ISA)  // all that CMake was asked for
    if (isa() != Isa::OCTAVO_CPU_ISA) {
        throw ValueError(std::string("this build has CPU kernels for one instruction set, which is not ") +
                         isa_name() +
                         ": OCTAVO_CPU_ISA in the environment must name the one that it was given");
    }
    return OCTAVO_CPU_ISA::kKernels;
#else
    switch (isa()) {
#if defined(__x86_64__)
        case Isa::avx512_bf16: return avx512_bf16::kKernels;
        case Isa::avx512: return avx512::kKernels;
        case Isa::avx2: return avx2::kKernels;
#endif
        default: return baseline::kKernels;
    }
#endif
}

}  // namespace octavo::cpu
