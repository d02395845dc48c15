#include "cpu/backend.h"

#include <cstring>

namespace octavo::cpu {

void clear_padding(const Padding& padding) {
    for (int32_t i = 0; i < padding.count; ++i) {
        const PaddedArray& array = padding.arrays[i];
        for (int64_t token = array.cu_seqlens[array.batch]; token < array.total; ++token) {
            for (int32_t head = 0; head < array.num_heads; ++head) {
                char* const row =
                    static_cast<char*>(array.data) + token * array.token_stride + head * array.head_stride;
                if (array.word == 0) {
                    std::memset(row, 0, array.head_bytes);
                    continue;
                }
                for (int32_t at = 0; at < array.head_bytes; at += sizeof(array.word))
                    std::memcpy(row + at, &array.word, sizeof(array.word));
            }
        }
    }
}

}  // namespace octavo::cpu
