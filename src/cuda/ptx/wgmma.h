// d += a b by a warpgroup, asynchronously (sm_90a). a is 64 x 16, b is 16 x N, d is 64 x N in float32. b lies
// in shared memory, a lies there too (ss) or in registers (rs).
//
// d[i] of thread t is at row 16 (t / 32) + (t % 32) / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (t % 4) + i %
// 2. Packed in pairs, the elements of 16 columns are operand a of a product over these columns.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace octavo::cuda::ptx {

// Needed between writes to registers that wgmma reads or adds to, and the wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `kPending` groups are pending.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads of these accumulators above the wait for them.
template <int kCount>
__device__ __forceinline__ void wgmma_results(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Makes these operands now: left alone, the compiler packs some of them between the products that take them,
// and ptxas then has the products wait for one another (it says so: C7519, "warpgroup.arrive is injected").
template <int kCount>
__device__ __forceinline__ void wgmma_operands(uint32_t (&a)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i]));
}

template <class T, int N>
struct Wgmma;

#define OCTAVO_D0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define OCTAVO_D1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define OCTAVO_D2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define OCTAVO_D3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define OCTAVO_D4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define OCTAVO_D5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define OCTAVO_D6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define OCTAVO_D7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define OCTAVO_D8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define OCTAVO_D9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define OCTAVO_D10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define OCTAVO_D11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define OCTAVO_D12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define OCTAVO_D13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define OCTAVO_D14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define OCTAVO_D15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define OCTAVO_F8(d, i)                                                                         \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])

// The registers of d by name and as operands, for each N.
#define OCTAVO_D_48 OCTAVO_D0 ", " OCTAVO_D1 ", " OCTAVO_D2
#define OCTAVO_F_48(d) OCTAVO_F8(d, 0), OCTAVO_F8(d, 8), OCTAVO_F8(d, 16)
#define OCTAVO_D_64 OCTAVO_D_48 ", " OCTAVO_D3
#define OCTAVO_F_64(d) OCTAVO_F_48(d), OCTAVO_F8(d, 24)
#define OCTAVO_D_80 OCTAVO_D_64 ", " OCTAVO_D4
#define OCTAVO_F_80(d) OCTAVO_F_64(d), OCTAVO_F8(d, 32)
#define OCTAVO_D_96 OCTAVO_D_80 ", " OCTAVO_D5
#define OCTAVO_F_96(d) OCTAVO_F_80(d), OCTAVO_F8(d, 40)
#define OCTAVO_D_112 OCTAVO_D_96 ", " OCTAVO_D6
#define OCTAVO_F_112(d) OCTAVO_F_96(d), OCTAVO_F8(d, 48)
#define OCTAVO_D_128 OCTAVO_D_112 ", " OCTAVO_D7
#define OCTAVO_F_128(d) OCTAVO_F_112(d), OCTAVO_F8(d, 56)
#define OCTAVO_D_144 OCTAVO_D_128 ", " OCTAVO_D8
#define OCTAVO_F_144(d) OCTAVO_F_128(d), OCTAVO_F8(d, 64)
#define OCTAVO_D_160 OCTAVO_D_144 ", " OCTAVO_D9
#define OCTAVO_F_160(d) OCTAVO_F_144(d), OCTAVO_F8(d, 72)
#define OCTAVO_D_176 OCTAVO_D_160 ", " OCTAVO_D10
#define OCTAVO_F_176(d) OCTAVO_F_160(d), OCTAVO_F8(d, 80)
#define OCTAVO_D_192 OCTAVO_D_176 ", " OCTAVO_D11
#define OCTAVO_F_192(d) OCTAVO_F_176(d), OCTAVO_F8(d, 88)
#define OCTAVO_D_224 OCTAVO_D_192 ", " OCTAVO_D12 ", " OCTAVO_D13
#define OCTAVO_F_224(d) OCTAVO_F_192(d), OCTAVO_F8(d, 96), OCTAVO_F8(d, 104)
#define OCTAVO_D_256 OCTAVO_D_224 ", " OCTAVO_D14 ", " OCTAVO_D15
#define OCTAVO_F_256(d) OCTAVO_F_224(d), OCTAVO_F8(d, 112), OCTAVO_F8(d, 120)

