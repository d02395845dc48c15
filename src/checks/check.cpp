#include "checks/check.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <vector>

namespace octavo {
namespace {

// One axis of the differences of two arrays' indices, which run from `first` to `last`.
struct Axis {
    int64_t stride, first, last;  // the stride in bytes
};

// Adds the axes of more than one element, and an axis for the bytes of an element, and sorts all from the
// largest stride on; no stride is negative. `sign` is the sign of the indices.
void add_axes(const TensorView& t, int sign, std::vector<Axis>& axes) {
    auto add = [&](int64_t stride, int64_t last) {
        if (last < 1 || stride == 0) return;  // such an axis does not change the address
        auto found =
            std::find_if(axes.begin(), axes.end(), [=](const Axis& a) { return a.stride == stride; });
        if (found == axes.end()) found = axes.insert(found, {stride, 0, 0});
        (sign < 0 ? found->first : found->last) += sign * last;
    };
    const int64_t size = size_of(t.dtype);
    for (int axis = 0; axis < t.ndim; ++axis) add(size * std::abs(stride_of(t, axis)), t.shape[axis] - 1);
    add(1, size - 1);
    std::sort(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) { return a.stride > b.stride; });
}

// Whether `offset` is a sum of index * stride over the axes from `axis` on. Where each stride exceeds the sum
// that the axes behind it can reach, at most two indices of an axis can lead to the offset.
bool reaches(const std::vector<Axis>& axes, size_t axis, int64_t offset) {
    if (axis == axes.size()) return offset == 0;
    int64_t least_behind = 0, most_behind = 0;
    for (size_t inner = axis + 1; inner < axes.size(); ++inner) {
        least_behind += axes[inner].stride * axes[inner].first;
        most_behind += axes[inner].stride * axes[inner].last;
    }
    const auto [stride, first, last] = axes[axis];
    const int64_t nearest = offset / stride;
    for (int64_t index = nearest - 1; index <= nearest + 1; ++index) {
        const int64_t rest = offset - index * stride;
        if (index < first || index > last || rest < least_behind || rest > most_behind) continue;
        if (reaches(axes, axis + 1, rest)) return true;
    }
    return false;
}

// Whether the array's bytes, from the first to the last, are so few that neither their number nor a sum of
// two such numbers overflows. What has more is in no machine's memory, and its addresses would wrap around.
bool can_lie_in_memory(const TensorView& t) {
    constexpr int64_t kMostBytes = int64_t{1} << 62;
    int64_t reach = 0;  // from the lowest element to the highest
    for (int axis = 0; axis < t.ndim; ++axis) {
        if (t.shape[axis] < 2) continue;  // such an axis may have any stride
        int64_t length = 0;
        if (t.strides[axis] == std::numeric_limits<int64_t>::min() ||
            __builtin_mul_overflow(t.shape[axis] - 1, std::abs(t.strides[axis]), &length) ||
            __builtin_add_overflow(reach, length, &reach))
            return false;
    }
    return reach < kMostBytes / size_of(t.dtype);
}

// Whether two arrays share elements. The answer is exact if both have the same strides in bytes, whichever
// axes have them. With other strides it may miss shared elements, but never finds any that are not shared.
bool share_elements(const TensorView& a, const TensorView& b) {
    const Bytes a_bytes = bytes_of(a), b_bytes = bytes_of(b);
    if (std::max(a_bytes.begin, b_bytes.begin) >= std::min(a_bytes.end, b_bytes.end)) return false;
    // The distance from a's lowest byte to b's is what an index into a, less one into b, has to reach.
    const auto distance = static_cast<int64_t>(b_bytes.begin - a_bytes.begin);
    std::vector<Axis> of_a, of_b, of_both;
    add_axes(a, 1, of_a);
    add_axes(b, -1, of_b);
    add_axes(a, 1, of_both);
    add_axes(b, -1, of_both);
    return reaches(of_both, 0, distance) || reaches(of_a, 0, distance) || reaches(of_b, 0, distance);
}

}  // namespace

