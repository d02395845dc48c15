// Writes each sequence's newest tokens to the end of its pages as codes.
//
// grid: one warp per (token, KV head), which writes K and then V. With a rotary embedding it is one warp per
// (token, head), and query heads follow the KV heads.
#include "cuda/cache/append_codes.h"

#include "common/codes.h"
#include "cuda/cache/new_token.cuh"
#include "cuda/cache/rotary.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx/grid_dependency.h"
#include "cuda/row_in_registers.cuh"
#include "cuda/rows.cuh"
#include "params/attention_params.h"

namespace octavo::cuda {
namespace {

// Where a row goes, and its scale: a static one, or a word that is written.
struct Target {
    DType dtype;
    uint8_t* codes;
    float static_scale;
    uint32_t* word;  // null if the scale is static
};

__device__ __forceinline__ float largest_of(DType dtype) {
    return dtype == DType::int8 ? kLargestInt8 : (dtype == DType::float8_e4m3fn ? E4m3::kMax : E5m2::kMax);
}

__device__ __forceinline__ void store_int4(const Row& row, int32_t head_dim, const Target& to) {
    int32_t smallest = INT32_MAX, largest = INT32_MIN;
    row.for_each(head_dim, [&](float x, int32_t) {
        smallest = min(smallest, order_bits(x));
        largest = max(largest, order_bits(x));
    });
    const CodeScale scale =
        int4_scale_of_row(__reduce_min_sync(~0u, smallest), __reduce_max_sync(~0u, largest));
    if (threadIdx.x % 32 == 0) *to.word = int4_word(scale);
    uint32_t even = 0;
    row.for_each(head_dim, [&](float x, int32_t d) {
        const uint32_t code = to_int4(scale.above_minimum(x));
        if (d % 2 == 0) even = code;
        if (d % 2 == 1) to.codes[d / 2] = static_cast<uint8_t>(even | code << 4);
    });
}

__device__ __forceinline__ void store_codes(const Row& row, int32_t head_dim, const Target& to) {
    if (to.dtype == DType::int4) return store_int4(row, head_dim, to);
    CodeScale scale = CodeScale::of(to.static_scale);
    if (to.word != nullptr) {
        uint32_t absmax = 0;
        row.for_each(head_dim, [&](float x, int32_t) { absmax = max(absmax, size_bits(x)); });
        scale = code_scale_of_row(__reduce_max_sync(~0u, absmax), largest_of(to.dtype));
        if (threadIdx.x % 32 == 0) *to.word = bits_of_float(scale.scale);
    }
    row.for_each(head_dim, [&](float x, int32_t d) {
        const float scaled = scale(x);
        if (to.dtype == DType::int8) {
            to.codes[d] = static_cast<uint8_t>(to_int8(scaled));
        } else {
            to.codes[d] =
                to.dtype == DType::float8_e4m3fn ? to_float8<E4m3>(scaled) : to_float8<E5m2>(scaled);
        }
    });
}

__device__ __forceinline__ uint32_t* word_at(const CacheScales& scales, const Place& place, int64_t head) {
    return scales.data ? &scales.word(place.page, place.slot, head) : nullptr;
}

__device__ __forceinline__ float static_scale_of(const CacheScales& scales, float scale, int64_t head) {
    return scales.data ? float_of_bits(scales.word(0, 0, head)) : scale;
}

// Rotates a query of one head, by one warp. A query of padding stays as it is. `place`: the token's, if the
// tables are static.
template <class T>
__device__ __forceinline__ void rotate_query(const AppendKvParams& p, const FastDivide& page_size,
                                             int64_t token, int64_t head, Place place) {
    const T* const from = static_cast<const T*>(p.q) + token * p.q_token_stride + head * p.q_head_stride;
    T* const to = static_cast<T*>(p.q_out) + token * p.q_out_token_stride + head * p.q_out_head_stride;
    Row q = load_row(from, p.head_dim);
    if (!p.static_tables) place = find_place(p, page_size, token);
    if (place.exists) apply_rotary(p.rotary, from, place.position, q);
    __syncwarp();  // every lane has read the partners of its numbers, which the result may overwrite
    q.for_each(p.head_dim, [&](float x, int32_t d) { to[d] = from_float<T>(x); });
}

template <class T, bool kHasRotary>
__global__ void append_codes_kernel(const __grid_constant__ AppendKvParams p, FastDivide page_size) {
    ptx::launch_dependents();
    const int32_t heads = kHasRotary ? p.num_kv_heads + p.num_q_heads : p.num_kv_heads;
    const int64_t row = warp_row(), token = row / heads, head = row % heads;
    Place place{};
    if (p.static_tables && token < p.total) place = find_place(p, page_size, token);
    ptx::wait_for_previous_grid();
    if (token >= p.total) return;
    if (kHasRotary && head >= p.num_kv_heads)
        return rotate_query<T>(p, page_size, token, head - p.num_kv_heads, place);
    const T* const k_from = static_cast<const T*>(p.k) + token * p.k_token_stride + head * p.k_head_stride;
    Row k = load_row(k_from, p.head_dim);
    const Row v = load_row(static_cast<const T*>(p.v) + token * p.v_token_stride + head * p.v_head_stride,
                           p.head_dim_v);
    if (!p.static_tables) place = find_place(p, page_size, token);
    if (!place.exists) return;
    if constexpr (kHasRotary) apply_rotary(p.rotary, k_from, place.position, k);
    k.for_each(p.head_dim, [&](float& x, int32_t d) { x = p.key_transform.of_key(x, head, d); });
    if (p.key_transform.rotates) k.rotate(p.head_dim);
    auto* const k_codes = static_cast<uint8_t*>(p.k_pages) + place.page * p.k_page_stride +
                          place.slot * p.k_slot_stride + head * p.k_pages_head_stride;
    auto* const v_codes = static_cast<uint8_t*>(p.v_pages) + place.page * p.v_page_stride +
                          place.slot * p.v_slot_stride + head * p.v_pages_head_stride;
    store_codes(k, p.head_dim,
                {p.k_dtype, k_codes, static_scale_of(p.k_static_scales, p.k_scale, head),
                 word_at(p.k_scales, place, head)});
    store_codes(v, p.head_dim_v,
                {p.v_dtype, v_codes, static_scale_of(p.v_static_scales, p.v_scale, head),
                 word_at(p.v_scales, place, head)});
}

}  // namespace

void append_codes(const AppendKvParams& p, const AppendKvPlan& plan, cudaStream_t stream) {
    const LaunchShape shape{dim3(blocks_for_rows(plan.num_rows)), 32 * kRowsPerBlock, true};
    auto run = [&](auto type, auto has_rotary) {
        launch<append_codes_kernel<decltype(type), decltype(has_rotary)::value>>(
            "append_kv", p.device.index, stream, shape, p, FastDivide::by(p.page_size));
    };
    with_type(p.dtype, [&](auto type) {
        if (plan.has_rotary) return run(type, std::true_type{});
        run(type, std::false_type{});
    });
}

}  // namespace octavo::cuda
