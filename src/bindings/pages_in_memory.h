#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace octavo::bindings {

// How many pages this much memory holds, of a cache as octavo.empty_cache makes it for each layer.
// Arguments of PageAllocator.from_memory(), which the messages name.
int64_t pages_in_memory(nanobind::handle num_bytes, nanobind::handle page_size, nanobind::handle num_layers,
                        nanobind::handle num_kv_heads, nanobind::handle head_dim, nanobind::handle head_dim_v,
                        nanobind::handle dtype, nanobind::handle token_scales);

}  // namespace octavo::bindings
