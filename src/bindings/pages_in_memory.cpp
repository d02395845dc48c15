#include "bindings/pages_in_memory.h"

#include "bindings/scalars.h"
#include "common/fail.h"

namespace octavo::bindings {

int64_t pages_in_memory(nb::handle num_bytes, nb::handle page_size, nb::handle num_layers,
                        nb::handle num_kv_heads, nb::handle head_dim, nb::handle head_dim_v, nb::handle dtype,
                        nb::handle token_scales) {
    constexpr const char* call = "from_memory";
    auto positive = [](const char* name, nb::handle given) {
        const int64_t value = int_argument(call, name, given);
        if (value < 1) fail<ValueError>(call, name, " (", value, ") must be at least 1");
        return value;
    };
    const int64_t size = positive("page_size", page_size), layers = positive("num_layers", num_layers);
    nb::object of_values = nb::none();
    if (!head_dim_v.is_none()) of_values = nb::int_(positive("head_dim_v", head_dim_v));
    // Python's integers, since the product may pass 64 bits.
    const nb::object token_bytes =
        nb::module_::import_("octavo._cache")
            .attr("bytes_per_token")(call, positive("num_kv_heads", num_kv_heads),
                                     positive("head_dim", head_dim), dtype,
                                     bool_argument(call, "token_scales", token_scales), of_values);
    const int64_t bytes = positive("num_bytes", num_bytes);
    const nb::object page_bytes = token_bytes * nb::int_(layers) * nb::int_(size);
    const auto num_pages = nb::cast<int64_t>(nb::int_(bytes).floor_div(page_bytes));
    if (num_pages < 1) {
        fail<ValueError>(call, "num_bytes (", bytes, ") hold no page: one of ", size, " tokens takes ",
                         nb::str(token_bytes).c_str(), " bytes for each token and layer, of which there are ",
                         layers);
    }
    return num_pages;
}

}  // namespace octavo::bindings
