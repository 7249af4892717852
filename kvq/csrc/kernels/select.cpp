// Chooses the kernels once, at load: the best set this processor runs. KVQ_ISA overrides it.
#include <cstdlib>
#include <cstring>
#include <string>

#include "kernels.h"

namespace kvq {
namespace {

using Getter = const Kernels* (*)();
constexpr Getter kBestFirst[] = {amxint8_kernels, avx512vnni_kernels, avxvnni_kernels, avx2_kernels,
                                 neon_kernels,    generic_kernels};

const Kernels* find(const char* name) {
    for (Getter getter : kBestFirst) {
        const Kernels* table = getter();
        if (table && (!name || !std::strcmp(table->name, name))) return table;
    }
    return nullptr;
}

const Kernels*& chosen() {
    static const Kernels* table = find(nullptr);
    return table;
}

}  // namespace

const Kernels& kernels() {
    return *chosen();
}

bool select_kernels(const char* name) {
    const Kernels* table = find(name);
    if (table) chosen() = table;
    return table != nullptr;
}

const char* available_kernels() {
    static const std::string names = [] {
        std::string all;
        for (Getter getter : kBestFirst)
            if (const Kernels* table = getter())
                all += (all.empty() ? "" : ",") + std::string(table->name);
        return all;
    }();
    return names.c_str();
}

const char* refused_kernels() {
    static const std::string refused =
        *amxint8_refusal() ? std::string("amxint8: ") + amxint8_refusal() : "";
    return refused.c_str();
}

}  // namespace kvq
