// A borrowed, strided array: what every operator takes and writes.
#pragma once

#include <octavo/error.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace octavo {

// Those from int8 to int4 are of codes, which a cache may hold (paged_attention.h): uint8 in an array of
// bytes, and int4 as what such bytes hold, two numbers in each, that of the even index in the lower half.
enum class DType : uint8_t {
    float32,
    float16,
    bfloat16,
    int32,
    int8,
    float8_e4m3fn,
    float8_e5m2,
    uint8,
    int4,
    int64
};

// Every dtype that an array may have.
constexpr DType kDTypes[] = {DType::float32,     DType::float16, DType::bfloat16,
                             DType::int32,       DType::int8,    DType::float8_e4m3fn,
                             DType::float8_e5m2, DType::uint8,   DType::int64};

// meta: shapes, strides and, where they have any, addresses, but no values. Operators refuse such arrays;
// explain() takes them.
enum class DeviceType : uint8_t { cpu, cuda, meta };

struct Device {
    DeviceType type = DeviceType::cpu;
    int32_t index = 0;

    friend bool operator==(Device a, Device b) { return a.type == b.type && a.index == b.index; }
    friend bool operator!=(Device a, Device b) { return !(a == b); }
};

// Bytes of one element, of int4 of two. There is no size for "every other dtype": the library is compiled
// with -Werror=switch, so that a dtype which lacks its line here does not compile.
constexpr int64_t size_of(DType dtype) {
    switch (dtype) {
        case DType::float32: return 4;
        case DType::float16: return 2;
        case DType::bfloat16: return 2;
        case DType::int32: return 4;
        case DType::int8: return 1;
        case DType::float8_e4m3fn: return 1;
        case DType::float8_e5m2: return 1;
        case DType::uint8: return 1;
        case DType::int4: return 1;
        case DType::int64: return 8;
    }
    throw TypeError("size_of: no dtype has the number " + std::to_string(static_cast<int>(dtype)));
}

// Whether its numbers are codes: of keys and values divided by a scale.
constexpr bool is_code(DType dtype) { return size_of(dtype) == 1; }

std::string to_string(DType dtype);    // "float16"
std::string to_string(Device device);  // "cpu", "cuda:0", "meta"

// Owns nothing. Shape and strides count elements. An axis of length one, and every axis of an empty
// array, may have any stride.
struct TensorView {
    static constexpr int kMaxDims = 6;

    void* data = nullptr;
    DType dtype = DType::float32;
    Device device;
    int32_t ndim = 0;
    bool read_only = false;  // operators refuse to write to it
    std::array<int64_t, kMaxDims> shape{};
    std::array<int64_t, kMaxDims> strides{};

    TensorView() = default;

    // A contiguous (C order) array over `data`.
    TensorView(void* data, DType dtype, std::initializer_list<int64_t> shape, Device device = {});

    int64_t size() const;                // number of elements; INT64_MAX where an int64_t is too small
    std::string shape_string() const;    // "[2, 128, 9, 64]"
    std::string strides_string() const;  // likewise
};

}  // namespace octavo
