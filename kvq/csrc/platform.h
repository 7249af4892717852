// What differs between operating systems, and between processors in how they tell what they run:
// an arena's memory, views of files, libraries loaded at run time, instruction sets.
#pragma once
#include <cstdint>
#include <string>

namespace kvq::platform {

enum class Instructions { kAvx2, kAvxVnni, kAvx512Vnni, kAmxInt8, kDotProducts };
// Whether the processor runs what the kernels of that name are compiled to, and the system keeps
// its registers.
bool runs(Instructions set);
// What the processor says of itself: who makes it, as CPUID spells it (empty elsewhere), and what
// the second-level cache holds that a core reads through, alone or with others (0: not said).
struct Processor {
    char maker[13];
    int64_t level2_bytes;
};
Processor processor();
// Whether this process, its threads and its children may use AMX's tiles from now on; asks for them.
bool grants_tiles();
// What trial() says in a process of its own; false, too, if it ends there otherwise, such as by an
// instruction that faults. trial must allocate nothing and take no lock.
bool survives(bool (*trial)());

// Memory at a multiple of 64 bytes, in huge pages where `huge` and the system has such; null: there
// is none.
uint8_t* allocate(int64_t bytes, bool huge);
void release(uint8_t* memory);
// As `allocate`, but the last `file_bytes`, up to part of a system page, are the first of this file:
// what is written there is written to it, and the system keeps in memory what it has room for. Null:
// it has no such views, no room for one, or the file is shorter. Freed by `release_view` alone.
uint8_t* allocate_over(int file, int64_t bytes, int64_t file_bytes);
void release_view(uint8_t* memory, int64_t bytes);
// Whether bytes of such a view are read here and there, so that nothing is gained by reading on.
void expect_jumps(uint8_t* begin, uint8_t* end, bool jumps);

// Views of files, which leave memory and come back as the file has them: nobody writes to them.
bool forgets();  // whether the system does what follows
uintptr_t page_bytes();
// Whether all bytes of these whole pages are such a view, of no matter which files.
bool views_file(uintptr_t begin, uintptr_t end);
// Pages of a view leave this process's memory, to be read from the file when they are next wanted.
void forget(uintptr_t begin, uintptr_t end);
// The system may begin to read these bytes; where they appear in memory is not changed by it.
void read_ahead(uintptr_t begin, uintptr_t end);

// A shared library, for as long as the process lives; null: `why` says why not.
void* open_library(const char* path, std::string& why);
void* find_symbol(void* library, const char* name);  // null: it has none

}  // namespace kvq::platform
