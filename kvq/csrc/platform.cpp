#include "platform.h"

#include <cstddef>
#include <cstring>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <sstream>
#endif
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace kvq::platform {

#if defined(__x86_64__)
namespace {

// Of leaves 1 and 7 of CPUID, and what the system keeps of a thread's registers. Asked by hand: not
// every compiler's library has what __builtin_cpu_supports reads.
struct Cpuid {
    unsigned ecx1 = 0, ebx7 = 0, ecx7 = 0, edx7 = 0, eax71 = 0;
    bool keeps256 = false, keeps512 = false, keeps_tiles = false;

    Cpuid() {
        unsigned a = 0, b = 0, c = 0, d = 0;
        if (__get_cpuid(1, &a, &b, &c, &d)) ecx1 = c;
        if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) ebx7 = b, ecx7 = c, edx7 = d;
        if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) eax71 = a;
        if (!(ecx1 & bit_OSXSAVE)) return;
        unsigned low = 0, high = 0;
        __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        keeps256 = (low & 0x06) == 0x06;
        keeps_tiles = (low & 0x60000) == 0x60000;
#ifdef __APPLE__
        keeps512 = keeps256;  // macOS keeps them from a thread's first use on
#else
        keeps512 = (low & 0xe6) == 0xe6;
#endif
    }
};

bool all(unsigned found, unsigned wanted) {
    return (found & wanted) == wanted;
}

}  // namespace

bool runs(Instructions set) {
    static const Cpuid cpu;
    static const bool avx2 = cpu.keeps256 && all(cpu.ecx1, bit_FMA | bit_F16C) &&
                             all(cpu.ebx7, bit_AVX2);
    switch (set) {
        case Instructions::kAvx2:
            return avx2;
        case Instructions::kAvxVnni:
            return avx2 && all(cpu.eax71, 1u << 4);
        case Instructions::kAmxInt8:  // amx-tile and amx-int8; their products beside AVX-512's
            return cpu.keeps_tiles && all(cpu.edx7, 3u << 24) && runs(Instructions::kAvx512Vnni);
        case Instructions::kAvx512Vnni:
            return avx2 && cpu.keeps512 && all(cpu.ecx7, bit_AVX512VNNI) &&
                   all(cpu.ebx7, bit_AVX512F | bit_AVX512VL | bit_AVX512BW | bit_AVX512DQ);
        default:
            return false;
    }
}

namespace {

// Of the leaf that lists caches one after the other; AMD's is another than Intel's.
int64_t level2_bytes(unsigned leaf) {
    constexpr unsigned kData = 1, kBoth = 3;
    unsigned a = 0, b = 0, c = 0, d = 0;
    for (unsigned i = 0; __get_cpuid_count(leaf, i, &a, &b, &c, &d) && (a & 31); i++)
        if ((a >> 5 & 7) == 2 && ((a & 31) == kData || (a & 31) == kBoth))
            return (int64_t{b >> 22} + 1) * ((b >> 12 & 1023) + 1) * ((b & 4095) + 1) *
                   (int64_t{c} + 1);
    return 0;
}

}  // namespace

Processor processor() {
    constexpr unsigned kIntelCaches = 4, kAmdCaches = 0x8000001d;
    Processor found{};
    unsigned most = 0, parts[3] = {};
    if (!__get_cpuid(0, &most, &parts[0], &parts[2], &parts[1])) return found;
    std::memcpy(found.maker, parts, sizeof parts);
    found.level2_bytes = level2_bytes(kIntelCaches);
    if (!found.level2_bytes) found.level2_bytes = level2_bytes(kAmdCaches);
    return found;
}
#else
bool runs(Instructions set) {
    if (set != Instructions::kDotProducts) return false;
#if !defined(__aarch64__)
    return false;
#elif defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(_WIN32)
    return IsProcessorFeaturePresent(PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE);
#else
    return true;  // every Mac with such a processor
#endif
}

Processor processor() {
    Processor found{};
#ifdef __linux__
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index";
    for (int i = 0; i < 8; i++) {
        int level = 0;
        std::string type;
        int64_t kib = 0;
        std::ifstream(folder + std::to_string(i) + "/level") >> level;
        std::ifstream(folder + std::to_string(i) + "/type") >> type;
        std::ifstream(folder + std::to_string(i) + "/size") >> kib;  // such as 512K
        if (level == 2 && type != "Instruction") found.level2_bytes = kib << 10;
    }
#endif
    return found;
}
#endif

