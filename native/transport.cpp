#include "transport.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <linux/sockios.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "checksum.hpp"

namespace fullwire {

namespace {

constexpr std::uint32_t kMagic = 0x32545746;  // "FWT2"
constexpr std::size_t kLargestChunk = std::size_t{256} << 10;
constexpr std::size_t kSmallestChunk = std::size_t{16} << 10;
constexpr std::size_t kSegment = std::size_t{64} << 10;  // what the kernel takes off a wire at once
constexpr std::size_t kLongestNote = 16384;
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

std::int64_t now_ns() {
    timespec now;
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * kSecond + now.tv_nsec;
}

std::uint64_t hash_of(const char* bytes, std::size_t count) {  // FNV-1a
    std::uint64_t hash = 0xcbf29ce484222325ULL;
    for (std::size_t i = 0; i < count; ++i) {
        hash = (hash ^ static_cast<unsigned char>(bytes[i])) * 0x100000001b3ULL;
    }
    return hash;
}

std::string seconds(std::int64_t ns) {
    std::string text = std::to_string(static_cast<double>(ns) / 1e9);
    text.erase(text.find('.') + 2);
    return text + " s";
}

char* at(std::uint64_t address) { return reinterpret_cast<char*>(address); }

}  // namespace

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
    std::string loss;  // how it was closed, if it was and nobody had said so

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
    } out;
    std::string out_note;
    std::vector<char> spill;
    std::deque<std::pair<Head, std::string>> notes;
    std::deque<TaskPointer> granted_transfers;
    bool is_full = false;  // the kernel takes no more for now
    bool is_broken = false;

    // The collective under way, as this connection sees it.
    std::vector<std::uint32_t> sends, receives;
    std::size_t next_send = 0, next_receive = 0;
    Block send_range{};
    std::uint64_t sent_of_range = 0, sent = 0, to_send = 0, to_receive = 0;
    std::uint64_t granted_sequence = 0;

    Connection(int rank, int socket) : rank(rank), socket(socket), heard_ns(now_ns()) {}
    ~Connection() { close(); }
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    bool is_open() const { return socket >= 0; }
    bool has_output() const {
        return out.what != Out::What::nothing || !notes.empty() || !granted_transfers.empty() ||
               next_send < sends.size();
    }
    void close() {
        if (socket >= 0) ::close(socket);
        socket = -1;
    }
};

// Rank 0 finds out why a collective does not come to its end, and tells all ranks the same.
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

Engine::Engine(int rank, std::vector<int> sockets, std::vector<std::string> names,
               std::string group, double silence_s, int spin_us, bool checks)
    : rank_(rank), names_(std::move(names)), group_(std::move(group)),
      silence_ns_(static_cast<std::int64_t>(silence_s * 1e9)), spin_ns_(spin_us * 1000LL),
      checks_(checks), process_(::getpid()), scratch_(kScratch) {
    for (std::size_t other = 0; other < sockets.size(); ++other) {
        const bool is_self = static_cast<int>(other) == rank;
        connections_.push_back(is_self ? nullptr : std::make_unique<Connection>(
                                                       static_cast<int>(other), sockets[other]));
        if (!is_self) ::fcntl(sockets[other], F_SETFL, O_NONBLOCK);
    }
    wake_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (wake_ < 0) throw std::runtime_error("no descriptor is left for a transport");
    moved_ns_ = now_ns();
    thread_ = std::thread([this] { work_in_background(); });
}

Engine::~Engine() {
    close();
    ::close(wake_);
}

// ---- Who drives -------------------------------------------------------------------------------

void Engine::issue(const TaskPointer& task, Caller caller) {
    const std::int64_t now = task->times.issued_ns = now_ns();
    const std::lock_guard lock(mutex_);
    if (closing_ || !problem_.empty()) {
        task->problem = problem_.empty() ? "the group was destroyed" : problem_;
        task->state.store(Task::State::failed, std::memory_order_release);
        ++ended_count_;
        ended_.notify_all();
        return;
    }
    issued_.push_back(task);
    if (driven_) {
        const std::uint64_t one = 1;
        (void)!::write(wake_, &one, sizeof one);
    } else if (caller == Caller::goes_on || (caller == Caller::may_wait && busy_.load())) {
        patient_until_ns_ = 0;
        changed_.notify_all();
    } else if (caller == Caller::may_wait) {
        if (issued_.size() == 1) patient_until_ns_ = now + kPatienceNs;
        // To wake somebody for each costs more than a small transfer: so he stays awake for a while.
        if (now > watchful_until_ns_) changed_.notify_all();
        watchful_until_ns_ = now + kWatchNs;
    }
}

bool Engine::wait(const TaskPointer& task, double timeout_s) {
    using Clock = std::chrono::steady_clock;
    const auto until = timeout_s < 0 ? Clock::time_point::max()
                                     : Clock::now() + std::chrono::nanoseconds(
                                           static_cast<std::int64_t>(timeout_s * 1e9));
    std::unique_lock lock(mutex_);
    while (!task->is_done()) {
        if (Clock::now() >= until) return false;
        if (driven_ || closing_) {
            ended_.wait_until(lock, std::min(until, Clock::now() + kLookAgain));
            continue;
        }
        driven_ = true;
        lock.unlock();
        do {
            drive(kTickMs);
        } while (!task->is_done() && !closing_ && Clock::now() < until);
        lock.lock();
        driven_ = false;
        if (closing_ || busy_.load() || !issued_.empty()) changed_.notify_all();
    }
    return true;
}

bool Engine::wait_for_any() {
    std::unique_lock lock(mutex_);
    while (!closing_ && ended_count_ == ended_seen_) ended_.wait_for(lock, kLookAgain);
    ended_seen_ = ended_count_;
    return !closing_;
}

