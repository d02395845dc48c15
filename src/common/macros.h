#pragma once

// Marks the maths that both backends compile.
#ifdef __CUDACC__
#define OCTAVO_HD __host__ __device__ __forceinline__
#else
#define OCTAVO_HD inline
#endif
