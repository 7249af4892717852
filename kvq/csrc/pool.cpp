#include "pool.h"

#include <cstring>

namespace kvq {

void Pool::place(PoolState* state, uint8_t* bytes, int64_t size, int64_t constant_bytes,
                 int64_t granule_bytes, uint32_t* constant_owner, uint32_t* granule_owner) {
    state_ = state;
    bytes_ = bytes;
    size_ = size;
    constant_bytes_ = constant_bytes;
    granule_bytes_ = granule_bytes;
    constant_owner_ = constant_owner;
    granule_owner_ = granule_owner;
}

void Pool::clear() {
    state_->constants = {0, 0, kNone};
    state_->granules = {0, 0, kNone};
}

int64_t Pool::used_bytes() const {
    return state_->constants.used * constant_bytes_ + state_->granules.used * granule_bytes_;
}

bool Pool::fits(int64_t constants, int64_t granules) const {
    return used_bytes() + constants * constant_bytes_ + granules * granule_bytes_ <= size_;
}

int64_t Pool::gap() const {
    return size_ - state_->constants.high * constant_bytes_ -
           state_->granules.high * granule_bytes_;
}

void Pool::unlink(int kind, uint32_t slot) {
    Links links;
    std::memcpy(&links, address(kind, slot), sizeof links);
    const auto edit = [&](uint32_t at, auto change) {
        Links neighbour;
        std::memcpy(&neighbour, address(kind, at), sizeof neighbour);
        change(neighbour);
        std::memcpy(address(kind, at), &neighbour, sizeof neighbour);
    };
    if (links.previous == kNone) slots(kind).free = links.next;
    else edit(links.previous, [&](Links& l) { l.next = links.next; });
    if (links.next != kNone) edit(links.next, [&](Links& l) { l.previous = links.previous; });
}

void Pool::give(int kind, uint32_t slot) {
    SlotState& mine = slots(kind);
    const Links links{kNone, mine.free};
    if (mine.free != kNone) {
        Links head;
        std::memcpy(&head, address(kind, mine.free), sizeof head);
        head.previous = slot;
        std::memcpy(address(kind, mine.free), &head, sizeof head);
    }
    std::memcpy(address(kind, slot), &links, sizeof links);
    owners(kind)[slot] = kNone;
    mine.free = slot;
    mine.used--;
}

uint32_t Pool::retreat(int kind) {
    SlotState& mine = slots(kind);
    const uint32_t edge = --mine.high;
    if (owners(kind)[edge] == kNone) {
        unlink(kind, edge);
        return kNone;
    }
    // fits() held, so a free slot below the edge exists.
    const uint32_t to = mine.free;
    unlink(kind, to);
    owners(kind)[to] = owners(kind)[edge];
    return to;
}

}  // namespace kvq
