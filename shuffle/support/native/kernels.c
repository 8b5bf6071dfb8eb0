/* The loops over rows that numpy and Arrow have no call for, in plain C.
 *
 * Everything here has a twin in Python, which is used where there was no compiler at the time of the installation, and
 * which the tests compare with this one. So nothing may live here alone, and nothing here knows of Python: functions get
 * addresses and lengths, allocate nothing and keep nothing. Callers (``__init__.py``) have checked the sizes.
 *
 * ``part`` is always the reducer of each row, in one byte or two.
 */

#include <stdint.h>
#include <string.h>

#define KERNELS_VERSION 1

int kernels_version(void) { return KERNELS_VERSION; }

/* ---- XXH64, as Spark SQL uses it: the hash of one column is the seed of the next ---------------------------------- */

#define P1 0x9E3779B185EBCA87ULL
#define P2 0xC2B2AE3D27D4EB4FULL
#define P3 0x165667B19E3779F9ULL
#define P4 0x85EBCA77C2B2AE63ULL
#define P5 0x27D4EB2F165667C5ULL

static inline uint64_t rotate(uint64_t word, int bits) { return (word << bits) | (word >> (64 - bits)); }

static inline uint64_t read_8(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

static inline uint32_t read_4(const uint8_t *at) {
    uint32_t half;
    memcpy(&half, at, 4);
    return half;
}

static inline uint64_t mix_lane(uint64_t lane, uint64_t word) { return rotate(lane + word * P2, 31) * P1; }

static inline uint64_t mix_word(uint64_t hash, uint64_t word) {
    return rotate(hash ^ mix_lane(0, word), 27) * P1 + P4;
}

static inline uint64_t finish(uint64_t hash) {
    hash = (hash ^ (hash >> 33)) * P2;
    hash = (hash ^ (hash >> 29)) * P3;
    return hash ^ (hash >> 32);
}

static uint64_t stripes(const uint8_t **at, const uint8_t *end, uint64_t seed) {
    uint64_t lanes[4] = {seed + P1 + P2, seed + P2, seed, seed - P1};
    const uint8_t *here = *at;
    for (; here + 32 <= end; here += 32)
        for (int lane = 0; lane < 4; lane++) lanes[lane] = mix_lane(lanes[lane], read_8(here + 8 * lane));
    uint64_t hash = rotate(lanes[0], 1) + rotate(lanes[1], 7) + rotate(lanes[2], 12) + rotate(lanes[3], 18);
    for (int lane = 0; lane < 4; lane++) hash = (hash ^ mix_lane(0, lanes[lane])) * P1 + P4;
    *at = here;
    return hash;
}

static inline uint64_t hash_value(const uint8_t *at, uint64_t size, uint64_t seed) {
    const uint8_t *end = at + size;
    uint64_t hash = size >= 32 ? stripes(&at, end, seed) : seed + P5;
    hash += size;
    for (; at + 8 <= end; at += 8) hash = mix_word(hash, read_8(at));
    if (at + 4 <= end) {
        hash = rotate(hash ^ (uint64_t)read_4(at) * P1, 23) * P2 + P3;
        at += 4;
    }
    for (; at < end; at++) hash = rotate(hash ^ *at * P5, 11) * P1;
    return finish(hash);
}

/* In each of these, ``hashes`` has the seeds, and gets the hashes. */

void hash_bytes_32(const uint8_t *data, const int32_t *offsets, int64_t rows, uint64_t *hashes) {
    for (int64_t row = 0; row < rows; row++)
        hashes[row] = hash_value(data + offsets[row], (uint64_t)(offsets[row + 1] - offsets[row]), hashes[row]);
}

void hash_bytes_64(const uint8_t *data, const int64_t *offsets, int64_t rows, uint64_t *hashes) {
    for (int64_t row = 0; row < rows; row++)
        hashes[row] = hash_value(data + offsets[row], (uint64_t)(offsets[row + 1] - offsets[row]), hashes[row]);
}

void hash_ints(const uint64_t *values, int64_t rows, uint64_t *hashes) {
    for (int64_t row = 0; row < rows; row++)
        hashes[row] = finish(rotate((hashes[row] + P5 + 4) ^ (values[row] & 0xFFFFFFFFULL) * P1, 23) * P2 + P3);
}

void hash_longs(const uint64_t *values, int64_t rows, uint64_t *hashes) {
    for (int64_t row = 0; row < rows; row++) hashes[row] = finish(mix_word(hashes[row] + P5 + 8, values[row]));
}

/* ---- Key groups and their owners ----------------------------------------------------------------------------------- */

/* ``owners`` has the reducer of each key group. */
void owners_8(const int64_t *hashes, int64_t rows, int64_t groups, const uint8_t *owners, uint8_t *part) {
    if ((groups & (groups - 1)) == 0)
        for (int64_t row = 0; row < rows; row++) part[row] = owners[hashes[row] & (groups - 1)];
    else
        for (int64_t row = 0; row < rows; row++) {
            int64_t group = hashes[row] % groups;
            part[row] = owners[group < 0 ? group + groups : group];
        }
}

void owners_16(const int64_t *hashes, int64_t rows, int64_t groups, const uint16_t *owners, uint16_t *part) {
    for (int64_t row = 0; row < rows; row++) {
        int64_t group = hashes[row] % groups;
        part[row] = owners[group < 0 ? group + groups : group];
    }
}

/* ---- Splitting: each row to the memory of its reducer, in one pass over the rows of a column ------------------------ */

/* A value is copied 16 bytes at a time, so up to 15 bytes behind it are written too. They belong to the next value of
 * the same reducer, which is written later, or to the padding that the caller has left behind each column. Behind the
 * last values of ``data`` there may be nothing to read, so those are copied exactly. */
static inline void copy_value(uint8_t *to, const uint8_t *from, int64_t size, const uint8_t *data_end) {
    if (from + size + 16 > data_end) {
        memcpy(to, from, (size_t)size);
        return;
    }
    for (int64_t done = 0; done < size; done += 16) memcpy(to + done, from + done, 16);
}

/* The functions below exist for parts of one byte and of two. ``to`` has for each reducer the place of its next row, and
 * is moved on: a table of several chunks is split chunk by chunk. */
#define SPLIT(BITS)                                                                                                    \
                                                                                                                       \
    /* The ascending numbers of each reducer's rows, from ``first`` on. */                                             \
    void split_rows_##BITS(const uint##BITS##_t *part, int64_t rows, uint32_t first, uint32_t **to) {                  \
        for (int64_t row = 0; row < rows; row++) *to[part[row]]++ = first + (uint32_t)row;                             \
    }                                                                                                                  \
                                                                                                                       \
    /* The number of rows of each reducer; returns the first row whose reducer does not exist, or -1. */               \
    int64_t split_counts_##BITS(const uint##BITS##_t *part, int64_t rows, int64_t reducers, int64_t *counts) {         \
        for (int64_t row = 0; row < rows; row++) {                                                                     \
            if (part[row] >= reducers) return row;                                                                     \
            counts[part[row]]++;                                                                                       \
        }                                                                                                              \
        return -1;                                                                                                     \
    }                                                                                                                  \
                                                                                                                       \
    void split_fixed_##BITS(const uint8_t *values, int64_t width, const uint##BITS##_t *part, int64_t rows,            \
                            uint8_t **to) {                                                                            \
        switch (width) {                                                                                               \
            case 1: SPLIT_WIDTH(1)                                                                                     \
            case 2: SPLIT_WIDTH(2)                                                                                     \
            case 4: SPLIT_WIDTH(4)                                                                                     \
            case 8: SPLIT_WIDTH(8)                                                                                     \
            case 16: SPLIT_WIDTH(16)                                                                                   \
            default: SPLIT_WIDTH(width)                                                                                \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    /* Bits from bit ``begin`` of ``values`` on. The memory of each reducer has zeros; ``at`` is its next bit, and     \
     * ``ones`` counts the ones that it got. */                                                                        \
    void split_bits_##BITS(const uint8_t *values, int64_t begin, const uint##BITS##_t *part, int64_t rows,             \
                           uint8_t **to, int64_t *at, int64_t *ones) {                                                 \
        for (int64_t row = 0; row < rows; row++) {                                                                     \
            uint32_t reducer = part[row];                                                                              \
            uint8_t bit = (values[(begin + row) >> 3] >> ((begin + row) & 7)) & 1;                                     \
            to[reducer][at[reducer] >> 3] |= (uint8_t)(bit << (at[reducer] & 7));                                      \
            at[reducer]++;                                                                                             \
            ones[reducer] += bit;                                                                                      \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    /* Where each value will end in the memory of its reducer. ``ends`` has the bytes so far, and is moved on; beyond   \
     * 2 GiB the offsets are wrong, which the caller sees in ``ends``. */                                              \
    void split_offsets_##BITS(const int32_t *offsets, const uint##BITS##_t *part, int64_t rows, int32_t **to,          \
                              int64_t *ends) {                                                                         \
        for (int64_t row = 0; row < rows; row++) {                                                                     \
            uint32_t reducer = part[row];                                                                              \
            ends[reducer] += offsets[row + 1] - offsets[row];                                                          \
            *to[reducer]++ = (int32_t)ends[reducer];                                                                   \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    void split_bytes_##BITS(const uint8_t *data, int64_t data_size, const int32_t *offsets,                            \
                            const uint##BITS##_t *part, int64_t rows, uint8_t **to) {                                  \
        const uint8_t *data_end = data + data_size;                                                                    \
        for (int64_t row = 0; row < rows; row++) {                                                                     \
            uint32_t reducer = part[row];                                                                              \
            int64_t size = offsets[row + 1] - offsets[row];                                                            \
            copy_value(to[reducer], data + offsets[row], size, data_end);                                              \
            to[reducer] += size;                                                                                       \
        }                                                                                                              \
    }

#define SPLIT_WIDTH(WIDTH)                                                                                             \
    for (int64_t row = 0; row < rows; row++) {                                                                         \
        memcpy(to[part[row]], values + row * (WIDTH), (size_t)(WIDTH));                                                \
        to[part[row]] += (WIDTH);                                                                                      \
    }                                                                                                                  \
    break;

SPLIT(8)
SPLIT(16)
