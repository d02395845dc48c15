// The C face of the library: octavo.h over the C++ headers.
#include <octavo/attention.h>
#include <octavo/build_info.h>
#include <octavo/octavo.h>
#include <octavo/page_allocator.h>
#include <octavo/paged_attention.h>

#include <algorithm>
#include <cmath>
#include <limits>
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
    } catch (const std::bad_alloc&) {
        return failed(OCTAVO_OUT_OF_MEMORY, "out of memory");
    } catch (const std::exception& error) {
        return failed(OCTAVO_ERROR, error.what());
    } catch (...) {
        return failed(OCTAVO_ERROR, "an unknown C++ exception");
    }
}

// Names an operator's arguments in errors.
struct Importer {
    const char* op;

    [[noreturn]] void refuse(const char* name, const std::string& what) const {
        throw octavo::ValueError(std::string(op) + ": " + name + what);
    }

    // The caller's struct, which must be of this version.
    template <class Args>
    Args arguments(const Args* given, void (*init)(Args*)) const {
        if (!given) refuse("args", " must not be null");
        Args args;
        init(&args);
        if (given->struct_size != args.struct_size) {
            refuse("args->struct_size", " (" + std::to_string(given->struct_size) + ") must be " +
                                            std::to_string(args.struct_size) +
                                            ", as the struct's init function sets it");
        }
        return *given;
    }

    TensorView view(const char* name, const octavo_tensor& tensor) const {
        auto require_between = [&](const char* field, int32_t value, int32_t last) {
            if (value < 0 || value > last) {
                refuse(name, std::string("'s ") + field + " must be from 0 to " + std::to_string(last) +
                                 "; got " + std::to_string(value));
            }
        };
        require_between("ndim", tensor.ndim, TensorView::kMaxDims);
        require_between("dtype", tensor.dtype, OCTAVO_INT32);
        require_between("device_type", tensor.device_type, OCTAVO_CUDA);
        if (tensor.ndim > 0 && !tensor.shape) refuse(name, "'s shape must not be null");
        TensorView view;
        view.data = tensor.data;
        view.dtype = static_cast<octavo::DType>(tensor.dtype);
        view.device.type = static_cast<octavo::DeviceType>(tensor.device_type);
        view.device.index = view.device.type == octavo::DeviceType::cuda ? tensor.device_index : 0;
        view.ndim = tensor.ndim;
        int64_t stride = 1;
        for (int axis = tensor.ndim - 1; axis >= 0; --axis) {
            view.shape[axis] = tensor.shape[axis];
            if (view.shape[axis] < 0) refuse(name, "'s shape must not be negative");
            view.strides[axis] = tensor.strides ? tensor.strides[axis] : stride;
            stride *= view.shape[axis];
        }
        if (!view.data && view.size() != 0) refuse(name, " must have data");
        return view;
    }

    TensorView view(const char* name, const octavo_tensor* tensor) const {
        if (!tensor) refuse(name, " must not be null");
        return view(name, *tensor);
    }

    std::optional<TensorView> optional(const char* name, const octavo_tensor& tensor) const {
        if (!tensor.data) return std::nullopt;
        return view(name, tensor);
    }
};

std::optional<int64_t> optional(int64_t value) {
    return value == -1 ? std::nullopt : std::optional<int64_t>(value);
}

std::optional<double> optional(double value) {
    return std::isnan(value) ? std::nullopt : std::optional<double>(value);
}

constexpr double kChosen = std::numeric_limits<double>::quiet_NaN();

octavo::Sequence to_sequence(octavo_sequence sequence) { return octavo::Sequence{sequence}; }

// octavo::Sequence is an enum of this very type.
const octavo::Sequence* to_sequences(const octavo_sequence* sequences) {
    static_assert(std::is_same_v<std::underlying_type_t<octavo::Sequence>, octavo_sequence>);
    return reinterpret_cast<const octavo::Sequence*>(sequences);
}

}  // namespace

const char* octavo_last_error(void) { return last_error.c_str(); }
const char* octavo_version(void) { return octavo::build_info().version.c_str(); }

void octavo_attention_args_init(octavo_attention_args* args) {
    *args = {};
    args->struct_size = sizeof *args;
    args->max_seqlen_q = args->max_seqlen_k = args->window_left = args->window_right = args->dropout_seed =
        -1;
    args->softmax_scale = kChosen;
}

void octavo_paged_attention_args_init(octavo_paged_attention_args* args) {
    *args = {};
    args->struct_size = sizeof *args;
    args->max_seqlen_q = args->window_left = args->num_splits = -1;
    args->softmax_scale = kChosen;
    args->causal = 1;
    args->k_scale = args->v_scale = 1.0f;
}

