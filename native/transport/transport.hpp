// Carries collectives out over connections to the other ranks of a group, one after the other.
//
// A collective is a program: what this rank sends and receives, in order, and which send waits for
// which receive. A send may follow the receive that it waits for byte by byte, so a ring forwards
// what it has reduced while the rest is still on the wire. Between two ranks there is one
// connection, which carries frames: a head of 48 bytes and what it announces. Of one collective at
// most `kEagerBytes` are sent to a rank before it has said that it is there too; so everything that
// arrives can be read at once, and no frame ever waits behind another that nobody wants yet.
//
// One thread at a time drives an engine: its own, or the one that waits for a collective. Where one
// connection does not fill the line there are several to each rank: each is an engine of its own, and
// carries a part of what is large (transport_streams.cpp).

#pragma once

#include <poll.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "transport/arithmetic.hpp"
#include "transport/records.hpp"
#include "transport/wire_formats.hpp"

namespace fullwire {

constexpr std::size_t kEagerBytes = std::size_t{1} << 20;

struct Send {
    int rank;
    std::uint32_t first_block, blocks;
    int after;         // the receive whose bytes it passes on, or -1: the rank's own
    int after_all_of;  // so many receives must be whole before it begins
};

struct Receive {
    int rank;
    std::uint32_t first_block, blocks;
    bool reduces;    // adds to what is there, else replaces it
    bool from_work;  // adds to what was received before, else to the rank's own
    bool completes;  // afterwards every rank's part is in it
    int after;       // the receive whose bytes it adds to, or -1
    int after_sends; // so many sends read what it overwrites, and must have left
};

// Shared with Python, and let go of without it: no thread of ours ever waits for the interpreter.
struct Program : std::enable_shared_from_this<Program> {
    std::uint32_t blocks;
    std::vector<Send> sends;
    std::vector<Receive> receives;
    bool signals;  // empty messages are sent too: that a rank has come is all they say
};

struct Block {
    std::uint64_t address;  // in `work` 0 stands for memory that the engine finds
    std::uint64_t bytes;
};

struct Times {
    std::int64_t issued_ns, begun_ns, heard_ns, ended_ns, reducing_ns;
    std::uint64_t sent_bytes;
};

// What packing for the wire has cost in accuracy, as far as this rank has packed.
struct Rounding {
    double error = 0;  // the largest relative squared error of a chunk, measured on samples
    std::uint64_t chunks = 0, out_of_range = 0;  // the latter went out as bf16 instead of fp16
};

class Task;
using TaskPointer = std::shared_ptr<Task>;

// What is to be done, and what became of it.
class Task {
public:
    enum class Kind : std::uint8_t { collective, send, receive };
    enum class State : std::uint8_t { open, done, failed };

    std::string description;
    Kind kind = Kind::collective;
    std::shared_ptr<const Program> program;
    std::vector<Block> source, work;
    std::optional<Reduction> reduction;
    Number number = Number::uint8;
    std::uint32_t divide_by = 1;
    std::optional<WireFormat> wire;  // of float32 numbers that are packed for the wire
    double most_error = 0;           // of them: a larger one makes the group fall back to float32
    double timeout_s = 0;
    int rank = -1;          // of a transfer: the other one; -1 receives from any
    std::uint64_t tag = 0;  // of a transfer

    bool is_done() const { return state.load(std::memory_order_acquire) != State::open; }
    bool has_failed() const { return state.load(std::memory_order_acquire) == State::failed; }

