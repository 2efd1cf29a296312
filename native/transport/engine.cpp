// Who drives the engine, and how its tasks begin and end.

#include "transport/transport.hpp"

#include <fcntl.h>
#include <linux/sockios.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "transport/parts.hpp"

namespace fullwire {

Engine::Engine(Streams& streams, const Manner& manner, std::vector<int>& sockets,
               const std::vector<Keys>& keys, bool is_first)
    : streams_(streams), is_first_(is_first), rank_(manner.rank), names_(manner.names),
      group_(manner.group), silence_ns_(static_cast<std::int64_t>(manner.silence_s * 1e9)),
      spin_ns_(is_first ? manner.spin_us * 1000LL : 0), checks_(manner.checks),
      process_(::getpid()), scratch_(kScratch) {
    moved_ns_ = now_ns();
    try {
        take_connections(sockets, keys);
        problem_.reserve(kLongestLastWords);
        wake_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        if (wake_ < 0) never_began(errno == ENOMEM ? kNoMemory : kNoDescriptor);
        thread_ = std::thread([this] { work_in_background(); });
    } catch (const std::bad_alloc&) {
        never_began(kNoMemory);
    } catch (const std::system_error&) {
        never_began(kNoThread);
    }
}

void Engine::take_connections(std::vector<int>& sockets, const std::vector<Keys>& keys) {
    connections_.reserve(sockets.size());
    polled_.reserve(sockets.size() + 1);
    for (std::size_t other = 0; other < sockets.size(); ++other) {
        if (static_cast<int>(other) == rank_) {
            connections_.push_back(nullptr);
            continue;
        }
        connections_.push_back(std::make_unique<Connection>(static_cast<int>(other), sockets[other]));
        sockets[other] = -1;
        Connection& connection = *connections_.back();
        ::fcntl(connection.socket, F_SETFL, O_NONBLOCK);
        if (keys.empty()) continue;
        try {
            connection.encrypt(keys[other]);
        } catch (...) {
            // Nothing may go over it in clear, last words neither.
            say_last_words(connection.socket, names_[static_cast<std::size_t>(rank_)].c_str(), kNoMemory,
                           &keys[other]);
            connection.close();
            throw;
        }
    }
}

// The others are told why, for they wait already.
void Engine::never_began(const char* lacking) {
    run_out(lacking);
    say_goodbye();
    if (wake_ >= 0) ::close(wake_);
    throw std::runtime_error(problem_);
}

Engine::~Engine() { close(); }

void Engine::require_own_process() const {
    if (is_fork_) throw std::runtime_error("a forked process has no part in its parent's group");
}

// ---- Who drives -------------------------------------------------------------------------------

void Engine::issue(const TaskPointer& task, Caller caller) {
    require_own_process();
    const std::int64_t now = task->times.issued_ns = now_ns();
    const std::lock_guard lock(mutex_);
    if (closing_ || !problem_.empty()) {
        keep_problem(*task, problem_.empty() ? "the group was destroyed" : problem_);
        task->state.store(Task::State::failed, std::memory_order_release);
        ended_.notify_all();
        return streams_.has_ended(task);
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

void Engine::make_room() {
    require_own_process();  // in a fork, who holds the mutex is past
    const std::lock_guard lock(mutex_);
    if (issued_.size() == issued_.capacity()) issued_.reserve(2 * issued_.size() + 8);
}

bool Engine::wait(const TaskPointer& task, double timeout_s) {
    using Clock = std::chrono::steady_clock;
    require_own_process();
    const bool is_for_ever = timeout_s < 0 || timeout_s > 1e9;
    const auto until = is_for_ever ? Clock::time_point::max()
                                   : Clock::now() + std::chrono::nanoseconds(nanoseconds(timeout_s));
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

// For want of memory the group ends, and the process goes on: what ends it needs none.
void Engine::drive(int wait_ms) noexcept {
    try {
        drive_once(wait_ms);
    } catch (const std::bad_alloc&) {
        run_out(kNoMemory);
        busy_.store(is_busy());
        ::poll(nullptr, 0, kWatchfulTickMs);  // if there still is none, at no processor's cost
    }
}

void Engine::drive_once(int wait_ms) {
    take_issued();
    if (!failed_ && streams_.has_failed_) fail(streams_.problem(), true);
    transmit_all();
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
    const int found = poll_for(busy_.load() ? wait_ms : 0);
    if (found < 0 && errno != EINTR) {
        run_out(errno == EINVAL ? kNoDescriptor : kNoMemory);  // of more than are allowed it says EINVAL
        ::poll(nullptr, 0, kWatchfulTickMs);
    }
    const bool is_quiet = found == 0;
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
    transmit_all();
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
    const std::size_t left = connection.opens ? connection.record_left() : is_due ? connection.left : 0;
    const std::size_t wanted = left > kSegment ? left : 1;
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
    {
        const std::lock_guard lock(mutex_);
        if (failed_) {
            taken_.swap(issued_);
        } else {
            taken_.insert(taken_.end(), issued_.begin(), issued_.end());
            issued_.clear();
        }
    }
    if (failed_) return end_all_that_is_open(problem_);
    for (std::size_t each = 0; each < taken_.size(); ++each) {  // one that fails ends all that follow
        const TaskPointer task = taken_[each];
        if (task->kind != Task::Kind::collective) {
            begin_transfer(task);
        } else {
            next_sequence_ = task->sequence + 1;
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
    taken_.clear();
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
    if (task.wire) prepare_packing(task);
}

void Engine::begin(const TaskPointer& task) {
    current_ = task;
    task->times.begun_ns = moved_ns_ = now_ns();
    prepare(*task);
    const Program& program = *task->program;
    const bool signals = program.signals && is_first_ && !task->wire;
    for (auto& connection : connections_) {
        if (!connection) continue;
        connection->sends.clear();
        connection->receives.clear();
        connection->next_send = connection->next_receive = 0;
        connection->sent_of_range = connection->sent = 0;
        connection->to_send = connection->to_receive = 0;
    }
    const auto bytes_in = [&](const std::vector<Block>& blocks, std::uint32_t first,
                              std::uint32_t count) {
        if (task->wire) return packing_.bytes_of(first, count);
        std::uint64_t bytes = 0;
        for (std::uint32_t block = first; block < first + count; ++block) bytes += blocks[block].bytes;
        return bytes;
    };
    for (std::uint32_t index = 0; index < program.sends.size(); ++index) {
        const Send& send = program.sends[index];
        const std::uint64_t bytes = bytes_in(send.after < 0 ? task->source : task->work,
                                             send.first_block, send.blocks);
        if (!bytes && !signals) {
            --task->sends_left;
            continue;
        }
        Connection& connection = *connections_[static_cast<std::size_t>(send.rank)];
        connection.sends.push_back(index);
        connection.to_send += bytes;
    }
    for (std::uint32_t index = 0; index < program.receives.size(); ++index) {
        const Receive& receive = program.receives[index];
        const std::uint64_t bytes = bytes_in(task->work, receive.first_block, receive.blocks);
        if (!bytes && !signals) {
            task->received[index] = 1;  // whole
            --task->receives_left;
            continue;
        }
        Connection& connection = *connections_[static_cast<std::size_t>(receive.rank)];
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
            return fail(absence_of(*connection, ", before " + task->description), true);
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
        if (whole->wire) judge_rounding(*whole);
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

void Engine::end(const TaskPointer& task, Task::State state, std::string_view problem) noexcept {
    if (task->is_done()) return;
    task->times.ended_ns = now_ns();
    keep_problem(*task, problem);
    if (task->storage_bytes > spare_bytes_) {
        spare_ = std::move(task->storage);
        spare_bytes_ = task->storage_bytes;
    }
    task->storage.reset();
    task->storage_bytes = 0;
    {
        const std::lock_guard lock(mutex_);
        task->state.store(state, std::memory_order_release);
        ended_.notify_all();
    }
    streams_.has_ended(task);
}

void Engine::end_all_that_is_open(std::string_view problem) noexcept {
    const auto end_these = [&](auto& tasks) {
        for (const TaskPointer& task : tasks) end(task, Task::State::failed, problem);
        tasks.clear();
    };
    current_ = nullptr;
    end_these(waiting_);
    end_these(taken_);
    end_these(sending_);
    end_these(receiving_);
    for (auto& connection : connections_) {
        if (connection) end_these(connection->granted_transfers);
    }
}

// ---- The end ----------------------------------------------------------------------------------

void Engine::abort(const std::string& reason) {
    {
        const std::lock_guard lock(mutex_);
        if (!closing_) keep(abort_reason_, reason);
    }
    close();
}

void Engine::wake() {
    const std::lock_guard lock(mutex_);
    const std::uint64_t one = 1;
    if (!closing_) (void)!::write(wake_, &one, sizeof one);
}

void Engine::leave_to_parent() {
    is_fork_ = true;
    for (auto& connection : connections_) {
        if (connection) connection->close();
    }
}

void Engine::close(const std::string& reason) {
    if (!is_of_this_process()) {
        // A fork has the descriptors, but neither the thread nor a say; who holds the mutex is past.
        if (thread_.joinable()) thread_.detach();
        return;
    }
    {
        std::unique_lock lock(mutex_);
        if (closing_) return;
        closing_ = true;
        keep(leaving_reason_, reason);
        const std::uint64_t one = 1;
        (void)!::write(wake_, &one, sizeof one);
        changed_.notify_all();
        ended_.notify_all();
        while (driven_) changed_.wait_for(lock, kLookAgain);
        driven_ = true;  // for good
    }
    thread_.join();
    say_goodbye();
    // Whoever still holds a result of the group holds no more than that.
    ::close(std::exchange(wake_, -1));
    spare_.reset();
    scratch_ = {};
}

void Engine::say_goodbye() {
    try {
        take_issued();
    } catch (const std::bad_alloc&) {
        run_out(kNoMemory);
    }
    const bool has_news = failed_ || !abort_reason_.empty() || !leaving_reason_.empty();
    if (!failed_ && !abort_reason_.empty()) {
        fail(abort_reason_, true);
    } else if (!failed_) {
        fail("the group was destroyed", false);
        for (auto& connection : connections_) {
            if (!connection || !connection->is_open()) continue;
            try {
                say(*connection, kBye, 0, 0, leaving_reason_);
            } catch (const std::bad_alloc&) {
                connection->close();  // which they take for the end of this process
            }
        }
    }
    const std::int64_t until_ns = now_ns() + kGoodbyeNs;
    bool is_over = false;
    while (!is_over) {
        is_over = true;
        for (auto& connection : connections_) {
            if (!connection || !connection->is_open()) continue;
            bool has_parted_from_it = now_ns() > until_ns;
            try {
                has_parted_from_it = has_parted_from_it || has_parted(*connection, has_news);
            } catch (const std::bad_alloc&) {
                has_parted_from_it = true;
            }
            if (has_parted_from_it) {
                connection->close();
            } else {
                is_over = false;
            }
        }
        if (!is_over) ::poll(nullptr, 0, kWatchfulTickMs);
    }
}

// Closing over bytes that nobody read makes the kernel take back what was just said. So whatever
// comes is read, and news have to arrive first.
bool Engine::has_parted(Connection& connection, bool has_news) {
    transmit(connection);
    ssize_t got = 0;
    do {
        got = ::recv(connection.socket, scratch_.data(), scratch_.size(), MSG_DONTWAIT);
    } while (got > 0);
    const bool is_there = got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
    if (!is_there || connection.is_broken) return true;
    int unacknowledged = 0;
    ::ioctl(connection.socket, SIOCOUTQ, &unacknowledged);
    return !connection.has_output() && !(has_news && unacknowledged);
}

}  // namespace fullwire
