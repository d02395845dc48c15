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
    const auto token_bytes = nb::cast<int64_t>(
        nb::module_::import_("octavo._cache")
            .attr("bytes_per_token")(call, positive("num_kv_heads", num_kv_heads),
                                     positive("head_dim", head_dim), dtype,
                                     bool_argument(call, "token_scales", token_scales), of_values));
    const int64_t bytes = positive("num_bytes", num_bytes);
    if (bytes / token_bytes / layers / size < 1) {  // no product that could overflow
        fail<ValueError>(call, "num_bytes (", bytes, ") hold no page: one of ", size, " tokens takes ",
                         token_bytes, " bytes for each token and layer, of which there are ", layers);
    }
    return bytes / token_bytes / layers / size;
}

}  // namespace octavo::bindings