void Engine::work_in_background() {
    ::pthread_setname_np(::pthread_self(), "fullwire");
    std::unique_lock lock(mutex_);
    bool is_due = false;
    while (!closing_) {
        if (driven_ || (!is_due && issued_.empty() && !busy_.load())) {
            // Idle, it looks from time to time whether somebody asks or is gone.
            const bool is_watchful = now_ns() < watchful_until_ns_;
            const std::chrono::milliseconds tick{is_watchful ? kWatchfulTickMs : kTickMs};
            is_due = changed_.wait_for(lock, tick) == std::cv_status::timeout && !is_watchful;
            continue;
        }
        if (const std::int64_t rest_ns = patient_until_ns_ - now_ns(); rest_ns > 0) {
            changed_.wait_for(lock, std::chrono::nanoseconds(rest_ns));
            continue;
        }
        is_due = false;
        driven_ = true;
        const bool has_work = busy_.load() || !issued_.empty();
        lock.unlock();
        drive(has_work ? kTickMs : 0);
        lock.lock();
        driven_ = false;
        if (closing_) changed_.notify_all();
    }
}

void Engine::drive(int wait_ms) {
    take_issued();
    for (auto& connection : connections_) {
        if (connection && connection->is_open() && !connection->is_full) transmit(*connection);
    }
    finish_collective_if_whole();
    polled_.clear();
    polled_.push_back({wake_, POLLIN, 0});
    for (auto& connection : connections_) {
        const bool is_open = connection && connection->is_open();
        if (is_open) choose_wake(*connection);
        const short events = is_open && connection->is_full ? POLLIN | POLLOUT : POLLIN;
        polled_.push_back({is_open ? connection->socket : -1, events, 0});
    }
    busy_.store(is_busy());
    const bool is_quiet = poll_for(busy_.load() ? wait_ms : 0) == 0;
    if (polled_[0].revents) {
        std::uint64_t count;
        (void)!::read(wake_, &count, sizeof count);
    }
    for (auto& connection : connections_) {
        if (!connection || !connection->is_open()) continue;
        const short events = polled_[static_cast<std::size_t>(connection->rank) + 1].revents;
        if (events & POLLOUT) connection->is_full = false;
        // What does not fill a chunk is looked at when nothing else happens.
        const bool may_have_some = is_quiet && connection->wakes_at > 1;
        if ((events & ~POLLOUT) || may_have_some) receive(*connection);
    }
    for (auto& connection : connections_) {
        if (connection && connection->is_open() && !connection->is_full) transmit(*connection);
    }
    finish_collective_if_whole();
    for (auto& connection : connections_) {
        if (connection && connection->is_open() && connection->is_broken) {
            receive(*connection);  // what it said last tells more than that it is gone
            if (connection->is_open()) lost(*connection, "its connection was closed");
        }
    }
    const std::int64_t now = now_ns();
    if (now - looked_ns_ > std::min(silence_ns_ / 16, kSecond / 4)) {
        looked_ns_ = now;
        look_for_silence(now);
        judge_if_heard(now);
    }
    busy_.store(is_busy());
}

int Engine::poll_for(int wait_ms) {
    const bool spins = wait_ms > 0 && spin_ns_ > 0 && current_ && current_->is_small;
    int found = ::poll(polled_.data(), polled_.size(), spins ? 0 : wait_ms);
    if (!spins) return found;
    for (const std::int64_t since = now_ns(); found == 0 && now_ns() - since < spin_ns_;) {
        ::sched_yield();  // to the other rank, if it was put on the same processor
        found = ::poll(polled_.data(), polled_.size(), 0);
    }
    return found ? found : ::poll(polled_.data(), polled_.size(), wait_ms);
}

