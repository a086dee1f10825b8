// MinHash, buckets, and the greedy removal of near duplicates. `shingles.py`, and `minhash.py`, `clusters.py` and
// `verify.py` of `near` have the same functions in numpy, and tests compare the two.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr uint64_t P = 0x9E3779B97F4A7C15ull;  // odd, so invertible modulo 2^64
typedef uint64_t Lanes __attribute__((vector_size(64), aligned(8)));
constexpr int LANES = 8, BLOCK = 8;  // a pass keeps LANES * BLOCK minima in registers
constexpr int PASS = LANES * BLOCK;
constexpr size_t MAX_KEPT_PER_BUCKET = 256;
constexpr size_t MAX_COMPARED_ALL = 16;

template <typename T>  // a number or Lanes
inline void splitmix64(T& x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    x = x ^ (x >> 31);
}
inline uint64_t mix(uint64_t x) {
    splitmix64(x);
    return x;
}

struct Powers {
    uint64_t of[64];
    Powers() {
        of[0] = 1;
        for (int i = 1; i < 64; i++) of[i] = of[i - 1] * P;
    }
    inline uint64_t operator()(int64_t i) const {
        uint64_t power = of[i & 63];
        for (i >>= 6; i > 0; i--) power *= of[63] * P;
        return power;
    }
};
const Powers power;

void minhash(const uint64_t* shingles, int64_t n, const uint64_t* a, const uint64_t* b, int hashes, uint32_t* out) {
    for (int k = 0; k < hashes; k += PASS) {
        Lanes multiply[BLOCK], add[BLOCK], least[BLOCK];
        std::memcpy(multiply, a + k, sizeof multiply);
        std::memcpy(add, b + k, sizeof add);
        std::memset(least, 0xFF, sizeof least);
        for (int64_t i = 0; i < n; i++) {
            const uint64_t x = shingles[i];
            const Lanes value = {x, x, x, x, x, x, x, x};
            for (int j = 0; j < BLOCK; j++) {
                const Lanes hashed = value * multiply[j] + add[j];
                least[j] = hashed < least[j] ? hashed : least[j];
            }
        }
        uint64_t found[PASS];
        std::memcpy(found, least, sizeof found);
        for (int j = 0; j < std::min(PASS, hashes - k); j++) out[k + j] = uint32_t(found[j] >> 32);
    }
}

void band_keys(const uint32_t* signature, int bands, int rows, uint64_t* out) {
    for (int band = 0; band < bands; band++) {
        uint64_t key = uint64_t(band);
        for (int row = 0; row < rows; row++) key = mix(key ^ signature[band * rows + row]) * P;
        out[band] = key;
    }
}

int64_t find(int64_t* parent, int64_t i) {
    while (parent[i] != i) i = parent[i] = parent[parent[i]];
    return i;
}

int64_t common(const uint64_t* a, int64_t n, const uint64_t* b, int64_t m) {
    int64_t i = 0, j = 0, count = 0;
    while (i < n && j < m) {  // without branches that depend on the values
        const uint64_t x = a[i], y = b[j];
        count += x == y;
        i += x <= y;
        j += y <= x;
    }
    return count;
}

// Sort hashes by their upper bits into about as many buckets as there are hashes, then each bucket. Hashes are nearly
// uniform, so a bucket has one or two. `ends` is scratch.
void sort_hashes(const uint64_t* hashes, int64_t n, std::vector<uint64_t>& sorted, std::vector<int64_t>& ends) {
    int bits = 1;
    while (bits < 20 && int64_t(1) << bits < n) bits++;
    const int shift = 64 - bits;
    sorted.resize(n);
    ends.assign((int64_t(1) << bits) + 1, 0);
    for (int64_t i = 0; i < n; i++) ends[(hashes[i] >> shift) + 1]++;
    for (size_t k = 1; k < ends.size(); k++) ends[k] += ends[k - 1];
    for (int64_t i = 0; i < n; i++) sorted[ends[hashes[i] >> shift]++] = hashes[i];
    int64_t begin = 0;
    for (size_t k = 0; k + 1 < ends.size(); k++) {
        if (ends[k] - begin > 1) std::sort(sorted.begin() + begin, sorted.begin() + ends[k]);
        begin = ends[k];
    }
}

struct Files {  // the signatures of all files; a document is a number over all of them
    const uint16_t* const* signatures;
    const int64_t* first;  // [n + 1]
    int64_t n;
    int hashes;
    const uint16_t* at(int64_t document) const {
        const int64_t file = std::upper_bound(first, first + n + 1, document) - first - 1;
        return signatures[file] + (document - first[file]) * hashes;
    }
};

