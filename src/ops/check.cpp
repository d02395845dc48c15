#include "ops/check.h"

namespace octavo {

void Checker::device_and_ndim(const char* name, const TensorView& t, int ndim, const char* axes) const {
    if (t.device != device_) {
        fail<DeviceError>(op_, "all arrays must be on one device; ", name, " is on ", to_string(t.device),
                          ", the first array on ", to_string(device_));
    }
    if (t.ndim != ndim) fail<ValueError>(op_, name, " must have shape ", axes, "; got ", t.shape_string());
}

void Checker::unit_last_stride(const char* name, const TensorView& t) const {
    const int last = t.ndim - 1;
    if (t.size() > 0 && t.shape[last] > 1 && t.strides[last] != 1) {
        fail<ValueError>(op_, name, " must have a unit stride along its last axis; got stride ",
                         t.strides[last]);
    }
}

void Checker::data(const char* name, const TensorView& t, int ndim, const char* axes) const {
    device_and_ndim(name, t, ndim, axes);
    unit_last_stride(name, t);
}

void Checker::output(const char* name, const TensorView& t, int ndim, const char* axes) const {
    data(name, t, ndim, axes);
    if (t.read_only) fail<ValueError>(op_, name, " must be writable; it is read-only");
    if (t.size() == 0) return;
    for (int axis = 0; axis < t.ndim; ++axis) {
        if (t.shape[axis] > 1 && t.strides[axis] == 0) {
            fail<ValueError>(op_, name, " must not overlap itself; axis ", axis, " of length ", t.shape[axis],
                             " has stride 0");
        }
    }
}

void Checker::index(const char* name, const TensorView& t, int ndim, const char* axes) const {
    if (t.dtype != DType::int32) {
        fail<TypeError>(op_, name, " must be int32; got ", to_string(t.dtype));
    }
    data(name, t, ndim, axes);
}

void Checker::dtype(const char* name, const TensorView& t, DType wanted, const char* of) const {
    if (t.dtype != wanted) {
        fail<TypeError>(op_, name, " must be ", to_string(wanted), of, "; got ", to_string(t.dtype));
    }
}

void Checker::float_dtype(const char* name, const TensorView& t) const {
    if (t.dtype == DType::int32) {
        fail<TypeError>(op_, name, " must be float32, float16 or bfloat16; got int32");
    }
}

void Checker::equal(const char* what, const char* name, int64_t value, const char* other_name,
                    int64_t other) const {
    if (value != other) {
        fail<ValueError>(op_, what, " of ", name, " (", value, ") must equal that of ", other_name, " (",
                         other, ")");
    }
}

void Checker::same_shape(const char* name, const TensorView& t, const char* other_name,
                         const TensorView& other) const {
    if (t.ndim == other.ndim && t.shape == other.shape) return;
    fail<ValueError>(op_, name, " must have the shape of ", other_name, " ", other.shape_string(), "; got ",
                     t.shape_string());
}

void Checker::length(const char* what, int64_t value) const {
    if (value < 0 || value > kMaxLength) {
        fail<ValueError>(op_, what, " must lie in [0, ", kMaxLength, "]; got ", value);
    }
}

void check_cu_seqlens(const char* op, const char* name, const int32_t* cu_seqlens, int64_t batch,
                      int64_t total) {
    if (cu_seqlens[0] != 0) fail<ValueError>(op, name, "[0] must be 0; got ", cu_seqlens[0]);
    for (int64_t b = 0; b < batch; ++b) {
        if (cu_seqlens[b + 1] < cu_seqlens[b]) {
            fail<ValueError>(op, name, " must not decrease; ", name, "[", b + 1, "] is ", cu_seqlens[b + 1],
                             " after ", cu_seqlens[b]);
        }
    }
    if (cu_seqlens[batch] != total) {
        fail<ValueError>(op, name, "[", batch, "] must equal the number of packed tokens (", total, "); got ",
                         cu_seqlens[batch]);
    }
}

void check_pages_in_host(const char* op, const int32_t* page_table, int64_t page_table_stride,
                         const int32_t* seq_lens, int64_t batch, int64_t max_pages, int64_t page_size,
                         int64_t num_pages) {
    for (int64_t b = 0; b < batch; ++b) {
        const int64_t seq_len = seq_lens[b];
        if (seq_len < 0 || seq_len > max_pages * page_size) {
            fail<ValueError>(op, "seq_lens[", b,
                             "] must lie in [0, max_pages * page_size = ", max_pages * page_size, "]; got ",
                             seq_len);
        }
        const int64_t used = (seq_len + page_size - 1) / page_size;
        for (int64_t i = 0; i < used; ++i) {
            const int32_t page = page_table[b * page_table_stride + i];
            if (page < 0 || page >= num_pages) {
                fail<ValueError>(op, "page_table[", b, ", ", i, "] must lie in [0, num_pages = ", num_pages,
                                 "); got ", page);
            }
        }
    }
}

}  // namespace octavo
