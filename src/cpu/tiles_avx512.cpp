// The kernels for x86-64-v4. What the headers define was compiled for every machine before the target
// changes: nothing outside this namespace may hold an instruction that only some have.
#include "common/macros.h"
#include "common/online_softmax.h"
#include "cpu/kernels.h"
#include "cpu/with_type.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <utility>

#pragma GCC diagnostic ignored "-Wpsabi"
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#endif

namespace octavo::cpu::avx512 {

#include "cpu/avx512.inl"

constexpr bool kHasPairProducts = false;

#include "cpu/tiles.inl"

}  // namespace octavo::cpu::avx512

#ifdef __clang__
#pragma clang attribute pop
#endif

#endif  // __x86_64__