// `n0` to `n5` number the operands behind d.
#define OCTAVO_WGMMA(T, name, N, n0, n1, n2, n3, n4, n5)                                                   \
    template <>                                                                                            \
    struct Wgmma<T, N> {                                                                                   \
        /* Both operands in shared memory, K-major. */                                                     \
        __device__ static __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b,               \
                                                  bool accumulate) {                                       \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #n2                                          \
                         ", 0;\n"                                                                          \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." name "." name " {" OCTAVO_D_##N \
                         "}, %" #n0 ", %" #n1 ", p, 1, 1, 0, 0;\n}"                                        \
                         : OCTAVO_F_##N(d)                                                                 \
                         : "l"(a), "l"(b), "r"(int{accumulate}));                                          \
        }                                                                                                  \
        /* a in registers; b in shared memory, K-major. */                                                 \
        __device__ static __forceinline__ void rs_keys(float (&d)[N / 2], const uint32_t* a, uint64_t b,   \
                                                       bool accumulate) {                                  \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #n5                                          \
                         ", 0;\n"                                                                          \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." name "." name " {" OCTAVO_D_##N \
                         "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", p, 1, 1, 0;\n}"           \
                         : OCTAVO_F_##N(d)                                                                 \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}));      \
        }                                                                                                  \
        /* a in registers; b in shared memory, N-major ("transposed"). */                                  \
        __device__ static __forceinline__ void rs(float (&d)[N / 2], const uint32_t* a, uint64_t b) {      \
            asm volatile(                                                                                  \
                "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"                                                 \
                "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." name "." name " {" OCTAVO_D_##N          \
                "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", p, 1, 1, 1;\n}"                    \
                : OCTAVO_F_##N(d)                                                                          \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                     \
        }                                                                                                  \
        /* Both in shared memory, K-major and N-major. */                                                  \
        __device__ static __forceinline__ void ss_values(float (&d)[N / 2], uint64_t a, uint64_t b) {      \
            asm volatile(                                                                                  \
                "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"                                                 \
                "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." name "." name " {" OCTAVO_D_##N          \
                "}, %" #n0 ", %" #n1 ", p, 1, 1, 0, 1;\n}"                                                 \
                : OCTAVO_F_##N(d)                                                                          \
                : "l"(a), "l"(b));                                                                         \
        }                                                                                                  \
        /* Both in shared memory, M-major and N-major. */                                                  \
        __device__ static __forceinline__ void ss_transposed(float (&d)[N / 2], uint64_t a, uint64_t b,    \
                                                             bool accumulate) {                            \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #n2                                          \
                         ", 0;\n"                                                                          \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." name "." name " {" OCTAVO_D_##N \
                         "}, %" #n0 ", %" #n1 ", p, 1, 1, 1, 1;\n}"                                        \
                         : OCTAVO_F_##N(d)                                                                 \
                         : "l"(a), "l"(b), "r"(int{accumulate}));                                          \
        }                                                                                                  \
    };
#define OCTAVO_WGMMA_TYPES(...)              \
    OCTAVO_WGMMA(__half, "f16", __VA_ARGS__) \
    OCTAVO_WGMMA(__nv_bfloat16, "bf16", __VA_ARGS__)

OCTAVO_WGMMA_TYPES(48, 24, 25, 26, 27, 28, 29)
OCTAVO_WGMMA_TYPES(64, 32, 33, 34, 35, 36, 37)
OCTAVO_WGMMA_TYPES(80, 40, 41, 42, 43, 44, 45)
OCTAVO_WGMMA_TYPES(96, 48, 49, 50, 51, 52, 53)
OCTAVO_WGMMA_TYPES(112, 56, 57, 58, 59, 60, 61)
OCTAVO_WGMMA_TYPES(128, 64, 65, 66, 67, 68, 69)
OCTAVO_WGMMA_TYPES(144, 72, 73, 74, 75, 76, 77)
OCTAVO_WGMMA_TYPES(160, 80, 81, 82, 83, 84, 85)
OCTAVO_WGMMA_TYPES(176, 88, 89, 90, 91, 92, 93)
OCTAVO_WGMMA_TYPES(192, 96, 97, 98, 99, 100, 101)
OCTAVO_WGMMA_TYPES(224, 112, 113, 114, 115, 116, 117)
OCTAVO_WGMMA_TYPES(256, 128, 129, 130, 131, 132, 133)

#undef OCTAVO_WGMMA_TYPES
#undef OCTAVO_WGMMA

// Describes where a K-major or N-major operand lies: in rows of kRowBytes, 128 or 64, with a swizzle of as
// many bytes, in blocks of eight rows that start at multiples of their size. `column_block_bytes` is the
// distance to the columns of an N-major operand that follow those of a row.
template <int kRowBytes = 128>
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t shared_address, uint32_t column_block_bytes) {
    static_assert(kRowBytes == 128 || kRowBytes == 64);
    constexpr uint64_t kSwizzle = uint64_t{128 / kRowBytes} << 62;
    constexpr uint64_t kEightRows = uint64_t{8 * kRowBytes >> 4} << 32;
    return kSwizzle | kEightRows | uint64_t{column_block_bytes >> 4} << 16 | (shared_address & 0x3ffff) >> 4;
}

// Describes a K-major operand of 16 columns whose second eight equal the first, without swizzle: a row takes
// 16 bytes.
__device__ __forceinline__ uint64_t wgmma_descriptor_plain(uint32_t shared_address) {
    constexpr uint64_t kEightRows = uint64_t{128 >> 4} << 32;
    return kEightRows | (shared_address & 0x3ffff) >> 4;
}

}  // namespace octavo::cuda::ptx
