// Which instruction set the kernels use: chosen once, from what the machine has.
#pragma once

namespace octavo::cpu {

enum class Isa { baseline, avx2, avx512, avx512_bf16 };

// The widest that this machine runs, or the one that the environment variable OCTAVO_CPU_ISA names.
// Throws ValueError if it names one that is unknown or that the machine lacks.
Isa isa();

const char* isa_name();  // "baseline", "avx2", "avx512", "avx512_bf16"

}  // namespace octavo::cpu
