// The C face of the library: octavo.h over the C++ headers.
#include "operators/schema.h"

#include <octavo/octavo.h>
#include <octavo/page_allocator.h>
#include <octavo/version.h>

#include <algorithm>
#include <array>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

struct octavo_page_allocator {
    octavo::PageAllocator allocator;
    std::vector<octavo::PageCopy> copies;  // those taken last
};

namespace {

namespace schema = octavo::schema;
using octavo::TensorView;

thread_local std::string last_error;

// Runs `work`, and turns what it throws into a status and a message.
template <class Work>
octavo_status guarded(const Work& work) noexcept {
    auto failed = [](octavo_status status, const char* message) {
        try {
            last_error = message;
        } catch (const std::bad_alloc&) {
            last_error.clear();  // no memory for the message either; the status stands
        }
        return status;
    };
    try {
        work();
        return OCTAVO_OK;
    } catch (const octavo::ValueError& error) {
        return failed(OCTAVO_VALUE_ERROR, error.what());
    } catch (const octavo::TypeError& error) {
        return failed(OCTAVO_TYPE_ERROR, error.what());
    } catch (const octavo::DeviceError& error) {
        return failed(OCTAVO_DEVICE_ERROR, error.what());
    } catch (const octavo::OutOfPages& error) {
        return failed(OCTAVO_OUT_OF_PAGES, error.what());
    } catch (const octavo::InvalidSequence& error) {
        return failed(OCTAVO_INVALID_SEQUENCE, error.what());
    } catch (const octavo::OutOfMemory& error) {
        return failed(OCTAVO_OUT_OF_MEMORY, error.what());
    } catch (const std::bad_alloc&) {
        return failed(OCTAVO_OUT_OF_MEMORY, "out of memory");
    } catch (const std::exception& error) {
        return failed(OCTAVO_ERROR, error.what());
    } catch (...) {
        return failed(OCTAVO_ERROR, "an unknown C++ exception");
    }
}

// What a pointer of the caller's points to. `call` is named in errors.
template <class T>
T& require(const char* call, const char* name, T* pointer) {
    if (!pointer) throw octavo::ValueError(std::string(call) + ": " + name + " must not be null");
    return *pointer;
}

// Names an operator's arguments in errors.
struct Importer {
    const char* op;

    [[noreturn]] void refuse(const char* name, const std::string& what) const {
        throw octavo::ValueError(std::string(op) + ": " + name + what);
    }

    // The caller's struct must be of this version.
    template <class CArgs>
    void require_struct(const CArgs* given) const {
        require(op, "args", given);
        if (given->struct_size != sizeof *given) {
            refuse("args->struct_size", " (" + std::to_string(given->struct_size) + ") must be " +
                                            std::to_string(sizeof *given) +
                                            ", as the struct's init function sets it");
        }
    }

