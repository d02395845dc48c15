// The arguments of one operator in a JAX program: arrays and options by name.
#pragma once

#include "bindings/import_array.h"
#include "bindings/xla_ffi.h"

#include <octavo/tensor.h>

#include <nanobind/nanobind.h>

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace octavo::bindings {

namespace nb = nanobind;

class XlaCall {
  public:
    // When the program runs. The attribute "arrays" names arguments and results, in order; a result with an
    // argument's name is that argument, written in place. All other attributes are options.
    XlaCall(const char* op, const xla::CallFrame& frame, Device device);

    // When it is traced: [(name, dtype, shape), ...], on the device meta, since nothing has values yet.
    XlaCall(const char* op, nb::handle arrays, nb::dict options);

    const char* op() const { return op_; }
    TensorView array(const char* name, Accept accept = Accept::data) const;
    std::optional<TensorView> optional_array(const char* name, Accept accept = Accept::data) const;

    // T: bool, int64_t, double or std::string_view.
    template <class T>
    std::optional<T> option(std::string_view name) const {
        for (const Option& option : options_) {
            if (option.name == name) return std::get<T>(option.value);
        }
        return std::nullopt;
    }

  private:
    struct Array {
        std::string_view name;
        std::string dtype;
        TensorView view;  // its dtype counts where `dtype` is one of Octavo's
    };
    struct Option {
        std::string_view name;
        std::variant<bool, int64_t, double, std::string_view> value;
    };

    void add(Array array, bool is_result);
    const Array* find(std::string_view name) const;

    const char* op_;
    std::vector<Array> arrays_;
    std::vector<Option> options_;
};

}  // namespace octavo::bindings
