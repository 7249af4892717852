// Layout of a page: the only definition of its bytes. kvq/reference/stored.py restates it in numpy and the
// tests compare the two byte for byte.
//
// A page holds 64 tokens of one (layer, KV head). A code is an unsigned 8-bit number kept as two
// nibble planes, hi4 and lo4; a read at b bits means
//     x = mid + step * (code_b - (2^b - 1) / 2),   step = scale * 2^(8-b)
// where code_8 = 16*hi + lo, code_6 = 4*hi + (lo >> 2), code_4 = hi, code_2 = hi >> 2. What is
// encoded lies within 120 scales of its mid, not 127.5: that is as far as the outermost levels of a
// 4-bit read reach. 8 bits store hi4 and lo4, 6 bits hi4 and the top bits of lo4 as a 2-bit plane,
// 4 bits hi4, 2 bits its top bits as a 2-bit plane.
//
//   K nibble plane  [8 token groups][D/8][32 bytes]   byte 4*t + c of vector j in group g:
//                   token 8g + t; low nibble channel 8j + c, high nibble channel 8j + 4 + c
//   K 2-bit plane   [8 token groups][D/16][32 bytes]  bits 2i of byte 4*t + c: channel 16j + 4i + c
//   V nibble plane  [D/8 channel groups][8][32 bytes] byte 4*c + t of vector j in group g:
//                   channel 8g + c; low nibble token 8j + t, high nibble token 8j + 4 + t
//   V 2-bit plane   [D/8 channel groups][4][32 bytes] bits 2i of byte 4*c + t: token 16j + 4i + t
//   K constants     a grid of n = D groups            (per channel over the page's tokens)
//   V constants     a grid of n = 64 groups           (per token over the head's channels), or
//                   of n = D where the stream's form has kChannelValues (per channel over tokens)
//   grid            float16 low, unit of the scales, low, unit of the mids;
//                   uint8 scale[n], mid[n], each meaning low + unit * code
//
// Where the form has kRotatedKeys, each block of channels of keys (the largest power of two that
// divides D) was multiplied by the orthonormal Hadamard matrix before all this, as the query is
// that meets them.
//
// The unit of storage is a granule of 16*D bytes: half a nibble plane, or a whole 2-bit plane. All
// granules are alike, so demotion never leaves a hole that another plane cannot use.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvq {

constexpr int kPageVersion = 3;  // of all that is said here
constexpr int kPageTokens = 64;
constexpr int kMaxHeadDim = 512;
constexpr float kReach = 120.0f;  // scales from a group's mid to its ends
constexpr int64_t kMaxPosition = INT32_MAX - 2 * kPageTokens;  // a page's last one stays an int32
constexpr int kGranulesPerSide = 4;  // 8 bits: hi4 in granules 0 and 1, lo4 in 2 and 3
constexpr bool valid_width(int bits) { return bits == 8 || bits == 6 || bits == 4 || bits == 2; }
// Widths that keep the top half of a plane, and the granule it begins at: hi4's, or lo4's.
constexpr bool halves_plane(int bits) { return bits == 6 || bits == 2; }
constexpr size_t halved(int bits) { return bits == 6 ? 2 : 0; }
// Of a mask of a page's tokens, or of other 64 rows, the first `count`.
constexpr uint64_t low_bits(int64_t count) {
    return count >= 64 ? ~uint64_t{0} : count <= 0 ? 0 : (uint64_t{1} << count) - 1;
}

// A code as a read at `bits` has it, its dropped bits 0, plus this: steps from its grid's middle.
constexpr float from_middle(int bits) {
    return static_cast<float>((1 << (8 - bits)) - 1) / 2 - 127.5f;
}
// Where planes of keys have the code of a token's channel: the byte of a plane of nibbles and how
// far up in it, and the same of a plane of two bits.
struct KeyPlace {
    int nibble, nibble_shift, pair, pair_shift;
};
constexpr KeyPlace key_place(int head_dim, int token, int channel) {
    const int at = token / 8 * 4 * head_dim + 4 * (token % 8) + channel / 8 * 32 + channel % 4;
    const int shift = channel % 8 / 4 * 4;
    return {at, shift, at / 64 * 32 + at % 32, at / 32 % 2 * 4 + shift / 2};
}

constexpr size_t granule_bytes(int head_dim) { return size_t{16} * head_dim; }
constexpr int granules(int bits) { return bits / 2; }
constexpr size_t grid_bytes(int groups) { return 8 + size_t{2} * groups; }
constexpr size_t constant_bytes(int head_dim, int value_groups) {
    return grid_bytes(head_dim) + grid_bytes(value_groups);
}

static_assert(granules(8) * granule_bytes(128) == kPageTokens * 128, "8 bits are one byte a code");
static_assert(granules(4) * granule_bytes(64) == kPageTokens * 64 / 2, "4 bits are half a byte");
static_assert(granules(2) * granule_bytes(80) == kPageTokens * 80 / 4, "2 bits are a quarter");
static_assert(granule_bytes(80) % 64 == 0, "a granule keeps vector alignment");
static_assert(constant_bytes(80, kPageTokens) % 16 == 0, "constants keep each other aligned");

// How the pages of one (layer, KV head) are encoded, as bits.
enum Form : uint8_t { kRotatedKeys = 1, kChannelValues = 2, kForms = 4 };

// Tokens of one page, of all layers and heads, that have moved together. Slot i holds token
// first_token + i, whose key was rotated to position pos0 + i and stands delta further now.
struct View {
    int32_t column;  // the page
    int32_t pos0;
    int32_t delta;
    int32_t first_token;
    uint64_t mask;  // bit i: slot i is visible, in this view
};
static_assert(sizeof(View) == 24, "kvq/geometry.py counts these bytes too");

// Where one page of one (layer, KV head) lies. Widths 0, 0: evicted. The last two are the page's
// history of attention received, as `mass_code` (0: never observed).
struct Entry {
    uint32_t granule[2 * kGranulesPerSide];  // K then V
    uint32_t constants;
    uint8_t k_bits;
    uint8_t v_bits;
    uint8_t peak_weight;
    uint8_t mean_mass;
};
static_assert(sizeof(Entry) == 40);

}  // namespace kvq
