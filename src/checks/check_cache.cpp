#include "checks/cache_codes.h"
#include "checks/check.h"
#include "checks/checks.h"
#include "checks/key_transform.h"
#include "checks/rotary.h"
#include "cuda/backend.h"

#include <algorithm>
#include <string>
#include <vector>

namespace octavo {
namespace {

void check_cache(const Checker& check, const CacheArrays& cache, bool is_written = true) {
    const auto& [k_name, k_pages, v_name, v_pages] = cache;
    check.data(k_name, k_pages, 4, kPages);
    if (is_written) check.writable(k_name, k_pages);
    check.data(v_name, v_pages, 4, kPages);
    if (is_written) check.writable(v_name, v_pages);
    check_same_cache_shape(check, cache);
    if (k_pages.shape[1] < 1) {
        fail<ValueError>(check.op(), "page_size (", k_pages.shape[1], ") must be at least 1");
    }
    check.length("page_size", k_pages.shape[1]);
    check.length("num_kv_heads", k_pages.shape[2]);
    check.length("head_dim", k_pages.shape[3]);
    check.length((std::string("head_dim of ") + v_name).c_str(), v_pages.shape[3]);
}

// Whether each row of one array is the same row of the other or a part of it, as values of latents are of
// keys. Then what a copy of a page writes to both is the same.
bool share_rows(const TensorView& a, const TensorView& b) {
    for (int axis = 0; axis < 3; ++axis) {
        if (stride_of(a, axis) != stride_of(b, axis)) return false;
    }
    auto is_within = [](const TensorView& part, const TensorView& whole) {
        const auto begin = reinterpret_cast<uintptr_t>(whole.data);
        const auto part_begin = reinterpret_cast<uintptr_t>(part.data);
        return part_begin >= begin && part_begin + part.shape[3] * size_of(part.dtype) <=
                                          begin + whole.shape[3] * size_of(whole.dtype);
    };
    return is_within(a, b) || is_within(b, a);
}

// What pages that are only copied hold: the dtypes of the arrays, which must make a pair.
StoredDtypes copied_dtypes(const Checker& check, const CacheArrays& cache) {
    const DType k = cache.k_pages.dtype, v = cache.v_pages.dtype;
    if (!is_code(k)) check.float_dtype(cache.k_name, cache.k_pages);
    if (k == DType::int8 && v == DType::uint8) return {k, DType::int4};
    if (v != k) check.dtype(cache.v_name, cache.v_pages, k, (std::string(" like ") + cache.k_name).c_str());
    return {k, v};
}

// Checks the scales of each token and KV head of pages that are copied; pages of uint8 may hold int4.
CacheScales check_copied_scales(const Checker& check, const char* name, const TensorView& scales,
                                const char* pages_name, const TensorView& pages, DType stored,
                                bool is_written) {
    if (!is_code(stored)) {
        fail<ValueError>(check.op(), name, " belong to codes of 8 or 4 bits; ", pages_name, " hold ",
                         to_string(stored));
    }
    const bool may_be_int4 = stored == DType::uint8 && scales.dtype == DType::float16;
    const CacheScales words =
        check_token_scales(check, name, scales, may_be_int4 || stored == DType::int4, pages);
    if (is_written) check.writable(name, scales);
    return words;
}

// Checks that what append_kv only reads, rotary's arrays aside, lies apart from what it writes.
void check_apart_from_written(const Checker& check, const AppendKvArgs& args) {
    const NamedInput inputs[] = {{"page_table", args.page_table},
                                 {"seq_lens", args.seq_lens},
                                 {"cu_seqlens", args.cu_seqlens},
                                 {"slot_mapping", args.slot_mapping},
                                 {"k_scale", args.k_scale_array},
                                 {"v_scale", args.v_scale_array},
                                 {"k_channel_offset", args.k_channel_offset},
                                 {"k_channel_scale", args.k_channel_scale}};
    for (const NamedInput& input : inputs) {
        if (!input.view) continue;
        check.apart(input.name, *input.view,
                    {{"k_pages", args.k_pages},
                     {"v_pages", args.v_pages},
                     {"k_scales", args.k_scales},
                     {"v_scales", args.v_scales},
                     {"q_out", args.q_out}});
    }
}

// Checks that the scales that append_kv writes share no memory with other arrays; they may lie between codes.
void check_written_scales(const Checker& check, const AppendKvArgs& args) {
    auto check_one = [&](const char* name, const std::optional<TensorView>& scales) {
        if (!scales) return;
        check.writable(name, *scales);
        check.apart("k", args.k, name, *scales);
        check.apart("v", args.v, name, *scales);
        check.no_shared_elements(name, *scales, "k_pages", args.k_pages);
        check.no_shared_elements(name, *scales, "v_pages", args.v_pages);
    };
    check_one("k_scales", args.k_scales);
    check_one("v_scales", args.v_scales);
    if (args.k_scales && args.v_scales)
        check.no_shared_elements("v_scales", *args.v_scales, "k_scales", *args.k_scales);
}

// The address at which `device` reads or writes the array.
void* data_for(const char* op, const char* name, const TensorView& array, Device device) {
    if (device.type == DeviceType::cpu || array.device == device || array.size() == 0) return array.data;
    const Bytes bytes = bytes_of(array);
    void* const mapped = cuda::mapped_host_memory(array.data, bytes.begin, bytes.end, device.index);
    if (!mapped) {
        fail<ValueError>(op, name,
                         " must be in pinned host memory (cudaHostAlloc, cudaHostRegister; in PyTorch ",
                         "pin_memory()) to be copied by ", to_string(device), "; it is in pageable memory");
    }
    return mapped;
}

void check_copies_in_host(const CopyPagesParams& p, int64_t num_from, int64_t num_to, bool is_within) {
    constexpr const char* op = "copy_pages";
    enum : uint8_t { kRead = 1, kWritten = 2 };
    std::vector<uint8_t> use(p.num_copies > 0 ? num_to : 0);  // per page of the cache that is written
    auto check_page = [&](int64_t i, int column) {
        const int64_t page = p.copies.whole(i * p.copies_stride + column);
        const int64_t num_pages = column == 0 ? num_from : num_to;
        if (page < 0 || page >= num_pages) {
            fail<ValueError>(op, "copies[", i, ", ", column, "] must lie in [0, num_pages = ", num_pages,
                             "); got ", page);
        }
        if (page > INT32_MAX) {
            fail<ValueError>(op, "copies[", i, ", ", column,
                             "] must be below 2^31, as pages are numbered in int32; got ", page);
        }
        return page;
    };
    for (int64_t i = 0; i < p.num_copies; ++i) {
        const int64_t from = check_page(i, 0);
        if (is_within) use[from] = kRead;
    }
    for (int64_t i = 0; i < p.num_copies; ++i) {
        const int64_t to = check_page(i, 1);
        if (use[to]) {
            fail<ValueError>(op, "copies[", i, ", 1] (", to, ") is also ",
                             use[to] & kRead ? "copied from" : "copied to by another row",
                             "; copies are made in no particular order");
        }
        use[to] |= kWritten;
    }
}

}  // namespace

std::string why_no_cuda_kernel(const AppendKvParams& p) {
    const int32_t head_dim = std::max(p.head_dim, p.head_dim_v);
    if (!is_code(p.k_dtype) || head_dim <= kMaxCudaCodeHeadDim) return {};
    return "no CUDA kernel makes codes of head_dim " + std::to_string(head_dim) + "; it may be up to " +
           std::to_string(kMaxCudaCodeHeadDim);
}

namespace {

// Checks and sets slot_mapping: where each row goes, instead of tables and lengths.
void check_slot_mapping(const Checker& check, const AppendKvArgs& args, AppendKvParams& p) {
    const char* op = check.op();
    auto refuse_with = [op](const char* name, bool is_given) {
        if (is_given) {
            fail<ValueError>(op,
                             "slot_mapping says where tokens go instead of page_table, seq_lens and "
                             "cu_seqlens, and cannot go with ",
                             name);
        }
    };
    refuse_with("page_table", args.page_table.has_value());
    refuse_with("seq_lens", args.seq_lens.has_value());
    refuse_with("cu_seqlens", args.cu_seqlens.has_value());
    if (args.rotary_cos) {
        fail<ValueError>(op,
                         "slot_mapping cannot go with rotary_cos and rotary_sin, as it does not say "
                         "positions; give page_table and seq_lens");
    }
    const TensorView& slots = *args.slot_mapping;
    check.index("slot_mapping", slots, 1, "[total]");
    check.equal("total", "slot_mapping", slots.shape[0], "k", args.k.shape[0]);
    p.slot_mapping = slots.data;
    p.has_wide_slots = slots.dtype == DType::int64;
}

void check_slots_in_host(const char* op, const AppendKvParams& p, int64_t num_pages) {
    for (int64_t token = 0; token < p.total; ++token) {
        const int64_t slot = p.mapped_slot(token);
        if (slot < num_pages * p.page_size) continue;
        fail<ValueError>(op, "slot_mapping[", token, "] must be below num_pages * page_size (",
                         num_pages * p.page_size, "); got ", slot);
    }
}

// Checks and sets tables, lengths and where the tokens of each sequence begin.
void check_tables(const Checker& check, const AppendKvArgs& args, AppendKvParams& p) {
    const char* op = check.op();
    if (!args.page_table || !args.seq_lens) {
        fail<TypeError>(op, args.page_table ? "seq_lens" : "page_table",
                        " must be given, or slot_mapping instead of page_table and seq_lens");
    }
    p.page_table = check.index("page_table", *args.page_table, 2, "[batch, max_pages]");
    p.seq_lens = check.index("seq_lens", *args.seq_lens, 1, "[batch]");
    const int64_t batch = args.page_table->shape[0], max_pages = args.page_table->shape[1];
    check.equal("batch", "seq_lens", args.seq_lens->shape[0], "page_table", batch);
    check.length("batch", batch);
    check.length("max_pages", max_pages);
    p.page_table_stride = stride_of(*args.page_table, 0);
    p.max_pages = static_cast<int32_t>(max_pages);
    p.batch = static_cast<int32_t>(batch);
    if (args.cu_seqlens) {
        p.cu_seqlens = check.index("cu_seqlens", *args.cu_seqlens, 1, "[batch + 1]");
        if (args.cu_seqlens->shape[0] != batch + 1) {
            fail<ValueError>(op, "cu_seqlens must have batch + 1 = ", batch + 1, " entries; got ",
                             args.cu_seqlens->shape[0]);
        }
    } else {
        check.row_each("k", p.total, batch, "cu_seqlens");
    }
}

}  // namespace

AppendKvParams check_append_kv(const AppendKvArgs& args) {
    constexpr const char* op = "append_kv";
    AppendKvParams p{};
    p.device = args.k.device;
    const bool has_codes = is_code(args.k_pages.dtype);
    p.dtype = has_codes ? args.k.dtype : args.k_pages.dtype;
    const Checker check(op, p.device);
    const CacheArrays cache{"k_pages", args.k_pages, "v_pages", args.v_pages};
    const char* axes = args.cu_seqlens || args.slot_mapping ? "[total, num_kv_heads, head_dim]"
                                                            : "[batch, num_kv_heads, head_dim]";
    check.data("k", args.k, 3, axes);
    check.data("v", args.v, 3, axes);
    p.static_tables = args.static_tables;
    const StoredDtypes stored = stored_dtypes(check, cache, args.kv_dtype);
    p.k_dtype = stored.k;
    p.v_dtype = stored.v;
    check_cache(check, cache);
    check.no_shared_elements("v_pages", args.v_pages, "k_pages", args.k_pages);
    if (has_codes) check.float_dtype("k", args.k);
    const char* const like = has_codes ? " like k" : " like k_pages";
    check.dtype("k", args.k, p.dtype, like);
    check.dtype("v", args.v, p.dtype, like);
    if (!std::equal(args.k.shape.begin(), args.k.shape.begin() + 2, args.v.shape.begin())) {
        fail<ValueError>(op, "v must have the shape of k ", args.k.shape_string(), ", but for head_dim; got ",
                         args.v.shape_string());
    }
    check.apart("k", args.k, "k_pages", args.k_pages);
    check.apart("k", args.k, "v_pages", args.v_pages);
    check.apart("v", args.v, "k_pages", args.k_pages);
    check.apart("v", args.v, "v_pages", args.v_pages);
    check.equal("num_kv_heads", "k", args.k.shape[1], "k_pages", args.k_pages.shape[2]);
    auto check_dim = [&](const char* name, const TensorView& rows, DType held, const char* pages_name,
                         const TensorView& pages) {
        if (held == DType::int4 && rows.shape[2] % 2 != 0) {
            fail<ValueError>(op, "head_dim of ", name, " (", rows.shape[2],
                             ") must be even for int4, two numbers in a byte");
        }
        check.equal("head_dim", name, rows.shape[2], pages_name, numbers_in(held, pages.shape[3]));
    };
    check_dim("k", args.k, stored.k, "k_pages", args.k_pages);
    check_dim("v", args.v, stored.v, "v_pages", args.v_pages);
    const CheckedScales k_scales = check_scales(
        check, {"k_pages", "k_scale", args.k_scale, args.k_scale_array, "k_scales", args.k_scales}, stored.k,
        args.k_pages);
    const CheckedScales v_scales = check_scales(
        check, {"v_pages", "v_scale", args.v_scale, args.v_scale_array, "v_scales", args.v_scales}, stored.v,
        args.v_pages);
    check_written_scales(check, args);
    p.key_transform = check_key_transform(check, KeyTransformArguments::of(args), stored.k, args.k.shape[1],
                                          args.k.shape[2]);
    check_rotary(check, args, p);
    p.total = args.k.shape[0];
    args.slot_mapping ? check_slot_mapping(check, args, p) : check_tables(check, args, p);
    check_apart_from_written(check, args);
    check.length("total", p.total);

    p.k = args.k.data;
    p.k_token_stride = stride_of(args.k, 0);
    p.k_head_stride = stride_of(args.k, 1);
    p.v = args.v.data;
    p.v_token_stride = stride_of(args.v, 0);
    p.v_head_stride = stride_of(args.v, 1);
    p.k_pages = args.k_pages.data;
    p.k_page_stride = stride_of(args.k_pages, 0);
    p.k_slot_stride = stride_of(args.k_pages, 1);
    p.k_pages_head_stride = stride_of(args.k_pages, 2);
    p.v_pages = args.v_pages.data;
    p.v_page_stride = stride_of(args.v_pages, 0);
    p.v_slot_stride = stride_of(args.v_pages, 1);
    p.v_pages_head_stride = stride_of(args.v_pages, 2);
    p.page_size = static_cast<int32_t>(args.k_pages.shape[1]);
    p.num_kv_heads = static_cast<int32_t>(args.k.shape[1]);
    p.head_dim = static_cast<int32_t>(args.k.shape[2]);
    p.head_dim_v = static_cast<int32_t>(args.v.shape[2]);
    p.k_scale = k_scales.number;
    p.v_scale = v_scales.number;
    p.k_static_scales = k_scales.in_memory;
    p.v_static_scales = v_scales.in_memory;
    p.k_scales = k_scales.of_each_token;
    p.v_scales = v_scales.of_each_token;
    require_kernel(op, p);
    if (p.device.type != DeviceType::cpu) return p;
    if (args.slot_mapping) {
        check_slots_in_host(op, p, args.k_pages.shape[0]);
    } else {
        if (p.cu_seqlens) check_cu_seqlens(op, "cu_seqlens", p.cu_seqlens, p.batch, p.total);
        check_pages_in_host(op, p.page_table, p.page_table_stride, p.seq_lens, p.batch,
                            args.page_table->shape[1], p.page_size, args.k_pages.shape[0]);
        check_new_tokens_in_host(op, p.seq_lens, p.cu_seqlens, p.batch);
        check_positions_in_host(op, p);
    }
    return p;
}

CopyPagesParams check_copy_pages(const CopyPagesArgs& args) {
    constexpr const char* op = "copy_pages";
    const bool is_within = !args.to_k_pages && !args.to_v_pages;
    if (!is_within && !(args.to_k_pages && args.to_v_pages)) {
        fail<ValueError>(op, "to_k_pages and to_v_pages must be given together; got only ",
                         args.to_k_pages ? "to_k_pages" : "to_v_pages");
    }
    auto check_pair = [&](const char* name, const auto& scales, const char* to_name, const auto& to_scales) {
        if (is_within && to_scales)
            fail<ValueError>(op, to_name, " belong to another cache; give to_k_pages and to_v_pages too");
        if (!is_within && scales.has_value() != to_scales.has_value()) {
            fail<ValueError>(op, name, " and ", to_name, " must be given together; got only ",
                             scales ? name : to_name);
        }
    };
    check_pair("k_scales", args.k_scales, "to_k_scales", args.to_k_scales);
    check_pair("v_scales", args.v_scales, "to_v_scales", args.to_v_scales);
    const CacheArrays from{"k_pages", args.k_pages, "v_pages", args.v_pages};
    const CacheArrays to =
        is_within ? from : CacheArrays{"to_k_pages", *args.to_k_pages, "to_v_pages", *args.to_v_pages};
    const Device from_device = from.k_pages.device, to_device = to.k_pages.device;
    CopyPagesParams p{};
    p.device = from_device.type == DeviceType::cuda ? from_device : to_device;
    p.dtype = args.k_pages.dtype;
    const Checker check_from(op, from_device), check_to(op, to_device);
    const StoredDtypes stored = copied_dtypes(check_from, from);
    check_cache(check_from, from, is_within);
    if (!is_within) {
        copied_dtypes(check_to, to);
        check_cache(check_to, to);
        if (to_device.type == DeviceType::cuda && to_device != p.device) {
            fail<DeviceError>(op, "two caches on GPUs must be on the same one; to_k_pages is on ",
                              to_string(to_device), ", k_pages on ", to_string(from_device));
        }
        const Checker check(op, p.device);
        check.dtype("to_k_pages", to.k_pages, p.dtype, " like k_pages");
        check.dtype("to_v_pages", to.v_pages, from.v_pages.dtype, " like v_pages");
        const char* axes[] = {"page_size", "num_kv_heads", "head_dim"};
        for (int axis = 1; axis < 4; ++axis) {
            check.equal(axes[axis - 1], "to_k_pages", to.k_pages.shape[axis], "k_pages",
                        from.k_pages.shape[axis]);
        }
        check.equal("head_dim", "to_v_pages", to.v_pages.shape[3], "v_pages", from.v_pages.shape[3]);
        check.no_shared_elements("to_v_pages", to.v_pages, "to_k_pages", to.k_pages);
        check.apart("k_pages", from.k_pages, "to_k_pages", to.k_pages);
        check.apart("k_pages", from.k_pages, "to_v_pages", to.v_pages);
        check.apart("v_pages", from.v_pages, "to_k_pages", to.k_pages);
        check.apart("v_pages", from.v_pages, "to_v_pages", to.v_pages);
    } else if (!share_rows(args.k_pages, args.v_pages)) {
        check_from.no_shared_elements("v_pages", args.v_pages, "k_pages", args.k_pages);
    }
    if (args.copies.device != p.device) {
        fail<DeviceError>(op, "copies must be on ", to_string(p.device),
                          ", the device that makes them; it is on ", to_string(args.copies.device));
    }
    p.copies = Checker(op, p.device).index("copies", args.copies, 2, "[num_copies, 2]");
    if (args.copies.shape[1] != 2) {
        fail<ValueError>(op, "copies must have shape [num_copies, 2]; got ", args.copies.shape_string());
    }
    Checker(op, p.device).length("num_copies", args.copies.shape[0]);
    auto pages = [&p](const char* name, const TensorView& array) -> CopyPagesParams::Pages {
        return {data_for(op, name, array, p.device), stride_of(array, 0), stride_of(array, 1),
                stride_of(array, 2)};
    };
    struct ScalesOfCache {
        const char* k_name;
        const std::optional<TensorView>& k;
        const char* v_name;
        const std::optional<TensorView>& v;
    };
    const ScalesOfCache from_scales{"k_scales", args.k_scales, "v_scales", args.v_scales};
    const ScalesOfCache to_scales =
        is_within ? from_scales
                  : ScalesOfCache{"to_k_scales", args.to_k_scales, "to_v_scales", args.to_v_scales};
    auto set_scales = [&](const Checker& check, const CacheArrays& cache, const ScalesOfCache& scales,
                          bool is_written, CacheScales& k, CacheScales& v) {
        auto set = [&](const char* name, const std::optional<TensorView>& array, const char* pages_name,
                       const TensorView& pages, DType stored, CacheScales& to) {
            if (!array) return;
            to = check_copied_scales(check, name, *array, pages_name, pages, stored, is_written);
            if (is_written) {
                check.no_shared_elements(name, *array, cache.k_name, cache.k_pages);
                check.no_shared_elements(name, *array, cache.v_name, cache.v_pages);
            }
            to.data = data_for(op, name, *array, p.device);
        };
        set(scales.k_name, scales.k, cache.k_name, cache.k_pages, stored.k, k);
        set(scales.v_name, scales.v, cache.v_name, cache.v_pages, stored.v, v);
        if (is_written && scales.k && scales.v)
            check.no_shared_elements(scales.v_name, *scales.v, scales.k_name, *scales.k);
    };
    set_scales(check_from, from, from_scales, is_within, p.from_k_scales, p.from_v_scales);
    set_scales(check_to, to, to_scales, true, p.to_k_scales, p.to_v_scales);
    check_from.apart("copies", args.copies,
                     {{to.k_name, to.k_pages},
                      {to.v_name, to.v_pages},
                      {to_scales.k_name, to_scales.k},
                      {to_scales.v_name, to_scales.v}});
    if (!is_within) {
        auto check_apart = [&](const char* name, const std::optional<TensorView>& array, const char* to_name,
                               const std::optional<TensorView>& to_array) {
            if (!array) return;
            Checker(op, p.device)
                .dtype(to_name, *to_array, array->dtype, (std::string(" like ") + name).c_str());
            check_from.apart(name, *array, to.k_name, to.k_pages);
            check_from.apart(name, *array, to.v_name, to.v_pages);
            if (args.to_k_scales) check_from.apart(name, *array, "to_k_scales", *args.to_k_scales);
            if (args.to_v_scales) check_from.apart(name, *array, "to_v_scales", *args.to_v_scales);
            check_from.apart("k_pages", from.k_pages, to_name, *to_array);
            check_from.apart("v_pages", from.v_pages, to_name, *to_array);
        };
        check_apart("k_scales", args.k_scales, "to_k_scales", args.to_k_scales);
        check_apart("v_scales", args.v_scales, "to_v_scales", args.to_v_scales);
    }
    p.from_k = pages(from.k_name, from.k_pages);
    p.from_v = pages(from.v_name, from.v_pages);
    p.to_k = pages(to.k_name, to.k_pages);
    p.to_v = pages(to.v_name, to.v_pages);
    p.copies_stride = stride_of(args.copies, 0);
    p.num_copies = args.copies.shape[0];
    p.page_size = static_cast<int32_t>(args.k_pages.shape[1]);
    p.num_kv_heads = static_cast<int32_t>(args.k_pages.shape[2]);
    auto row_bytes = [](const char* name, const TensorView& pages) {
        const int64_t bytes = size_of(pages.dtype) * pages.shape[3];
        if (bytes > INT32_MAX) {
            fail<ValueError>(op, "a token and head of ", name, " must take less than 2 GiB; got head_dim ",
                             pages.shape[3], " of ", to_string(pages.dtype));
        }
        return static_cast<int32_t>(bytes);
    };
    p.k_row_bytes = row_bytes("k_pages", args.k_pages);
    p.v_row_bytes = row_bytes("v_pages", args.v_pages);
    require_kernel(op, p);
    if (p.device.type == DeviceType::cpu)
        check_copies_in_host(p, from.k_pages.shape[0], to.k_pages.shape[0], is_within);
    return p;
}

}  // namespace octavo
