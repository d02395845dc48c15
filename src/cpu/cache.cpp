// What writes a paged cache on the CPU.
#include "cpu/backend.h"
#include "cpu/key_transform.h"
#include "cpu/thread_pool.h"
#include "cpu/with_type.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

namespace octavo::cpu {
namespace {

// Bytes that one piece of parallel work moves at least: below, waking a thread costs more than it saves.
constexpr int64_t kGrainBytes = 64 << 10;

int64_t grain_for(int64_t item_bytes) {
    return std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, item_bytes));
}

template <class Number, class T>
void store_scaled(const Number* from, T* to, int32_t n, float scale) {
    if (std::is_same_v<Number, T> && scale == 1.0f) {
        if (n > 0) std::memcpy(to, from, n * sizeof(T));  // arrays without numbers may be null
    } else {
        for (int32_t d = 0; d < n; ++d) from_float(to_float(from[d]) / scale, to[d]);
    }
}

// A row as float32, rotated by its position.
template <class T>
void apply_rotary(const Rotary& rotary, int64_t position, const T* from, int32_t head_dim, float* to) {
    for (int32_t d = 0; d < head_dim; ++d) to[d] = to_float(from[d]);
    with_type(rotary.dtype, [&](auto type) {
        using Angle = decltype(type);
        const Angle* const cos = static_cast<const Angle*>(rotary.cos) + position * rotary.cos_stride;
        const Angle* const sin = static_cast<const Angle*>(rotary.sin) + position * rotary.sin_stride;
        for (int32_t i = 0; i < rotary.dim / 2; ++i) {
            float& first = to[rotary.first_of(i)];
            float& second = to[rotary.first_of(i) + rotary.distance()];
            const float a = first, b = second, c = to_float(cos[i]), s = to_float(sin[i]);
            first = rotated_first(a, b, c, s);
            second = rotated_second(a, b, c, s);
        }
    });
}

// Scratch of this thread.
float* row_of_floats(int32_t head_dim) {
    thread_local std::vector<float> row;
    row.resize(head_dim);
    return row.data();
}

// Writes the queries of one token to q_out: rotated, or for a token of padding as they are.
template <class T>
void apply_rotary_to_queries(const AppendKvParams& p, int64_t token, int32_t position) {
    const bool is_padding = position < 0;
    if (is_padding && p.q_out == p.q) return;
    for (int32_t h = 0; h < p.num_q_heads; ++h) {
        const T* from = static_cast<const T*>(p.q) + token * p.q_token_stride + h * p.q_head_stride;
        T* to = static_cast<T*>(p.q_out) + token * p.q_out_token_stride + h * p.q_out_head_stride;
        if (is_padding) {
            std::memcpy(to, from, p.head_dim * sizeof(T));
        } else {
            float* const row = row_of_floats(p.head_dim);
            apply_rotary(p.rotary, position, from, p.head_dim, row);
            store_scaled(row, to, p.head_dim, 1.0f);
        }
    }
}

// Stores numbers as codes, which every backend has to compute alike.
template <class T, class Code>
void store_codes(const T* from, Code* to, int32_t n, const CodeScale& scale) {
    for (int32_t d = 0; d < n; ++d) from_float(scale(to_float(from[d])), to[d]);
}

template <class T>
void store_codes(const T* from, Int4Pair* to, int32_t n, const CodeScale& scale) {
    auto code = [&](int32_t d) { return to_int4(scale.above_minimum(to_float(from[d]))); };
    for (int32_t d = 0; d < n; d += 2) to[d / 2].pair = static_cast<uint8_t>(code(d) | code(d + 1) << 4);
}

// Stores a row with a scale of its own, which goes to `word`.
template <class T, class Code>
void store_row(const T* from, Code* to, int32_t n, uint32_t& word) {
    uint32_t absmax = 0;
    for (int32_t d = 0; d < n; ++d) absmax = std::max(absmax, size_bits(to_float(from[d])));
    const CodeScale scale = code_scale_of_row(absmax, kLargestOf<Code>);
    word = bits_of_float(scale.scale);
    store_codes(from, to, n, scale);
}

