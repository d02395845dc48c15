// Writes each sequence's newest tokens to the end of its pages.
//
// grid: one warp per token, which writes K and V of all its KV heads.
#include "common/print_kernels.h"
#include "cuda/backend.h"
#include "cuda/cache/append_codes.h"
#include "cuda/cache/append_rotary.h"
#include "cuda/cache/new_token.cuh"
#include "cuda/cache/plan.h"
#include "cuda/launch.cuh"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/rows.cuh"

#include <type_traits>

namespace octavo::cuda {
namespace {

// One warp moves K and V of a token, for all heads, in pieces of which `per_head` make a row. `place`: where
// to, if the tables are static.
template <class Piece, class T, class Convert>
__device__ __forceinline__ void move_token(const AppendKvParams& p, const FastDivide& page_size,
                                           const FastDivide& per_head, int64_t token, Place place,
                                           Convert convert) {
    constexpr int kAtOnce = 4, kLanes = 32;
    const T* const k_from = static_cast<const T*>(p.k) + token * p.k_token_stride;
    const T* const v_from = static_cast<const T*>(p.v) + token * p.v_token_stride;
    const int32_t lane = threadIdx.x % kLanes,
                  pieces = p.num_kv_heads * static_cast<int32_t>(per_head.divisor);
    T *k_to = nullptr, *v_to = nullptr;
    for (int32_t first = 0; first < pieces; first += kAtOnce * kLanes) {
        Piece k[kAtOnce], v[kAtOnce];
        int64_t head[kAtOnce], column[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const int32_t i = first + j * kLanes + lane;
            if (i >= pieces) break;
            head[j] = per_head.quotient(i);
            column[j] = (i - head[j] * per_head.divisor) * static_cast<int64_t>(sizeof(Piece) / sizeof(T));
            k[j] = *reinterpret_cast<const Piece*>(k_from + head[j] * p.k_head_stride + column[j]);
            v[j] = *reinterpret_cast<const Piece*>(v_from + head[j] * p.v_head_stride + column[j]);
        }
        if (first == 0) {  // done while the first pieces are being loaded
            if (!p.static_tables) place = find_place(p, page_size, token);
            if (!place.exists) return;
            k_to = static_cast<T*>(p.k_pages) + place.page * p.k_page_stride + place.slot * p.k_slot_stride;
            v_to = static_cast<T*>(p.v_pages) + place.page * p.v_page_stride + place.slot * p.v_slot_stride;
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            if (first + j * kLanes + lane >= pieces) break;
            *reinterpret_cast<Piece*>(k_to + head[j] * p.k_pages_head_stride + column[j]) =
                convert(k[j], p.k_scale);
            *reinterpret_cast<Piece*>(v_to + head[j] * p.v_pages_head_stride + column[j]) =
                convert(v[j], p.v_scale);
        }
    }
}

// The same where a row of K and one of V differ in length: a head has the pieces of both, `per_key` of which
// are those of K.
template <class Piece, class T, class Convert>
__device__ __forceinline__ void move_unlike_rows(const AppendKvParams& p, const FastDivide& page_size,
                                                 const FastDivide& per_head, int32_t per_key, int64_t token,
                                                 Place place, Convert convert) {
    constexpr int kAtOnce = 8, kLanes = 32;
    constexpr auto kNumbers = static_cast<int64_t>(sizeof(Piece) / sizeof(T));
    const T* const k_from = static_cast<const T*>(p.k) + token * p.k_token_stride;
    const T* const v_from = static_cast<const T*>(p.v) + token * p.v_token_stride;
    if (!p.static_tables) place = find_place(p, page_size, token);
    if (!place.exists) return;
    T* const k_to = static_cast<T*>(p.k_pages) + place.page * p.k_page_stride + place.slot * p.k_slot_stride;
    T* const v_to = static_cast<T*>(p.v_pages) + place.page * p.v_page_stride + place.slot * p.v_slot_stride;
    const int32_t lane = threadIdx.x % kLanes,
                  pieces = p.num_kv_heads * static_cast<int32_t>(per_head.divisor);
    for (int32_t first = 0; first < pieces; first += kAtOnce * kLanes) {
        Piece read[kAtOnce];
        T* to[kAtOnce];
        bool is_key[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const int32_t i = first + j * kLanes + lane;
            if (i >= pieces) break;
            const int64_t head = per_head.quotient(i);
            const auto place_in_head = static_cast<int32_t>(i - head * per_head.divisor);
            is_key[j] = place_in_head < per_key;
            const int64_t column = (is_key[j] ? place_in_head : place_in_head - per_key) * kNumbers;
            const T* const from =
                is_key[j] ? k_from + head * p.k_head_stride : v_from + head * p.v_head_stride;
            to[j] = (is_key[j] ? k_to + head * p.k_pages_head_stride : v_to + head * p.v_pages_head_stride) +
                    column;
            read[j] = *reinterpret_cast<const Piece*>(from + column);
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            if (first + j * kLanes + lane >= pieces) break;
            *reinterpret_cast<Piece*>(to[j]) = convert(read[j], is_key[j] ? p.k_scale : p.v_scale);
        }
    }
}

// A head has `pieces_per_head` of K and as many of V; with kUnlikeRows it has so many of both, `per_key` of
// which are those of K.
template <class T, bool kUnlikeRows>
__global__ void append_kv_kernel(const __grid_constant__ AppendKvParams p, FastDivide page_size,
                                 FastDivide pieces_per_head, int32_t per_key, bool in_chunks) {
    ptx::launch_dependents();
    const int64_t token = warp_row();
    Place place{};
    if (p.static_tables && token < p.total) place = find_place(p, page_size, token);
    ptx::wait_for_previous_grid();
    if (token >= p.total) return;
    auto copy = [](uint4 x, float) { return x; };
    auto divide = [](T x, float scale) { return scale == 1.0f ? x : from_float<T>(to_float(x) / scale); };
    if constexpr (kUnlikeRows) {
        if (in_chunks)
            move_unlike_rows<uint4, T>(p, page_size, pieces_per_head, per_key, token, place, copy);
        else
            move_unlike_rows<T, T>(p, page_size, pieces_per_head, per_key, token, place, divide);
    } else {
        if (in_chunks)
            move_token<uint4, T>(p, page_size, pieces_per_head, token, place, copy);
        else
            move_token<T, T>(p, page_size, pieces_per_head, token, place, divide);
    }
}

}  // namespace

void append_kv(const AppendKvParams& p, void* stream) {
    const AppendKvPlan plan = plan_append_kv(p);
    if (plan.num_rows == 0) return;
    if (prints_kernels()) print_kernel(describe(plan));
    const DeviceGuard guard(p.device.index);
    if (plan.has_codes()) return append_codes(p, plan, static_cast<cudaStream_t>(stream));
    if (plan.has_rotary) return append_rotary(p, plan, static_cast<cudaStream_t>(stream));
    const int32_t per_piece = plan.in_chunks ? static_cast<int32_t>(16 / size_of(p.dtype)) : 1;
    const int32_t per_key = p.head_dim / per_piece, per_value = p.head_dim_v / per_piece;
    const LaunchShape shape{dim3(blocks_for_rows(plan.num_rows)), 32 * kRowsPerBlock, true};
    auto run = [&](auto type, auto unlike_rows) {
        constexpr bool kUnlikeRows = decltype(unlike_rows)::value;
        launch<append_kv_kernel<decltype(type), kUnlikeRows>>(
            "append_kv", p.device.index, static_cast<cudaStream_t>(stream), shape, p,
            FastDivide::by(p.page_size), FastDivide::by(kUnlikeRows ? per_key + per_value : per_key), per_key,
            plan.in_chunks);
    };
    with_type(p.dtype, [&](auto type) {
        if (per_key != per_value) return run(type, std::true_type{});
        run(type, std::false_type{});
    });
}

}  // namespace octavo::cuda
