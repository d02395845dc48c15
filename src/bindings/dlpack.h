// The C ABI of DLPack 1.3 (https://dmlc.github.io/dlpack/latest/c_api.html), as far as Octavo uses it: the
// capsules that __dlpack__ returns, and the function table behind __dlpack_c_exchange_api__.
#pragma once

#include <cstdint>

namespace octavo::dlpack {

struct Version {
    uint32_t major, minor;
};

// A device or dtype outside these lists is one that Octavo refuses; its number goes into the message.
enum DeviceCode : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };
enum DTypeCode : uint8_t {
    kInt = 0,
    kUInt = 1,
    kFloat = 2,
    kOpaque = 3,
    kBfloat = 4,
    kComplex = 5,
    kBool = 6,
    kFloat8E4m3fn = 10,
    kFloat8E5m2 = 12
};

struct Device {
    int32_t type;  // DeviceCode
    int32_t id;
};

struct DataType {
    uint8_t code;  // DTypeCode
    uint8_t bits;
    uint16_t lanes;

    friend bool operator==(DataType a, DataType b) {
        return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
    }
};

struct Tensor {
    void* data;
    Device device;
    int32_t ndim;
    DataType dtype;
    int64_t* shape;
    int64_t* strides;  // in elements; null: C order (before DLPack 1.2)
    uint64_t byte_offset;
};

// What capsules named "dltensor" hold.
struct ManagedTensor {
    Tensor tensor;
    void* context;
    void (*deleter)(ManagedTensor*);
};

constexpr uint64_t kReadOnly = 1, kCopied = 2;

// What capsules named "dltensor_versioned" hold. If the major version is another one, nothing behind it but
// the deleter may be touched.
struct ManagedTensorVersioned {
    Version version;
    void* context;
    void (*deleter)(ManagedTensorVersioned*);
    uint64_t flags;
    Tensor tensor;
};

constexpr uint32_t kMajorVersion = 1, kMinorVersion = 3;

// What a capsule named "dlpack_exchange_api" on the array type holds. Functions return 0, or -1 with a Python
// error set; none orders streams.
struct ExchangeApi {
    Version version;
    const ExchangeApi* previous;  // of an older major version; may be null
    int (*allocate)(Tensor* prototype, ManagedTensorVersioned** out, void* error_context,
                    void (*set_error)(void* error_context, const char* kind, const char* message));
    int (*managed_tensor_from_object)(void* object, ManagedTensorVersioned** out);
    int (*managed_tensor_to_object)(ManagedTensorVersioned* tensor, void** out_object);  // steals the tensor
    int (*tensor_from_object)(void* object, Tensor* out);  // borrows; may be null
    int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

}  // namespace octavo::dlpack
