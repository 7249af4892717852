// A cache's pages on a device in two tiers: the newest columns lie in the device's memory, of the
// others the constants do, and the planes in memory of the host's that the device reads by itself.
// Ahead of a layer's attention its planes of the second tier are copied to a room on the device: of
// two such rooms, one is read while the other fills. Attention finds all of a layer's pages at once,
// as if none had left. Or the constants choose, and what they choose alone comes to the room.
//
// Every page has room for its bytes at the plan's widths, so that places need no moving.
#pragma once
#include <memory>
#include <vector>

#include "device_library.h"
#include "layout.h"

namespace kvq {

// Pages side by side, as a Pool has slots: constants from the start up, granules from the end down.
struct PageRoom {
    uint8_t* start = nullptr;
    int64_t constant_pages, plane_pages;  // pages whose constants, and whose planes, are here
    int64_t granules;                     // of a page
    int64_t constant_bytes, granule_bytes;

    int64_t plane_bytes() const { return granules * granule_bytes; }  // of a page
    int64_t bytes() const {
        return constant_pages * constant_bytes + plane_pages * plane_bytes();
    }
    uint8_t* constants(int64_t page) const { return start + page * constant_bytes; }
    uint8_t* end_of(int64_t slot) const { return start + bytes() - slot * granule_bytes; }
    uint8_t* granule(int64_t slot) const { return end_of(slot + 1); }
};

class Tiers {
public:
    // Bytes on the device if `resident` columns lie there.
    static int64_t device_bytes(const Arena& arena, int resident);
    // `memory`: so many bytes there. Null: the host has no memory for the second tier.
    static std::unique_ptr<Tiers> open(Device& device, const Arena& arena, int resident,
                                       uint8_t* memory);
    ~Tiers();

    // What kernels are told is the pool, and what they are told of an entry.
    const PageRoom& room() const { return device_room_; }
    Entry told(int stream, int column, const Entry& entry) const;
    // Where a page of the column lies: constants on the device, a granule there or on the host;
    // `slot` is one of an entry's.
    uint8_t* constants(int stream, int column) const;
    uint8_t* granule(int stream, int column, int slot) const;

    // The column to come gets a place on the device; the oldest there leaves where none is free.
    int enter(int column);
    void drop(int column) { places_.erase(places_.begin() + column); }
    // So many columns are there, the newest of them on the device; their bytes are not.
    void place(int columns);
    // What attention of the layer reads of the second tier is there when it runs, and that of the
    // next layer on its way.
    int bring(int layer);
    // Attention of the layer will bring what it chooses to its room. Null: nothing is away.
    struct Away {
        const uint8_t* end;  // as kvq_cuda_sequence has them
        int64_t slot;
    };
    int lend(int layer, Away& away);

    int64_t offloaded_bytes() const;
    // Copied from the host since `new_pass`, but for what attention chose.
    int64_t streamed_bytes() const { return streamed_bytes_; }
    void new_pass() { streamed_bytes_ = 0; }

private:
    // A page's planes.
    struct Page {
        const PageRoom& room;
        int64_t number;
    };

    Tiers(Device& device, const Arena& arena, int resident);
    // On the host a layer's pages are neighbours, to be copied at once.
    Page on_device(int place) const { return {device_room_, int64_t{place} * arena_.streams()}; }
    Page on_host(int place, int layer) const {
        return {host_room_, (int64_t{layer} * spilled_ + place - resident_) * kv_heads()};
    }
    // The first page of one of the rooms for copies.
    Page in_room(int room) const {
        return {device_room_,
                int64_t{resident_} * arena_.streams() + int64_t{room} * spilled_ * kv_heads()};
    }
    int place_of(int column) const { return places_[static_cast<size_t>(column)]; }
    // Of the page whose constants lie there, by its column's place.
    int64_t constants_number(int stream, int place) const {
        return int64_t{place} * arena_.streams() + stream;
    }
    int kv_heads() const { return arena_.config().kv_heads; }
    int layers() const { return arena_.config().layers; }
    int columns() const { return static_cast<int>(places_.size()); }
    int granule_number(int slot) const;
    Page page(int stream, int column) const;
    int unused(int first, int end) const;
    int host_columns() const;
    int offload(int& place);
    int stage(int layer);
    int copy(Page to, Page from, int64_t count, void* stream);

    Device& device_;
    const Arena& arena_;
    int resident_, spilled_;  // columns that the device and the host have places for
    PageRoom device_room_, host_room_;
    std::vector<int> places_;   // of columns: below resident_ on the device, then on the host
    int staged_[2] = {-1, -1};  // the layer whose pages each of the rooms for copies holds
    int64_t streamed_bytes_ = 0;
};

}  // namespace kvq
