#include "tiers.h"

#include <algorithm>

namespace kvq {
namespace {

PageRoom room_for(const Arena& arena, int64_t constant_pages, int64_t plane_pages) {
    const kvq_config& c = arena.config();
    return {nullptr,
            constant_pages,
            plane_pages,
            granules(c.k_bits) + granules(c.v_bits),
            arena.sizes.constant_bytes,
            arena.sizes.granule_bytes};
}

// All constants; planes of the resident columns, and twice what a layer has in the second tier.
PageRoom room_on_device(const Arena& arena, int resident) {
    const int64_t columns = arena.sizes.max_columns, spilled = columns - resident;
    return room_for(arena, columns * arena.streams(),
                    resident * arena.streams() + 2 * spilled * arena.config().kv_heads);
}

}  // namespace

int64_t Tiers::device_bytes(const Arena& arena, int resident) {
    return room_on_device(arena, resident).bytes();
}

Tiers::Tiers(Device& device, const Arena& arena, int resident)
    : device_(device),
      arena_(arena),
      resident_(resident),
      spilled_(arena.sizes.max_columns - resident),
      device_room_(room_on_device(arena, resident)),
      host_room_(room_for(arena, 0, int64_t{spilled_} * arena.streams())) {}

std::unique_ptr<Tiers> Tiers::open(Device& device, const Arena& arena, int resident,
                                   uint8_t* memory) {
    std::unique_ptr<Tiers> tiers(new Tiers(device, arena, resident));
    void* host = nullptr;
    if (device.calls().allocate_host(tiers->host_room_.bytes(), &host)) return nullptr;
    tiers->device_room_.start = memory;
    tiers->host_room_.start = static_cast<uint8_t*>(host);
    return tiers;
}

Tiers::~Tiers() {
    std::lock_guard<std::mutex> turn(device_.turn);
    device_.calls().wait(device_.facts().copies);
    device_.wait();
    if (host_room_.start) device_.calls().free_host(host_room_.start);
}

// Of a page's granules, keys before values, as many as the plan's widths have.
int Tiers::granule_number(int slot) const {
    const int first = granules(arena_.config().k_bits);
    return slot < kGranulesPerSide ? slot : first + slot - kGranulesPerSide;
}

Tiers::Page Tiers::page(int stream, int column) const {
    const int place = place_of(column);
    Page found = place < resident_ ? on_device(place) : on_host(place, stream / kv_heads());
    found.number += place < resident_ ? stream : stream % kv_heads();
    return found;
}

uint8_t* Tiers::constants(int stream, int column) const {
    return device_room_.constants(constants_number(stream, place_of(column)));
}

uint8_t* Tiers::granule(int stream, int column, int slot) const {
    const Page at = page(stream, column);
    return at.room.granule(at.number * at.room.granules + granule_number(slot));
}

Entry Tiers::told(int stream, int column, const Entry& entry) const {
    Entry told = entry;
    if (!entry.k_bits) return told;
    const int layer = stream / kv_heads();
    const Page at = page(stream, column);
    const bool copied = &at.room == &host_room_;
    const int64_t number =
        copied ? in_room(layer % 2).number + at.number - on_host(resident_, layer).number
               : at.number;
    told.constants = static_cast<uint32_t>(constants_number(stream, place_of(column)));
    for (int slot = 0; slot < 2 * kGranulesPerSide; slot++)
        if (entry.granule[slot] != kNone)
            told.granule[slot] =
                static_cast<uint32_t>(number * device_room_.granules + granule_number(slot));
    return told;
}

int Tiers::unused(int first, int end) const {
    for (int place = first; place < end; place++)
        if (std::find(places_.begin(), places_.end(), place) == places_.end()) return place;
    return -1;
}

// Places on the host from the first to the last that is in use.
int Tiers::host_columns() const {
    int end = resident_;
    for (int place : places_) end = std::max(end, place + 1);
    return end - resident_;
}

int64_t Tiers::offloaded_bytes() const {
    const auto on_host = [&](int place) { return place >= resident_; };
    return std::count_if(places_.begin(), places_.end(), on_host) * arena_.streams() *
           host_room_.plane_bytes();
}

void Tiers::place(int columns) {
    places_.clear();
    staged_[0] = staged_[1] = -1;
    const int behind = std::max(0, columns - resident_);
    for (int c = 0; c < columns; c++) places_.push_back(c < behind ? resident_ + c : c - behind);
}

int Tiers::enter(int column) {
    if (column < columns()) return KVQ_OK;
    int place = unused(0, resident_), status = KVQ_OK;
    if (place < 0) status = offload(place);
    places_.push_back(place);
    return status;
}

// The oldest column on the device leaves it; `place` becomes free.
int Tiers::offload(int& place) {
    const auto oldest =
        std::find_if(places_.begin(), places_.end(), [&](int one) { return one < resident_; });
    const int there = unused(resident_, resident_ + spilled_);
    void* const stream = device_.facts().stream;
    place = *oldest;
    *oldest = there;
    staged_[0] = staged_[1] = -1;
    // What is on its way may still be read where this one goes.
    int status = device_.calls().after(stream, device_.facts().copies);
    const auto constants = [&](int at) { return device_room_.constants(constants_number(0, at)); };
    const int64_t constant_bytes = arena_.streams() * device_room_.constant_bytes;
    if (!status) status = device_.copy(constants(there), constants(place), constant_bytes);
    for (int layer = 0; layer < layers() && !status; layer++) {
        Page from = on_device(place);
        from.number += int64_t{layer} * kv_heads();
        status = copy(on_host(there, layer), from, kv_heads(), stream);
    }
    return status;
}

int Tiers::stage(int layer) {
    const int64_t count = int64_t{host_columns()} * kv_heads();
    const int room = layer % 2;
    if (!count || staged_[room] == layer) return KVQ_OK;
    // After all that may read what the room holds, and after what came to the host.
    if (const int status = device_.calls().after(device_.facts().copies, device_.facts().stream))
        return status;
    staged_[room] = layer;
    streamed_bytes_ += count * host_room_.plane_bytes();
    return copy(in_room(room), on_host(resident_, layer), count, device_.facts().copies);
}

int Tiers::bring(int layer) {
    if (const int status = stage(layer)) return status;
    if (!host_columns()) return KVQ_OK;
    if (const int status = device_.calls().after(device_.facts().stream, device_.facts().copies))
        return status;
    // Of an odd number of layers the last and the first share a room.
    const int next = (layer + 1) % layers();
    return next % 2 == layer % 2 ? int{KVQ_OK} : stage(next);
}

int Tiers::lend(int layer, Away& away) {
    away = {};
    if (!host_columns()) return KVQ_OK;
    const Page room = in_room(layer % 2), host = on_host(resident_, layer);
    staged_[layer % 2] = -1;
    away = {host.room.end_of(host.number * host.room.granules), room.number * room.room.granules};
    // What is on its way to the room comes before what is chosen.
    return device_.calls().after(device_.facts().stream, device_.facts().copies);
}

// Planes of so many neighbouring pages.
int Tiers::copy(Page to, Page from, int64_t count, void* stream) {
    const auto lowest = [&](Page at) {
        return at.room.end_of((at.number + count) * at.room.granules);
    };
    return device_.calls().copy(lowest(to), 0, lowest(from), 0, count * to.room.plane_bytes(), 1,
                                stream);
}

}  // namespace kvq
