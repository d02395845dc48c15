#pragma once

// Marks the maths that both backends compile.
#ifdef __CUDACC__
#define OCTAVO_HD __host__ __device__ __forceinline__
#else
#define OCTAVO_HD inline
#endif

// A condition that seldom holds: the compiler lays out the code that it guards away from the usual path.
#define OCTAVO_RARE(condition) __builtin_expect(static_cast<bool>(condition), 0)
