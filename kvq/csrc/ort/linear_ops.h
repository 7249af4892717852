// The ops over stored weights: kvq::Linear and kvq::Embed.
#pragma once
#include <vector>

#include "kernel.h"

namespace kvq::ort {

std::vector<Op> linear_ops(Device* device);

}  // namespace kvq::ort