    TensorView view(const char* name, const octavo_tensor& tensor) const {
        auto require_between = [&](const char* field, int32_t value, int32_t last) {
            if (value < 0 || value > last) {
                refuse(name, std::string("'s ") + field + " must be from 0 to " + std::to_string(last) +
                                 "; got " + std::to_string(value));
            }
        };
        require_between("ndim", tensor.ndim, TensorView::kMaxDims);
        require_between("dtype", tensor.dtype, OCTAVO_INT64);
        if (tensor.dtype == OCTAVO_INT4)
            refuse(name, "'s dtype must be that of an array; OCTAVO_INT4 is for kv_dtype alone");
        require_between("device_type", tensor.device_type, OCTAVO_CUDA);
        if (tensor.ndim > 0 && !tensor.shape) refuse(name, "'s shape must not be null");
        TensorView view;
        view.data = tensor.data;
        view.dtype = static_cast<octavo::DType>(tensor.dtype);
        view.device.type = static_cast<octavo::DeviceType>(tensor.device_type);
        view.device.index = view.device.type == octavo::DeviceType::cuda ? tensor.device_index : 0;
        view.ndim = tensor.ndim;
        for (int axis = 0; axis < tensor.ndim; ++axis) {
            view.shape[axis] = tensor.shape[axis];
            if (view.shape[axis] < 0) refuse(name, "'s shape must not be negative");
        }
        int64_t stride = 1;
        for (int axis = tensor.ndim - 1; axis >= 0; --axis) {
            view.strides[axis] = tensor.strides ? tensor.strides[axis] : stride;
            if (__builtin_mul_overflow(stride, view.shape[axis], &stride))
                refuse(name, "'s shape must have fewer than 2^63 elements; got " + view.shape_string());
        }
        if (!view.data && view.size() != 0) refuse(name, " must have data");
        return view;
    }
};

// Takes one argument from the caller's struct.
template <class Argument, class CArgs, class Args>
void take(const Importer& importer, const Argument& argument, const CArgs& given, Args& args) {
    const auto& value = given.*argument.c_member;
    if constexpr (Argument::kIsArray) {
        // An empty array may have no data; one that is not given has no shape either.
        const bool is_given = value.data || value.shape;
        if (Argument::kIsRequired || is_given) args.*argument.member = importer.view(argument.name, value);
    } else {
        const auto none = argument.c_none;
        const bool is_none = value == none || (value != value && none != none);  // both NaN
        if (Argument::kIsOptional && is_none) return;
        if constexpr (std::is_enum_v<typename Argument::Number>) {
            constexpr bool kIsDType = std::is_same_v<typename Argument::Number, octavo::DType>;
            if (value < 0 || value > (kIsDType ? int32_t{OCTAVO_INT4} : int32_t{OCTAVO_SILU_GATE}))
                importer.refuse(argument.name, " (" + std::to_string(value) + ") must be an " +
                                                   (kIsDType ? "octavo_dtype" : "octavo_activation") +
                                                   ", or -1");
        }
        args.*argument.member = static_cast<typename Argument::Number>(value);
    }
}

// In C a scale of 1 is none, so that it cannot be the one that pages of int8 need.
template <class Args>
void require_scales(const Importer& importer, const Args& args) {
    auto require = [&](const char* name, const TensorView& pages, bool is_given) {
        if (pages.dtype != octavo::DType::int8 || is_given) return;
        importer.refuse(name, std::string(" (1) means none, and pages of int8 need a scale: give ") + name +
                                  "_array, which may be 1, " + name + "s, or another " + name);
    };
    require("k_scale", args.k_pages, args.k_scale || args.k_scale_array || args.k_scales);
    require("v_scale", args.v_pages, args.v_scale || args.v_scale_array || args.v_scales);
}

template <class Operator>
octavo_status init(typename Operator::CArgs* args) {
    return guarded([&] {
        require(Operator::kName, "args", args) = {};
        args->struct_size = sizeof *args;
        const typename Operator::Args defaults;
        schema::for_each_argument<Operator>([&](const auto& argument) {
            using Argument = std::decay_t<decltype(argument)>;
            if constexpr (Argument::kIsArray) {
                return;  // not given
            } else if constexpr (Argument::kIsOptional) {
                args->*argument.c_member = argument.c_none;
            } else {
                args->*argument.c_member = static_cast<typename Argument::CValue>(defaults.*argument.member);
            }
        });
    });
}

// Calls an operator that takes a struct.
template <class Operator>
octavo_status run(const typename Operator::CArgs* given) {
    return guarded([&] {
        const Importer importer{Operator::kName};
        importer.require_struct(given);
        typename Operator::Args args;
        schema::for_each_argument<Operator>(
            [&](const auto& argument) { take(importer, argument, *given, args); });
        if constexpr (std::is_same_v<Operator, schema::PagedAttention> ||
                      std::is_same_v<Operator, schema::AppendKv>)
            require_scales(importer, args);
        args.stream = given->stream;
        Operator::kRun(args);
    });
}

// Calls an operator that takes its arrays one by one, in the order of the description.
template <class Operator>
octavo_status run(const std::array<const octavo_tensor*, schema::kNumArguments<Operator>>& given,
                  void* stream) {
    return guarded([&] {
        const Importer importer{Operator::kName};
        typename Operator::Args args;
        const octavo_tensor* const* next = given.data();
        schema::for_each_argument<Operator>([&](const auto& array) {
            const octavo_tensor* tensor = *next++;
            if (!tensor && array.kIsRequired) importer.refuse(array.name, " must not be null");
            if (tensor) args.*array.member = importer.view(array.name, *tensor);
        });
        args.stream = stream;
        Operator::kRun(args);
    });
}

octavo::Sequence to_sequence(octavo_sequence sequence) { return octavo::Sequence{sequence}; }

// octavo::Sequence is an enum of this very type.
const octavo::Sequence* to_sequences(const octavo_sequence* sequences) {
    static_assert(std::is_same_v<std::underlying_type_t<octavo::Sequence>, octavo_sequence>);
    return reinterpret_cast<const octavo::Sequence*>(sequences);
}

template <class Allocator>
auto& of(const char* call, Allocator* allocator) {
    return require(call, "allocator", allocator).allocator;
}

// An array of `count` elements, which may be null where it has none.
template <class T>
void require_array(const char* call, const char* name, T* array, int64_t count) {
    if (count > 0) require(call, name, array);
}

}  // namespace