void octavo_append_kv_args_init(octavo_append_kv_args* args) {
    *args = {};
    args->struct_size = sizeof *args;
    args->k_scale = args->v_scale = 1.0f;
}

octavo_status octavo_attention(const octavo_attention_args* given) {
    return guarded([&] {
        const Importer import{"attention"};
        const octavo_attention_args c = import.arguments(given, octavo_attention_args_init);
        octavo::AttentionArgs args;
        args.q = import.view("q", c.q);
        args.k = import.view("k", c.k);
        args.v = import.view("v", c.v);
        args.out = import.view("out", c.out);
        args.lse = import.optional("lse", c.lse);
        args.cu_seqlens_q = import.optional("cu_seqlens_q", c.cu_seqlens_q);
        args.cu_seqlens_k = import.optional("cu_seqlens_k", c.cu_seqlens_k);
        args.prefix_lens = import.optional("prefix_lens", c.prefix_lens);
        args.alibi_slopes = import.optional("alibi_slopes", c.alibi_slopes);
        args.max_seqlen_q = optional(c.max_seqlen_q);
        args.max_seqlen_k = optional(c.max_seqlen_k);
        args.softmax_scale = optional(c.softmax_scale);
        args.causal = c.causal != 0;
        args.window_left = c.window_left;
        args.window_right = c.window_right;
        args.softcap = c.softcap;
        args.dropout_p = c.dropout_p;
        args.dropout_seed = optional(c.dropout_seed);
        args.dropout_offset = c.dropout_offset;
        args.stream = c.stream;
        octavo::attention(args);
    });
}

octavo_status octavo_paged_attention(const octavo_paged_attention_args* given) {
    return guarded([&] {
        const Importer import{"paged_attention"};
        const octavo_paged_attention_args c = import.arguments(given, octavo_paged_attention_args_init);
        octavo::PagedAttentionArgs args;
        args.q = import.view("q", c.q);
        args.k_pages = import.view("k_pages", c.k_pages);
        args.v_pages = import.view("v_pages", c.v_pages);
        args.page_table = import.view("page_table", c.page_table);
        args.seq_lens = import.view("seq_lens", c.seq_lens);
        args.out = import.view("out", c.out);
        args.lse = import.optional("lse", c.lse);
        args.cu_seqlens_q = import.optional("cu_seqlens_q", c.cu_seqlens_q);
        args.prefix_lens = import.optional("prefix_lens", c.prefix_lens);
        args.alibi_slopes = import.optional("alibi_slopes", c.alibi_slopes);
        args.max_seqlen_q = optional(c.max_seqlen_q);
        args.softmax_scale = optional(c.softmax_scale);
        args.causal = c.causal != 0;
        args.window_left = c.window_left;
        args.softcap = c.softcap;
        args.k_scale = c.k_scale;
        args.v_scale = c.v_scale;
        args.num_splits = optional(c.num_splits);
        args.batch_invariant = c.batch_invariant != 0;
        args.shared_prefix_len = c.shared_prefix_len;
        args.stream = c.stream;
        octavo::paged_attention(args);
    });
}

octavo_status octavo_append_kv(const octavo_append_kv_args* given) {
    return guarded([&] {
        const Importer import{"append_kv"};
        const octavo_append_kv_args c = import.arguments(given, octavo_append_kv_args_init);
        octavo::AppendKvArgs args;
        args.k = import.view("k", c.k);
        args.v = import.view("v", c.v);
        args.k_pages = import.view("k_pages", c.k_pages);
        args.v_pages = import.view("v_pages", c.v_pages);
        args.page_table = import.view("page_table", c.page_table);
        args.seq_lens = import.view("seq_lens", c.seq_lens);
        args.cu_seqlens = import.optional("cu_seqlens", c.cu_seqlens);
        args.k_scale = c.k_scale;
        args.v_scale = c.v_scale;
        args.stream = c.stream;
        octavo::append_kv(args);
    });
}

octavo_status octavo_copy_pages(const octavo_tensor* k_pages, const octavo_tensor* v_pages,
                                const octavo_tensor* copies, const octavo_tensor* to_k_pages,
                                const octavo_tensor* to_v_pages, void* stream) {
    return guarded([&] {
        const Importer import{"copy_pages"};
        octavo::CopyPagesArgs args;
        args.k_pages = import.view("k_pages", k_pages);
        args.v_pages = import.view("v_pages", v_pages);
        args.copies = import.view("copies", copies);
        if (to_k_pages) args.to_k_pages = import.view("to_k_pages", to_k_pages);
        if (to_v_pages) args.to_v_pages = import.view("to_v_pages", to_v_pages);
        args.stream = stream;
        octavo::copy_pages(args);
    });
}

