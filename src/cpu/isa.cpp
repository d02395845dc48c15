#include "cpu/isa.h"

#include <octavo/error.h>

#include <cstdlib>
#include <string>

namespace octavo::cpu {
namespace {

constexpr const char* kNames[] = {"baseline", "avx2", "avx512", "avx512_bf16"};

Isa widest_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
            return __builtin_cpu_supports("avx512bf16") ? Isa::avx512_bf16 : Isa::avx512;
        }
        return Isa::avx2;
    }
#endif
    return Isa::baseline;
}

Isa choose_isa() {
    Isa widest = widest_isa();
    const char* asked = std::getenv("OCTAVO_CPU_ISA");
    if (!asked || !*asked) return widest;
    for (Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512, Isa::avx512_bf16}) {
        if (asked != std::string(kNames[static_cast<int>(isa)])) continue;
        if (isa <= widest) return isa;
        throw ValueError(std::string("OCTAVO_CPU_ISA (") + asked +
                         ") must not exceed what this machine has (" + kNames[static_cast<int>(widest)] +
                         ")");
    }
    throw ValueError(std::string("OCTAVO_CPU_ISA (") + asked +
                     ") must be baseline, avx2, avx512 or avx512_bf16");
}

}  // namespace

Isa isa() {
    static const Isa chosen = choose_isa();
    return chosen;
}

const char* isa_name() { return kNames[static_cast<int>(isa())]; }

}  // namespace octavo::cpu