int agreement(const uint16_t* a, const uint16_t* b, int hashes) {
    int equal = 0;
    for (int k = 0; k < hashes; k++) equal += a[k] == b[k];
    return equal;
}

int64_t hash_characters(const uint8_t* p, const uint8_t* end, const uint8_t* table, uint64_t* out) {
    int64_t count = 0;
    while (p < end) {
        if (!table[*p] || (*p & 0xC0) == 0x80) { p++; continue; }
        uint64_t hash = 0;
        int64_t at = 0;
        do {
            hash += table[*p++] * power(at++);
        } while (p < end && (*p & 0xC0) == 0x80);
        out[count++] = mix(hash);
    }
    return count;
}

struct Scratch {
    std::vector<uint8_t> hashed;  // the value of each byte in the table, and zeros at the end
    std::vector<std::pair<int64_t, uint64_t>> longer;  // words of more than eight bytes, and the sum of the others
};

// Copy the values of a text, with a zero before and after each character that is a word; return their number.
int64_t separate(const uint8_t* p, int64_t size, const uint8_t* table, const uint8_t* alone, uint8_t* out) {
    int64_t n = 0;
    for (int64_t i = 0; i < size;) {
        const bool is_word = alone[p[i] << 8 | (i + 1 < size ? p[i + 1] : 10)];
        if (is_word) out[n++] = 0;
        do out[n++] = table[p[i++]];
        while (is_word && i < size && (p[i] & 0xC0) == 0x80);
        if (is_word) out[n++] = 0;
    }
    return n;
}

// The words are found eight bytes at a time, then hashed eight at a time. out: has space for seven words more.
int64_t hash_words(const uint8_t* p, const uint8_t* end, const uint8_t* table, const uint8_t* alone, Scratch& scratch,
                   uint64_t* out) {
    constexpr uint64_t HIGH = 0x8080808080808080ull;
    int64_t size = end - p;
    if (int64_t(scratch.hashed.size()) < 3 * size + 16) scratch.hashed.resize(3 * size + 16);
    scratch.longer.clear();
    uint8_t* bytes = scratch.hashed.data();
    uint8_t largest = 0;
    for (int64_t i = 0; i < size; i++) {
        bytes[i] = table[p[i]];
        largest = std::max(largest, p[i]);
    }
    if (largest >= 0xE0) size = separate(p, size, table, alone, bytes);
    std::memset(bytes + size, 0, 16);
    int64_t count = 0;
    for (int64_t i = 0; i < size;) {
        uint64_t x;
        std::memcpy(&x, bytes + i, 8);
        if (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__) x = __builtin_bswap64(x);
        const uint64_t full = (((x & ~HIGH) + ~HIGH) | x) & HIGH;  // the high bit of each byte that is not zero
        if (full == HIGH) {
            uint64_t more = 0;
            int64_t at = 8;
            for (; bytes[i + at]; at++) more += bytes[i + at] * power(at);
            if (at > 8) scratch.longer.emplace_back(count, more);
            out[count++] = x;
            i += at;
            continue;
        }
        const int length = __builtin_ctzll(~full & HIGH) >> 3;
        out[count] = x & ((1ull << 8 * length) - 1);
        count += length > 0;
        const uint64_t rest = full >> 8 * length;
        i += rest ? length + (__builtin_ctzll(rest) >> 3) : 8;
    }
    for (int64_t i = 0; i < count; i += LANES) {
        Lanes x, sum = {};
        std::memcpy(&x, out + i, sizeof x);
        for (int j = 0; j < 8; j++, x >>= 8) sum += (x & 0xFF) * power.of[j];
        std::memcpy(out + i, &sum, sizeof sum);
    }
    for (const auto& [word, more] : scratch.longer) out[word] += more;
    for (int64_t i = 0; i < count; i++) out[i] = mix(out[i]);
    return count;
}

void hash_windows(const uint64_t* words, int64_t n, int32_t size, uint64_t* out) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        Lanes x, word;
        std::memcpy(&x, words + i, sizeof x);
        for (int32_t j = 1; j < size; j++) {
            std::memcpy(&word, words + i + j, sizeof word);
            x = x * P + word;
        }
        splitmix64(x);
        std::memcpy(out + i, &x, sizeof x);
    }
    for (; i < n; i++) {
        uint64_t x = words[i];
        for (int32_t j = 1; j < size; j++) x = x * P + words[i + j];
        out[i] = mix(x);
    }
}

}  // namespace

