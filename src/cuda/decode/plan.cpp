#include "cuda/decode/plan.h"

#include "cuda/decode/instances.h"

#include <algorithm>

namespace octavo::cuda {

std::optional<StreamKPlan> plan_stream_k(const AttentionParams& call, const Gpu& gpu, std::string* why_not) {
    const int32_t group_parts = group_parts_of(call);
    const AttentionParams p = with_group_parts(call, group_parts);
    if (p.batch_invariant)
        return refuse(why_not,
                      "where it cuts a sequence depends on the others, and batch_invariant is given");
    if (p.chosen_pages) return refuse(why_not, kReadsAllPages);
    const std::optional<Instance> instance = choose_instance(p, gpu, why_not);
    if (!instance) return std::nullopt;
    const DecodeShape& shape = shape_of(instance->codes, instance->row);
    StreamKPlan plan{};
    plan.dtype = p.dtype;
    plan.codes = instance->codes;
    plan.row = instance->row;
    plan.block_keys = shape.block_keys;
    plan.num_sequences = count_sequences(p);
    plan.num_kv_heads = p.num_kv_heads;
    plan.group_parts = group_parts;
    plan.num_ctas = std::min(gpu.num_sms, kMaxDecodeCtas);
    plan.threads = shape.stream_k_threads;
    plan.partial_words = p.seqlen_q * p.group_size() * shape.stream_k_row_words;
    return plan;
}

std::optional<DecodePlan> plan_decode_at_once(const AttentionParams& p, const Gpu& gpu,
                                              std::string* why_not) {
    const bool serves_a_part = p.most_queries > 0;  // of which CTAs by length know nothing
    const auto split_kv = plan_split_kv(p, gpu);
    if (split_kv && split_kv->num_sequences == p.batch &&
        !(serves_a_part && split_kv->policy == SplitPolicy::by_length))
        return *split_kv;
    const auto stream_k = plan_stream_k(p, gpu, why_not);
    if (stream_k && stream_k->num_sequences == p.batch) return *stream_k;
    if (stream_k)
        refuse(why_not, "stream_k_decode serves ", stream_k->num_sequences, " sequences in a launch");
    return std::nullopt;
}

}  // namespace octavo::cuda