    std::atomic<State> state{State::open};
    std::string problem;  // once failed; empty if there was no memory for it: the group's own has it
    Times times{};        // once done
    Rounding rounding;    // once done
    int from = -1;        // once received: who sent it

private:
    friend class Engine;
    friend class Streams;
    TaskPointer whole;               // that this is one stream's part of; until both have ended
    std::vector<TaskPointer> parts;  // if several streams carry it
    std::size_t parts_left = 0;
    bool has_failed_part = false;
    std::uint64_t sequence = 0, signature = 0, transfer = 0;
    std::size_t chunk_bytes = 0;
    bool is_small = false;
    std::unique_ptr<char[]> storage;
    std::size_t storage_bytes = 0;
    std::vector<Block> receive_ranges;
    std::vector<std::size_t> received;  // bytes of each receive
    std::size_t receives_left = 0, sends_left = 0;
};

class Streams;

class Engine {
public:
    struct Manner {
        int rank;
        std::vector<std::string> names;
        std::string group;
        double silence_s;
        int spin_us;
        bool checks;  // what it sends bears a checksum; where there is one the receiver looks at it
    };
    // `sockets` by rank, connected and trusted, -1 at the own place; they are closed with the engine.
    // With keys, by rank too, everything between two ranks is encrypted.
    // Those that it has taken are -1 afterwards, even where it then could not begin.
    Engine(Streams& streams, const Manner& manner, std::vector<int>& sockets,
           const std::vector<Keys>& keys, bool is_first);
    ~Engine();

    // Who waits at once will drive; who may, is given a moment to.
    enum class Caller : std::uint8_t { waits, may_wait, goes_on };
    void issue(const TaskPointer& task, Caller caller);
    // So that the next `issue` needs no memory.
    void make_room();
    // False when the time is over. A negative time is for ever.
    bool wait(const TaskPointer& task, double timeout_s);
    void abort(const std::string& reason);
    // With a reason those who still need this rank are told it.
    void close(const std::string& reason = "");
    // In a process that was forked off: lets go of the connections, so that the parent's end ends them.
    void leave_to_parent();
    bool is_of_this_process() const { return ::getpid() == process_; }
    // Has whoever drives look up: another stream has failed.
    void wake();
    // Collectives are numbered for people from the one after this.
    void count_from(std::uint64_t sequence) { uncounted_ = sequence; }
    std::uint64_t malformed() const { return malformed_.load(); }
    // Over a connection that no engine could take. With keys they are the first record under them, and
    // the last: nothing else may go over it.
    static void say_last_words(int socket, const char* rank, const char* lacking, const Keys* keys) noexcept;

private:
    struct Head;
    struct Connection;
    struct Case;

    // Of the collective under way, if its numbers are packed for the wire.
    struct Chunk {
        std::uint32_t block;
        std::uint64_t first, count;   // numbers, from the block's first one
        std::uint64_t passed_on_at;   // in `passed_on`
        bool is_passed_on = false;    // its final numbers go to others
        bool is_final = false;
        std::uint32_t added = 0;      // contributions of other ranks
        float error = 0;
    };
    struct Packing {
        WireFormat format = WireFormat::float32;
        std::vector<Chunk> chunks;
        std::vector<std::uint32_t> first_chunk;    // of each block, and the end
        std::vector<std::uint32_t> contributions;  // of other ranks, to each block
        std::vector<std::uint32_t> received;       // chunks of each receive
        std::vector<char> passed_on;               // final chunks as they go over the wire
        float error = 0, untold = 0;               // the largest, over the limit: of all ranks; of ours
        bool tells = false;
        std::size_t bytes_of(const Chunk& chunk) const;
        std::uint64_t bytes_of(std::uint32_t first_block, std::uint32_t blocks) const;
    };

    void require_own_process() const;
    void take_connections(std::vector<int>& sockets, const std::vector<Keys>& keys);
    [[noreturn]] void never_began(const char* lacking);
    void work_in_background();
    void drive(int wait_ms) noexcept;
    void drive_once(int wait_ms);
    int poll_for(int wait_ms);
    void choose_wake(Connection& connection);
    void take_issued();
    void begin(const TaskPointer& task);
    void begin_transfer(const TaskPointer& task);
    void prepare(Task& task);
    void finish(const TaskPointer& task);
    void finish_collective_if_whole();
    void end(const TaskPointer& task, Task::State state, std::string_view problem) noexcept;
    void end_all_that_is_open(std::string_view problem) noexcept;