extern "C" {

// Write the shingle hashes of n documents, one document after the other. Document i is data[starts[i], ends[i]).
// The array first has n + 1 numbers, and words is scratch for the longest document. A separator has 0 in table.
// alone: for the first two bytes of a character, whether it is a word.
void whorl_shingles(const uint8_t* data, const int64_t* starts, const int64_t* ends, int64_t n, const uint8_t* table,
                    const uint8_t* alone, int32_t characters, int32_t size, uint64_t* words, uint64_t* out, int64_t* first) {
    int64_t written = 0;
    Scratch scratch;
    for (int64_t d = 0; d < n; d++) {
        first[d] = written;
        const uint8_t *p = data + starts[d], *end = data + ends[d];
        const int64_t count = characters ? hash_characters(p, end, table, words) : hash_words(p, end, table, alone, scratch, words);
        const int64_t shingles = std::max<int64_t>(count - size + 1, 1);
        if (count < size) {
            uint64_t shingle = 0;
            for (int32_t j = 0; j < size; j++) shingle = shingle * P + (j < count ? words[j] : 0);
            out[written] = mix(shingle);
        } else {
            hash_windows(words, shingles, size, out + written);
        }
        written += shingles;
    }
    first[n] = written;
}

// a, b: padded to a multiple of PASS. out: [n, hashes].
void whorl_minhash(const uint64_t* shingles, const int64_t* first, int64_t n, const uint64_t* a, const uint64_t* b,
                   int32_t hashes, uint32_t* out) {
    for (int64_t d = 0; d < n; d++)
        minhash(shingles + first[d], first[d + 1] - first[d], a, b, hashes, out + d * hashes);
}

// out: [n, bands].
void whorl_band_keys(const uint32_t* signatures, int64_t n, int32_t hashes, int32_t bands, int32_t rows, uint64_t* out) {
    for (int64_t d = 0; d < n; d++) band_keys(signatures + d * hashes, bands, rows, out + d * bands);
}

// Sort each document's shingles and remove repetitions, in place; `first` is updated.
void whorl_unique(uint64_t* shingles, int64_t* first, int64_t n) {
    int64_t written = 0, begin = first[0];
    std::vector<uint64_t> sorted;
    std::vector<int64_t> ends;
    for (int64_t d = 0; d < n; d++) {
        const int64_t end = first[d + 1];
        sort_hashes(shingles + begin, end - begin, sorted, ends);
        const int64_t count = std::unique_copy(sorted.begin(), sorted.end(), shingles + written) - (shingles + written);
        first[d] = written;
        written += count;
        begin = end;
    }
    first[n] = written;
}

// Order records by key; records of equal keys keep their order. The arrays `other_*` are scratch.
void whorl_sort(uint32_t* keys, int64_t* documents, int64_t n, uint32_t* other_keys, int64_t* other_documents) {
    for (int shift = 0; shift < 32; shift += 8) {  // four passes: the result is back in `keys`
        int64_t counts[256] = {}, sum = 0;
        for (int64_t i = 0; i < n; i++) counts[keys[i] >> shift & 0xFF]++;
        for (auto& count : counts) { const int64_t here = count; count = sum; sum += here; }
        for (int64_t i = 0; i < n; i++) {
            const int64_t at = counts[keys[i] >> shift & 0xFF]++;
            other_keys[at] = keys[i];
            other_documents[at] = documents[i];
        }
        std::swap(keys, other_keys);
        std::swap(documents, other_documents);
    }
}

// Divide keys [n, bands] by their upper bits. out: the lower halves, by partition. counts: [2^bits, n] how many each document
// has. first: [2^bits + 1].
void whorl_partition(const uint64_t* keys, int64_t n, int32_t bands, int32_t bits, uint32_t* out, uint16_t* counts,
                     int64_t* first) {
    const int64_t partitions = int64_t(1) << bits;
    const auto number = [&](uint64_t key) { return bits ? int64_t(key >> (64 - bits)) : 0; };
    std::fill(counts, counts + partitions * n, 0);
    for (int64_t d = 0; d < n; d++)
        for (int32_t b = 0; b < bands; b++) counts[number(keys[d * bands + b]) * n + d]++;
    std::vector<int64_t> at(partitions);
    first[0] = 0;
    for (int64_t p = 0; p < partitions; p++) {
        at[p] = first[p];
        first[p + 1] = first[p];
        for (int64_t d = 0; d < n; d++) first[p + 1] += counts[p * n + d];
    }
    for (int64_t i = 0; i < n * bands; i++) out[at[number(keys[i])]++] = uint32_t(keys[i]);
}

// Write a hash of each row of numbers [n, width].
void whorl_digest(const uint64_t* rows, int64_t n, int64_t width, uint64_t* out) {
    for (int64_t d = 0; d < n; d++) {
        out[d] = 0;
        for (int64_t k = 0; k < width; k++) out[d] = mix(out[d] ^ rows[d * width + k]) * P;
    }
}

// Join documents of a bucket that agree in at least `least` numbers. keys: sorted. parent: [documents]. text_file:
// [documents], those with the same number, except 0, are pieces of one text and are not joined.
void whorl_join(const uint32_t* keys, const int64_t* documents, int64_t n, const uint16_t* const* signatures,
                const int64_t* first, int64_t files, int32_t hashes, int32_t least, int64_t all_pairs,
                const int64_t* text_file, int64_t* parent) {
    const Files from{signatures, first, files, hashes};
    std::vector<int64_t> rest, next;
    for (int64_t begin = 0, end; begin < n; begin = end) {
        for (end = begin + 1; end < n && keys[end] == keys[begin]; end++) {}
        if (end - begin < 2) continue;
        rest.assign(documents + begin, documents + end);
        const bool all = end - begin <= all_pairs;
        for (int64_t leaders = 0; rest.size() > 1 && leaders < all_pairs; leaders++) {
            const int64_t leader = rest[0];
            const uint16_t* own = from.at(leader);
            next.clear();
            for (size_t i = 1; i < rest.size(); i++) {
                const int64_t other = rest[i], x = find(parent, leader), y = find(parent, other);
                const bool apart = text_file[leader] && text_file[leader] == text_file[other];
                const bool similar = (all && x == y) || (!apart && agreement(own, from.at(other), hashes) >= least);
                if (similar && x != y) parent[std::max(x, y)] = std::min(x, y);
                if (all || !similar) next.push_back(other);
            }
            rest.swap(next);
        }
    }
    const int64_t total = first[files];
    for (int64_t i = 0; i < total; i++) parent[i] = parent[parent[i]];
}

// Greedy removal in the order given. Document i has the sorted set sets[i], of lengths[i]; those with the same number
// of component[i] follow one another. matched[i]: the document that stays and makes i superfluous, or -1. Up to
// MAX_COMPARED_ALL that stay are compared each; of more, those that share a band, whose signatures are computed then.
// Those with the same number of text_file, except 0, are not compared.
void whorl_remove(int64_t n, const uint64_t* const* sets, const int64_t* lengths, const int64_t* component,
                  const int64_t* text_file, const uint8_t* stays, const uint64_t* a, const uint64_t* b, int32_t hashes, int32_t bands,
                  int32_t rows, double threshold, int64_t* matched, double* similarity) {
    std::unordered_map<uint64_t, std::vector<int64_t>> buckets;
    std::vector<uint32_t> signature(hashes);
    std::vector<uint64_t> keys(bands);
    std::vector<int64_t> candidates, kept;
    bool has_buckets = false;
    const auto compute_keys = [&](int64_t i) {
        minhash(sets[i], lengths[i], a, b, hashes, signature.data());
        band_keys(signature.data(), bands, rows, keys.data());
    };
    const auto add = [&](int64_t i) {
        for (uint64_t key : keys) {
            auto& bucket = buckets[key];
            if (bucket.size() < MAX_KEPT_PER_BUCKET && (bucket.empty() || bucket.back() != i)) bucket.push_back(i);
        }
    };
    for (int64_t i = 0; i < n; i++) {
        if (i && component[i] != component[i - 1]) {
            buckets.clear();
            kept.clear();
            has_buckets = false;
        }
        matched[i] = -1;
        similarity[i] = 0;
        if (has_buckets) {
            compute_keys(i);
            candidates.clear();
            for (uint64_t key : keys) {
                const auto found = buckets.find(key);
                if (found != buckets.end()) candidates.insert(candidates.end(), found->second.begin(), found->second.end());
            }
            std::sort(candidates.begin(), candidates.end());
            candidates.erase(std::unique(candidates.begin(), candidates.end()), candidates.end());
        }
        for (int64_t j : has_buckets ? candidates : kept) {
            if (stays[i]) break;
            if (text_file[i] && text_file[i] == text_file[j]) continue;
            const int64_t sum = lengths[i] + lengths[j], most = std::min(lengths[i], lengths[j]);
            if (double(most) < threshold * double(sum - most)) continue;
            const int64_t both = sets[i] == sets[j] ? most : common(sets[i], lengths[i], sets[j], lengths[j]);
            if (double(both) < threshold * double(sum - both)) continue;
            matched[i] = j;
            similarity[i] = double(both) / double(sum - both);
            break;
        }
        if (matched[i] >= 0) continue;
        kept.push_back(i);
        if (has_buckets) {
            add(i);
        } else if (kept.size() > MAX_COMPARED_ALL) {
            for (int64_t j : kept) {
                compute_keys(j);
                add(j);
            }
            has_buckets = true;
        }
    }
}

}  // extern "C"
