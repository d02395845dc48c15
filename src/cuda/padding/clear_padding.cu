// Clears the rows of packed results that belong to no sequence.
//
// grid: x parts of the padding of an array, y arrays. Where there is no padding, as in most calls, a CTA
// reads one number and ends.
#include "common/print_kernels.h"
#include "cuda/backend.h"
#include "cuda/launch.cuh"
#include "cuda/ptx/grid_dependency.h"
#include "params/padding.h"

#include <string>

namespace octavo::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kCtas = 64;  // CTAs for an array: enough to write at the speed of the memory

// Fills this CTA's part. `Word` has as many bytes as the alignment of all rows allows.
template <class Word>
__device__ void clear(const PaddedArray& array, Word word) {
    const int64_t begin = array.cu_seqlens[array.batch];
    const int64_t words = array.head_bytes / static_cast<int32_t>(sizeof(Word));  // in one head
    const int64_t token_words = words * array.num_heads, end = (array.total - begin) * token_words;
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < end; i += kCtas * kThreads) {
        const int64_t token = i / token_words, in_token = i - token * token_words, head = in_token / words;
        char* const row =
            static_cast<char*>(array.data) + (begin + token) * array.token_stride + head * array.head_stride;
        reinterpret_cast<Word*>(row)[in_token - head * words] = word;
    }
}

__global__ void __launch_bounds__(kThreads) clear_padding_kernel(const __grid_constant__ Padding padding) {
    // This kernel does not let the next one start early, since the next kernel's CTAs would pile up around
    // these.
    ptx::wait_for_previous_grid();
    const PaddedArray& array = padding.arrays[blockIdx.y];
    const uint32_t word = array.word;
    const int64_t bits =
        reinterpret_cast<intptr_t>(array.data) | array.token_stride | array.head_stride | array.head_bytes;
    if (bits % 16 == 0) return clear(array, make_uint4(word, word, word, word));
    if (bits % 4 == 0) return clear(array, word);
    clear(array, static_cast<uint16_t>(word));
}

}  // namespace

void clear_padding(const Padding& padding, int32_t device, void* stream) {
    if (padding.count == 0) return;
    if (prints_kernels()) {
        Explanation text;
        text.kernel = "clear_padding_kernel";
        text.summary = std::to_string(kCtas) + " CTAs of " + std::to_string(kThreads) +
                       " threads for the rows past the last token of each of " +
                       std::to_string(padding.count) + " arrays";
        text.file = "src/cuda/padding/clear_padding.cu";
        print_kernel(text);
    }
    const DeviceGuard guard(device);
    const LaunchShape shape{dim3(kCtas, padding.count), kThreads, true};
    launch<clear_padding_kernel>("clear_padding", device, static_cast<cudaStream_t>(stream), shape, padding);
}

}  // namespace octavo::cuda
