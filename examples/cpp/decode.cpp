// Two samples of one prompt decode side by side: pages shared, the last one copied on write, new tokens
// appended, attention over the paged cache. Runs on the CPU; with --gpu on the GPU too, and compares.
#include <octavo/page_allocator.h>
#include <octavo/paged_attention.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef EXAMPLE_WITH_CUDA
#include <cuda_runtime.h>
#else
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
#endif

namespace {

using octavo::DType;
using octavo::TensorView;

constexpr int64_t kNumPages = 16, kPageSize = 16, kPrompt = 40, kBatch = 2;
constexpr int64_t kNumQHeads = 8, kNumKvHeads = 2, kHeadDim = 64;

using Half = uint16_t;  // the bits of a float16 from [1, 2): the exponent is fixed, 10 bits follow

float to_float(Half value) { return 1.0f + static_cast<float>(value & 0x3ff) / 1024.0f; }

std::vector<Half> random_halves(int64_t count, unsigned seed) {
    std::mt19937 generator(seed);
    std::vector<Half> values(count);
    for (Half& value : values) value = static_cast<Half>(0x3c00 | (generator() & 0x3ff));
    return values;
}

#ifdef EXAMPLE_WITH_CUDA
void check(const char* function, cudaError_t status) {
    if (status != cudaSuccess)
        throw std::runtime_error(std::string(function) + ": " + cudaGetErrorString(status));
}
#endif

// The arrays of one device.
class Memory {
  public:
    explicit Memory(octavo::DeviceType type) : device_{type, 0} {}

    // A copy of the values.
    template <class T>
    TensorView put(const std::vector<T>& values, DType dtype, std::initializer_list<int64_t> shape) {
        const size_t bytes = values.size() * sizeof(T);
        owned_.push_back(allocate(bytes));
        copy(owned_.back().get(), values.data(), bytes, cudaMemcpyHostToDevice);
        return {owned_.back().get(), dtype, shape, device_};
    }

    std::vector<Half> read(const TensorView& view) const {  // waits for the work
        std::vector<Half> values(view.size());
        copy(values.data(), view.data, values.size() * sizeof(Half), cudaMemcpyDeviceToHost);
        return values;
    }

  private:
    std::shared_ptr<void> allocate(size_t bytes) const {
        if (device_.type != octavo::DeviceType::cuda) return {std::malloc(bytes), std::free};
#ifdef EXAMPLE_WITH_CUDA
        void* pointer = nullptr;
        check("cudaMalloc", cudaMalloc(&pointer, bytes));
        return {pointer, cudaFree};
#else
        throw std::runtime_error("no GPU: this program was built without a CUDA toolkit");
#endif
    }
    void copy(void* to, const void* from, size_t bytes, [[maybe_unused]] cudaMemcpyKind kind) const {
#ifdef EXAMPLE_WITH_CUDA
        if (device_.type == octavo::DeviceType::cuda) {
            check("cudaMemcpy", cudaMemcpy(to, from, bytes, kind));
            return;
        }
#endif
        std::memcpy(to, from, bytes);
    }

    octavo::Device device_;
    std::vector<std::shared_ptr<void>> owned_;
};

std::vector<Half> decode(octavo::DeviceType device) {
    Memory memory(device);
    const std::vector<Half> zeros(kNumPages * kPageSize * kNumKvHeads * kHeadDim);
    auto halves = [&](int64_t tokens, int64_t heads, unsigned seed) {
        return memory.put(random_halves(tokens * heads * kHeadDim, seed), DType::float16,
                          {tokens, heads, kHeadDim});
    };
    auto integers = [&](const std::vector<int32_t>& values, std::initializer_list<int64_t> shape) {
        return memory.put(values, DType::int32, shape);
    };
    auto pages = [&] {
        return memory.put(zeros, DType::float16, {kNumPages, kPageSize, kNumKvHeads, kHeadDim});
    };
    const TensorView k_pages = pages(), v_pages = pages();

    // The prompt, in one call.
    octavo::PageAllocator alloc(kNumPages, kPageSize);
    const octavo::Sequence prompt = alloc.create();
    alloc.extend(prompt, kPrompt);
    const std::vector<int32_t> prompt_pages = alloc.pages(prompt);
    octavo::AppendKvArgs append;
    append.k = halves(kPrompt, kNumKvHeads, 1);
    append.v = halves(kPrompt, kNumKvHeads, 2);
    append.k_pages = k_pages;
    append.v_pages = v_pages;
    append.page_table = integers(prompt_pages, {1, static_cast<int64_t>(prompt_pages.size())});
    append.seq_lens = integers({kPrompt}, {1});
    append.cu_seqlens = integers({0, kPrompt}, {2});
    octavo::append_kv(append);

    // Two samples, one token each. Both get a copy of the last page, which the prompt keeps.
    const std::vector<octavo::Sequence> samples = alloc.fork(prompt, kBatch);
    std::vector<int32_t> page_table, seq_lens, copies;
    for (const octavo::Sequence sample : samples) {
        alloc.extend(sample, 1);
        const std::vector<int32_t> its_pages = alloc.pages(sample);
        page_table.insert(page_table.end(), its_pages.begin(), its_pages.end());
        seq_lens.push_back(static_cast<int32_t>(alloc.length(sample)));
    }
    for (const octavo::PageCopy copy : alloc.take_copies()) copies.insert(copies.end(), {copy.from, copy.to});
    octavo::CopyPagesArgs copy;
    copy.k_pages = k_pages;
    copy.v_pages = v_pages;
    copy.copies = integers(copies, {static_cast<int64_t>(copies.size()) / 2, 2});
    octavo::copy_pages(copy);

    append.k = halves(kBatch, kNumKvHeads, 3);
    append.v = halves(kBatch, kNumKvHeads, 4);
    append.page_table = integers(page_table, {kBatch, static_cast<int64_t>(page_table.size()) / kBatch});
    append.seq_lens = integers(seq_lens, {kBatch});
    append.cu_seqlens.reset();
    octavo::append_kv(append);

    octavo::PagedAttentionArgs attend;
    attend.q = halves(kBatch, kNumQHeads, 5);
    attend.k_pages = k_pages;
    attend.v_pages = v_pages;
    attend.page_table = *append.page_table;
    attend.seq_lens = *append.seq_lens;
    attend.out = halves(kBatch, kNumQHeads, 6);  // overwritten
    octavo::paged_attention(attend);
    return memory.read(attend.out);
}

int run(bool with_gpu) {
    const std::vector<Half> out = decode(octavo::DeviceType::cpu);
    // A mean of values from [1, 2) lies there too: the samples' first elements.
    std::printf("CPU: %.4f %.4f\n", to_float(out[0]), to_float(out[kNumQHeads * kHeadDim]));
    if (!with_gpu) return 0;
    const std::vector<Half> on_gpu = decode(octavo::DeviceType::cuda);
    float error = 0.0f;
    for (size_t i = 0; i < out.size(); ++i)
        error = std::max(error, std::abs(to_float(out[i]) - to_float(on_gpu[i])));
    std::printf("GPU: differs by %.4f at most\n", error);
    return error < 0.01f ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    const bool with_gpu = argc == 2 && std::strcmp(argv[1], "--gpu") == 0;
    if (argc > 1 && !with_gpu) {
        std::fprintf(stderr, "usage: %s [--gpu]\n", argv[0]);
        return 2;
    }
    try {
        return run(with_gpu);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
