// Three ranks in one process, of which calls fail by their number: `transport_faults KIND FROM COUNT
// [for-good] [encrypted] [disagree] [bf16 | fp16 | int8]`.
//
// KIND is `memory` (operator new), or one of the calls that are wrapped below. Of the calls of that kind that the
// transport makes, FROM, FROM + 1, ... fail, one a round, until COUNT rounds are over or no call has that number;
// with `for-good` every later one of the round fails too. A round makes a group, carries collectives
// and a transfer out, adds a connection, and ends. Each rank has to have the right sums or a cause, and
// to end in time. Encrypted, no frame may go out in clear. With `disagree` the ranks describe their first
// collective in different, long words, so that they tell each other long notes, and the cause is that they
// disagree. With a wire format the large sum travels packed, by direct exchange. Prints "rounds, faults, causes" and ends with 1 at the first round that is wrong.

#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "transport/transport.hpp"

using namespace fullwire;

namespace {

// Counted only in threads that are the transport's, or in it: what the test needs for itself is there.
thread_local bool is_watched = false;
std::atomic<long> calls{0}, faults{0};
long fails_at = -1;
bool for_good = false, is_encrypted = false, disagrees = false;
const char* failing = "";
std::optional<WireFormat> packed_as;
std::atomic<long> sent_in_clear{0};

bool fails(const char* kind) {
    if (!is_watched || std::strcmp(kind, failing)) return false;
    const long number = ++calls;
    const bool is_hit = number == fails_at || (for_good && number > fails_at);
    if (is_hit) ++faults;
    return is_hit;
}

struct Watched {
    Watched() { is_watched = true; }
    ~Watched() { is_watched = false; }
};

void* found(std::size_t bytes) {
    if (fails("memory")) throw std::bad_alloc();
    void* memory = std::malloc(bytes ? bytes : 1);
    if (!memory) throw std::bad_alloc();
    return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return found(bytes); }
void* operator new[](std::size_t bytes) { return found(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

struct Entry {
    void* (*run)(void*);
    void* argument;
};

// The transport's own threads are watched from their first call on.
void* watched_thread(void* given) {
    const Entry entry = *static_cast<Entry*>(given);
    std::free(given);
    is_watched = true;
    return entry.run(entry.argument);
}

}  // namespace

extern "C" {
int __real_pthread_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
int __wrap_pthread_create(pthread_t* made, const pthread_attr_t* how, void* (*run)(void*), void* argument) {
    if (!is_watched) return __real_pthread_create(made, how, run, argument);
    if (fails("thread")) return EAGAIN;
    auto* entry = static_cast<Entry*>(std::malloc(sizeof(Entry)));
    *entry = {run, argument};
    return __real_pthread_create(made, how, watched_thread, entry);
}
int __real_eventfd(unsigned, int);
int __wrap_eventfd(unsigned value, int flags) {
    if (!fails("descriptor")) return __real_eventfd(value, flags);
    errno = EMFILE;
    return -1;
}
ssize_t __real_sendmsg(int, const msghdr*, int);
ssize_t __wrap_sendmsg(int to, const msghdr* message, int flags) {
    const iovec& first = message->msg_iov[0];
    const bool is_head = first.iov_len >= 4 && !std::memcmp(first.iov_base, "FWT2", 4);
    if (is_encrypted && is_head) ++sent_in_clear;
    if (!fails("send")) return __real_sendmsg(to, message, flags);
    errno = ENOBUFS;
    return -1;
}
ssize_t __real_recvmsg(int, msghdr*, int);
ssize_t __wrap_recvmsg(int from, msghdr* message, int flags) {
    if (!fails("receive")) return __real_recvmsg(from, message, flags);
    errno = ENOMEM;
    return -1;
}
int __real_poll(pollfd*, nfds_t, int);
int __wrap_poll(pollfd* all, nfds_t count, int wait_ms) {
    if (!count || !fails("poll")) return __real_poll(all, count, wait_ms);
    errno = ENOMEM;
    return -1;
}
ssize_t __real_recv(int, void*, size_t, int);
ssize_t __wrap_recv(int from, void* bytes, size_t count, int flags) {
    if (!fails("receive")) return __real_recv(from, bytes, count, flags);
    errno = ENOMEM;
    return -1;
}
ssize_t __real_write(int, const void*, size_t);
ssize_t __wrap_write(int to, const void* bytes, size_t count) {
    if (!fails("write")) return __real_write(to, bytes, count);
    errno = EIO;
    return -1;
}
int __real_setsockopt(int, int, int, const void*, socklen_t);
int __wrap_setsockopt(int of, int level, int name, const void* value, socklen_t bytes) {
    if (!fails("option")) return __real_setsockopt(of, level, name, value, bytes);
    errno = ENOBUFS;
    return -1;
}
}

namespace {

constexpr int kRanks = 3;
constexpr double kTimeoutS = 20;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr double kMostProcessorS = 15;  // of a round; sanitizers make it slower
#else
constexpr double kMostProcessorS = 3;
#endif
constexpr std::size_t kCounts[] = {1, 600'000, 7};  // of which the second needs scratch, and two streams

std::shared_ptr<const Program> ring(int rank) {
    auto program = std::make_shared<Program>();
    program->blocks = kRanks;
    program->signals = false;
    const int next = (rank + 1) % kRanks, before = (rank + kRanks - 1) % kRanks;
    for (int round = 0; round < 2 * (kRanks - 1); ++round) {
        const bool reduces = round < kRanks - 1;
        const int lead = reduces ? rank - 1 - round : rank - (round - (kRanks - 1));
        const auto sent = static_cast<std::uint32_t>((lead + 2 * kRanks) % kRanks);
        const auto got = static_cast<std::uint32_t>((lead - 1 + 2 * kRanks) % kRanks);
        program->sends.push_back({next, sent, 1, round - 1, 0});
        program->receives.push_back({before, got, 1, reduces, false, round == kRanks - 2, -1, 0});
    }
    return program;
}

// Each rank adds up its own block, and sends the sum to the others.
std::shared_ptr<const Program> exchange(int rank) {
    auto program = std::make_shared<Program>();
    program->blocks = kRanks;
    program->signals = false;
    const auto own = static_cast<std::uint32_t>(rank);
    for (const int after : {-1, 1}) {
        for (int step = 1; step < kRanks; ++step) {
            const int other = (rank + step) % kRanks;
            const auto block = after < 0 ? static_cast<std::uint32_t>(other) : own;
            program->sends.push_back({other, block, 1, after, 0});
        }
    }
    for (const bool reduces : {true, false}) {
        for (int other = 0, count = 0; other < kRanks; ++other) {
            if (other == rank) continue;
            const auto block = reduces ? own : static_cast<std::uint32_t>(other);
            const bool is_later = reduces && count++;
            program->receives.push_back({other, block, 1, reduces, is_later, is_later, is_later ? 0 : -1, 0});
        }
    }
    return program;
}

// The first rank reduces into memory that the transport has to find.
TaskPointer sum_of(std::vector<float>& values, int rank, bool scratch) {
    auto task = std::make_shared<Task>();
    task->description = "a sum of " + std::to_string(values.size()) + " float32";
    // Longer than what a connection has room for from its beginning.
    if (disagrees) task->description += " as rank " + std::to_string(rank) + std::string(600, '.');
    task->program = ring(rank);
    task->source = {{reinterpret_cast<std::uint64_t>(values.data()), 4 * values.size()}};
    if (values.size() % kRanks == 0) {
        const std::size_t bytes = 4 * values.size() / kRanks;
        task->source.clear();
        for (std::size_t block = 0; block < kRanks; ++block) {
            task->source.push_back({reinterpret_cast<std::uint64_t>(values.data()) + block * bytes, bytes});
        }
    }
    task->work = task->source;
    if (scratch) {
        for (Block& block : task->work) block.address = 0;
    }
    task->reduction = Reduction::sum;
    task->number = Number::float32;
    task->timeout_s = kTimeoutS;
    if (packed_as && values.size() == kCounts[1]) {
        task->description += " packed";
        task->program = exchange(rank);
        task->wire = packed_as;
        task->most_error = 1;
    }
    return task;
}

TaskPointer transfer_of(std::vector<float>& values, int rank) {
    auto task = std::make_shared<Task>();
    task->description = rank ? "a receive" : "a send";
    task->kind = rank ? Task::Kind::receive : Task::Kind::send;
    task->rank = rank ? 0 : 1;
    (rank ? task->work : task->source) = {{reinterpret_cast<std::uint64_t>(values.data()), 4 * values.size()}};
    task->timeout_s = kTimeoutS;
    return task;
}

using Sockets = std::vector<std::vector<int>>;

Sockets connected() {
    Sockets sockets(kRanks, std::vector<int>(kRanks, -1));
    for (int a = 0; a < kRanks; ++a) {
        for (int b = 0; b < a; ++b) {
            int ends[2];
            if (::socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) std::abort();
            sockets[static_cast<std::size_t>(a)][static_cast<std::size_t>(b)] = ends[0];
            sockets[static_cast<std::size_t>(b)][static_cast<std::size_t>(a)] = ends[1];
        }
    }
    return sockets;
}

// What rank a sends to rank b is encrypted with a key of their own.
std::vector<Keys> keys_of(int rank) {
    std::vector<Keys> keys;
    for (int other = 0; is_encrypted && other < kRanks; ++other) {
        keys.push_back({std::string(kKeyBytes, static_cast<char>(16 * rank + other)),
                        std::string(kKeyBytes, static_cast<char>(16 * other + rank))});
    }
    return keys;
}

// What became of a rank: "" if all was well, else the cause that it was told.
struct Fate {
    std::string cause;
    bool is_wrong = false;
};

bool carry_out(Streams& streams, int rank, Fate& fate) {
    for (const std::size_t count : kCounts) {
        std::vector<float> values(count, static_cast<float>(rank + 1));
        const bool scratch = rank == 0 && count == kCounts[1] && !packed_as;
        const TaskPointer task = sum_of(values, rank, scratch);
        {
            const Watched watched;
            streams.issue(task, count == 7 ? Engine::Caller::goes_on : Engine::Caller::waits);
            if (!streams.wait(task, kTimeoutS)) fate.is_wrong = true;
        }
        if (task->has_failed()) {
            fate.cause = task->problem;
            return false;
        }
        if (!scratch) {
            for (const float value : values) fate.is_wrong |= std::fabs(value - 6) > (packed_as ? 0.1F : 0.0F);
        }
    }
    if (rank == 2) return true;
    std::vector<float> values(50'000, static_cast<float>(rank));
    const TaskPointer task = transfer_of(values, rank);
    {
        const Watched watched;
        streams.issue(task, Engine::Caller::may_wait);
        if (!streams.wait(task, kTimeoutS)) fate.is_wrong = true;
    }
    if (task->has_failed()) fate.cause = task->problem;
    else fate.is_wrong |= values.back() != 0;
    return !task->has_failed();
}

Fate take_part(int rank, const Sockets& first, const Sockets& second) {
    const auto self = static_cast<std::size_t>(rank);
    const Engine::Manner manner{rank, {"0", "1", "2"}, "faults", 5.0, 0, rank == 2};
    const auto keys = keys_of(rank);
    Fate fate;
    std::optional<Streams> streams;
    std::vector<int> of_first = first[self], of_second = second[self];
    bool has_second = false;
    try {
        {
            Engine::Manner own = manner;
            const Watched watched;
            streams.emplace(std::move(own), std::move(of_first), keys);
        }
        const Watched watched;
        has_second = true;
        streams->add(std::move(of_second), keys);
    } catch (const std::exception& error) {
        is_watched = false;
        fate.cause = error.what();
    }
    if (!has_second) {
        for (const int socket : second[self]) {
            if (socket >= 0) ::close(socket);
        }
    }
    if (streams && fate.cause.empty()) carry_out(*streams, rank, fate);
    if (streams) {
        const Watched watched;
        streams->close(fate.cause);
    }
    return fate;
}

bool names(const std::string& cause, const char* resource) {
    return cause.find(resource) != std::string::npos;
}

bool is_a_cause(const std::string& cause) {
    return names(cause, "out of memory") || names(cause, "no new thread") ||
           names(cause, "too many open files") || names(cause, "bad_alloc");
}

double processor_s() {
    timespec used;
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) / 1e9;
}

std::vector<Fate> one_round() {
    const Sockets first = connected(), second = connected();
    std::vector<Fate> fates(kRanks);
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
        ranks.emplace_back([&, rank] {
            fates[static_cast<std::size_t>(rank)] = take_part(rank, first, second);
        });
    }
    for (std::thread& each : ranks) each.join();
    return fates;
}

}  // namespace

int main(int count, char** words) {
    if (count < 4) return 2;
    failing = words[1];
    const long from = std::atol(words[2]), rounds = std::atol(words[3]);
    for (int each = 4; each < count; ++each) {
        for_good |= !std::strcmp(words[each], "for-good");
        is_encrypted |= !std::strcmp(words[each], "encrypted");
        disagrees |= !std::strcmp(words[each], "disagree");
        if (!std::strcmp(words[each], "bf16")) packed_as = WireFormat::bf16;
        if (!std::strcmp(words[each], "fp16")) packed_as = WireFormat::fp16;
        if (!std::strcmp(words[each], "int8")) packed_as = WireFormat::int8;
    }
    long done = 0, hit = 0, unnamed = 0;
    for (; done < rounds; ++done) {
        calls = faults = 0;
        fails_at = from + done;
        const auto began = std::chrono::steady_clock::now();
        const double used_s = processor_s();
        ::alarm(60);  // a round that hangs ends the program
        const std::vector<Fate> fates = one_round();
        ::alarm(0);
        const double took_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
        bool is_told = false;
        for (int rank = 0; rank < kRanks; ++rank) {
            const Fate& fate = fates[static_cast<std::size_t>(rank)];
            const bool is_verdict = disagrees && names(fate.cause, "ranks disagree");
            if (fate.is_wrong || (!faults && is_verdict != disagrees) ||
                (!faults && !disagrees && !fate.cause.empty())) {
                std::printf("%s %ld: rank %d is wrong: %s\n", failing, fails_at, rank, fate.cause.c_str());
                return 1;
            }
            is_told |= is_a_cause(fate.cause);
            if (!fate.cause.empty() && !is_verdict && !is_a_cause(fate.cause)) {
                ++unnamed;
                std::printf("%s %ld: rank %d was told: %s\n", failing, fails_at, rank, fate.cause.c_str());
            }
        }
        if (sent_in_clear) {
            std::printf("%s %ld: a frame went out in clear\n", failing, fails_at);
            return 1;
        }
        if (took_s > kTimeoutS || processor_s() - used_s > kMostProcessorS) {
            std::printf("%s %ld: took %.1f s, %.1f s of a processor\n", failing, fails_at, took_s,
                        processor_s() - used_s);
            return 1;
        }
        hit += is_told;
        if (!faults) break;
    }
    std::printf("%ld rounds, %ld told of the cause, %ld ranks told without it\n", done, hit, unnamed);
    return 0;
}
