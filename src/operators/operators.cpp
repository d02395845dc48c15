// The public operators. Each checks its arguments, and then calls the backend that the arrays' device picks.
#include "checks/check.h"
#include "checks/checks.h"
#include "common/print_kernels.h"
#include "cpu/backend.h"
#include "cpu/float_mode.h"
#include "cuda/backend.h"

#include <vector>

namespace octavo {

namespace {

void require_values(const char* op, Device device) {
    if (device.type == DeviceType::meta)
        fail<DeviceError>(op, "arrays on the device meta have no values to work on");
}

// Checks a call, and runs it on the backend that its device picks.
template <class Args, class Params>
void run(const char* op, const Args& args, Params (*check)(const Args&), void (*on_cpu)(const Params&),
         void (*on_cuda)(const Params&, void*)) {
    const cpu::DefaultFloatMode mode;
    const Params p = check(args);
    require_values(op, p.device);
    if (p.device.type == DeviceType::cuda) return on_cuda(p, args.stream);  // prints what it runs
    if (prints_kernels()) print_kernel(cpu::explain(p));
    on_cpu(p);
}

LinearParams check_linear_of_octavo(const LinearArgs& args) {
    const LinearParams params = check_linear(args);
    require_kernel("linear", params);
    if (params.plan && params.plan->kernel == LinearKernel::library) {
        fail<ValueError>("linear", "plan must be one of a kernel of Octavo's, which has no library to hand ",
                         "over to here; got ", params.plan->to_string());
    }
    return params;
}

}  // namespace

void attention(const AttentionArgs& args) {
    run("attention", args, check_attention, cpu::attention, cuda::attention);
}

void paged_attention(const PagedAttentionArgs& args) {
    run("paged_attention", args, check_paged_attention, cpu::paged_attention, cuda::paged_attention);
}

void append_kv(const AppendKvArgs& args) {
    run("append_kv", args, check_append_kv, cpu::append_kv, cuda::append_kv);
}

void copy_pages(const CopyPagesArgs& args) {
    run("copy_pages", args, check_copy_pages, cpu::copy_pages, cuda::copy_pages);
}

void merge_states(const MergeStatesArgs& args) {
    run("merge_states", args, check_merge_states, cpu::merge_states, cuda::merge_states);
}

void attention_backward(const AttentionBackwardArgs& args) {
    run("attention_backward", args, check_attention_backward, cpu::attention_backward,
        cuda::attention_backward);
}

void linear(const LinearArgs& args) {
    run("linear", args, check_linear_of_octavo, cpu::linear, cuda::linear);
}

void rms_norm(const RmsNormArgs& args) {
    run("rms_norm", args, check_rms_norm, cpu::rms_norm, cuda::rms_norm);
}

void latent_attention(const LatentAttentionArgs& args) {
    run("latent_attention", args, check_latent_attention, cpu::latent_attention, cuda::latent_attention);
}

void check_page_table(const TensorView& page_table, const TensorView& seq_lens, int64_t num_pages,
                      int64_t page_size, void* stream, std::optional<int64_t> max_positions) {
    constexpr const char* op = "check_page_table";
    const Checker check(op, page_table.device);
    require_values(op, page_table.device);
    IndexArray table = check.index("page_table", page_table, 2, "[batch, max_pages]");
    IndexArray lengths = check.index("seq_lens", seq_lens, 1, "[batch]");
    const int64_t batch = page_table.shape[0], max_pages = page_table.shape[1];
    check.equal("batch", "seq_lens", seq_lens.shape[0], "page_table", batch);
    if (page_size < 1) fail<ValueError>(op, "page_size (", page_size, ") must be at least 1");
    check.length("page_size", page_size);
    check.length("max_pages", max_pages);
    if (num_pages < 0) fail<ValueError>(op, "num_pages (", num_pages, ") must be at least 0");

    int64_t table_stride = stride_of(page_table, 0);
    std::vector<int64_t> host_table, host_lengths;  // room for int32 or int64
    if (page_table.device.type == DeviceType::cuda && batch > 0) {
        host_table.resize(batch * max_pages);
        host_lengths.resize(batch);
        const auto copy = [&](std::vector<int64_t>& to, IndexArray& from, int64_t stride, int64_t columns,
                              int64_t rows) {
            cuda::copy_to_host(to.data(), from.data, stride * from.stride_bytes, columns * from.stride_bytes,
                               rows, page_table.device.index, stream);
            from.data = reinterpret_cast<const int32_t*>(to.data());
        };
        copy(host_table, table, batch > 1 ? table_stride : max_pages, max_pages, batch);
        copy(host_lengths, lengths, batch, batch, 1);
        table_stride = max_pages;
    }
    check_pages_in_host(op, table, table_stride, lengths, batch, max_pages, page_size, num_pages);
    for (int64_t b = 0; max_positions && b < batch; ++b) {
        if (lengths.whole(b) <= *max_positions) continue;
        fail<ValueError>(op, "seq_lens[", b, "] (", lengths.whole(b), ") must be at most max_positions (",
                         *max_positions, ")");
    }
}

}  // namespace octavo
