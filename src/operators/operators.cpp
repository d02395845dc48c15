// The public operators: check, then the backend that the arrays' device picks.
#include "checks/check.h"
#include "checks/checks.h"
#include "cpu/backend.h"
#include "cuda/backend.h"

#include <vector>

namespace octavo {

void attention(const AttentionArgs& args) {
    const AttentionParams p = check_attention(args);
    if (p.device.type == DeviceType::cpu) return cpu::attention(p);
    cuda::attention(p, args.stream);
}

void paged_attention(const PagedAttentionArgs& args) {
    const AttentionParams p = check_paged_attention(args);
    if (p.device.type == DeviceType::cpu) return cpu::attention(p);
    cuda::attention(p, args.stream);
}

void append_kv(const AppendKvArgs& args) {
    const AppendKvParams p = check_append_kv(args);
    if (p.device.type == DeviceType::cpu) return cpu::append_kv(p);
    cuda::append_kv(p, args.stream);
}

void copy_pages(const CopyPagesArgs& args) {
    const CopyPagesParams p = check_copy_pages(args);
    if (p.device.type == DeviceType::cpu) return cpu::copy_pages(p);
    cuda::copy_pages(p, args.stream);
}

void merge_states(const MergeStatesArgs& args) {
    const MergeStatesParams p = check_merge_states(args);
    if (p.device.type == DeviceType::cpu) return cpu::merge_states(p);
    cuda::merge_states(p, args.stream);
}

void check_page_table(const TensorView& page_table, const TensorView& seq_lens, int64_t num_pages,
                      int64_t page_size, void* stream) {
    constexpr const char* op = "check_page_table";
    const Checker check(op, page_table.device);
    check.index("page_table", page_table, 2, "[batch, max_pages]");
    check.index("seq_lens", seq_lens, 1, "[batch]");
    const int64_t batch = page_table.shape[0], max_pages = page_table.shape[1];
    check.equal("batch", "seq_lens", seq_lens.shape[0], "page_table", batch);
    if (page_size < 1) fail<ValueError>(op, "page_size (", page_size, ") must be at least 1");
    check.length("page_size", page_size);
    check.length("max_pages", max_pages);
    if (num_pages < 0) fail<ValueError>(op, "num_pages (", num_pages, ") must be at least 0");

    const auto* table = static_cast<const int32_t*>(page_table.data);
    const auto* lengths = static_cast<const int32_t*>(seq_lens.data);
    int64_t table_stride = stride_of(page_table, 0);
    std::vector<int32_t> host_table, host_lengths;
    if (page_table.device.type == DeviceType::cuda && batch > 0) {
        host_table.resize(batch * max_pages);
        host_lengths.resize(batch);
        const size_t row_bytes = max_pages * sizeof(int32_t);
        cuda::copy_to_host(host_table.data(), table, batch > 1 ? table_stride * sizeof(int32_t) : row_bytes,
                           row_bytes, batch, page_table.device.index, stream);
        cuda::copy_to_host(host_lengths.data(), lengths, batch * sizeof(int32_t), batch * sizeof(int32_t), 1,
                           page_table.device.index, stream);
        table = host_table.data();
        table_stride = max_pages;
        lengths = host_lengths.data();
    }
    check_pages_in_host(op, table, table_stride, lengths, batch, max_pages, page_size, num_pages);
}

}  // namespace octavo
