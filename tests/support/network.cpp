// Preloaded into a process, it writes down whom the process asks for beyond this machine, one to a
// line of $KVQ_NETWORK_LOG, and refuses it: names that are looked up, addresses that are reached.
#include <arpa/inet.h>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <netdb.h>
#include <sys/socket.h>

namespace {

void write_down(const char* call, const char* whom) {
    FILE* log = std::fopen(std::getenv("KVQ_NETWORK_LOG"), "a");
    std::fprintf(log, "%s %s\n", call, whom);
    std::fclose(log);
}

// Whether a call leaves this machine, and is therefore written down.
bool leaves(const char* call, const sockaddr* address) {
    char text[INET6_ADDRSTRLEN] = "";
    if (!address) return false;
    if (address->sa_family == AF_INET) {
        const auto& host = reinterpret_cast<const sockaddr_in*>(address)->sin_addr;
        if (ntohl(host.s_addr) >> 24 == 127) return false;
        inet_ntop(AF_INET, &host, text, sizeof text);
    } else if (address->sa_family == AF_INET6) {
        const auto& host = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
        if (IN6_IS_ADDR_LOOPBACK(&host)) return false;
        inet_ntop(AF_INET6, &host, text, sizeof text);
    } else {
        return false;
    }
    write_down(call, text);
    errno = ENETUNREACH;
    return true;
}

template <class Function> Function* next(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

int getaddrinfo(const char* name, const char* service, const addrinfo* hints, addrinfo** found) {
    const bool local = !name || !std::strcmp(name, "localhost") || !std::strncmp(name, "127.", 4) ||
                       !std::strcmp(name, "::1");
    if (local) return next<decltype(getaddrinfo)>("getaddrinfo")(name, service, hints, found);
    write_down("getaddrinfo", name);
    return EAI_FAIL;
}

int connect(int socket, const sockaddr* address, socklen_t size) {
    if (leaves("connect", address)) return -1;
    return next<int(int, const sockaddr*, socklen_t)>("connect")(socket, address, size);
}

ssize_t sendto(int socket, const void* data, size_t bytes, int flags, const sockaddr* address,
               socklen_t size) {
    if (leaves("sendto", address)) return -1;
    return next<ssize_t(int, const void*, size_t, int, const sockaddr*, socklen_t)>("sendto")(
        socket, data, bytes, flags, address, size);
}

ssize_t sendmsg(int socket, const msghdr* message, int flags) {
    if (leaves("sendmsg", static_cast<const sockaddr*>(message->msg_name))) return -1;
    return next<ssize_t(int, const msghdr*, int)>("sendmsg")(socket, message, flags);
}
}
