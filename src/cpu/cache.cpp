// What writes a paged cache on the CPU.
#include "cpu/backend.h"
#include "cpu/thread_pool.h"
#include "cpu/with_type.h"

#include <algorithm>
#include <cstring>

namespace octavo::cpu {
namespace {

// Bytes that one piece of parallel work moves at least: below, waking a thread costs more than it saves.
constexpr int64_t kGrainBytes = 64 << 10;

int64_t grain_for(int64_t item_bytes) {
    return std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, item_bytes));
}

template <class T>
void store_scaled(const T* from, T* to, int32_t n, float scale) {
    if (scale == 1.0f) {
        std::memcpy(to, from, n * sizeof(T));
    } else {
        for (int32_t d = 0; d < n; ++d) from_float(to_float(from[d]) / scale, to[d]);
    }
}

// As codes, by a product with 1 / scale in float32: every backend has to do the same for the same codes.
template <class T, class Code>
void store_scaled(const T* from, Code* to, int32_t n, float scale) {
    const float inverse = 1.0f / scale;
    for (int32_t d = 0; d < n; ++d) from_float(to_float(from[d]) * inverse, to[d]);
}

template <class T, class Stored>
void append_typed(const AppendKvParams& p) {
    auto append_token = [&](int32_t b, int64_t token, int32_t position) {
        int64_t page = p.page_table[b * p.page_table_stride + position / p.page_size];
        int32_t slot = position % p.page_size;
        const T* k = static_cast<const T*>(p.k) + token * p.k_token_stride;
        const T* v = static_cast<const T*>(p.v) + token * p.v_token_stride;
        Stored* k_slot = static_cast<Stored*>(p.k_pages) + page * p.k_page_stride + slot * p.k_slot_stride;
        Stored* v_slot = static_cast<Stored*>(p.v_pages) + page * p.v_page_stride + slot * p.v_slot_stride;
        for (int32_t h = 0; h < p.num_kv_heads; ++h) {
            store_scaled(k + h * p.k_head_stride, k_slot + h * p.k_pages_head_stride, p.head_dim, p.k_scale);
            store_scaled(v + h * p.v_head_stride, v_slot + h * p.v_pages_head_stride, p.head_dim, p.v_scale);
        }
    };
    const int64_t token_bytes = 2 * int64_t{p.num_kv_heads} * p.head_dim * static_cast<int64_t>(sizeof(T));
    const int64_t grain = grain_for(token_bytes);
    if (!p.cu_seqlens) {
        parallel_for_ranges(p.batch, grain, [&](int64_t begin, int64_t end) {
            for (auto b = static_cast<int32_t>(begin); b < end; ++b) {
                if (p.seq_lens[b] > 0) append_token(b, b, p.seq_lens[b] - 1);
            }
        });
        return;
    }
    parallel_for_ranges(p.total, grain, [&](int64_t begin, int64_t end) {
        int64_t token = std::max<int64_t>(begin, p.cu_seqlens[0]);
        end = std::min<int64_t>(end, p.cu_seqlens[p.batch]);
        auto b = static_cast<int32_t>(std::upper_bound(p.cu_seqlens, p.cu_seqlens + p.batch + 1, token) -
                                      p.cu_seqlens - 1);
        for (; token < end; ++token) {
            while (token >= p.cu_seqlens[b + 1]) ++b;
            int64_t from_end = p.cu_seqlens[b + 1] - token;
            if (p.seq_lens[b] > 0) append_token(b, token, static_cast<int32_t>(p.seq_lens[b] - from_end));
        }
    });
}

}  // namespace

void append_kv(const AppendKvParams& p) {
    with_type(p.dtype, [&](auto type) {
        using T = decltype(type);
        if (p.k_dtype == p.dtype) return append_typed<T, T>(p);
        with_cache_type(p.k_dtype, [&](auto code) { append_typed<T, decltype(code)>(p); });
    });
}

void copy_pages(const CopyPagesParams& p) {
    const int64_t element = size_of(p.dtype), row_bytes = p.head_dim * element;
    using Pages = CopyPagesParams::Pages;
    auto row = [element](const Pages& pages, int64_t page, int32_t slot, int32_t head) {
        return static_cast<char*>(pages.data) +
               (page * pages.page_stride + slot * pages.slot_stride + head * pages.head_stride) * element;
    };
    auto copy = [&](const Pages& from, int32_t from_page, const Pages& to, int32_t to_page) {
        for (int32_t slot = 0; slot < p.page_size; ++slot) {
            for (int32_t h = 0; h < p.num_kv_heads; ++h)
                std::memcpy(row(to, to_page, slot, h), row(from, from_page, slot, h), row_bytes);
        }
    };
    const int64_t page_bytes = 2 * int64_t{p.page_size} * p.num_kv_heads * row_bytes;
    parallel_for_ranges(p.num_copies, grain_for(page_bytes), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int32_t* pages = p.copies + i * p.copies_stride;
            copy(p.from_k, pages[0], p.to_k, pages[1]);
            copy(p.from_v, pages[0], p.to_v, pages[1]);
        }
    });
}

}  // namespace octavo::cpu