const char* octavo_last_error(void) { return last_error.c_str(); }
const char* octavo_version(void) { return OCTAVO_VERSION; }

octavo_status octavo_attention_args_init(octavo_attention_args* args) {
    return init<schema::Attention>(args);
}
octavo_status octavo_paged_attention_args_init(octavo_paged_attention_args* args) {
    return init<schema::PagedAttention>(args);
}
octavo_status octavo_append_kv_args_init(octavo_append_kv_args* args) { return init<schema::AppendKv>(args); }
octavo_status octavo_copy_pages_args_init(octavo_copy_pages_args* args) {
    return init<schema::CopyPages>(args);
}

octavo_status octavo_attention_backward_args_init(octavo_attention_backward_args* args) {
    return init<schema::AttentionBackward>(args);
}
octavo_status octavo_linear_args_init(octavo_linear_args* args) { return init<schema::Linear>(args); }

octavo_status octavo_rms_norm_args_init(octavo_rms_norm_args* args) { return init<schema::RmsNorm>(args); }

octavo_status octavo_latent_attention_args_init(octavo_latent_attention_args* args) {
    return init<schema::LatentAttention>(args);
}

octavo_status octavo_attention(const octavo_attention_args* args) { return run<schema::Attention>(args); }

octavo_status octavo_paged_attention(const octavo_paged_attention_args* args) {
    return run<schema::PagedAttention>(args);
}

octavo_status octavo_append_kv(const octavo_append_kv_args* args) { return run<schema::AppendKv>(args); }

octavo_status octavo_copy_pages(const octavo_copy_pages_args* args) { return run<schema::CopyPages>(args); }

octavo_status octavo_merge_states(const octavo_tensor* out_a, const octavo_tensor* lse_a,
                                  const octavo_tensor* out_b, const octavo_tensor* lse_b,
                                  const octavo_tensor* out, const octavo_tensor* lse, void* stream) {
    return run<schema::MergeStates>({out_a, lse_a, out_b, lse_b, out, lse}, stream);
}

octavo_status octavo_attention_backward(const octavo_attention_backward_args* args) {
    return run<schema::AttentionBackward>(args);
}

octavo_status octavo_linear(const octavo_linear_args* args) { return run<schema::Linear>(args); }

octavo_status octavo_rms_norm(const octavo_rms_norm_args* args) { return run<schema::RmsNorm>(args); }

octavo_status octavo_latent_attention(const octavo_latent_attention_args* args) {
    return run<schema::LatentAttention>(args);
}

octavo_status octavo_page_allocator_new(int64_t num_pages, int64_t page_size,
                                        octavo_page_allocator** allocator) {
    return guarded([&] {
        octavo_page_allocator*& made = require("PageAllocator", "allocator", allocator);
        made = new octavo_page_allocator{octavo::PageAllocator(num_pages, page_size), {}};
    });
}

void octavo_page_allocator_delete(octavo_page_allocator* allocator) { delete allocator; }