    void transmit(Connection& connection);
    bool choose_next(Connection& connection);
    bool choose_collective(Connection& connection);
    bool choose_transfer(Connection& connection);
    bool choose_packed(Connection& connection);
    void prepare_packing(Task& task);
    void pack_chunk(Task& task, char* to, const float* values, std::size_t count, float error);
    void finish_chunk(Task& task, Chunk& chunk);
    std::size_t next_chunk_bytes(const Connection& connection) const;
    bool take_chunk(Connection& connection, const char* bytes, std::size_t count);
    void judge_rounding(const Task& task);
    void seal(Connection& connection);
    ssize_t send_rest(Connection& connection);
    bool flushes_in_time(Connection& connection) noexcept;
    bool push(Connection& connection);
    void say(Connection& connection, std::uint8_t kind, std::uint64_t number, std::uint64_t extra,
             const std::string& text = "", std::uint64_t signature = 0);

    void receive(Connection& connection);
    void receive_records(Connection& connection);
    void transmit_all();
    bool has_arrived(Connection& connection, ssize_t got);
    void open_records(Connection& connection);
    std::size_t look_at(Connection& connection, const char* bytes, std::size_t count);
    void understand_head(Connection& connection);
    void understand_data(Connection& connection);
    void understand_note(Connection& connection);
    void take_payload(Connection& connection, const char* bytes, std::size_t count, bool in_place);
    std::size_t most_early_bytes() const;
    void take_early(Connection& connection);
    void take_all_early();
    void arrived(Connection& connection, const char* bytes, std::size_t count, bool in_place);
    void reduce_into(Task& task, std::size_t index, const char* bytes, std::size_t count);
    bool may_receive(const Connection& connection, std::size_t count) const;
    void match_transfers();

    void look_for_silence(std::int64_t now_ns);
    std::string what_is_missing(const Task& transfer) const;
    void suspect(std::uint64_t sequence, bool is_late);
    void open_case(std::uint64_t sequence, bool is_late);
    const std::string* misses(const Connection& connection) const;
    std::vector<TaskPointer> transfers_under_way() const;
    void tell(Connection& to, std::uint64_t sequence);
    std::pair<int, std::uint64_t> most_on_the_way() const;
    void judge_if_heard(std::int64_t now_ns);
    std::string verdict() const;
    std::string on_the_way() const;
    const std::string* description_of(std::uint64_t sequence) const;
    void lost(Connection& connection, const std::string& how);
    std::string absence_of(const Connection& connection, const std::string& when = "") const;
    int first_present() const;
    void refuse(Connection& connection, const std::string& what);
    void fail(std::string_view problem, bool tell_others) noexcept;
    void let_go_of_tasks(Connection& connection) noexcept;
    void tell_why(Connection& connection, std::string_view problem) noexcept;
    void run_out(const char* lacking) noexcept;
    bool is_busy() const;
    void say_goodbye();
    bool has_parted(Connection& connection, bool has_news);
    std::string problem();
    std::string name_of(int rank) const;

    Streams& streams_;
    const bool is_first_;  // of its group's streams: that ranks disagree is found out there
    const int rank_;
    const std::vector<std::string> names_;
    const std::string group_;
    const std::int64_t silence_ns_;
    const std::int64_t spin_ns_;
    const bool checks_;
    const int process_;

    std::mutex mutex_;
    std::condition_variable changed_;  // the engine is free to be driven, or has something to do
    std::condition_variable ended_;    // a task has ended
    bool driven_ = false;
    std::int64_t patient_until_ns_ = 0, watchful_until_ns_ = 0;
    std::atomic<bool> closing_{false};
    bool is_fork_ = false;
    std::atomic<bool> busy_{false};
    std::vector<TaskPointer> issued_, taken_;  // `taken_`: by who drives, and not in a queue yet
    std::string problem_, abort_reason_, leaving_reason_;
    int wake_ = -1;
    std::thread thread_;
    std::atomic<std::uint64_t> malformed_{0};