template <class T>
void store_row(const T* from, Int4Pair* to, int32_t n, uint32_t& word) {
    int32_t min = INT32_MAX, max = INT32_MIN;
    for (int32_t d = 0; d < n; ++d) {
        const int32_t bits = order_bits(to_float(from[d]));
        min = std::min(min, bits);
        max = std::max(max, bits);
    }
    const CodeScale scale = int4_scale_of_row(min, max);
    word = int4_word(scale);
    store_codes(from, to, n, scale);
}

// Where a token goes.
struct Slot {
    int64_t page;
    int32_t slot;      // of the page
    int32_t position;  // in its sequence, where that is known
};

// Where the keys, or the values, of new tokens come from and go to.
template <class T, class Stored>
struct Rows {
    const T* from;
    int64_t from_token_stride, from_head_stride;
    Stored* pages;
    int64_t page_stride, slot_stride, head_stride;
    float scale;
    CacheScales static_scales, scales;
    KeyTransform transform;
    Rotary rotary;
    int32_t head_dim;

    void append(const AppendKvParams& p, int64_t token, const Slot& at) const {
        for (int32_t h = 0; h < p.num_kv_heads; ++h) {
            const T* row = from + token * from_token_stride + h * from_head_stride;
            if (rotary.dim > 0) {
                float* const rotated = row_of_floats(head_dim);
                apply_rotary(rotary, at.position, row, head_dim, rotated);
                store(rotated, head_dim, at, h);
            } else {
                store(row, head_dim, at, h);
            }
        }
    }

  private:
    template <class Number>
    void store(const Number* row, int32_t n, const Slot& at, int32_t head) const {
        Stored* to = pages + at.page * page_stride + at.slot * slot_stride + head * head_stride;
        if constexpr (!kIsCode<Stored>) {
            store_scaled(row, to, n, scale);
        } else if (transform.is_identity()) {
            store_as_codes(row, to, n, at, head);
        } else {
            float* const transformed = row_of_floats(n);  // where a rotated row is already
            transform_row(transform, row, n, head, KeyTransformSide::key, transformed);
            store_as_codes(transformed, to, n, at, head);
        }
    }

    template <class Number>
    void store_as_codes(const Number* row, Stored* to, int32_t n, const Slot& at, int32_t head) const {
        if (scales.data) return store_row(row, to, n, scales.word(at.page, at.slot, head));
        const float own = static_scales.data ? float_of_bits(static_scales.word(0, 0, head)) : scale;
        store_codes(row, to, n, CodeScale::of(own));
    }
};