octavo_status octavo_page_allocator_create(octavo_page_allocator* allocator, octavo_sequence* sequence) {
    return guarded([&] {
        octavo_sequence& made = require("create", "sequence", sequence);
        made = static_cast<octavo_sequence>(of("create", allocator).create());
    });
}

octavo_status octavo_page_allocator_extend(octavo_page_allocator* allocator, octavo_sequence sequence,
                                           int64_t n) {
    return guarded([&] { of("extend", allocator).extend(to_sequence(sequence), n); });
}

octavo_status octavo_page_allocator_fork(octavo_page_allocator* allocator, octavo_sequence sequence,
                                         int64_t n, octavo_sequence* forks) {
    return guarded([&] {
        octavo::PageAllocator& of_sequence = of("fork", allocator);
        require_array("fork", "forks", forks, n);
        for (octavo::Sequence fork : of_sequence.fork(to_sequence(sequence), n))
            *forks++ = static_cast<octavo_sequence>(fork);
    });
}

octavo_status octavo_page_allocator_truncate(octavo_page_allocator* allocator, octavo_sequence sequence,
                                             int64_t length) {
    return guarded([&] { of("truncate", allocator).truncate(to_sequence(sequence), length); });
}

octavo_status octavo_page_allocator_free(octavo_page_allocator* allocator, octavo_sequence sequence) {
    return guarded([&] { of("free", allocator).free(to_sequence(sequence)); });
}

octavo_status octavo_page_allocator_length(const octavo_page_allocator* allocator, octavo_sequence sequence,
                                           int64_t* length) {
    return guarded(
        [&] { require("length", "length", length) = of("length", allocator).length(to_sequence(sequence)); });
}

octavo_status octavo_page_allocator_max_pages(const octavo_page_allocator* allocator,
                                              const octavo_sequence* sequences, int64_t count,
                                              int64_t* max_pages) {
    return guarded([&] {
        require_array("max_pages", "sequences", sequences, count);
        require("max_pages", "max_pages", max_pages) =
            of("max_pages", allocator).max_pages(to_sequences(sequences), count);
    });
}

octavo_status octavo_page_allocator_page_table(const octavo_page_allocator* allocator,
                                               const octavo_sequence* sequences, int64_t count,
                                               int32_t* page_table, int64_t max_pages, int32_t* seq_lens) {
    return guarded([&] {
        require_array("page_table", "sequences", sequences, count);
        require_array("page_table", "page_table", page_table, std::min(count, max_pages));
        require_array("page_table", "seq_lens", seq_lens, count);
        of("page_table", allocator)
            .write_page_table(to_sequences(sequences), count, page_table, max_pages, seq_lens);
    });
}

octavo_status octavo_page_allocator_shared_prefix_len(const octavo_page_allocator* allocator,
                                                      const octavo_sequence* sequences, int64_t count,
                                                      int64_t num_queries, int64_t* shared_prefix_len) {
    return guarded([&] {
        require_array("shared_prefix_len", "sequences", sequences, count);
        require("shared_prefix_len", "shared_prefix_len", shared_prefix_len) =
            of("shared_prefix_len", allocator).shared_prefix_len(to_sequences(sequences), count, num_queries);
    });
}

octavo_status octavo_page_allocator_take_copies(octavo_page_allocator* allocator, const int32_t** copies,
                                                int64_t* count) {
    return guarded([&] {
        static_assert(sizeof(octavo::PageCopy) == 2 * sizeof(int32_t));
        auto& taken = require("take_copies", "allocator", allocator).copies;
        const int32_t*& first = require("take_copies", "copies", copies);
        int64_t& num_taken = require("take_copies", "count", count);
        taken = allocator->allocator.take_copies();
        first = taken.empty() ? nullptr : &taken.front().from;
        num_taken = static_cast<int64_t>(taken.size());
    });
}

int64_t octavo_page_allocator_num_free_pages(const octavo_page_allocator* allocator) {
    int64_t num_free_pages = -1;
    guarded([&] { num_free_pages = of("num_free_pages", allocator).num_free_pages(); });
    return num_free_pages;
}