    // What follows belongs to whoever drives.
    std::vector<std::unique_ptr<Connection>> connections_;  // by rank; null at the own place
    std::vector<pollfd> polled_;
    std::vector<char> scratch_;
    std::deque<TaskPointer> waiting_;
    TaskPointer current_;
    std::uint64_t next_sequence_ = 1;
    std::atomic<std::uint64_t> uncounted_{0};
    std::map<std::uint64_t, std::string> history_;
    std::vector<TaskPointer> sending_, receiving_;
    struct Announced {
        int rank;
        std::uint64_t transfer, tag, bytes;
    };
    std::deque<Announced> announced_;
    std::uint64_t next_transfer_ = 1;
    std::unique_ptr<Case> case_;
    int judge_ = 0;
    std::uint64_t asked_ = 0;
    std::vector<int> askers_;
    std::int64_t moved_ns_ = 0, looked_ns_ = 0, suspected_ns_ = 0;
    bool failed_ = false;
    std::unique_ptr<char[]> spare_;
    std::size_t spare_bytes_ = 0;
    Packing packing_;
    float untold_error_ = 0;  // of collectives in which nobody could be told
    bool has_fallen_back_ = false;
};

// All connections of a group. Every rank cuts alike: a block goes over so many streams that each has
// a part worth a collective of its own, and what is small over the first one, with every transfer.
class Streams {
public:
    Streams(Engine::Manner manner, std::vector<int> sockets, const std::vector<Keys>& keys = {});
    ~Streams();
    Streams(const Streams&) = delete;
    Streams& operator=(const Streams&) = delete;

    // One more connection to each rank. Nothing may be under way.
    void add(std::vector<int> sockets, const std::vector<Keys>& keys = {});
    // The largest part of so many bytes that one stream carries.
    std::uint64_t largest_part(std::uint64_t bytes) const;

    // A collective's `source` and `work` are what the caller has: one block is cut into as many as
    // the program moves.
    void issue(const TaskPointer& task, Engine::Caller caller);
    // False when the time is over. A negative time is for ever.
    bool wait(const TaskPointer& task, double timeout_s);
    // Waits until any task has ended since this was last called, or the group is closed: false.
    bool wait_for_any();
    void abort(const std::string& reason);
    // Ends the group, on every rank, for want of something in this process; it may still be closed.
    void give_up(std::string_view problem) noexcept;
    void run_out_before(std::string_view what) noexcept;  // of memory
    // With a reason those who still need this rank are told it.
    void close(const std::string& reason = "");
    // In a process that was forked off: lets go of the connections, so that the parent's end ends them.
    void leave_to_parent();
    // What was issued before does not count when collectives are numbered for people.
    void count_from_here();
    std::string problem();
    std::uint64_t malformed() const;
    // The collective whose rounding made the group fall back to float32, or "".
    std::string fallen_back_after();

private:
    friend class Engine;
    const char* own_name() const;
    std::vector<TaskPointer> parts_of(const TaskPointer& task) const;
    std::size_t streams_for(std::uint64_t bytes) const;
    Block part_of(const Block& block, std::size_t stream) const;
    TaskPointer part_of(const TaskPointer& task, std::size_t stream) const;
    void issue_parts(const TaskPointer& task, Engine::Caller caller);
    void has_ended(const TaskPointer& task) noexcept;
    void note_fall_back(const std::string& description);
    bool ends_whole(const TaskPointer& whole, const Task& part) noexcept;
    template <typename End> void end_all(End end);

    const Engine::Manner manner_;
    std::vector<std::unique_ptr<Engine>> engines_;
    std::mutex order_;  // of what is issued: on every stream the same
    std::uint64_t next_sequence_ = 1;
    std::mutex mutex_;
    std::condition_variable ended_;  // a task has ended
    bool closing_ = false;
    std::uint64_t ended_count_ = 0, ended_seen_ = 0;
    std::atomic<bool> has_failed_{false};
    std::string problem_, fallen_back_after_;
};

}  // namespace fullwire
