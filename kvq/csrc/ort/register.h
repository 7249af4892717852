// Adding the ops to a session of ONNX Runtime.
#pragma once

namespace kvq::ort {

// Adds domain "kvq" to OrtSessionOptions `options`, `base` being its OrtApiBase and `device` the
// kvq::Device that computes, null for the processor. An OrtStatus, null: done.
void* register_ops(void* options, const void* base, void* device);

}  // namespace kvq::ort
