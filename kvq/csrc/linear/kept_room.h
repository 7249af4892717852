// Room that calls keep between them, so that none has to ask for it again.
#pragma once
#include <mutex>

namespace kvq {

// A call has a room of its own for as long as this lives, and leaves it to a later call of any
// thread. No thread_local object does that: where memory ends while a thread registers its
// destructor, the C library ends the process.
template <class Room>
class KeptRoom {
public:
    KeptRoom() : kept_(taken()) {
        if (!kept_) kept_ = new Kept;
    }
    ~KeptRoom() {
        const std::lock_guard<std::mutex> lock(mutex());
        kept_->next = first();
        first() = kept_;
    }
    KeptRoom(const KeptRoom&) = delete;
    KeptRoom& operator=(const KeptRoom&) = delete;
    Room& room() { return kept_->room; }

private:
    struct Kept {
        Room room;
        Kept* next = nullptr;
    };
    static std::mutex& mutex() {
        static std::mutex all;
        return all;
    }
    static Kept*& first() {
        static Kept* kept = nullptr;
        return kept;
    }
    static Kept* taken() {
        const std::lock_guard<std::mutex> lock(mutex());
        Kept* const kept = first();
        if (kept) first() = kept->next;
        return kept;
    }

    Kept* kept_;
};

}  // namespace kvq