octavo_status octavo_merge_states(const octavo_tensor* out_a, const octavo_tensor* lse_a,
                                  const octavo_tensor* out_b, const octavo_tensor* lse_b,
                                  const octavo_tensor* out, const octavo_tensor* lse, void* stream) {
    return guarded([&] {
        const Importer import{"merge_states"};
        octavo::MergeStatesArgs args;
        args.out_a = import.view("out_a", out_a);
        args.lse_a = import.view("lse_a", lse_a);
        args.out_b = import.view("out_b", out_b);
        args.lse_b = import.view("lse_b", lse_b);
        args.out = import.view("out", out);
        args.lse = import.view("lse", lse);
        args.stream = stream;
        octavo::merge_states(args);
    });
}

octavo_status octavo_page_allocator_new(int64_t num_pages, int64_t page_size,
                                        octavo_page_allocator** allocator) {
    return guarded(
        [&] { *allocator = new octavo_page_allocator{octavo::PageAllocator(num_pages, page_size), {}}; });
}

void octavo_page_allocator_delete(octavo_page_allocator* allocator) { delete allocator; }

octavo_status octavo_page_allocator_create(octavo_page_allocator* allocator, octavo_sequence* sequence) {
    return guarded([&] { *sequence = static_cast<octavo_sequence>(allocator->allocator.create()); });
}

octavo_status octavo_page_allocator_extend(octavo_page_allocator* allocator, octavo_sequence sequence,
                                           int64_t n) {
    return guarded([&] { allocator->allocator.extend(to_sequence(sequence), n); });
}

octavo_status octavo_page_allocator_fork(octavo_page_allocator* allocator, octavo_sequence sequence,
                                         int64_t n, octavo_sequence* forks) {
    return guarded([&] {
        for (octavo::Sequence fork : allocator->allocator.fork(to_sequence(sequence), n))
            *forks++ = static_cast<octavo_sequence>(fork);
    });
}

octavo_status octavo_page_allocator_truncate(octavo_page_allocator* allocator, octavo_sequence sequence,
                                             int64_t length) {
    return guarded([&] { allocator->allocator.truncate(to_sequence(sequence), length); });
}

octavo_status octavo_page_allocator_free(octavo_page_allocator* allocator, octavo_sequence sequence) {
    return guarded([&] { allocator->allocator.free(to_sequence(sequence)); });
}

octavo_status octavo_page_allocator_length(const octavo_page_allocator* allocator, octavo_sequence sequence,
                                           int64_t* length) {
    return guarded([&] { *length = allocator->allocator.length(to_sequence(sequence)); });
}

octavo_status octavo_page_allocator_max_pages(const octavo_page_allocator* allocator,
                                              const octavo_sequence* sequences, int64_t count,
                                              int64_t* max_pages) {
    return guarded([&] { *max_pages = allocator->allocator.max_pages(to_sequences(sequences), count); });
}

octavo_status octavo_page_allocator_page_table(const octavo_page_allocator* allocator,
                                               const octavo_sequence* sequences, int64_t count,
                                               int32_t* page_table, int64_t max_pages, int32_t* seq_lens) {
    return guarded([&] {
        allocator->allocator.write_page_table(to_sequences(sequences), count, page_table, max_pages,
                                              seq_lens);
    });
}

octavo_status octavo_page_allocator_shared_prefix_len(const octavo_page_allocator* allocator,
                                                      const octavo_sequence* sequences, int64_t count,
                                                      int64_t num_queries, int64_t* shared_prefix_len) {
    return guarded([&] {
        *shared_prefix_len =
            allocator->allocator.shared_prefix_len(to_sequences(sequences), count, num_queries);
    });
}

octavo_status octavo_page_allocator_take_copies(octavo_page_allocator* allocator, const int32_t** copies,
                                                int64_t* count) {
    return guarded([&] {
        static_assert(sizeof(octavo::PageCopy) == 2 * sizeof(int32_t));
        allocator->copies = allocator->allocator.take_copies();
        *copies = allocator->copies.empty() ? nullptr : &allocator->copies.front().from;
        *count = static_cast<int64_t>(allocator->copies.size());
    });
}

int64_t octavo_page_allocator_num_free_pages(const octavo_page_allocator* allocator) {
    return allocator->allocator.num_free_pages();
}
