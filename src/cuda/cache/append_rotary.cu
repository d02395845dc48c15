// Writes each sequence's newest tokens to the end of its pages, keys rotated by their positions, and rotates
// the queries. A token has a row for each head of keys, of values and of queries, in this order, and a thread
// has one unit of a row: two pieces of it, which hold partners where the row is rotated.
//
// grid: x tokens, y runs of kRotaryThreads units of a token.
#include "cuda/cache/append_rotary.h"

#include "cuda/cache/new_token.cuh"
#include "cuda/cache/rotary.cuh"
#include "cuda/columns.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx/grid_dependency.h"

namespace octavo::cuda {
namespace {

// The cosines and sines of as many pairs as a piece has numbers.
template <int kWide>
struct Angles {
    Columns<float, kWide> cos, sin;
};

template <class T, int kWide>
__device__ __forceinline__ Angles<kWide> load_pairs(const Rotary& rotary, int32_t position, int32_t pair) {
    return {load_cos<T, kWide>(rotary, position, pair), load_sin<T, kWide>(rotary, position, pair)};
}

template <int kWide>
__device__ __forceinline__ void rotate_pieces(const Rotary& rotary, const Angles<kWide>& angles,
                                              float (&x)[2 * kWide]) {
    auto rotate = [&](float& a, float& b, int i) {
        const float first = a, second = b, cos = angles.cos.at[i], sin = angles.sin.at[i];
        a = rotated_first(first, second, cos, sin);
        b = rotated_second(first, second, cos, sin);
    };
    if (rotary.interleaved) {
#pragma unroll
        for (int i = 0; i < kWide; ++i) rotate(x[2 * i], x[2 * i + 1], i);
    } else {
#pragma unroll
        for (int i = 0; i < kWide; ++i) rotate(x[i], x[kWide + i], i);
    }
}

template <class T, int kWide>
__global__ void append_rotary_kernel(const __grid_constant__ AppendKvParams p, FastDivide page_size,
                                     FastDivide units_per_row) {
    using Piece = Columns<T, kWide>;
    ptx::launch_dependents();
    const int64_t token = blockIdx.x;
    const auto index = static_cast<int32_t>(blockIdx.y * kRotaryThreads + threadIdx.x);
    const int32_t row = units_per_row.quotient(index);
    const int32_t unit = index - row * static_cast<int32_t>(units_per_row.divisor);
    const bool is_key = row < p.num_kv_heads, is_query = row >= 2 * p.num_kv_heads;
    const int32_t head = row - (is_query ? 2 * p.num_kv_heads : (is_key ? 0 : p.num_kv_heads));

    const int32_t rotated_units = is_key || is_query ? p.rotary.dim / 2 / kWide : 0;
    const bool are_halves = unit < rotated_units && !p.rotary.interleaved;
    const int32_t first = are_halves ? unit : 2 * unit,
                  second = are_halves ? unit + rotated_units : first + 1;
    const int32_t pieces_of_row = (is_key || is_query ? p.head_dim : p.head_dim_v) / kWide;
    const bool exists = row < 2 * p.num_kv_heads + p.num_q_heads && first < pieces_of_row;
    const bool has_second = second < pieces_of_row;
    const bool may_rotate = exists && unit < rotated_units;
    Place place{};
    Angles<kWide> angles{};
    auto look_up = [&] {  // whole warps do it together
        place = find_place(p, page_size, token);
        if (may_rotate && place.exists) angles = load_pairs<T, kWide>(p.rotary, place.position, unit * kWide);
    };
    if (p.static_tables) look_up();
    ptx::wait_for_previous_grid();
    Piece pieces[2] = {};
    if (exists) {
        const T* const from =
            is_query ? static_cast<const T*>(p.q) + token * p.q_token_stride + head * p.q_head_stride
            : is_key ? static_cast<const T*>(p.k) + token * p.k_token_stride + head * p.k_head_stride
                     : static_cast<const T*>(p.v) + token * p.v_token_stride + head * p.v_head_stride;
        pieces[0] = reinterpret_cast<const Piece*>(from)[first];
        if (has_second) pieces[1] = reinterpret_cast<const Piece*>(from)[second];
    }
    if (!p.static_tables) look_up();  // while the pieces are being loaded
    if (!exists || (!place.exists && !is_query)) return;
    const float scale = is_query ? 1.0f : (is_key ? p.k_scale : p.v_scale);
    const bool is_rotated = may_rotate && place.exists;
    if (is_rotated || scale != 1.0f) {
        float x[2 * kWide];
#pragma unroll
        for (int i = 0; i < 2 * kWide; ++i) x[i] = to_float(pieces[i / kWide].at[i % kWide]);
        if (is_rotated) rotate_pieces(p.rotary, angles, x);
#pragma unroll
        for (int i = 0; i < 2 * kWide; ++i)
            pieces[i / kWide].at[i % kWide] = from_float<T>(scale == 1.0f ? x[i] : x[i] / scale);
    }
    T* const to = is_query
                      ? static_cast<T*>(p.q_out) + token * p.q_out_token_stride + head * p.q_out_head_stride
                  : is_key ? static_cast<T*>(p.k_pages) + place.page * p.k_page_stride +
                                 place.slot * p.k_slot_stride + head * p.k_pages_head_stride
                           : static_cast<T*>(p.v_pages) + place.page * p.v_page_stride +
                                 place.slot * p.v_slot_stride + head * p.v_pages_head_stride;
    reinterpret_cast<Piece*>(to)[first] = pieces[0];
    if (has_second) reinterpret_cast<Piece*>(to)[second] = pieces[1];
}

}  // namespace

void append_rotary(const AppendKvParams& p, const AppendKvPlan& plan, cudaStream_t stream) {
    const LaunchShape shape{dim3(static_cast<unsigned>(p.total), static_cast<unsigned>(plan.ctas_per_token)),
                            kRotaryThreads, true};
    auto run = [&](auto type, auto wide) {
        constexpr int kWide = decltype(wide)::value;
        launch<append_rotary_kernel<decltype(type), kWide>>("append_kv", p.device.index, stream, shape, p,
                                                            FastDivide::by(p.page_size),
                                                            FastDivide::by(plan.units_per_row));
    };
    with_type(p.dtype, [&](auto type) {
        if (plan.in_chunks) return run(type, std::integral_constant<int, 16 / sizeof(type)>{});
        run(type, std::integral_constant<int, 1>{});
    });
}

}  // namespace octavo::cuda
