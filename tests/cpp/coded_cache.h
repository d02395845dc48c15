// Caches of codes for a PagedCall. Scales are powers of two, so that the numbers which codes stand for are
// float16 and bfloat16. Unused slots and pages hold codes of NaN, and their scales are NaN.
#pragma once

#include "cuda/codes.h"
#include "cuda/workspace.h"
#include "paged_call.h"

#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

namespace octavo {

enum class Layout { token_major, head_major, keys_beside_values };
enum class Scales { none, of_heads, of_tokens };

// One tensor of a cache: a row of codes and a scale for each token and head.
class CodedTensor {
  public:
    CodedTensor(DType type, int64_t head_dim, Scales scales)
        : type_(type), head_dim_(head_dim), scales_(scales) {}

    int64_t row_bytes() const { return head_dim_ * cuda::bits_of(type_) / 8; }
    // Random codes and their scale, into `row` and `scale`; `values` gets what they stand for.
    void make_row(Random& random, uint8_t* row, uint32_t& scale, int64_t head, uint16_t* values,
                  DType dtype) const {
        auto& engine = random.engine();
        const int spread = scales_ == Scales::of_tokens ? static_cast<int>(engine() % 4) : 0;
        const int of_head = scales_ == Scales::none ? 0 : static_cast<int>(head % 3);
        const float size = std::exp2(static_cast<float>(unit() - spread - of_head));
        const float minimum = -size * static_cast<float>(engine() % 12);
        std::memcpy(&scale, &size, sizeof scale);
        if (type_ == DType::int4)
            scale = to_bits(size, DType::float16) | uint32_t{to_bits(minimum, DType::float16)} << 16;
        for (int64_t d = 0; d < head_dim_; ++d) {
            uint8_t code = static_cast<uint8_t>(engine());
            float value = 0.0f;
            switch (type_) {
                case DType::int4:
                    code &= 15;
                    row[d / 2] = static_cast<uint8_t>(d % 2 == 0 ? code : row[d / 2] | code << 4);
                    values[d] = to_bits(size * static_cast<float>(code) + minimum, dtype);
                    continue;
                case DType::int8: value = static_cast<int8_t>(code); break;
                case DType::float8_e4m3fn:  // from 1 / 8 to 4
                    code = static_cast<uint8_t>((code & 0x87) | (4 + engine() % 5) << 3);
                    value = float_of(code, 3, 7);
                    break;
                default:  // float8_e5m2
                    code = static_cast<uint8_t>((code & 0x83) | (12 + engine() % 5) << 2);
                    value = float_of(code, 2, 15);
                    break;
            }
            row[d] = code;
            values[d] = to_bits(size * value, dtype);
        }
    }
    // The scale of all heads, where there are no scales in memory.
    float scale() const { return std::exp2(static_cast<float>(unit())); }
    uint8_t unused_code() const { return 0xff; }
    uint32_t unused_scale() const { return type_ == DType::int4 ? 0x7e007e00u : 0x7fc00000u; }

  private:
    // The largest values are then 2 to 4.
    int unit() const { return type_ == DType::int8 ? -6 : (type_ == DType::int4 ? -2 : -1); }
    static float float_of(uint8_t code, int mantissa_bits, int bias) {
        const int exponent = (code & 0x7f) >> mantissa_bits;
        const int mantissa = code & ((1 << mantissa_bits) - 1);
        const float size =
            std::ldexp(1.0f + std::ldexp(static_cast<float>(mantissa), -mantissa_bits), exponent - bias);
        return code & 0x80 ? -size : size;
    }