#if defined(__linux__) && defined(__x86_64__)
bool grants_tiles() {
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
#else
bool grants_tiles() {
    return false;
}
#endif

#ifdef _WIN32
bool survives(bool (*)()) {
    return false;
}
#else
bool survives(bool (*trial)()) {
    const pid_t child = fork();
    if (child == 0) {
        // A fault is no news: nobody prints it, and no memory is written down.
        for (int number : {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGTRAP}) std::signal(number, SIG_DFL);
        const rlimit none{0, 0};
        setrlimit(RLIMIT_CORE, &none);
        _exit(trial() ? 0 : 1);
    }
    if (child < 0) return false;
    int status = 0;
    pid_t ended = 0;
    do ended = waitpid(child, &status, 0);
    while (ended < 0 && errno == EINTR);
    return ended == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}
#endif

#ifdef _WIN32
uint8_t* allocate(int64_t bytes, bool) {
    const auto size = static_cast<size_t>(bytes);
    return static_cast<uint8_t*>(
        VirtualAlloc(nullptr, size, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE));
}

void release(uint8_t* memory) {
    VirtualFree(memory, 0, MEM_RELEASE);
}

void* open_library(const char* path, std::string& why) {
    std::wstring wide(static_cast<size_t>(MultiByteToWideChar(CP_UTF8, 0, path, -1, nullptr, 0)), 0);
    MultiByteToWideChar(CP_UTF8, 0, path, -1, wide.data(), static_cast<int>(wide.size()));
    HMODULE library = LoadLibraryW(wide.data());
    if (!library) why = "Windows does not load it: error " + std::to_string(GetLastError());
    return library;
}

void* find_symbol(void* library, const char* name) {
    return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(library), name));
}
#else
uint8_t* allocate(int64_t bytes, [[maybe_unused]] bool huge) {
    constexpr int64_t kHugePage = int64_t{1} << 21;
    void* memory = nullptr;
    const size_t alignment = bytes >= 2 * kHugePage ? kHugePage : 64;
    if (posix_memalign(&memory, alignment, static_cast<size_t>(bytes))) return nullptr;
#ifdef MADV_HUGEPAGE
    if (huge && bytes >= 2 * kHugePage) {
        const size_t whole = static_cast<size_t>(bytes) / kHugePage * kHugePage;
        madvise(memory, whole, MADV_HUGEPAGE);  // advice: a refusal changes nothing but speed
    }
#endif
    return static_cast<uint8_t*>(memory);
}

void release(uint8_t* memory) {
    std::free(memory);
}

void* open_library(const char* path, std::string& why) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) why = dlerror();
    return library;
}

void* find_symbol(void* library, const char* name) {
    return dlsym(library, name);
}
#endif

#ifdef __linux__
bool forgets() {
    return true;
}

uintptr_t page_bytes() {
    return static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
}

bool views_file(uintptr_t begin, uintptr_t end) {
    std::ifstream maps("/proc/self/maps");
    // In the order of addresses: begin-end permissions offset device inode path.
    for (std::string line; begin < end && std::getline(maps, line);) {
        std::istringstream fields(line);
        uintptr_t first = 0, last = 0;
        std::string permissions, offset, device, inode;
        char dash = 0;
        fields >> std::hex >> first >> dash >> last >> permissions >> offset >> device >> inode;
        if (last <= begin) continue;
        if (first > begin || inode == "0" || permissions[0] != 'r') return false;
        begin = last;
    }
    return begin >= end;
}

void forget(uintptr_t begin, uintptr_t end) {
    // A refusal costs memory alone.
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

void read_ahead(uintptr_t begin, uintptr_t end) {
    begin -= begin % page_bytes();
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_WILLNEED);
}

uint8_t* allocate_over(int file, int64_t bytes, int64_t file_bytes) {
    const auto page = static_cast<int64_t>(page_bytes());
    const int64_t first = (bytes - file_bytes + page - 1) / page * page;
    const auto size = static_cast<size_t>(bytes), rest = static_cast<size_t>(bytes - first);
    struct stat found {};  // behind a file's end there is nothing: touching it would end the process
    if (fstat(file, &found) || found.st_size < bytes - first) return nullptr;
    const int access = PROT_READ | PROT_WRITE;
    void* all = mmap(nullptr, size, access, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) return nullptr;
    auto* memory = static_cast<uint8_t*>(all);
    madvise(memory, static_cast<size_t>(first), MADV_HUGEPAGE);
    if (mmap(memory + first, rest, access, MAP_SHARED | MAP_FIXED, file, 0) != MAP_FAILED)
        return memory;
    munmap(memory, size);
    return nullptr;
}

void release_view(uint8_t* memory, int64_t bytes) {
    munmap(memory, static_cast<size_t>(bytes));
}

void expect_jumps(uint8_t* begin, uint8_t* end, bool jumps) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(begin) / page_bytes() * page_bytes();
    madvise(reinterpret_cast<void*>(first), reinterpret_cast<uintptr_t>(end) - first,
            jumps ? MADV_RANDOM : MADV_NORMAL);
}
#else
// Elsewhere nothing says that a page has left memory: what bounds it is refused.
bool forgets() {
    return false;
}
uintptr_t page_bytes() {
    return 4096;
}
bool views_file(uintptr_t, uintptr_t) {
    return false;
}
void forget(uintptr_t, uintptr_t) {}
void read_ahead(uintptr_t, uintptr_t) {}
uint8_t* allocate_over(int, int64_t, int64_t) {
    return nullptr;
}
void release_view(uint8_t*, int64_t) {}
void expect_jumps(uint8_t*, uint8_t*, bool) {}
#endif

}  // namespace kvq::platform
