// A PyTorch profiler (Kineto) trace read once, as it comes, into columns.
//
// A trace is one JSON object whose "traceEvents" hold nearly all of its bytes. Four kinds of event
// are kept: work on a device, the calls that launched it, operators on the processor, and marks
// (steps, optimizers, loading of data, collectives); all else is passed over without being decoded.
// What is kept takes some 60 bytes an event. Nothing is recursive, and no value is kept in the
// buffer that is longer than `most_value_bytes`, so neither depth nor size of what is hostile
// matters. Text stays as it is escaped in the file, each once: Python decodes a few hundred names.
//
// It is forgiving within values that it passes over, which need not be valid JSON; NaN and Infinity,
// which some writers print, are read as numbers that cannot be.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace fullwire {

inline constexpr std::int64_t kAbsent = INT64_MIN;  // a number that an event does not give

// Texts, each once. Long ones are cut, and past a limit new ones are all taken for number 0, "".
class Names {
  public:
    Names() { number(""); }
    std::int32_t number(std::string_view raw);
    const std::deque<std::string>& all() const { return texts_; }

  private:
    std::deque<std::string> texts_;  // whose elements stay where they are
    std::unordered_map<std::string_view, std::int32_t> numbers_;
    std::size_t bytes_ = 0;
};

enum class Work : std::uint8_t { kernel, copy, fill };

struct DeviceWork {
    std::vector<std::int64_t> start_ns, duration_ns, correlation;
    std::vector<std::int64_t> operation;  // the operator behind it, by its External id
    std::vector<std::int64_t> launch;     // a digest of its grid, block and shared memory, or 0
    std::vector<std::int32_t> name, device, stream, note;  // a row of Notes, or -1
    std::vector<std::uint8_t> kind;
};

struct Launches {
    std::vector<std::int64_t> correlation, time_ns;
    std::vector<std::int32_t> thread;
};

// Operators that lie inside the one kept before them on their thread are left out.
struct Operators {
    std::vector<std::int64_t> start_ns, end_ns;
    std::vector<std::int32_t> thread;
    std::vector<std::uint8_t> is_backward;
};

// What follows the calls of collectives within an operator: the thread runs no operator from the
// call's return until the next one begins, or the operator around them ends.
struct Pauses {
    std::vector<std::int64_t> start_ns, end_ns;
};

struct Marks {
    std::vector<std::int64_t> start_ns, duration_ns;
    std::vector<std::int32_t> name, thread, note;
};

// What events say of a collective.
struct Notes {
    std::vector<std::int64_t> in_elements, out_elements, group_size, sequence, source, target,
        first_input_elements;
    std::vector<std::int32_t> op, dtype, group, ranks, first_input_type;
};

class KinetoScanner {
  public:
    explicit KinetoScanner(std::size_t most_value_bytes) : most_value_bytes_(most_value_bytes) {}

    void feed(std::string_view chunk);  // an empty one is the end

    bool is_whole() const { return state_ == State::done; }
    const std::string& damage() const { return damage_; }  // why reading stopped, or ""
    std::uint64_t bytes_read() const { return before_ + position_; }
    std::uint64_t events() const { return events_; }
    std::uint64_t unusable() const { return unusable_; }  // events kept but for times that cannot be
    std::vector<std::string> threads() const;  // as the file names them, by their number
    std::size_t processes() const { return processes_.size(); }  // that launched work
    const std::vector<std::pair<std::string, std::string>>& header() const { return header_; }

    Names names;
    DeviceWork work;
    Launches launches;
    Operators operators;
    Pauses pauses;
    Marks marks;
    Notes notes;

  private:
    enum class State { begin, key, colon, value, after_value, event, after_event, done, damaged };
    struct Event;

    std::size_t held() const;  // bytes of the buffer that were fed
    void read();
    void fail(std::string problem);
    bool begin_value();
    bool read_event();
    void keep(Event& event);
    void keep_operator(const Event& event);
    void end_pause(std::size_t thread, std::int64_t next_ns);
    void keep_flow(const Event& event);
    std::int32_t keep_note(std::string_view args);
    std::int32_t thread_of(std::string_view raw);
    void note_process(std::string_view raw);

    std::size_t most_value_bytes_;
    State state_ = State::begin;
    std::string buffer_;        // what was fed, and room behind it to look ahead
    std::size_t worth_reading_ = 0;  // bytes of the buffer: less was tried, and does not do
    std::size_t position_ = 0;  // in the buffer, of what is not yet read
    std::uint64_t before_ = 0;  // bytes read and gone from the buffer
    std::uint64_t events_ = 0, unusable_ = 0;
    std::string damage_, key_;
    std::vector<std::pair<std::string, std::string>> header_;
    std::unordered_map<std::string, std::int32_t> threads_;
    std::string last_thread_;
    std::int32_t last_thread_number_ = -1;
    std::unordered_set<std::string> processes_;
    std::string last_process_;
    bool lacks_launch_ = false;  // the work kept last, of which an arrow may still tell it
    std::vector<std::int64_t> kept_end_ns_, kept_start_ns_;  // by thread: its last operator kept
    std::vector<std::int64_t> returned_ns_;  // by thread: the last call, if no operator followed yet
};

}  // namespace fullwire