Bytes bytes_of(const TensorView& t) {
    const auto data = reinterpret_cast<uintptr_t>(t.data);
    if (t.size() == 0) return {data, data};
    int64_t first = 0, last = 0;
    for (int axis = 0; axis < t.ndim; ++axis) {
        const int64_t reach = (t.shape[axis] - 1) * stride_of(t, axis);
        (reach < 0 ? first : last) += reach;
    }
    return {data + first * size_of(t.dtype), data + (last + 1) * size_of(t.dtype)};
}

void Checker::memory(const char* name, const TensorView& t) const {
    if (t.device != device_) {
        fail<DeviceError>(op_, "all arrays must be on one device; ", name, " is on ", to_string(t.device),
                          ", the first array on ", to_string(device_));
    }
    for (int axis = 0; axis < t.ndim; ++axis) {
        if (t.shape[axis] < 0)
            fail<ValueError>(op_, name, " must have no negative length; got shape ", t.shape_string());
    }
    if (t.size() > 0 && !can_lie_in_memory(t)) {
        fail<ValueError>(op_, name, " must lie within 2^62 bytes of memory; got shape ", t.shape_string(),
                         " and strides ", t.strides_string());
    }
    if (!t.data && t.size() > 0) {
        fail<ValueError>(op_, name, " of shape ", t.shape_string(), " must have data; its pointer is null");
    }
}

void Checker::unit_last_stride(const char* name, const TensorView& t) const {
    const int last = t.ndim - 1;
    if (last >= 0 && t.size() > 0 && t.shape[last] > 1 && t.strides[last] != 1) {
        fail<ValueError>(op_, name, " must have a unit stride along its last axis; got stride ",
                         t.strides[last]);
    }
}

void Checker::data(const char* name, const TensorView& t, int ndim, const char* axes) const {
    memory(name, t);
    if (t.ndim != ndim) fail<ValueError>(op_, name, " must have shape ", axes, "; got ", t.shape_string());
    unit_last_stride(name, t);
}

void Checker::output(const char* name, const TensorView& t, int ndim, const char* axes) const {
    data(name, t, ndim, axes);
    writable(name, t);
}

void Checker::lse(const char* name, const TensorView& t, const char* out_name, const TensorView& out) const {
    dtype(name, t, DType::float32, "");
    memory(name, t);
    if (t.ndim != out.ndim - 1 || !std::equal(t.shape.begin(), t.shape.begin() + t.ndim, out.shape.begin())) {
        fail<ValueError>(op_, name, " must have the shape of ", out_name, " without its last axis; ",
                         out_name, " has ", out.shape_string(), ", ", name, " ", t.shape_string());
    }
}

IndexArray Checker::index(const char* name, const TensorView& t, int ndim, const char* axes) const {
    if (t.dtype != DType::int32 && t.dtype != DType::int64) {
        fail<TypeError>(op_, name, " must be int32 or int64; got ", to_string(t.dtype));
    }
    data(name, t, ndim, axes);
    return IndexArray::of(t);
}

void Checker::dtype(const char* name, const TensorView& t, DType wanted, const char* of) const {
    if (t.dtype != wanted) {
        fail<TypeError>(op_, name, " must be ", to_string(wanted), of, "; got ", to_string(t.dtype));
    }
}

void Checker::float_dtype(const char* name, const TensorView& t) const {
    switch (t.dtype) {
        case DType::float32:
        case DType::float16:
        case DType::bfloat16: return;
        case DType::int32:
        case DType::int8:
        case DType::float8_e4m3fn:
        case DType::float8_e5m2:
        case DType::uint8:
        case DType::int4:
        case DType::int64: break;
    }
    fail<TypeError>(op_, name, " must be float32, float16 or bfloat16; got ", to_string(t.dtype));
}

void Checker::cache_dtype(const char* name, const TensorView& t, const char* like_name,
                          const TensorView& like) const {
    if (t.dtype == like.dtype || is_code(t.dtype)) return;
    fail<TypeError>(op_, name, " must be ", to_string(like.dtype), " like ", like_name,
                    ", or int8, float8_e4m3fn, float8_e5m2 or uint8; got ", to_string(t.dtype));
}

void Checker::shape(const char* name, const TensorView& t, const char* axes,
                    std::initializer_list<int64_t> wanted) const {
    memory(name, t);
    if (t.ndim == static_cast<int>(wanted.size()) &&
        std::equal(wanted.begin(), wanted.end(), t.shape.begin()))
        return;
    TensorView fitting;
    for (int64_t length : wanted) fitting.shape[fitting.ndim++] = length;
    fail<ValueError>(op_, name, " must have shape ", axes, " = ", fitting.shape_string(), "; got ",
                     t.shape_string());
}