    DType type_;
    int64_t head_dim_;
    Scales scales_;
};

// int4 has a scale for each token always.
inline Scales pick_scales(Random& random, cuda::Codes codes) {
    if (cuda::type_of_values(codes) == DType::int4) return Scales::of_tokens;
    return random.pick({Scales::none, Scales::of_heads, Scales::of_tokens});
}
inline Layout pick_layout(Random& random) {
    return random.pick({Layout::token_major, Layout::head_major, Layout::keys_beside_values});
}
inline std::string name_of(Layout layout, Scales scales) {
    return "layout " + std::to_string(static_cast<int>(layout)) + ", scales " +
           std::to_string(static_cast<int>(scales));
}

// The cache of a call as codes, and the call's own as what they stand for.
class CodedCache {
  public:
    CodedCache(Random& random, PagedCall& call, cuda::Codes codes, Layout layout, Scales scales)
        : codes_(codes),
          scales_(scales),
          k_(cuda::type_of_keys(codes), call.head_dim, scales),
          v_(cuda::type_of_values(codes), call.head_dim_v, scales) {
        const int64_t pages = call.pages_shape[0], size = call.page_size(), heads = call.num_kv_heads();
        const bool is_beside = layout == Layout::keys_beside_values;
        const int64_t k_row = is_beside ? k_.row_bytes() + v_.row_bytes() : k_.row_bytes();
        const int64_t v_row = is_beside ? k_row : v_.row_bytes();
        const bool head_major = layout == Layout::head_major;
        k_strides_ = strides(k_row, size, heads, head_major);
        v_strides_ = strides(v_row, size, heads, head_major);
        word_strides_ = strides(1, size, heads, !head_major);
        std::vector<uint8_t> k(pages * k_strides_.page, k_.unused_code());
        std::vector<uint8_t> v(is_beside ? 0 : pages * v_strides_.page, v_.unused_code());
        std::vector<uint32_t> k_words(pages * word_strides_.page, k_.unused_scale());
        std::vector<uint32_t> v_words(pages * word_strides_.page, v_.unused_scale());
        uint8_t* const v_first = is_beside ? k.data() + k_.row_bytes() : v.data();
        std::vector<uint32_t> k_heads(heads), v_heads(heads);
        for (int64_t b = 0; b < call.batch; ++b) {
            for (int64_t i = 0; i < call.lengths.host[b]; ++i) {
                const int64_t page = call.table.host[b * call.max_pages + i / size], slot = i % size;
                for (int64_t h = 0; h < heads; ++h) {
                    const int64_t row = (page * size + slot) * heads + h;
                    const int64_t word = word_strides_.at(page, slot, h);
                    k_.make_row(random, k.data() + k_strides_.at(page, slot, h), k_words[word], h,
                                call.k.host.data() + row * call.head_dim, call.dtype);
                    v_.make_row(random, v_first + v_strides_.at(page, slot, h), v_words[word], h,
                                call.v.host.data() + row * call.head_dim_v, call.dtype);
                    k_heads[h] = k_words[word];
                    v_heads[h] = v_words[word];
                }
            }
        }
        k_bytes_.emplace(k);
        v_bytes_.emplace(v);
        k_words_.emplace(scales == Scales::of_heads ? k_heads : k_words);
        v_words_.emplace(scales == Scales::of_heads ? v_heads : v_words);
        v_offset_ = is_beside ? k_.row_bytes() : -1;
    }

    // The parameters of the call over the codes, on the GPU.
    AttentionParams params(const PagedAttentionArgs& args) const {
        AttentionParams p = check_paged_attention(args);
        p.k_dtype = cuda::type_of_keys(codes_);
        p.v_dtype = cuda::type_of_values(codes_);
        auto* const k = static_cast<char*>(k_bytes_->on_gpu(DType::int8, {1}).data);
        p.k = k;
        p.v = v_offset_ >= 0 ? k + v_offset_ : v_bytes_->on_gpu(DType::int8, {1}).data;
        p.k_outer_stride = k_strides_.page, p.k_token_stride = k_strides_.token;
        p.k_head_stride = k_strides_.head;
        p.v_outer_stride = v_strides_.page, p.v_token_stride = v_strides_.token;
        p.v_head_stride = v_strides_.head;
        if (scales_ == Scales::none) {
            p.softmax_scale *= k_.scale();
            p.out_scale *= v_.scale();
            return p;
        }
        p.k_scales = scales(*k_words_);
        p.v_scales = scales(*v_words_);
        return p;
    }

  private:
    struct Strides {
        int64_t page, token, head;

        int64_t at(int64_t page_index, int64_t slot, int64_t head_index) const {
            return page_index * page + slot * token + head_index * head;
        }
    };
    static Strides strides(int64_t row, int64_t page_size, int64_t heads, bool head_major) {
        if (head_major) return {row * page_size * heads, row, row * page_size};
        return {row * page_size * heads, row * heads, row};
    }
    CacheScales scales(const Mirror<uint32_t>& words) const {
        void* const data = words.on_gpu(DType::int32, {1}).data;
        if (scales_ == Scales::of_heads) return {data, 0, 0, 1};
        return {data, word_strides_.page, word_strides_.token, word_strides_.head};
    }

    cuda::Codes codes_;
    Scales scales_;
    CodedTensor k_, v_;
    std::optional<Mirror<uint8_t>> k_bytes_, v_bytes_;
    std::optional<Mirror<uint32_t>> k_words_, v_words_;
    Strides k_strides_{}, v_strides_{}, word_strides_{};
    int64_t v_offset_ = -1;
};

// Fills the workspace that this user gets next with NaN.
inline void poison_workspace(int64_t bytes, cuda::WorkspaceUser user) {
    const cuda::Workspace workspace(0, bytes, nullptr, user);
    ASSERT_EQ(cudaMemsetAsync(workspace.bytes(), 0xff, bytes, nullptr), cudaSuccess);
}

inline constexpr const char* kCodesNames[] = {"none", "e4m3", "e5m2", "int8", "int4", "int8_int4"};

}  // namespace octavo
