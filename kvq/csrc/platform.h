// What differs between operating systems, and between processors in how they tell what they run:
// an arena's memory, libraries loaded at run time, instruction sets.
#pragma once
#include <cstdint>
#include <string>

namespace kvq::platform {

enum class Instructions { kAvx2, kAvxVnni, kAvx512Vnni, kDotProducts };
// Whether the processor runs what the kernels of that name are compiled to, and the system keeps
// its registers.
bool runs(Instructions set);
bool processor_is_amd();

// Memory at a multiple of 64 bytes, in huge pages where `huge` and the system has such; null: there
// is none.
uint8_t* allocate(int64_t bytes, bool huge);
void release(uint8_t* memory);

// A shared library, for as long as the process lives; null: `why` says why not.
void* open_library(const char* path, std::string& why);
void* find_symbol(void* library, const char* name);  // null: it has none

}  // namespace kvq::platform
