#include "cuda/plan.h"

namespace octavo::cuda {

std::ostream& operator<<(std::ostream& out, const Counted& counted) {
    return out << counted.count << " " << counted.noun << (counted.count == 1 ? "" : "s");
}

}  // namespace octavo::cuda
