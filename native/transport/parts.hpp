// What the engine consists of: frames, connections, and a case of a collective that does not end.

#pragma once

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>

#include "transport/checksum.hpp"
#include "transport/transport.hpp"

namespace fullwire {

namespace wire {

constexpr std::uint32_t kMagic = 0x32545746;  // "FWT2"
constexpr std::size_t kLargestChunk = std::size_t{256} << 10;
constexpr std::size_t kSmallestChunk = std::size_t{16} << 10;
constexpr std::size_t kSegment = std::size_t{64} << 10;  // what the kernel takes off a wire at once
constexpr std::size_t kLongestNote = 16384;
// Of a problem, so much has room without asking for memory.
constexpr std::size_t kLongestLastWords = 400;
constexpr std::size_t kScratch = std::size_t{256} << 10;
// Read beyond what goes to its place at once: the next frame's head, and little else to copy.
constexpr std::size_t kLookAhead = 4096;
constexpr std::size_t kSmall = std::size_t{64} << 10;  // worth spinning for
constexpr std::size_t kRemembered = 64;                // descriptions, for a verdict
constexpr int kTickMs = 50;
constexpr int kWatchfulTickMs = 1;
constexpr std::int64_t kWatchNs = 100'000'000;  // for transfers, after one
constexpr std::int64_t kPatienceNs = 200'000;   // from the call to the wait of who waits at once
// Condition variables of glibc before 2.41 lose a wake-up now and then: so nobody waits for ever.
constexpr std::chrono::seconds kLookAgain{1};
constexpr std::int64_t kSecond = 1'000'000'000;
constexpr std::int64_t kGraceNs = kSecond;  // for ranks that are about to call a collective
constexpr std::int64_t kGoodbyeNs = kSecond;

enum Kind : std::uint8_t {
    kData = 1, kReady, kAnnounce, kGrant, kTransfer, kPing, kPong, kAbort, kBye, kSuspect, kAsk,
    kTell, kKinds
};

inline std::int64_t now_ns() {
    timespec now;
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * kSecond + now.tv_nsec;
}

inline std::uint64_t hash_of(const char* bytes, std::size_t count) {  // FNV-1a
    std::uint64_t hash = 0xcbf29ce484222325ULL;
    for (std::size_t i = 0; i < count; ++i) {
        hash = (hash ^ static_cast<unsigned char>(bytes[i])) * 0x100000001b3ULL;
    }
    return hash;
}

// A time that ends in this age of the world; others are as good as for ever.
inline std::int64_t nanoseconds(double seconds) {
    return seconds < 9e9 ? static_cast<std::int64_t>(seconds * 1e9)
                         : std::numeric_limits<std::int64_t>::max();
}

inline std::string seconds(std::int64_t ns) {
    std::string text = std::to_string(static_cast<double>(ns) / 1e9);
    text.erase(text.find('.') + 2);
    return text + " s";
}

// What a process may run out of, as every rank is told it.
constexpr const char* kNoMemory = "out of memory";
constexpr const char* kNoThread = "no new thread";
constexpr const char* kNoDescriptor = "too many open files";

// Keeps a text, or as much of it as there is room for where there is no memory.
inline void keep(std::string& where, std::string_view text) noexcept {
    try {
        where.assign(text);
    } catch (const std::bad_alloc&) {
        where.assign(text.substr(0, where.capacity()));
    }
}

inline void keep_problem(Task& task, std::string_view problem) noexcept {
    try {
        task.problem.assign(problem);
    } catch (const std::bad_alloc&) {
        task.problem.assign(kNoMemory);  // which fits into any string as it is
    }
}

inline char* at(std::uint64_t address) { return reinterpret_cast<char*>(address); }

}  // namespace wire

using namespace wire;  // in the files of the engine, which alone include this

struct Engine::Head {
    std::uint32_t magic = kMagic;
    std::uint8_t kind = 0;
    std::uint8_t has_checksum = 0;
    std::uint8_t unused[2] = {};
    std::uint64_t number = 0;
    std::uint64_t signature = 0;
    std::uint64_t extra = 0;
    std::uint32_t length = 0;
    std::uint32_t checksum = 0;  // of what the head announces
    std::uint32_t unused_too = 0;
    std::uint32_t check = 0;  // of the rest of the head

    std::uint32_t right_check() const { return crc32c(this, sizeof(Head) - sizeof(check)); }

