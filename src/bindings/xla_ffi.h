// The C ABI of XLA's foreign function interface, version 0.1, as far as Octavo uses it
// (https://openxla.org/xla/custom_call; xla/ffi/api/c_api.h). XLA refuses to start with a handler of a newer
// version than its own, so that a build against the headers of one jaxlib would break all older ones. Later
// versions only add fields at the ends; `size` then says how many there are.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo::xla {

constexpr int32_t kMajorVersion = 0, kMinorVersion = 1;

// What every struct that is passed begins with.
struct Extension {
    size_t size;
    int32_t kind;
    Extension* next;
};
constexpr int32_t kMetadataExtension = 1;

struct Header {
    size_t size = 0;  // of the struct
    Extension* extensions = nullptr;
};

enum DataType : int32_t {
    kPred = 1,
    kS8 = 2,
    kS32 = 4,
    kS64 = 5,
    kU8 = 6,
    kU32 = 8,
    kU64 = 9,
    kF16 = 10,
    kF32 = 11,
    kF64 = 12,
    kBf16 = 16,
    kF8E5m2 = 19,
    kF8E4m3fn = 20
};

struct Buffer {
    Header header;
    int32_t dtype;  // DataType
    void* data;
    int64_t ndim;
    int64_t* shape;  // in C order, unless the caller asked for another layout
};

struct Text {  // not terminated
    const char* data;
    size_t size;
};

struct Scalar {
    int32_t dtype;  // DataType
    void* value;
};

constexpr int32_t kBufferArray = 1;  // the only kind of argument and result

// Arguments or results.
struct Arrays {
    Header header;
    int64_t size;
    int32_t* kinds;
    void** values;
};

enum AttributeKind : int32_t { kScalarAttribute = 3, kTextAttribute = 4 };

struct Attributes {
    Header header;
    int64_t size;
    int32_t* kinds;  // AttributeKind
    Text** names;
    void** values;  // Scalar*, Text*
};

struct Error;
struct ExecutionContext;

// The values are those of absl::StatusCode.
enum ErrorCode : int32_t { kUnknown = 2, kInvalidArgument = 3, kResourceExhausted = 8, kInternal = 13 };

struct MakeError {
    Header header;
    const char* message;
    int32_t code;  // ErrorCode
};

struct GetStream {
    Header header;
    ExecutionContext* context;
    void* stream;  // out: CUstream
};

struct Version {
    Header header;
    int32_t major, minor;
};

// XLA's functions.
struct Api {
    Header header;
    Version version;
    const void* internal;
    Error* (*make_error)(MakeError*);
    void (*get_error_message)(void*);
    void (*destroy_error)(void*);
    Error* (*register_handler)(void*);
    Error* (*get_stream)(GetStream*);
};

// One call of a handler, which returns null or an error.
struct CallFrame {
    Header header;
    const Api* api;
    ExecutionContext* context;
    int32_t stage;
    Arrays arguments;
    Arrays results;
    Attributes attributes;
};

constexpr uint32_t kCommandBufferCompatible = 1;

// A call frame with this extension only asks what the handler is.
struct Metadata {
    size_t size;
    Version version;  // out
    uint32_t traits;  // out
};

struct MetadataExtension {
    Extension base;
    Metadata* metadata;
};

}  // namespace octavo::xla
