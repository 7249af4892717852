"""Reads and writes GGUF files, and knows what llama.cpp calls things."""