// Where the rest of a chunk is sure to come, the kernel wakes us for all of it and not for each piece.
void Engine::choose_wake(Connection& connection) {
    using Sink = Connection::Sink;
    const bool is_due = connection.sink == Sink::collective || connection.sink == Sink::transfer;
    const std::size_t wanted = is_due && connection.left > kSegment ? connection.left : 1;
    if (wanted == connection.wakes_at) return;
    const int bytes = static_cast<int>(wanted);
    ::setsockopt(connection.socket, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
    connection.wakes_at = wanted;
}

bool Engine::is_busy() const {
    if (current_ || !waiting_.empty() || !sending_.empty() || !receiving_.empty() || case_) {
        return true;
    }
    return std::any_of(connections_.begin(), connections_.end(), [](const auto& connection) {
        return connection && connection->is_open() && connection->has_output();
    });
}

// ---- Tasks begin and end ----------------------------------------------------------------------

void Engine::take_issued() {
    std::vector<TaskPointer> taken;
    {
        const std::lock_guard lock(mutex_);
        taken.swap(issued_);
    }
    for (const TaskPointer& task : taken) {
        if (failed_) {
            end(task, Task::State::failed, problem());
        } else if (task->kind != Task::Kind::collective) {
            begin_transfer(task);
        } else {
            task->sequence = next_sequence_++;
            task->signature = hash_of(task->description.data(), task->description.size());
            history_[task->sequence] = task->description;
            if (history_.size() > kRemembered) history_.erase(history_.begin());
            waiting_.push_back(task);
            if (task->sequence == asked_) {
                for (const int asker : askers_) tell(*connections_[static_cast<std::size_t>(asker)], asked_);
                askers_.clear();
            }
        }
    }
    if (!current_ && !waiting_.empty()) begin(waiting_.front());
}

void Engine::prepare(Task& task) {
    std::uint64_t missing = 0;
    for (const Block& block : task.work) missing += block.address ? 0 : block.bytes;
    if (missing) {
        if (missing > spare_bytes_) {
            spare_.reset(new char[missing]);
            spare_bytes_ = missing;
        }
        task.storage = std::move(spare_);
        task.storage_bytes = std::exchange(spare_bytes_, 0);
        std::uint64_t address = reinterpret_cast<std::uint64_t>(task.storage.get());
        for (Block& block : task.work) {
            if (!block.address) block.address = std::exchange(address, address + block.bytes);
        }
    }
    const Program& program = *task.program;
    std::uint64_t largest = 0;
    const auto range = [](const std::vector<Block>& blocks, std::uint32_t first,
                          std::uint32_t count) {
        Block found{blocks[first].address, 0};
        for (std::uint32_t block = first; block < first + count; ++block) {
            found.bytes += blocks[block].bytes;
        }
        return found;
    };
    for (const Receive& receive : program.receives) {
        task.receive_ranges.push_back(range(task.work, receive.first_block, receive.blocks));
        largest = std::max(largest, task.receive_ranges.back().bytes);
    }
    task.received.assign(program.receives.size(), 0);
    task.receives_left = program.receives.size();
    task.sends_left = program.sends.size();
    // Small enough that a block is several, so that what comes after can begin before it is whole.
    const bool is_exchange = std::any_of(program.receives.begin(), program.receives.end(),
                                         [](const Receive& each) { return each.after_sends > 0; });
    task.chunk_bytes = is_exchange ? kLargestChunk
                                   : std::clamp(largest / 4 / 4096 * 4096, kSmallestChunk,
                                                kLargestChunk);
    task.is_small = largest <= kSmall;
}

void Engine::begin(const TaskPointer& task) {
    current_ = task;
    task->times.begun_ns = moved_ns_ = now_ns();
    prepare(*task);
    const Program& program = *task->program;
    for (auto& connection : connections_) {
        if (!connection) continue;
        connection->sends.clear();
        connection->receives.clear();
        connection->next_send = connection->next_receive = 0;
        connection->sent_of_range = connection->sent = 0;
        connection->to_send = connection->to_receive = 0;
    }
    const auto bytes_in = [](const std::vector<Block>& blocks, std::uint32_t first,
                             std::uint32_t count) {
        std::uint64_t bytes = 0;
        for (std::uint32_t block = first; block < first + count; ++block) bytes += blocks[block].bytes;
        return bytes;
    };
    for (std::uint32_t index = 0; index < program.sends.size(); ++index) {
        const Send& send = program.sends[index];
        const std::uint64_t bytes = bytes_in(send.after < 0 ? task->source : task->work,
                                             send.first_block, send.blocks);
        if (!bytes && !program.signals) {
            --task->sends_left;
            continue;
        }
        Connection& connection = *connections_[static_cast<std::size_t>(send.rank)];
        connection.sends.push_back(index);
        connection.to_send += bytes;
    }
    for (std::uint32_t index = 0; index < program.receives.size(); ++index) {
        const std::uint64_t bytes = task->receive_ranges[index].bytes;
        if (!bytes && !program.signals) {
            task->received[index] = 1;  // whole
            --task->receives_left;
            continue;
        }
        Connection& connection = *connections_[static_cast<std::size_t>(program.receives[index].rank)];
        connection.receives.push_back(index);
        connection.to_receive += bytes;
    }
    // What a rank keeps of its own needs no wire.
    const std::size_t own = static_cast<std::size_t>(rank_);
    for (std::size_t block = 0; block < std::min(task->source.size(), task->work.size()); ++block) {
        const bool is_kept = block == own || program.receives.empty();
        if (is_kept && task->source[block].address != task->work[block].address) {
            std::memmove(at(task->work[block].address), at(task->source[block].address),
                         std::min(task->source[block].bytes, task->work[block].bytes));
        }
    }
    for (auto& connection : connections_) {
        if (!connection || (connection->sends.empty() && connection->receives.empty())) continue;
        if (!connection->is_open() || connection->has_left) {
            return fail(absence_of(*connection) + ", before " + task->description, true);
        }
        if (connection->to_receive > kEagerBytes) say(*connection, kReady, task->sequence, 0);
    }
    for (auto& connection : connections_) {
        if (connection && current_ == task) take_early(*connection);
    }
    for (auto& connection : connections_) {
        if (connection && current_ == task && connection->is_open() && !connection->is_full) {
            transmit(*connection);
        }
    }
}

void Engine::finish_collective_if_whole() {
    while (current_ && !current_->receives_left && !current_->sends_left) {
        const TaskPointer whole = std::exchange(current_, nullptr);
        waiting_.pop_front();
        for (auto& connection : connections_) {
            if (!connection) continue;
            connection->sends.clear();
            connection->receives.clear();
            connection->next_send = connection->next_receive = 0;
        }
        end(whole, Task::State::done, "");
        if (!waiting_.empty()) begin(waiting_.front());
    }
}

void Engine::end(const TaskPointer& task, Task::State state, const std::string& problem) {
    task->times.ended_ns = now_ns();
    task->problem = problem;
    if (task->storage_bytes > spare_bytes_) {
        spare_ = std::move(task->storage);
        spare_bytes_ = task->storage_bytes;
    }
    task->storage.reset();
    task->storage_bytes = 0;
    const std::lock_guard lock(mutex_);
    task->state.store(state, std::memory_order_release);
    ++ended_count_;
    ended_.notify_all();
}

// ---- Sending ----------------------------------------------------------------------------------

void Engine::transmit(Connection& connection) {
    while (!connection.is_broken) {
        if (connection.out.what == Connection::Out::What::nothing) {
            if (!choose_next(connection)) return;
            seal(connection);
        }
        if (!push(connection)) return;
    }
}

void Engine::seal(Connection& connection) const {
    Connection::Out& out = connection.out;
    out.head.has_checksum = checks_ ? 1 : 0;
    if (checks_) out.head.checksum = crc32c(out.payload, out.head.length);
    out.head.check = out.head.right_check();
}

bool Engine::choose_next(Connection& connection) {
    if (!connection.notes.empty()) {
        auto& [head, text] = connection.notes.front();
        connection.out_note = std::move(text);
        connection.out = {Connection::Out::What::note, head, connection.out_note.data(), 0, false};
        connection.notes.pop_front();
        return true;
    }
    return choose_transfer(connection) || choose_collective(connection);
}

bool Engine::choose_collective(Connection& connection) {
    if (!current_ || connection.next_send >= connection.sends.size()) return false;
    const Task& task = *current_;
    const Send& send = task.program->sends[connection.sends[connection.next_send]];
    if (!connection.sent_of_range) {
        const std::vector<Block>& blocks = send.after < 0 ? task.source : task.work;
        connection.send_range = {blocks[send.first_block].address, 0};
        for (std::uint32_t block = 0; block < send.blocks; ++block) {
            connection.send_range.bytes += blocks[send.first_block + block].bytes;
        }
    }
    const std::uint64_t rest = connection.send_range.bytes - connection.sent_of_range;
    const std::uint64_t bytes = std::min<std::uint64_t>(rest, task.chunk_bytes);
    for (int index = 0; index < send.after_all_of; ++index) {
        const std::size_t each = static_cast<std::size_t>(index);
        if (task.received[each] < task.receive_ranges[each].bytes + 1) return false;
    }
    if (send.after >= 0) {
        // Whole receives count one byte more than they have, so that empty ones are told apart.
        const std::size_t after = static_cast<std::size_t>(send.after);
        const Block& range = task.receive_ranges[after];
        const std::uint64_t offset = connection.send_range.address - range.address;
        const bool is_whole = task.received[after] > range.bytes;
        if (!is_whole && task.received[after] < offset + connection.sent_of_range + bytes) return false;
        if (!is_whole && !bytes) return false;
    }
    if (connection.sent + bytes > kEagerBytes && connection.granted_sequence < task.sequence) {
        return false;
    }
    Head head;
    head.kind = kData;
    head.number = task.sequence;
    head.signature = task.signature;
    head.extra = connection.to_send;
    head.length = static_cast<std::uint32_t>(bytes);
    connection.out = {Connection::Out::What::collective, head,
                      at(connection.send_range.address + connection.sent_of_range), 0,
                      bytes == rest};
    connection.sent += bytes;
    connection.sent_of_range += bytes;
    if (bytes == rest) {
        ++connection.next_send;
        connection.sent_of_range = 0;
    }
    current_->times.sent_bytes += bytes;
    return true;
}

// Hands a frame to the kernel; false if it takes no more for now.
bool Engine::push(Connection& connection) {
    Connection::Out& out = connection.out;
    const std::size_t all = sizeof(Head) + out.head.length;
    while (out.done < all) {
        iovec parts[2];
        std::size_t count = 0;
        if (out.done < sizeof(Head)) {
            parts[count++] = {reinterpret_cast<char*>(&out.head) + out.done,
                              sizeof(Head) - out.done};
        }
        const std::size_t payload_done = out.done > sizeof(Head) ? out.done - sizeof(Head) : 0;
        if (payload_done < out.head.length) {
            parts[count++] = {const_cast<char*>(out.payload) + payload_done,
                              out.head.length - payload_done};
        }
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = count;
        const ssize_t sent = ::sendmsg(connection.socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            connection.is_full = true;
            return false;
        }
        if (sent < 0) {
            connection.is_broken = true;
            return false;
        }
        out.done += static_cast<std::size_t>(sent);
    }
    const auto what = std::exchange(out.what, Connection::Out::What::nothing);
    // Ranks that ask each other whether they live move nothing.
    if (what != Connection::Out::What::note) moved_ns_ = now_ns();
    if (what == Connection::Out::What::collective && out.ends_send && current_) {
        --current_->sends_left;
        take_all_early();
    }
    if (what == Connection::Out::What::transfer && out.ends_send) {
        const TaskPointer task = connection.granted_transfers.front();
        connection.granted_transfers.pop_front();
        end(task, Task::State::done, "");
    }
    return true;
}

void Engine::say(Connection& connection, std::uint8_t kind, std::uint64_t number,
                 std::uint64_t extra, const std::string& text, std::uint64_t signature) {
    Head head;
    head.kind = kind;
    head.number = number;
    head.signature = signature;
    head.extra = extra;
    head.length = static_cast<std::uint32_t>(std::min(text.size(), kLongestNote));
    connection.notes.emplace_back(head, text.substr(0, kLongestNote));
}

// ---- Receiving --------------------------------------------------------------------------------

void Engine::receive(Connection& connection) {
    using Sink = Connection::Sink;
    for (int round = 0; round < 4 && connection.is_open(); ++round) {
        iovec parts[2];
        std::size_t count = 0, direct = 0;
        char* place = nullptr;
        if (connection.sink == Sink::transfer) {
            place = at(connection.transfer->work[0].address) + connection.transfer->received[0];
        } else if (connection.sink == Sink::collective) {
            const std::uint32_t index = connection.receives[connection.next_receive];
            if (!current_->program->receives[index].reduces) {
                place = at(current_->receive_ranges[index].address) + current_->received[index];
            }
        }
        if (place) {
            direct = connection.left;
            parts[count++] = {place, direct};
        }
        std::size_t room = scratch_.size();
        if (current_ && connection.next_receive < connection.receives.size()) {
            const std::uint32_t index = connection.receives[connection.next_receive];
            if (!current_->program->receives[index].reduces) room = kLookAhead;
        }
        parts[count++] = {scratch_.data(), room};
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = count;
        const ssize_t got = ::recvmsg(connection.socket, &message, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (got <= 0) return lost(connection, "its connection was closed");
        connection.heard_ns = now_ns();
        connection.pinged_ns = 0;
        const std::size_t all = static_cast<std::size_t>(got);
        const std::size_t in_place = std::min(all, direct);
        if (in_place) take_payload(connection, place, in_place, true);
        for (std::size_t done = in_place; done < all && connection.is_open();) {
            done += look_at(connection, scratch_.data() + (done - in_place), all - done);
        }
        if (all < direct + room) return;
        if (round == 1) {  // the other direction is not to fall silent meanwhile
            for (auto& other : connections_) {
                if (other && other->is_open() && !other->is_full) transmit(*other);
            }
        }
    }
}

std::size_t Engine::look_at(Connection& connection, const char* bytes, std::size_t count) {
    using Sink = Connection::Sink;
    if (connection.sink == Sink::head) {
        const std::size_t taken = std::min(count, sizeof(Head) - connection.head_bytes);
        std::memcpy(reinterpret_cast<char*>(&connection.head) + connection.head_bytes, bytes, taken);
        connection.head_bytes += taken;
        if (connection.head_bytes == sizeof(Head)) {
            connection.head_bytes = 0;
            understand_head(connection);
        }
        return taken;
    }
    const std::size_t taken = std::min(count, connection.left);
    take_payload(connection, bytes, taken, false);
    return taken;
}

void Engine::understand_head(Connection& connection) {
    using Sink = Connection::Sink;
    const Head& head = connection.head;
    if (!head.makes_sense()) return refuse(connection, "what is no frame of this transport");
    connection.left = head.length;
    connection.checksum = 0;
    connection.note.clear();
    if (failed_) {
        connection.sink = head.kind == kAbort ? Sink::note : Sink::nowhere;
    } else if (head.kind == kData) {
        understand_data(connection);
    } else if (head.kind == kTransfer) {
        const auto found = std::find_if(
            receiving_.begin(), receiving_.end(), [&](const TaskPointer& task) {
                return task->from == connection.rank && task->transfer == head.number;
            });
        const bool fits = found != receiving_.end() &&
                          head.length <= (*found)->work[0].bytes - (*found)->received[0];
        if (!fits) return refuse(connection, "a tensor that nobody had asked for");
        connection.transfer = *found;
        connection.sink = Sink::transfer;
    } else {
        connection.sink = Sink::note;
    }
    if (!connection.left && connection.is_open()) take_payload(connection, nullptr, 0, false);
}

void Engine::understand_data(Connection& connection) {
    using Sink = Connection::Sink;
    const Head& head = connection.head;
    const std::uint64_t first = current_ ? current_->sequence
                                         : (waiting_.empty() ? next_sequence_
                                                             : waiting_.front()->sequence);
    connection.sink = Sink::nowhere;
    if (head.number < first) return suspect(head.number, false);
    if (current_ && head.number == current_->sequence) {
        const bool agrees = head.signature == current_->signature &&
                            head.extra == connection.to_receive &&
                            connection.next_receive < connection.receives.size();
        if (!agrees) return suspect(head.number, false);
        if (connection.early.empty() && may_receive(connection, head.length)) {
            const std::uint32_t index = connection.receives[connection.next_receive];
            const std::uint64_t rest =
                current_->receive_ranges[index].bytes - current_->received[index];
            if (head.length > rest) return suspect(head.number, false);
            connection.sink = Sink::collective;
            return;
        }
    }
    const bool is_ahead = !current_ || head.number > current_->sequence;
    if (is_ahead && connection.early_bytes + head.length > 2 * kEagerBytes) {
        return refuse(connection, "more than it had been told to");
    }
    connection.early.push_back({head.number, head.signature, head.extra, {}});
    connection.early.back().bytes.reserve(head.length);
    connection.early_bytes += head.length;
    connection.sink = Sink::early;
}

void Engine::take_payload(Connection& connection, const char* bytes, std::size_t count,
                          bool in_place) {
    using Sink = Connection::Sink;
    connection.left -= count;
    const bool is_whole = !connection.left;
    if (connection.head.has_checksum) {
        connection.checksum = crc32c(bytes, count, connection.checksum);
        if (is_whole && connection.checksum != connection.head.checksum) {
            return refuse(connection, "bytes that were damaged on the way: their checksum is wrong");
        }
    }
    const Sink sink = connection.sink;
    if (is_whole) connection.sink = Sink::head;
    switch (sink) {
        case Sink::collective:
            connection.sink = sink;
            arrived(connection, bytes, count, in_place);
            if (is_whole) connection.sink = Sink::head;
            break;
        case Sink::early: {
            auto& frame = connection.early.back().bytes;
            frame.insert(frame.end(), bytes, bytes + count);
            if (is_whole && current_) take_early(connection);
            break;
        }
        case Sink::transfer: {
            const TaskPointer task = connection.transfer;
            if (!in_place && count) {
                std::memcpy(at(task->work[0].address) + task->received[0], bytes, count);
            }
            task->received[0] += count;
            moved_ns_ = now_ns();
            if (is_whole && task->received[0] == task->work[0].bytes) {
                connection.transfer = nullptr;
                std::erase(receiving_, task);
                end(task, Task::State::done, "");
            }
            break;
        }
        case Sink::note:
            connection.note.append(bytes, count);
            if (is_whole) understand_note(connection);
            break;
        case Sink::head:
        case Sink::nowhere:
            break;
    }
}

// Says whether the next bytes of a connection may be added already to what others sent.
bool Engine::may_receive(const Connection& connection, std::size_t count) const {
    const std::uint32_t index = connection.receives[connection.next_receive];
    const Receive& receive = current_->program->receives[index];
    const std::size_t sent = current_->program->sends.size() - current_->sends_left;
    if (sent < static_cast<std::size_t>(receive.after_sends)) return false;
    if (receive.after < 0) return true;
    const std::size_t after = static_cast<std::size_t>(receive.after);
    const Block& before = current_->receive_ranges[after];
    const std::uint64_t offset = current_->receive_ranges[index].address - before.address;
    return current_->received[after] > before.bytes ||
           (count && current_->received[after] >= offset + current_->received[index] + count);
}

void Engine::arrived(Connection& connection, const char* bytes, std::size_t count, bool in_place) {
    const TaskPointer kept = current_;
    Task& task = *kept;
    const std::uint32_t index = connection.receives[connection.next_receive];
    const Block& range = task.receive_ranges[index];
    moved_ns_ = connection.heard_ns;
    if (!task.times.heard_ns) task.times.heard_ns = moved_ns_;
    if (task.program->receives[index].reduces) {
        const std::size_t element = bytes_of(task.number);
        if (connection.carried && count) {
            const std::size_t taken = std::min(element - connection.carried, count);
            std::memcpy(connection.carry.data() + connection.carried, bytes, taken);
            connection.carried += taken;
            bytes += taken;
            count -= taken;
            if (connection.carried == element) {
                connection.carried = 0;
                reduce_into(task, index, connection.carry.data(), element);
            }
        }
        const std::size_t whole = count - count % element;
        if (whole) reduce_into(task, index, bytes, whole);
        if (count > whole) {
            connection.carried = count - whole;
            std::memcpy(connection.carry.data(), bytes + whole, connection.carried);
        }
    } else {
        if (!in_place && count) std::memcpy(at(range.address) + task.received[index], bytes, count);
        task.received[index] += count;
    }
    if (!connection.left && task.received[index] == range.bytes) {
        task.received[index] = range.bytes + 1;  // whole
        --task.receives_left;
        ++connection.next_receive;
    }
    for (auto& other : connections_) {
        if (other && other.get() != &connection && !other->early.empty()) take_early(*other);
    }
}

void Engine::reduce_into(Task& task, std::size_t index, const char* bytes, std::size_t count) {
    const std::int64_t began_ns = now_ns();
    const Receive& receive = task.program->receives[index];
    const std::uint64_t offset = task.received[index];
    char* result = at(task.receive_ranges[index].address) + offset;
    const Block& own = task.source[std::min<std::size_t>(receive.first_block, task.source.size() - 1)];
    const char* present = receive.from_work ? result : at(own.address) + offset;
    const std::size_t elements = count / bytes_of(task.number);
    combine(*task.reduction, task.number, result, present, bytes, elements);
    if (receive.completes && task.divide_by > 1) {
        divide(task.number, result, elements, task.divide_by);
    }
    task.received[index] += count;
    task.times.reducing_ns += now_ns() - began_ns;
}

// Hands on what had come too soon.
void Engine::take_early(Connection& connection) {
    if (connection.sink == Connection::Sink::collective) return;
    const std::size_t unread = connection.sink == Connection::Sink::early ? 1 : 0;
    while (current_ && connection.early.size() > unread &&
           connection.early.front().sequence == current_->sequence) {
        const Connection::Early& frame = connection.early.front();
        const std::size_t length = frame.bytes.size();
        const bool agrees = frame.signature == current_->signature &&
                            frame.total == connection.to_receive &&
                            connection.next_receive < connection.receives.size();
        if (!agrees) return suspect(current_->sequence, false);
        if (!may_receive(connection, length)) return;
        const std::vector<char> bytes = std::move(connection.early.front().bytes);
        connection.early.pop_front();
        connection.early_bytes -= length;
        const std::size_t left = std::exchange(connection.left, 0);
        connection.heard_ns = now_ns();
        arrived(connection, bytes.data(), length, false);
        connection.left = left;
    }
}

void Engine::take_all_early() {
    for (auto& connection : connections_) {
        if (connection && !connection->early.empty()) take_early(*connection);
    }
}

// ---- Transfers between two ranks --------------------------------------------------------------

void Engine::begin_transfer(const TaskPointer& task) {
    task->times.begun_ns = now_ns();
    task->received.assign(1, 0);
    task->transfer = next_transfer_++;
    if (task->rank >= 0) {
        Connection& connection = *connections_[static_cast<std::size_t>(task->rank)];
        if (!connection.is_open() || connection.has_left) {
            return fail(absence_of(connection) + ", before " + task->description, false);
        }
    }
    if (task->kind == Task::Kind::send) {
        sending_.push_back(task);
        Connection& connection = *connections_[static_cast<std::size_t>(task->rank)];
        Head head;
        head.kind = kAnnounce;
        head.number = task->transfer;
        head.signature = task->tag;
        head.extra = task->source[0].bytes;
        connection.notes.emplace_back(head, "");
    } else {
        receiving_.push_back(task);
        match_transfers();
    }
}

void Engine::match_transfers() {
    for (const TaskPointer& task : receiving_) {
        if (task->from >= 0) continue;
        const auto found = std::find_if(
            announced_.begin(), announced_.end(), [&](const Announced& each) {
                return (task->rank < 0 || task->rank == each.rank) && task->tag == each.tag;
            });
        if (found == announced_.end()) continue;
        if (found->bytes != task->work[0].bytes) {
            return fail(name_of(found->rank) + " sends " + std::to_string(found->bytes) +
                            " bytes to " + name_of(rank_) + ", which expects " +
                            std::to_string(task->work[0].bytes) + " (tag " +
                            std::to_string(task->tag) + ")",
                        true);
        }
        task->from = found->rank;
        task->transfer = found->transfer;
        say(*connections_[static_cast<std::size_t>(found->rank)], kGrant, found->transfer, 0);
        announced_.erase(found);
    }
}

bool Engine::choose_transfer(Connection& connection) {
    if (connection.granted_transfers.empty()) return false;
    Task& task = *connection.granted_transfers.front();
    const std::uint64_t rest = task.source[0].bytes - task.received[0];
    const std::uint64_t bytes = std::min<std::uint64_t>(rest, kLargestChunk);
    Head head;
    head.kind = kTransfer;
    head.number = task.transfer;
    head.length = static_cast<std::uint32_t>(bytes);
    connection.out = {Connection::Out::What::transfer, head,
                      at(task.source[0].address) + task.received[0], 0, bytes == rest};
    task.received[0] += bytes;
    task.times.sent_bytes += bytes;
    return true;
}

// ---- What ranks tell each other ---------------------------------------------------------------

void Engine::understand_note(Connection& connection) {
    const Head head = connection.head;
    switch (head.kind) {
        case kReady:
            connection.granted_sequence = std::max(connection.granted_sequence, head.number);
            break;
        case kAnnounce:
            announced_.push_back({connection.rank, head.number, head.signature, head.extra});
            match_transfers();
            break;
        case kGrant: {
            const auto found = std::find_if(
                sending_.begin(), sending_.end(), [&](const TaskPointer& task) {
                    return task->rank == connection.rank && task->transfer == head.number;
                });
            if (found == sending_.end()) return refuse(connection, "a request for what nobody sends");
            connection.granted_transfers.push_back(*found);
            sending_.erase(found);
            break;
        }
        case kPing:
            say(connection, kPong, 0, 0);
            break;
        case kAbort:
            // Passed on, or who hears of our end before the first to know has told him names us.
            if (!failed_) fail(connection.note, true);
            break;
        case kBye: {
            connection.has_left = true;
            const std::string* missed = misses(connection);
            if (missed) {
                fail(name_of(connection.rank) + " has left the group, in the middle of " + *missed,
                     true);
            }
            break;
        }
        case kSuspect:
            open_case(head.number, head.extra != 0);
            break;
        case kAsk:
            if (head.number >= next_sequence_) {
                asked_ = head.number;
                askers_.push_back(connection.rank);
            }
            tell(connection, head.number);
            break;
        case kTell:
            if (case_ && case_->sequence == head.number) {
                case_->heard[static_cast<std::size_t>(connection.rank)] =
                    Case::Heard{(head.extra & 1) != 0, connection.note,
                                static_cast<int>(std::min<std::uint64_t>(head.extra >> 1, names_.size())) - 1,
                                head.signature};
                judge_if_heard(now_ns());
            }
            break;
        default:
            break;
    }
}

// Returns what cannot come to its end without this rank.
const std::string* Engine::misses(const Connection& connection) const {
    const bool is_needed = connection.next_receive < connection.receives.size() ||
                           connection.next_send < connection.sends.size() ||
                           connection.out.what == Connection::Out::What::collective;
    if (current_ && is_needed) return &current_->description;
    const bool was_last = std::none_of(connections_.begin(), connections_.end(), [](const auto& each) {
        return each && each->is_open() && !each->has_left;
    });
    for (const TaskPointer& task : transfers_under_way()) {
        const int other = task->from >= 0 ? task->from : task->rank;
        if (other == connection.rank || (other < 0 && was_last)) return &task->description;
    }
    return nullptr;
}

// What is announced, expected, or asked for and on its way.
std::vector<TaskPointer> Engine::transfers_under_way() const {
    std::vector<TaskPointer> transfers = sending_;
    transfers.insert(transfers.end(), receiving_.begin(), receiving_.end());
    for (const auto& connection : connections_) {
        if (!connection) continue;
        transfers.insert(transfers.end(), connection->granted_transfers.begin(),
                         connection->granted_transfers.end());
    }
    return transfers;
}

void Engine::tell(Connection& to, std::uint64_t sequence) {
    const std::string* found = description_of(sequence);
    const auto [towards, bytes] = most_on_the_way();
    const std::uint64_t extra = static_cast<std::uint64_t>(towards + 1) << 1 | (found ? 1 : 0);
    say(to, kTell, sequence, extra, found ? *found : "", bytes);
}

// Returns the rank that has not acknowledged most of what the kernel has for it, and how much.
std::pair<int, std::uint64_t> Engine::most_on_the_way() const {
    std::pair<int, std::uint64_t> most{-1, 0};
    for (const auto& connection : connections_) {
        if (!connection || !connection->is_open()) continue;
        int bytes = 0;
        ::ioctl(connection->socket, SIOCOUTQ, &bytes);
        const auto unacknowledged = static_cast<std::uint64_t>(std::max(bytes, 0));
        if (unacknowledged > most.second) most = {connection->rank, unacknowledged};
    }
    return most;
}

const std::string* Engine::description_of(std::uint64_t sequence) const {
    const auto found = history_.find(sequence);
    return found == history_.end() ? nullptr : &found->second;
}

// ---- What goes wrong --------------------------------------------------------------------------

void Engine::look_for_silence(std::int64_t now) {
    if (failed_) return;
    const std::vector<TaskPointer> transfers = transfers_under_way();
    const bool waits = current_ || !transfers.empty();
    const auto is_over = [&](const TaskPointer& task) {
        return now - task->times.begun_ns > static_cast<std::int64_t>(task->timeout_s * 1e9);
    };
    const auto late = std::find_if(transfers.begin(), transfers.end(), is_over);
    if (late != transfers.end()) {
        const std::int64_t limit = static_cast<std::int64_t>((*late)->timeout_s * 1e9);
        return fail((*late)->description + " did not finish before the timeout of " +
                        seconds(limit) + " was over",
                    true);
    }
    if (current_ && is_over(current_)) suspect(current_->sequence, true);
    if (failed_ || !waits || now - moved_ns_ < silence_ns_ / 4) return;
    std::vector<int> silent;
    bool is_certain = false;
    for (auto& connection : connections_) {
        if (!connection || !connection->is_open() || connection->has_left) continue;
        if (now - connection->heard_ns < silence_ns_ / 4) continue;
        int unacknowledged = 0;
        ::ioctl(connection->socket, SIOCOUTQ, &unacknowledged);
        const bool is_reached = unacknowledged < connection->unacknowledged;
        if (!connection->pinged_ns) say(*connection, kPing, 0, 0);
        if (!connection->pinged_ns || is_reached) {
            connection->pinged_ns = now;
            connection->unacknowledged = unacknowledged;
        }
        connection->unacknowledged = std::max(connection->unacknowledged, unacknowledged);
        if (now - connection->pinged_ns > silence_ns_ * 45 / 100) silent.push_back(connection->rank);
        if (now - connection->pinged_ns > silence_ns_ * 55 / 100) is_certain = true;
    }
    if (!is_certain) return;
    std::string who;
    for (const int rank : silent) who += (who.empty() ? "" : ", ") + name_of(rank);
    fail(who + (silent.size() > 1 ? " do not answer" : " does not answer") + ": nothing was heard for " +
             seconds(silence_ns_ * 8 / 10) + " (paused, cut off, or its host is down)",
         true);
}

void Engine::suspect(std::uint64_t sequence, bool is_late) {
    if (failed_ || suspected_ns_) return;
    suspected_ns_ = now_ns();
    if (rank_ == 0) return open_case(sequence, is_late);
    Connection& judge = *connections_[0];
    if (judge.is_open() && !judge.has_left) return say(judge, kSuspect, sequence, is_late ? 1 : 0);
    const std::string* own = description_of(sequence);
    fail((own ? *own : "a collective") + (is_late ? " is late" : " differs between ranks") +
             ", and " + name_of(0) + " has left the group",
         true);
}

void Engine::open_case(std::uint64_t sequence, bool is_late) {
    if (failed_ || case_) return;
    const std::int64_t grace_ns = std::min(kGraceNs, silence_ns_ / 4);
    case_ = std::make_unique<Case>();
    case_->sequence = sequence;
    case_->is_late = is_late;
    case_->until_ns = now_ns() + grace_ns;
    case_->heard.resize(connections_.size());
    for (auto& connection : connections_) {
        if (connection && connection->is_open()) say(*connection, kAsk, sequence, 0);
    }
    judge_if_heard(now_ns());
}

void Engine::judge_if_heard(std::int64_t now) {
    if (suspected_ns_ && !failed_ && rank_ != 0 && now - suspected_ns_ > 4 * kGraceNs) {
        const std::string* own = current_ ? &current_->description : nullptr;
        return fail((own ? *own : "a collective") + " came to no end, and " + name_of(0) +
                        " does not say why",
                    true);
    }
    if (!case_ || failed_) return;
    const std::string* own = description_of(case_->sequence);
    const auto [towards, bytes] = most_on_the_way();
    case_->heard[0] = Case::Heard{own != nullptr, own ? *own : "", towards, bytes};
    // Of a collective that is late it is enough to know who has called it. Where ranks disagree, the
    // others may be about to say what they call.
    const bool is_clear = std::all_of(
        case_->heard.begin(), case_->heard.end(),
        [&](const auto& each) { return each && (each->has_called || case_->is_late); });
    if (!is_clear && now < case_->until_ns) return;
    const std::string found = verdict();
    case_.reset();
    fail(found, true);
}

std::string Engine::verdict() const {
    std::vector<std::pair<std::string, std::string>> said;  // what, and the ranks that say so
    for (std::size_t rank = 0; rank < case_->heard.size(); ++rank) {
        const auto& heard = case_->heard[rank];
        const std::string what = !heard               ? "does not answer"
                                 : !heard->has_called ? "has not called it"
                                                      : "called " + heard->what;
        const auto known = std::find_if(said.begin(), said.end(),
                                        [&](const auto& each) { return each.first == what; });
        const std::string& name = names_[rank];
        if (known == said.end()) {
            said.emplace_back(what, "rank " + name);
        } else {
            known->second += ", " + name;
        }
    }
    const std::string which = "collective " + std::to_string(case_->sequence - uncounted_) +
                              " of group " + group_;
    std::string text = case_->is_late ? which + " did not finish before the timeout was over: "
                                      : "ranks disagree on " + which + ": ";
    for (std::size_t each = 0; each < said.size(); ++each) {
        text += (each ? "; " : "") + said[each].second + " " + said[each].first;
    }
    if (case_->is_late) return text + on_the_way();
    return said.size() == 1 ? text + ", with parts of different sizes" : text;
}

// Around a ring all wait for the slowest connection, and only there is something on the way.
std::string Engine::on_the_way() const {
    std::uint64_t most = 0;
    for (const auto& heard : case_->heard) most = std::max(most, heard ? heard->on_the_way_bytes : 0);
    std::string text;
    for (std::size_t rank = 0; rank < case_->heard.size(); ++rank) {
        const auto& heard = case_->heard[rank];
        if (!heard || heard->towards < 0 || heard->on_the_way_bytes < most / 2) continue;
        text += (text.empty() ? "; still on the way: " : ", ") +
                std::to_string(heard->on_the_way_bytes) + " bytes from " +
                name_of(static_cast<int>(rank)) + " to " + name_of(heard->towards);
    }
    return text;
}

void Engine::lost(Connection& connection, const std::string& how) {
    connection.close();
    if (failed_ || connection.has_left) return;
    connection.loss = how;
    // A process may end without a word once it has all it wants; whoever still misses it tells.
    if (misses(connection)) fail(absence_of(connection), true);
}

std::string Engine::absence_of(const Connection& connection) const {
    return name_of(connection.rank) +
           (connection.has_left ? " has left the group" : " is gone: " + connection.loss);
}

// Whatever else comes from there is not looked at; but it is told why, like all others.
void Engine::refuse(Connection& connection, const std::string& what) {
    ++malformed_;
    connection.sink = Connection::Sink::nowhere;
    connection.left = std::numeric_limits<std::size_t>::max();
    connection.head = Head{};
    fail(name_of(connection.rank) + " sent " + name_of(rank_) + " " + what, true);
}

void Engine::fail(const std::string& problem, bool tell_others) {
    if (failed_) return;
    failed_ = true;
    std::vector<TaskPointer> ended(waiting_.begin(), waiting_.end());
    const std::vector<TaskPointer> transfers = transfers_under_way();
    ended.insert(ended.end(), transfers.begin(), transfers.end());
    for (auto& connection : connections_) {
        if (!connection) continue;
        // Nobody may look at a tensor from here on: what of one is half sent is copied.
        Connection::Out& out = connection->out;
        if (out.what == Connection::Out::What::collective ||
            out.what == Connection::Out::What::transfer) {
            if (out.payload != connection->spill.data()) {
                connection->spill.assign(out.payload, out.payload + out.head.length);
                out.payload = connection->spill.data();
            }
            out.what = Connection::Out::What::note;
        }
        connection->granted_transfers.clear();
        connection->transfer = nullptr;
        connection->early.clear();
        connection->early_bytes = 0;
        connection->sends.clear();
        connection->receives.clear();
        connection->next_send = connection->next_receive = 0;
        if (connection->sink != Connection::Sink::head) connection->sink = Connection::Sink::nowhere;
        if (tell_others && connection->is_open()) say(*connection, kAbort, 0, 0, problem);
    }
    current_ = nullptr;
    waiting_.clear();
    sending_.clear();
    receiving_.clear();
    case_.reset();
    {
        const std::lock_guard lock(mutex_);
        problem_ = problem;
    }
    for (const TaskPointer& task : ended) end(task, Task::State::failed, problem);
}

std::string Engine::problem() {
    const std::lock_guard lock(mutex_);
    return problem_;
}

std::string Engine::name_of(int rank) const {
    return "rank " + names_[static_cast<std::size_t>(rank)];
}

// ---- The end ----------------------------------------------------------------------------------

void Engine::abort(const std::string& reason) {
    {
        const std::lock_guard lock(mutex_);
        if (!closing_) abort_reason_ = reason;
    }
    close();
}

void Engine::close() {
    if (::getpid() != process_) {
        // A fork has the descriptors, but neither the thread nor a say; who holds the mutex is past.
        if (thread_.joinable()) thread_.detach();
        return;
    }
    {
        std::unique_lock lock(mutex_);
        if (closing_) return;
        closing_ = true;
        const std::uint64_t one = 1;
        (void)!::write(wake_, &one, sizeof one);
        changed_.notify_all();
        ended_.notify_all();
        while (driven_) changed_.wait_for(lock, kLookAgain);
        driven_ = true;  // for good
    }
    thread_.join();
    say_goodbye();
}

void Engine::say_goodbye() {
    take_issued();
    if (!failed_ && !abort_reason_.empty()) {
        fail(abort_reason_, true);
    } else if (!failed_) {
        fail("the group was destroyed", false);
        for (auto& connection : connections_) {
            if (connection && connection->is_open()) say(*connection, kBye, 0, 0);
        }
    }
    const std::int64_t until_ns = now_ns() + kGoodbyeNs;
    for (auto& connection : connections_) {
        if (!connection || !connection->is_open()) continue;
        transmit(*connection);
        while (connection->has_output() && !connection->is_broken && now_ns() < until_ns) {
            pollfd full{connection->socket, POLLOUT, 0};
            ::poll(&full, 1, kTickMs);
            transmit(*connection);
        }
        ::shutdown(connection->socket, SHUT_WR);
        // Closing over bytes that nobody read would make the kernel take back what was just sent.
        while (::recv(connection->socket, scratch_.data(), scratch_.size(), MSG_DONTWAIT) > 0) {
        }
        connection->close();
    }
}

}  // namespace fullwire
