// Device memory of tests.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>

namespace octavo {

// Where an array lies. Behind a gap, nothing is mapped before its first byte, so that a read there fails,
// which elsewhere is likely to find another array.
enum class ArrayPlace { anywhere, behind_a_gap };

class DeviceMemory {
  public:
    DeviceMemory(size_t bytes, ArrayPlace place) {
        if (place == ArrayPlace::anywhere) {
            EXPECT_EQ(cudaMalloc(&data_, std::max<size_t>(bytes, 1)), cudaSuccess);
            return;
        }
        EXPECT_EQ(cudaFree(nullptr), cudaSuccess);  // makes the context
        CUmemAllocationProp properties{};
        properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
        size_t page = 0;
        call<decltype(&cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity", &page, &properties,
                                                       CU_MEM_ALLOC_GRANULARITY_MINIMUM);
        if (page == 0) return;
        mapped_bytes_ = (std::max<size_t>(bytes, 1) + page - 1) / page * page;
        reserved_bytes_ = page + mapped_bytes_;
        call<decltype(&cuMemAddressReserve)>("cuMemAddressReserve", &reserved_, reserved_bytes_, size_t{0},
                                             CUdeviceptr{0}, 0ull);
        call<decltype(&cuMemCreate)>("cuMemCreate", &handle_, mapped_bytes_, &properties, 0ull);
        const CUdeviceptr begin = reserved_ + page;
        call<decltype(&cuMemMap)>("cuMemMap", begin, mapped_bytes_, size_t{0}, handle_, 0ull);
        const CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        call<decltype(&cuMemSetAccess)>("cuMemSetAccess", begin, mapped_bytes_, &access, size_t{1});
        data_ = reinterpret_cast<void*>(begin);
    }
    ~DeviceMemory() {
        if (reserved_bytes_ == 0) {
            cudaFree(data_);
            return;
        }
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        call<decltype(&cuMemUnmap)>("cuMemUnmap", reinterpret_cast<CUdeviceptr>(data_), mapped_bytes_);
        call<decltype(&cuMemRelease)>("cuMemRelease", handle_);
        call<decltype(&cuMemAddressFree)>("cuMemAddressFree", reserved_, reserved_bytes_);
    }
    DeviceMemory(const DeviceMemory&) = delete;

    void* data() const { return data_; }

  private:
    // A function of the driver, whose library the tests are not linked with.
    template <class Function, class... Arguments>
    static void call(const char* name, Arguments... arguments) {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found;
        ASSERT_EQ(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found),
                  cudaSuccess);
        ASSERT_EQ(found, cudaDriverEntryPointSuccess) << name;
        ASSERT_EQ(reinterpret_cast<Function>(function)(arguments...), CUDA_SUCCESS) << name;
    }

    void* data_ = nullptr;
    CUdeviceptr reserved_ = 0;
    CUmemGenericAllocationHandle handle_ = 0;
    size_t reserved_bytes_ = 0, mapped_bytes_ = 0;
};

}  // namespace octavo
