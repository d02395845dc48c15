// What the launches of the kernels that share Sm90Launch have in common.
#pragma once

#include "cuda/sm90_attention/operand_map.h"
#include "cuda/sm90_attention/operands.h"
#include "cuda/sm90_attention/parameters.h"

#include <algorithm>

namespace octavo::cuda {

// `plan` is Sm90Plan or Sm90WidePlan. The maps of k and v are made where the plan has boxes of keys.
template <class Plan>
Sm90Launch launch_arguments(const AttentionParams& p, const Plan& plan) {
    Sm90Launch arguments{};
    const Sm90Operands operands(p);
    arguments.q = map_of(operands.q, p.head_dim, plan.heads, plan.tokens);
    arguments.out = map_of(operands.out, p.head_dim_v, plan.heads, plan.tokens);
    if (plan.box_keys > 0) {
        arguments.k = map_of(operands.k, p.head_dim, 1, plan.box_keys);
        arguments.v = map_of(operands.v, p.head_dim_v, 1, plan.box_keys);
    }
    arguments.q_edge = operands.q.edge;
    arguments.k_edge = operands.k.edge;
    arguments.heads = plan.heads;
    arguments.tokens = plan.tokens;
    arguments.box_keys = plan.box_keys;
    arguments.page_size = FastDivide::by(std::max(p.page_size, 1));
    arguments.num_row_tiles = plan.order.unit_row_tiles;
    arguments.num_units = plan.order.num_units;
    arguments.section = plan.order.section;
    arguments.first_section = plan.order.first_section;
    return arguments;
}

}  // namespace octavo::cuda