    bool makes_sense() const {
        const std::size_t longest =
            kind == kData || kind == kTransfer ? kLargestChunk : kLongestNote;
        return magic == kMagic && kind > 0 && kind < kKinds && length <= longest &&
               check == right_check();
    }
};

struct Engine::Connection {
    enum class Sink { head, nowhere, collective, early, transfer, note };

    int rank;
    int socket;
    bool has_left = false;
    std::string loss;    // how it was closed, if it was and nobody had said so
    std::string reason;  // why it has left, if it said so

    // What comes in.
    Sink sink = Sink::head;
    Head head{};
    std::size_t head_bytes = 0, left = 0;
    std::uint32_t checksum = 0;  // of what has come of this frame
    std::size_t wakes_at = 1;    // so many bytes make the kernel wake us
    std::string note;
    TaskPointer transfer;
    std::array<char, 8> carry{};  // an element of which the end has not come yet
    std::size_t carried = 0;
    struct Early {
        std::uint64_t sequence, signature, total;
        std::vector<char> bytes;
    };
    std::deque<Early> early;
    std::size_t early_bytes = 0;
    std::int64_t heard_ns, pinged_ns = 0;
    int unacknowledged = 0;

    // What goes out.
    struct Out {
        enum class What { nothing, note, collective, transfer } what = What::nothing;
        Head head{};
        const char* payload = nullptr;
        std::size_t done = 0;
        bool ends_send = false;
        std::size_t record_bytes = 0;  // with keys: what goes out is in `out_record`
        std::size_t all_bytes() const { return record_bytes ? record_bytes : sizeof(Head) + head.length; }
    } out;
    std::string out_note;
    std::vector<char> spill;
    std::array<char, kLongestLastWords> last_words;
    std::size_t last_words_bytes = 0;
    std::deque<std::pair<Head, std::string>> notes;
    std::deque<TaskPointer> granted_transfers;
    std::uint64_t notes_since_data_bytes = 0;  // went out after the last byte of data
    bool is_full = false;  // the kernel takes no more for now
    bool is_broken = false;

    // The collective under way, as this connection sees it.
    std::vector<char> packed, chunk;  // a chunk that goes out, and the one that comes
    std::vector<std::uint32_t> sends, receives;
    std::size_t next_send = 0, next_receive = 0;
    Block send_range{};
    std::uint64_t sent_of_range = 0, sent = 0, to_send = 0, to_receive = 0;
    std::uint64_t granted_sequence = 0;

    // With keys, what goes over the wire.
    std::unique_ptr<RecordCipher> seals, opens;
    std::vector<char> out_record, in_record;
    std::size_t in_record_bytes = 0;
    bool is_refused = false;  // what comes is read, and nobody looks at it

    Connection(int rank, int socket) : rank(rank), socket(socket), heard_ns(now_ns()) {}
    void encrypt(const Keys& keys) {
        seals = std::make_unique<RecordCipher>(keys.sends, RecordCipher::Way::seals);
        opens = std::make_unique<RecordCipher>(keys.receives, RecordCipher::Way::opens);
        // For small frames, and so for last words; it grows with what is sent.
        out_record.resize(RecordCipher::sealed_bytes(sizeof(Head) + kLongestLastWords));
        in_record.resize(kLookAhead);
    }
    // So many bytes make the record whole of which the beginning has come.
    std::size_t record_left() const;
    ~Connection() { close(); }
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    bool is_open() const { return socket >= 0; }
    bool has_output() const {
        return out.what != Out::What::nothing || !notes.empty() || last_words_bytes ||
               !granted_transfers.empty() || next_send < sends.size();
    }
    void keep_last_words(std::string_view problem) noexcept {
        last_words_bytes = std::min(problem.size(), last_words.size());
        std::memcpy(last_words.data(), problem.data(), last_words_bytes);
    }
    void close() {
        if (socket >= 0) ::close(socket);
        socket = -1;
    }
};

// The first rank finds out why a collective does not come to its end, and tells all ranks the same.
struct Engine::Case {
    std::uint64_t sequence;
    bool is_late;
    std::int64_t until_ns;
    struct Heard {
        bool has_called;
        std::string what;
        int towards;  // the rank that it has most on the way to, or -1
        std::uint64_t on_the_way_bytes;
    };
    std::vector<std::optional<Heard>> heard;  // by rank
};

}  // namespace fullwire
