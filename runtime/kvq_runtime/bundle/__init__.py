"""Models as files: bundles and GGUF files, read and checked."""