template <class T, class StoredK, class StoredV>
void append_typed(const AppendKvParams& p) {
    const Rows<T, StoredK> keys{static_cast<const T*>(p.k),
                                p.k_token_stride,
                                p.k_head_stride,
                                static_cast<StoredK*>(p.k_pages),
                                p.k_page_stride,
                                p.k_slot_stride,
                                p.k_pages_head_stride,
                                p.k_scale,
                                p.k_static_scales,
                                p.k_scales,
                                p.key_transform,
                                p.rotary,
                                p.head_dim};
    const Rows<T, StoredV> values{static_cast<const T*>(p.v),
                                  p.v_token_stride,
                                  p.v_head_stride,
                                  static_cast<StoredV*>(p.v_pages),
                                  p.v_page_stride,
                                  p.v_slot_stride,
                                  p.v_pages_head_stride,
                                  p.v_scale,
                                  p.v_static_scales,
                                  p.v_scales,
                                  {},
                                  {},
                                  p.head_dim_v};
    auto append_token = [&](int32_t b, int64_t token, int64_t from_end) {  // 1: the last token
        const auto position = static_cast<int32_t>(p.seq_lens[b] - from_end);
        apply_rotary_to_queries<T>(p, token, position);
        if (position < 0) return;  // padding
        const int64_t page = p.page_table[b * p.page_table_stride + position / p.page_size];
        const Slot at{page, position % p.page_size, position};
        keys.append(p, token, at);
        values.append(p, token, at);
    };
    const int64_t numbers =
        int64_t{p.num_kv_heads + p.num_q_heads} * p.head_dim + int64_t{p.num_kv_heads} * p.head_dim_v;
    const int64_t grain = grain_for(numbers * static_cast<int64_t>(sizeof(T)));
    if (p.slot_mapping) {
        parallel_for_ranges(p.total, grain, [&](int64_t begin, int64_t end) {
            for (int64_t token = begin; token < end; ++token) {
                const int64_t slot = p.mapped_slot(token);
                if (slot < 0) continue;
                const Slot at{slot / p.page_size, static_cast<int32_t>(slot % p.page_size), 0};
                keys.append(p, token, at);
                values.append(p, token, at);
            }
        });
        return;
    }
    if (!p.cu_seqlens) {
        parallel_for_ranges(p.batch, grain, [&](int64_t begin, int64_t end) {
            for (auto b = static_cast<int32_t>(begin); b < end; ++b) append_token(b, b, 1);
        });
        return;
    }
    parallel_for_ranges(p.total, grain, [&](int64_t begin, int64_t end) {
        const int64_t num_new = p.cu_seqlens[p.batch];
        for (int64_t token = std::max(begin, num_new); token < end; ++token)
            apply_rotary_to_queries<T>(p, token, -1);
        int64_t token = std::max<int64_t>(begin, p.cu_seqlens[0]);
        end = std::min(end, num_new);
        int32_t b = 0;  // the last sequence that starts at `token` or before
        for (int32_t end = p.batch; end - b > 1;) {
            const int32_t middle = b + (end - b) / 2;
            (p.cu_seqlens[middle] <= token ? b : end) = middle;
        }
        for (; token < end; ++token) {
            while (token >= p.cu_seqlens[b + 1]) ++b;
            append_token(b, token, p.cu_seqlens[b + 1] - token);
        }
    });
}

}  // namespace

void append_kv(const AppendKvParams& p) {
    with_type(p.dtype, [&](auto type) {
        using T = decltype(type);
        if (p.k_dtype == p.dtype) return append_typed<T, T, T>(p);
        with_cache_types(p.k_dtype, p.v_dtype, [&](auto k, auto v) {
            if constexpr (kIsCode<decltype(k)>) append_typed<T, decltype(k), decltype(v)>(p);
        });
    });
}

void copy_pages(const CopyPagesParams& p) {
    using Pages = CopyPagesParams::Pages;
    const int64_t element = size_of(p.dtype);
    auto row = [element](const Pages& pages, int64_t page, int32_t slot, int32_t head) {
        return static_cast<char*>(pages.data) +
               (page * pages.page_stride + slot * pages.slot_stride + head * pages.head_stride) * element;
    };
    auto copy = [&](int32_t row_bytes, const Pages& from, const CacheScales& from_scales, int32_t from_page,
                    const Pages& to, const CacheScales& to_scales, int32_t to_page) {
        for (int32_t slot = 0; slot < p.page_size; ++slot) {
            for (int32_t h = 0; h < p.num_kv_heads; ++h) {
                std::memcpy(row(to, to_page, slot, h), row(from, from_page, slot, h), row_bytes);
                if (from_scales.data) to_scales.word(to_page, slot, h) = from_scales.word(from_page, slot, h);
            }
        }
    };
    const int64_t token_bytes = p.num_kv_heads * (int64_t{p.k_row_bytes} + p.v_row_bytes);
    parallel_for_ranges(p.num_copies, grain_for(p.page_size * token_bytes), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const IndexArray pages = p.copies.from(i * p.copies_stride);
            copy(p.k_row_bytes, p.from_k, p.from_k_scales, pages[0], p.to_k, p.to_k_scales, pages[1]);
            copy(p.v_row_bytes, p.from_v, p.from_v_scales, pages[0], p.to_v, p.to_v_scales, pages[1]);
        }
    });
}

}  // namespace octavo::cpu