void Checker::equal(const char* what, const char* name, int64_t value, const char* other_name,
                    int64_t other) const {
    if (value != other) {
        fail<ValueError>(op_, what, " of ", name, " (", value, ") must equal that of ", other_name, " (",
                         other, ")");
    }
}

void Checker::row_each(const char* name, int64_t rows, int64_t batch, const char* offsets) const {
    if (rows > batch) {
        fail<ValueError>(op_, "batch of ", name, " (", rows, ") must equal that of page_table (", batch,
                         "); several tokens of a sequence need ", offsets);
    }
    equal("batch", name, rows, "page_table", batch);
}

void Checker::same_shape(const char* name, const TensorView& t, const char* other_name,
                         const TensorView& other) const {
    if (t.ndim == other.ndim && t.shape == other.shape) return;
    fail<ValueError>(op_, name, " must have the shape of ", other_name, " ", other.shape_string(), "; got ",
                     t.shape_string());
}

void Checker::length(const char* what, int64_t value, int64_t most) const {
    if (value < 0 || value > most) {
        fail<ValueError>(op_, what, " must lie in [0, ", most, "]; got ", value);
    }
}

void Checker::writable(const char* name, const TensorView& t) const {
    if (t.read_only) fail<ValueError>(op_, name, " must be writable; it is read-only");
    if (t.size() == 0) return;
    for (int axis = 0; axis < t.ndim; ++axis) {
        // The span of the axes inside this one: those of smaller strides and, among equal ones, later axes.
        const int64_t stride = std::abs(stride_of(t, axis));
        int64_t span = 1;
        for (int inner = 0; inner < t.ndim; ++inner) {
            const int64_t inner_stride = std::abs(stride_of(t, inner));
            if (inner_stride < stride || (inner_stride == stride && inner > axis))
                span += (t.shape[inner] - 1) * inner_stride;
        }
        if (t.shape[axis] > 1 && stride < span) {
            fail<ValueError>(op_, name, " must not overlap itself: the stride of axis ", axis, " (",
                             t.strides[axis], ") must be at least ", span, " in magnitude");
        }
    }
}

void Checker::apart(const char* name, const TensorView& t, const char* other_name,
                    const TensorView& other) const {
    const Bytes a = bytes_of(t), b = bytes_of(other);
    if (std::max(a.begin, b.begin) < std::min(a.end, b.end)) {
        fail<ValueError>(op_, name, " must not overlap ", other_name, " in memory");
    }
}

void Checker::apart(const char* name, const TensorView& t, std::initializer_list<NamedInput> inputs) const {
    for (const NamedInput& input : inputs) {
        if (input.view) apart(name, t, input.name, *input.view);
    }
}

void Checker::no_shared_elements(const char* name, const TensorView& t, const char* other_name,
                                 const TensorView& other) const {
    if (!share_elements(t, other)) return;
    fail<ValueError>(op_, name, " must not share elements with ", other_name,
                     "; both may be views of one array, but not of the same part");
}

bool same_elements(const TensorView& a, const TensorView& b) {
    if (a.data != b.data || a.dtype != b.dtype || a.ndim != b.ndim || a.shape != b.shape) return false;
    for (int axis = 0; axis < a.ndim; ++axis) {
        if (stride_of(a, axis) != stride_of(b, axis)) return false;
    }
    return true;
}

void check_cu_seqlens(const char* op, const char* name, const IndexArray& cu_seqlens, int64_t batch,
                      int64_t total) {
    if (cu_seqlens.whole(0) != 0) fail<ValueError>(op, name, "[0] must be 0; got ", cu_seqlens.whole(0));
    for (int64_t b = 0; b < batch; ++b) {
        const int64_t begin = cu_seqlens.whole(b), end = cu_seqlens.whole(b + 1);
        if (end < begin) {
            fail<ValueError>(op, name, " must not decrease; ", name, "[", b + 1, "] is ", end, " after ",
                             begin);
        }
    }
    if (cu_seqlens.whole(batch) > total) {
        fail<ValueError>(op, name, "[", batch, "] must be at most the number of packed rows (", total,
                         "); got ", cu_seqlens.whole(batch));
    }
}

