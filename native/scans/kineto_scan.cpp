#include "scans/kineto_scan.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <optional>

#include "scans/json_bytes.hpp"

namespace fullwire {

namespace {

constexpr std::size_t kLongestName = 2000;        // bytes of a name that are kept
constexpr std::size_t kLongEvent = 1 << 20;       // that is not read anew with every chunk
constexpr std::size_t kMostNameBytes = 64 << 20;  // of all names together
constexpr std::size_t kMostHeaderBytes = 32 << 20;
constexpr double kMostMicroseconds = 2.0e15;  // 64 years: MOST_NS of the analysis
constexpr std::size_t kMostThreads = 100'000;
constexpr std::size_t kMostProcesses = 1'000;

bool is_space(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

// Which bytes a backslash before them escapes; `carry` says so of the first one, and then of the first
// of what follows.
std::uint64_t escaped(std::uint64_t slashes, bool& carry) {
    std::uint64_t found = carry;
    carry = false;
    for (slashes &= ~found; slashes;) {
        const std::uint64_t next = (slashes & -slashes) << 1;
        carry = next == 0;
        found |= next;
        slashes &= (slashes - 1) & ~next;
    }
    return found;
}

// From each bit that is set to before the next one.
std::uint64_t from_one_to_the_next(std::uint64_t bits) {
    for (int by = 1; by < 64; by *= 2) bits ^= bits << by;
    return bits;
}

// What ends a number or a word.
constexpr std::array<bool, 256> kEndsPlain = [] {
    std::array<bool, 256> found{};
    for (const char c : {',', '}', ']', ' ', '\n', '\t', '\r', '"', ':', '{', '['}) {
        found[static_cast<unsigned char>(c)] = true;
    }
    return found;
}();

// Reads within [at, end), and looks at up to 64 bytes behind. Each function returns false where the
// bytes end before the value does, or where it is broken; `is_broken` tells which.
struct Cursor {
    const char* at;
    const char* end;
    bool is_broken = false;

    bool skip_spaces() {
        while (at < end && is_space(*at)) ++at;
        return at < end;
    }

    // The text between quotes, as escaped; the cursor is behind the closing one.
    bool text(std::string_view& found) {
        const char* const from = ++at;
        while (at < end) {
            const Sixteen bytes(at);
            const std::uint64_t marks = bytes.are('"') | bytes.are('\\');
            if (!marks) {
                at += Sixteen::kBytes;
                continue;
            }
            at += std::countr_zero(marks);
            if (at >= end) return false;
            if (*at == '"') {
                found = {from, static_cast<std::size_t>(at - from)};
                ++at;
                return true;
            }
            at += 2;
        }
        return false;
    }

    // Any value, as it stands in the file.
    bool value(std::string_view& found) {
        const char* const from = at;
        const char first = *at;
        if (first == '"') {
            std::string_view inner;
            if (!text(inner)) return false;
        } else if (first == '{') {
            if (!close('{', '}', 0)) return false;
        } else if (first == '[') {
            if (!close('[', ']', 0)) return false;
        } else {
            if (!plain()) return false;
        }
        found = {from, static_cast<std::size_t>(at - from)};
        return true;
    }

    // A number or word: whatever stands before the next comma, bracket or space.
    bool plain() {
        const char* const from = at;
        while (at < end && !kEndsPlain[static_cast<unsigned char>(*at)]) ++at;
        if (at >= end) return false;
        if (at == from) is_broken = true;
        return at > from;
    }

    // Goes behind the bracket that closes the `depth` open ones. Brackets of the other kind are not
    // counted, nor are those in texts.
    bool close(char open, char shut, std::int64_t depth) {
        std::uint64_t goes_on = 0;  // all ones where a text of the block before does
        bool is_escaped = false;
        for (; at < end; at += SixtyFour::kBytes) {
            const SixtyFour bytes(at);
            std::uint64_t quotes = bytes.are('"');
            const std::uint64_t slashes = bytes.are('\\');
            if (slashes || is_escaped) quotes &= ~escaped(slashes, is_escaped);
            const std::uint64_t opens = bytes.are(open);
            std::uint64_t brackets = opens | bytes.are(shut);
            if (!brackets) {
                if (__builtin_parityll(quotes)) goes_on = ~goes_on;
                continue;
            }
            const std::uint64_t texts = from_one_to_the_next(quotes) ^ goes_on;
            goes_on = texts >> 63 ? ~std::uint64_t{0} : 0;
            for (brackets &= ~texts; brackets; brackets &= brackets - 1) {
                depth += brackets & -brackets & opens ? 1 : -1;
                if (depth == 0) {
                    at += std::countr_zero(brackets) + 1;
                    return at <= end;
                }
            }
        }
        return false;
    }

    bool expect(char wanted) {
        if (!skip_spaces()) return false;
        if (*at != wanted) {
            is_broken = true;
            return false;
        }
        ++at;
        return true;
    }

    // Goes through the members of the object that the cursor stands at. `take(key, value)` says
    // whether the rest is wanted; what is not is passed over.
    template <typename Take>
    bool members(Take take) {
        if (!expect('{') || !skip_spaces()) return false;
        if (*at == '}') {
            ++at;
            return true;
        }
        while (true) {
            if (!skip_spaces()) return false;
            if (*at != '"') {
                is_broken = true;
                return false;
            }
            std::string_view key, found;
            if (!text(key) || !expect(':') || !skip_spaces() || !value(found)) return false;
            if (!take(key, found)) return close('{', '}', 1);
            if (!skip_spaces()) return false;
            const char c = *at++;
            if (c == '}') return true;
            if (c != ',') {
                is_broken = true;
                return false;
            }
        }
    }
};

std::string_view unquoted(std::string_view raw) {
    if (raw.size() >= 2 && raw.front() == '"') return raw.substr(1, raw.size() - 2);
    return raw;
}

// Microseconds, decimal, to whole nanoseconds: exactly, where a double would lose some at 10^15.
std::optional<std::int64_t> nanoseconds(std::string_view raw) {
    raw = unquoted(raw);
    const bool is_negative = !raw.empty() && raw.front() == '-';
    std::size_t at = is_negative ? 1 : 0;
    std::int64_t whole = 0;
    const std::size_t first = at;
    while (at < raw.size() && raw[at] >= '0' && raw[at] <= '9' && at - first < 17) {
        whole = whole * 10 + (raw[at++] - '0');
    }
    if (at == first) return std::nullopt;
    std::int64_t thousandths = 0;
    std::size_t after = at;
    if (after < raw.size() && raw[after] == '.') {
        ++after;
        for (int place = 100; after < raw.size() && raw[after] >= '0' && raw[after] <= '9';
             ++after, place /= 10) {
            thousandths += place * (raw[after] - '0');
        }
    }
    if (after == raw.size() && static_cast<double>(whole) <= kMostMicroseconds) {
        const std::int64_t found = whole * 1000 + thousandths;
        return is_negative ? -found : found;
    }
    double microseconds = 0;
    const auto [rest, error] =
        std::from_chars(raw.data(), raw.data() + raw.size(), microseconds);
    if (error != std::errc() || rest != raw.data() + raw.size() ||
        !(std::abs(microseconds) <= kMostMicroseconds)) {
        return std::nullopt;
    }
    return std::llround(microseconds * 1000);
}

std::int64_t whole_number(std::string_view raw) {
    raw = unquoted(raw);
    std::int64_t found = kAbsent;
    const auto [rest, error] = std::from_chars(raw.data(), raw.data() + raw.size(), found);
    if (error != std::errc() || rest == raw.data()) return kAbsent;
    return found;
}

std::int32_t small_number(std::string_view raw) {
    const std::int64_t found = whole_number(raw);
    return found < INT32_MIN || found > INT32_MAX ? -1 : static_cast<std::int32_t>(found);
}

bool starts_with(std::string_view text, std::string_view with) {
    return text.substr(0, with.size()) == with;
}

bool ends_with(std::string_view text, std::string_view with) {
    return text.size() >= with.size() && text.substr(text.size() - with.size()) == with;
}

// What the last digits of a text say, as in `stream 7`; -1 without any.
std::int32_t last_number(std::string_view raw) {
    raw = unquoted(raw);
    return small_number(raw.substr(raw.find_last_not_of("0123456789") + 1));
}

enum class Category { other, kernel, copy, fill, launch, host };

// The names of 2026, those that PyTorch wrote before 1.12, and those of other makers' devices.
Category category_of(std::string_view raw) {
    if (raw == "cpu_op" || raw == "user_annotation" || raw == "Operator") return Category::host;
    if (raw == "kernel" || raw == "concurrent_kernel" || raw == "Kernel" ||
        raw == "mtia_ccp_events") {
        return Category::kernel;
    }
    if (ends_with(raw, "_runtime") || ends_with(raw, "_driver") || raw == "Runtime" ||
        raw == "runtime" || raw == "driver") {
        return Category::launch;
    }
    if (ends_with(raw, "_memcpy") || raw == "Memcpy") return Category::copy;
    if (ends_with(raw, "_memset") || raw == "Memset") return Category::fill;
    return Category::other;
}

constexpr std::array<std::string_view, 10> kLibraries = {"nccl:", "gloo:",   "mpi:",  "ucc:",
                                                         "rccl:", "xccl:",   "hccl:", "oneccl:",
                                                         "c10d::", "fullwire:"};

bool is_of_a_library(std::string_view name) {
    for (const std::string_view library : kLibraries) {
        if (starts_with(name, library)) return true;
    }
    return false;
}

bool is_mark(std::string_view name) {
    if (name.empty() || std::strchr("PeOrngmuxhof", name.front()) == nullptr) return false;
    return starts_with(name, "ProfilerStep#") || starts_with(name, "Optimizer.step#") ||
           name == "record_param_comms" || starts_with(name, "enumerate(DataLoader)#") ||
           is_of_a_library(name);
}

// FNV-1a of a value, which goes on from that of the values before it.
std::uint64_t digest(std::string_view raw, std::uint64_t before) {
    std::uint64_t found = before ? before : 0xcbf29ce484222325;
    for (const char c : raw) {
        if (!is_space(c)) found = (found ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    }
    return found;
}

// The elements of the first tensor in [[2, 3], [], ...]; none for [[], ...], a scalar or absent one.
std::int64_t first_elements(std::string_view raw) {
    if (!starts_with(raw, "[[")) return kAbsent;
    Cursor cursor{raw.data() + 2, raw.data() + raw.size()};
    std::int64_t product = 1;
    bool is_any = false;
    while (cursor.skip_spaces() && *cursor.at != ']') {
        const char* from = cursor.at;
        if (!cursor.plain()) return kAbsent;
        const std::int64_t length =
            whole_number({from, static_cast<std::size_t>(cursor.at - from)});
        if (length < 0 || (length && product > (std::int64_t{1} << 50) / length)) return kAbsent;
        product *= length;
        is_any = true;
        if (cursor.skip_spaces() && *cursor.at == ',') ++cursor.at;
    }
    return is_any ? product : kAbsent;
}

std::string_view first_text(std::string_view raw) {
    if (!starts_with(raw, "[\"")) return {};
    const std::size_t end = raw.find('"', 2);
    return end == std::string_view::npos ? std::string_view{} : raw.substr(2, end - 2);
}

}  // namespace

std::int32_t Names::number(std::string_view raw) {
    if (raw.size() > kLongestName) raw = raw.substr(0, kLongestName);
    const auto found = numbers_.find(raw);
    if (found != numbers_.end()) return found->second;
    if (bytes_ + raw.size() > kMostNameBytes) return 0;
    bytes_ += raw.size() + 64;
    texts_.emplace_back(raw);
    const auto number = static_cast<std::int32_t>(texts_.size() - 1);
    numbers_.emplace(texts_.back(), number);
    return number;
}

struct KinetoScanner::Event {
    std::string_view phase, category, name, process, thread, start, duration, id, args;
    std::int64_t start_ns, duration_ns;
};

void KinetoScanner::feed(std::string_view chunk) {
    if (state_ == State::done || state_ == State::damaged) return;
    buffer_.resize(held());
    buffer_.erase(0, position_);
    before_ += position_;
    position_ = 0;
    buffer_.append(chunk).append(SixtyFour::kBytes, '\0');
    if (chunk.empty() || held() >= worth_reading_) {
        read();
        const std::size_t left = held() - position_;
        worth_reading_ = left < kLongEvent ? 0 : 2 * left;
    }
    if (state_ != State::damaged && held() - position_ > most_value_bytes_) {
        fail("a value of over " + std::to_string(most_value_bytes_) + " bytes");
    }
}

std::size_t KinetoScanner::held() const {
    return buffer_.size() - std::min(buffer_.size(), SixtyFour::kBytes);
}

void KinetoScanner::fail(std::string problem) {
    damage_ = std::move(problem);
    state_ = State::damaged;
}

void KinetoScanner::read() {
    const char* const begin = buffer_.data();
    while (state_ != State::done && state_ != State::damaged) {
        Cursor cursor{begin + position_, begin + held()};
        const bool is_any = cursor.skip_spaces();
        position_ = static_cast<std::size_t>(cursor.at - begin);
        if (!is_any) return;
        const char c = *cursor.at;
        if (state_ == State::begin) {
            if (c != '{') return fail("expected an object");
            state_ = State::key;
            ++position_;
        } else if (state_ == State::key || state_ == State::after_value) {
            if (c == '}') {
                state_ = State::done;
                ++position_;
            } else if (c == ',' && state_ == State::after_value) {
                state_ = State::key;
                ++position_;
            } else if (c == '"' && state_ == State::key) {
                std::string_view key;
                if (!cursor.text(key)) return;
                key_ = key;
                state_ = State::colon;
                position_ = static_cast<std::size_t>(cursor.at - begin);
            } else {
                return fail("expected another member of the object");
            }
        } else if (state_ == State::colon) {
            if (c != ':') return fail("expected a colon");
            state_ = State::value;
            ++position_;
        } else if (state_ == State::value) {
            if (!begin_value()) return;
        } else if (c == ']') {
            state_ = State::after_value;
            ++position_;
        } else if (state_ == State::after_event) {
            if (c != ',') return fail("expected a comma between events");
            state_ = State::event;
            ++position_;
        } else {
            if (!read_event()) return;
        }
    }
}

bool KinetoScanner::begin_value() {
    Cursor cursor{buffer_.data() + position_, buffer_.data() + held()};
    if (key_ == "traceEvents" && *cursor.at == '[') {
        state_ = State::event;
        ++position_;
        return true;
    }
    std::string_view found;
    if (!cursor.value(found)) {
        if (cursor.is_broken) fail("expected a value");
        return false;
    }
    const bool is_wanted = key_ == "distributedInfo" || key_ == "baseTimeNanoseconds" ||
                           key_ == "deviceProperties" || key_ == "host_name";
    if (is_wanted && found.size() <= kMostHeaderBytes && header_.size() < 16) {
        header_.emplace_back(key_, found);
    }
    position_ = static_cast<std::size_t>(cursor.at - buffer_.data());
    state_ = State::after_value;
    return true;
}

bool KinetoScanner::read_event() {
    Cursor cursor{buffer_.data() + position_, buffer_.data() + held()};
    Event event;
    const bool is_read = cursor.members([&](std::string_view key, std::string_view value) {
        switch (key.size()) {
            case 2:
                if (key == "ts") event.start = value;
                else if (key == "id") event.id = value;
                else if (key == "ph") {
                    event.phase = value;
                    return lacks_launch_ || value == "\"X\"";
                }
                break;
            case 3:
                if (key == "tid") event.thread = value;
                else if (key == "pid") event.process = value;
                else if (key == "dur") event.duration = value;
                else if (key == "cat") {
                    event.category = unquoted(value);
                    return lacks_launch_ || category_of(event.category) != Category::other;
                }
                break;
            case 4:
                if (key == "name") event.name = value;
                else if (key == "args") event.args = value;
                break;
            default:
                break;
        }
        return true;
    });
    if (!is_read) {
        if (cursor.is_broken) fail("an event that is no JSON");
        return false;
    }
    keep(event);
    ++events_;
    position_ = static_cast<std::size_t>(cursor.at - buffer_.data());
    state_ = State::after_event;
    return true;
}

void KinetoScanner::keep(Event& event) {
    if (event.phase != "\"X\"") {
        if (lacks_launch_) keep_flow(event);
        return;
    }
    lacks_launch_ = false;
    const Category category = category_of(event.category);
    if (category == Category::other) return;
    const auto start = nanoseconds(event.start);
    const auto duration = nanoseconds(event.duration);
    if (!start || !duration || *duration < 0) {
        ++unusable_;
        return;
    }
    event.start_ns = *start;
    event.duration_ns = *duration;
    if (category == Category::host) {
        keep_operator(event);
        return;
    }
    std::int64_t correlation = kAbsent;
    std::int64_t operation = kAbsent;
    std::uint64_t launch = 0;
    std::int32_t device = -1, stream = -1;
    bool is_collective = false;
    if (!event.args.empty() && event.args.front() == '{') {
        Cursor args{event.args.data(), event.args.data() + event.args.size()};
        args.members([&](std::string_view key, std::string_view value) {
            if (key == "correlation") correlation = whole_number(value);
            else if (key == "device") device = small_number(value);
            else if (key == "stream") stream = small_number(value);
            else if (key == "External id") operation = whole_number(value);
            else if (key == "grid" || key == "block" || key == "shared memory")
                launch = digest(value, digest(key, launch));
            else if (key == "Collective name") is_collective = true;
            return true;
        });
    }
    if (category == Category::launch) {
        if (correlation == kAbsent) return;
        launches.correlation.push_back(correlation);
        launches.time_ns.push_back(*start);
        launches.thread.push_back(thread_of(event.thread));
        note_process(event.process);
        return;
    }
    const Work kind = category == Category::kernel ? Work::kernel
                      : category == Category::copy ? Work::copy
                                                   : Work::fill;
    work.start_ns.push_back(*start);
    work.duration_ns.push_back(*duration);
    work.correlation.push_back(correlation);
    work.operation.push_back(operation);
    work.launch.push_back(static_cast<std::int64_t>(launch));
    work.name.push_back(names.number(unquoted(event.name)));
    work.device.push_back(device >= 0 ? device : last_number(event.process));
    work.stream.push_back(stream >= 0 ? stream : last_number(event.thread));
    work.note.push_back(is_collective ? keep_note(event.args) : -1);
    work.kind.push_back(static_cast<std::uint8_t>(kind));
    lacks_launch_ = correlation == kAbsent;
}

// PyTorch up to 2.3 tells of an AMD device's work what launched it by an arrow behind it alone.
void KinetoScanner::keep_flow(const Event& event) {
    const bool leads_here = event.phase == "\"f\"" && event.category == "ac2g" &&
                            nanoseconds(event.start) == work.start_ns.back();
    if (!leads_here) return;
    work.correlation.back() = whole_number(event.id);
    lacks_launch_ = false;
}

void KinetoScanner::keep_operator(const Event& event) {
    const std::string_view name = unquoted(event.name);
    const std::int64_t start = event.start_ns, duration = event.duration_ns;
    const std::int32_t thread = thread_of(event.thread);
    if (is_mark(name)) {
        marks.start_ns.push_back(start);
        marks.duration_ns.push_back(duration);
        marks.name.push_back(names.number(name));
        marks.thread.push_back(thread);
        marks.note.push_back(is_of_a_library(name) || name.front() == 'r' ? keep_note(event.args)
                                                                          : -1);
        return;
    }
    if (event.category == "user_annotation") return;
    const auto place = static_cast<std::size_t>(thread);
    end_pause(place, start);
    if (starts_with(name, "c10d::")) {  // one within another returns before it
        returned_ns_[place] = std::max(returned_ns_[place], start + duration);
    }
    if (is_of_a_library(name)) return;
    if (start >= kept_start_ns_[place] && start + duration <= kept_end_ns_[place]) return;
    kept_start_ns_[place] = start;
    kept_end_ns_[place] = start + duration;
    operators.start_ns.push_back(start);
    operators.end_ns.push_back(start + duration);
    operators.thread.push_back(thread);
    operators.is_backward.push_back(starts_with(name, "autograd::engine::evaluate_function"));
}

// Operators of a thread come in the order of their beginnings. One that begins within a call is a
// part of it. A call that lies in no other operator has no pause within one.
void KinetoScanner::end_pause(std::size_t thread, std::int64_t next_ns) {
    const std::int64_t returned = returned_ns_[thread];
    if (returned == kAbsent || next_ns < returned) return;
    returned_ns_[thread] = kAbsent;
    const std::int64_t end = std::min(next_ns, kept_end_ns_[thread]);
    if (end <= returned) return;
    pauses.start_ns.push_back(returned);
    pauses.end_ns.push_back(end);
}

std::int32_t KinetoScanner::keep_note(std::string_view raw) {
    if (raw.empty() || raw.front() != '{') return -1;
    std::int64_t in = kAbsent, out = kAbsent, size = kAbsent, sequence = kAbsent, source = kAbsent,
                 target = kAbsent, elements = kAbsent;
    std::string_view op, dtype, group, ranks, type;
    Cursor args{raw.data(), raw.data() + raw.size()};
    args.members([&](std::string_view key, std::string_view value) {
        if (key == "Collective name") op = unquoted(value);
        else if (key == "In msg nelems") in = whole_number(value);
        else if (key == "Out msg nelems") out = whole_number(value);
        else if (key == "Group size") size = whole_number(value);
        else if (key == "Seq") sequence = whole_number(value);
        else if (key == "Src Rank") source = whole_number(value);
        else if (key == "Dst Rank") target = whole_number(value);
        else if (key == "dtype") dtype = unquoted(value);
        else if (key == "Process Group Name") group = unquoted(value);
        else if (key == "Process Group Ranks") ranks = unquoted(value);
        else if (key == "Input Dims") elements = first_elements(value);
        else if (key == "Input type") type = first_text(value);
        return true;
    });
    notes.in_elements.push_back(in);
    notes.out_elements.push_back(out);
    notes.group_size.push_back(size);
    notes.sequence.push_back(sequence);
    notes.source.push_back(source);
    notes.target.push_back(target);
    notes.first_input_elements.push_back(elements);
    notes.op.push_back(names.number(op));
    notes.dtype.push_back(names.number(dtype));
    notes.group.push_back(names.number(group));
    notes.ranks.push_back(names.number(ranks));
    notes.first_input_type.push_back(names.number(type));
    return static_cast<std::int32_t>(notes.op.size() - 1);
}

std::vector<std::string> KinetoScanner::threads() const {
    std::vector<std::string> found(threads_.size());
    for (const auto& [raw, number] : threads_) found[static_cast<std::size_t>(number)] = raw;
    return found;
}

std::int32_t KinetoScanner::thread_of(std::string_view raw) {
    if (last_thread_number_ >= 0 && raw == last_thread_) return last_thread_number_;
    last_thread_ = raw.substr(0, 64);
    const auto found = threads_.find(last_thread_);
    if (found != threads_.end()) return last_thread_number_ = found->second;
    if (threads_.size() >= kMostThreads) return last_thread_number_ = 0;
    last_thread_number_ = static_cast<std::int32_t>(threads_.size());
    threads_.emplace(last_thread_, last_thread_number_);
    kept_start_ns_.push_back(INT64_MAX);
    kept_end_ns_.push_back(INT64_MIN);
    returned_ns_.push_back(kAbsent);
    return last_thread_number_;
}

void KinetoScanner::note_process(std::string_view raw) {
    if (!processes_.empty() && raw == last_process_) return;
    last_process_ = raw.substr(0, 64);
    if (processes_.size() < kMostProcesses) processes_.insert(last_process_);
}

}  // namespace fullwire
