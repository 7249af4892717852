// The part of the arena that holds pages: constants grow up from its start, granules grow down from
// its end, the gap between serves both. Each kind is all one size, so a free slot fits any demand
// of its kind; when one kind needs the gap and the other's edge is in use, the edge item moves into
// a free slot of its own kind, which `moved` does. Hence a demand fits exactly when its bytes do.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvq {

constexpr uint32_t kNone = 0xffffffffu;

// One kind of slot. Slot i starts at base + i * step; step is negative for the kind that grows
// down.
struct SlotState {
    uint32_t high;  // slots ever handed out and not yet given back to the gap
    uint32_t used;  // slots in use, of those
    uint32_t free;  // head of the list of free slots below high
};

struct PoolState {
    SlotState constants, granules;
};

class Pool {
public:
    // Tables of owners: one uint32 per slot; kNone marks a free slot, whose bytes hold list links.
    void place(PoolState* state, uint8_t* bytes, int64_t size, int64_t constant_bytes,
               int64_t granule_bytes, uint32_t* constant_owner, uint32_t* granule_owner);
    void clear();

    bool fits(int64_t constants, int64_t granules) const;
    int64_t used_bytes() const;
    int64_t granule_bytes() const { return state_->granules.used * granule_bytes_; }
    // Calls run(address, bytes) on every stretch of slots in use.
    template <class Run>
    void visit_used(Run&& run) const {
        for (int kind = 0; kind < 2; kind++)
            for (uint32_t first = 0, end; first < slots(kind).high; first = end + 1) {
                for (end = first; end < slots(kind).high && owners(kind)[end] != kNone;) end++;
                if (end > first)
                    run(address(kind, kind ? end - 1 : first), (end - first) * slot_bytes(kind));
            }
    }

    uint8_t* constant(uint32_t slot) const { return bytes_ + int64_t{slot} * constant_bytes_; }
    uint8_t* granule(uint32_t slot) const {
        return bytes_ + size_ - (int64_t{slot} + 1) * granule_bytes_;
    }

    uint8_t* address(int kind, uint32_t slot) const {
        return kind ? granule(slot) : constant(slot);
    }
    int64_t slot_bytes(int kind) const { return kind ? granule_bytes_ : constant_bytes_; }

    // Take a slot for `owner`. The caller has asked fits() for all it takes. `moved(kind, from, to,
    // owner)` moves the bytes of every item that has to; kind 0 is a constant, 1 a granule.
    template <class Moved>
    uint32_t take_constant(uint32_t owner, Moved&& moved) {
        return take(0, owner, moved);
    }
    template <class Moved>
    uint32_t take_granule(uint32_t owner, Moved&& moved) {
        return take(1, owner, moved);
    }
    void give_constant(uint32_t slot) { give(0, slot); }
    void give_granule(uint32_t slot) { give(1, slot); }

private:
    struct Links {
        uint32_t previous, next;
    };
    SlotState& slots(int kind) const { return kind ? state_->granules : state_->constants; }
    uint32_t* owners(int kind) const { return kind ? granule_owner_ : constant_owner_; }
    int64_t gap() const;
    void unlink(int kind, uint32_t slot);
    void give(int kind, uint32_t slot);
    // Lowers the edge of `kind` by one slot; returns the slot its item has to move to, or kNone.
    uint32_t retreat(int kind);

    template <class Moved>
    uint32_t take(int kind, uint32_t owner, Moved&& moved) {
        SlotState& mine = slots(kind);
        uint32_t slot = mine.free;
        if (slot != kNone) {
            unlink(kind, slot);
        } else {
            while (gap() < slot_bytes(kind)) {
                SlotState& other = slots(1 - kind);
                const uint32_t from = other.high - 1;
                const uint32_t to = retreat(1 - kind);
                if (to != kNone) moved(1 - kind, from, to, owners(1 - kind)[to]);
            }
            slot = mine.high++;
        }
        mine.used++;
        owners(kind)[slot] = owner;
        return slot;
    }

    PoolState* state_ = nullptr;
    uint8_t* bytes_ = nullptr;
    int64_t size_ = 0, constant_bytes_ = 0, granule_bytes_ = 0;
    uint32_t* constant_owner_ = nullptr;
    uint32_t* granule_owner_ = nullptr;
};

}  // namespace kvq