namespace {

// How many pages sequence b has, whose length is checked.
int64_t count_pages(const char* op, const IndexArray& seq_lens, int64_t b, int64_t max_pages,
                    int64_t page_size) {
    const int64_t seq_len = seq_lens.whole(b);
    if (seq_len < 0 || seq_len > max_pages * page_size) {
        fail<ValueError>(op, "seq_lens[", b,
                         "] must lie in [0, max_pages * page_size = ", max_pages * page_size, "]; got ",
                         seq_len);
    }
    if (seq_len > kMaxLength)
        fail<ValueError>(op, "seq_lens[", b, "] must be at most ", kMaxLength, "; got ", seq_len);
    return (seq_len + page_size - 1) / page_size;
}

void check_page(const char* op, const IndexArray& page_table, int64_t page_table_stride, int64_t b, int64_t i,
                int64_t num_pages) {
    const int64_t page = page_table.whole(b * page_table_stride + i);
    if (page < 0 || page >= num_pages) {
        fail<ValueError>(op, "page_table[", b, ", ", i, "] must lie in [0, num_pages = ", num_pages,
                         "); got ", page);
    }
    if (page > INT32_MAX) {
        fail<ValueError>(op, "page_table[", b, ", ", i,
                         "] must be below 2^31, as pages are numbered in int32; got ", page);
    }
}

}  // namespace

void check_pages_in_host(const char* op, const IndexArray& page_table, int64_t page_table_stride,
                         const IndexArray& seq_lens, int64_t batch, int64_t max_pages, int64_t page_size,
                         int64_t num_pages) {
    for (int64_t b = 0; b < batch; ++b) {
        const int64_t used = count_pages(op, seq_lens, b, max_pages, page_size);
        for (int64_t i = 0; i < used; ++i) check_page(op, page_table, page_table_stride, b, i, num_pages);
    }
}

void check_chosen_pages_in_host(const char* op, const ChosenPages& chosen, const IndexArray& page_table,
                                int64_t page_table_stride, const IndexArray& seq_lens, int64_t batch,
                                int32_t num_kv_heads, int64_t max_pages, int64_t page_size,
                                int64_t num_pages) {
    const int32_t num_lists = chosen.has_lists_of_heads ? num_kv_heads : 1;
    for (int64_t b = 0; b < batch; ++b) {
        const int64_t used = count_pages(op, seq_lens, b, max_pages, page_size);
        if (used == 0) continue;  // padding
        for (int32_t h = 0; h < num_lists; ++h) {
            const IndexArray list = chosen.list(static_cast<int32_t>(b), h);
            for (int64_t i = 0, last = -1; i < chosen.num_chosen; ++i) {
                const int64_t page = list.whole(i);
                auto refuse = [&](const auto&... requirement) {
                    const std::string head = chosen.has_lists_of_heads ? std::to_string(h) + ", " : "";
                    fail<ValueError>(op, "chosen_pages[", b, ", ", head, i, "] must be ", requirement...,
                                     "; got ", page);
                };
                const bool has_ended = i > 0 && list.whole(i - 1) == -1;
                if (has_ended && page != -1) refuse("-1 like the entry before it, which ends the list");
                if (page == -1) continue;
                if (page < 0 || page >= used) {
                    refuse("-1, or in [0, ", used, "), the pages of sequence ", b, " of length ",
                           seq_lens[b]);
                }
                if (page <= last) refuse("greater than the entry before it (", last, ")");
                check_page(op, page_table, page_table_stride, b, page, num_pages);
                last = page;
            }
        }
    }
}

void check_new_tokens_in_host(const char* op, const IndexArray& seq_lens, const IndexArray& cu_seqlens,
                              int64_t batch) {
    for (int64_t b = 0; b < batch; ++b) {
        const int32_t count = cu_seqlens ? cu_seqlens[b + 1] - cu_seqlens[b] : 1;
        if (seq_lens[b] == 0 || seq_lens[b] >= count) continue;
        fail<ValueError>(op, "seq_lens[", b, "] (", seq_lens[b],
                         ") counts the new tokens and must be 0 (padding) or at least their number (", count,
                         ")");
    }
}

}  // namespace octavo
