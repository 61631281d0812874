// The table of one variant. A .cpp file sets its target options, VARIANT and its name, and includes
// this once.
#include <type_traits>
#include <utility>

#include "../../tee_side/native/attention.h"
#include "../../tee_side/native/elementwise.h"
#include "../../tee_side/native/quantise.h"

namespace VARIANT {

extern const Kernels table;
const Kernels table = {
    VARIANT_NAME, draw, encode, expect, decode, product, linear,
    norm,         activate, residual, rope, append, attention,
};

}  // namespace VARIANT
