// The ops over stored weights: kvq::Linear, kvq::Experts and kvq::Embed.
#pragma once
#include <vector>

#include "kernel.h"

namespace kvq::ort {

std::vector<Op> linear_ops(Device* device);
// On the processor wherever the model runs: which weights are read depends on each token.
Op experts_op();

}  // namespace kvq::ort
