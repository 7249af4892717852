// The ops over stored weights: kvq::Linear and kvq::Embed.
#pragma once
#include "abi.h"

namespace kvq::ort {

OrtStatus* add_linear_ops(OrtCustomOpDomain* domain);

}  // namespace kvq::ort
