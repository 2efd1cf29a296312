// Several connections to each rank: what goes over which, and when all parts of it have ended.

#include <algorithm>
#include <cstdio>
#include <stdexcept>

#include "transport/parts.hpp"

namespace fullwire {

namespace {

constexpr std::uint64_t kLeastPart = std::uint64_t{256} << 10;  // what a collective of its own is worth
constexpr std::uint64_t kPage = 4096;  // parts begin at one, and so at whole elements

std::uint64_t end_of_part(std::uint64_t bytes, std::size_t part, std::size_t parts) {
    if (part == parts) return bytes;
    return std::min(bytes, bytes * part / parts / kPage * kPage);
}

// One block is cut into as many as the program moves, at whole elements.
std::vector<Block> blocks_of(const std::vector<Block>& given, std::size_t wanted,
                             std::size_t element_bytes) {
    if (given.size() == wanted) return given;
    if (given.size() != 1) throw std::invalid_argument("as many blocks as the program has");
    std::vector<Block> blocks;
    const std::uint64_t elements = given[0].bytes / element_bytes;
    for (std::uint64_t block = 0; block < wanted; ++block) {
        const std::uint64_t from = elements * block / wanted, to = elements * (block + 1) / wanted;
        blocks.push_back({given[0].address + from * element_bytes, (to - from) * element_bytes});
    }
    return blocks;
}

}  // namespace

Streams::Streams(Engine::Manner manner, std::vector<int> sockets, const std::vector<Keys>& keys)
    : manner_(std::move(manner)) {
    add(std::move(sockets), keys);
}

Streams::~Streams() { close(); }

const char* Streams::own_name() const {
    return manner_.names[static_cast<std::size_t>(manner_.rank)].c_str();
}

void Streams::add(std::vector<int> sockets, const std::vector<Keys>& keys) {
    try {
        problem_.reserve(kLongestLastWords);
        engines_.reserve(engines_.size() + 1);
        engines_.push_back(
            std::make_unique<Engine>(*this, manner_, sockets, keys, engines_.empty()));
    } catch (...) {
        for (std::size_t other = 0; other < sockets.size(); ++other) {
            if (sockets[other] < 0) continue;
            Engine::say_last_words(sockets[other], own_name(), kNoMemory, keys.empty() ? nullptr : &keys[other]);
            ::close(sockets[other]);
        }
        throw;
    }
}

// ---- What goes over which ---------------------------------------------------------------------

std::size_t Streams::streams_for(std::uint64_t bytes) const {
    return std::clamp<std::size_t>(bytes / kLeastPart, 1, engines_.size());
}

std::uint64_t Streams::largest_part(std::uint64_t bytes) const {
    const std::size_t parts = streams_for(bytes);
    return bytes - end_of_part(bytes, parts - 1, parts);
}

Block Streams::part_of(const Block& block, std::size_t stream) const {
    const std::size_t parts = streams_for(block.bytes);
    if (stream >= parts) return {block.address, 0};
    const std::uint64_t from = end_of_part(block.bytes, stream, parts);
    const std::uint64_t to = end_of_part(block.bytes, stream + 1, parts);
    return {block.address ? block.address + from : 0, to - from};
}

TaskPointer Streams::part_of(const TaskPointer& whole, std::size_t stream) const {
    auto part = std::make_shared<Task>();
    part->description = whole->description;
    part->program = whole->program;
    part->reduction = whole->reduction;
    part->number = whole->number;
    part->divide_by = whole->divide_by;
    part->wire = whole->wire;
    part->most_error = whole->most_error;
    part->timeout_s = whole->timeout_s;
    part->whole = whole;
    for (const Block& block : whole->source) part->source.push_back(part_of(block, stream));
    for (const Block& block : whole->work) part->work.push_back(part_of(block, stream));
    return part;
}

// By stream; what one alone carries is its own part.
std::vector<TaskPointer> Streams::parts_of(const TaskPointer& task) const {
    if (task->kind != Task::Kind::collective) return {task};
    std::size_t streams = 1;
    for (const Block& block : task->source) streams = std::max(streams, streams_for(block.bytes));
    for (const Block& block : task->work) streams = std::max(streams, streams_for(block.bytes));
    std::vector<TaskPointer> parts{task};
    if (streams > 1) {
        parts.clear();
        for (std::size_t each = 0; each < streams; ++each) parts.push_back(part_of(task, each));
    }
    const std::size_t element_bytes = bytes_of(task->number);
    for (const TaskPointer& part : parts) {
        part->source = blocks_of(part->source, task->program->blocks, element_bytes);
        part->work = blocks_of(part->work, task->program->blocks, element_bytes);
    }
    return parts;
}

void Streams::issue(const TaskPointer& task, Engine::Caller caller) {
    try {
        issue_parts(task, caller);
    } catch (const std::bad_alloc&) {  // no stream has any of it yet
        run_out_before(task->description);
        task->parts.clear();
        keep_problem(*task, problem_);
        task->state.store(Task::State::failed, std::memory_order_release);
        has_ended(task);
    }
}

void Streams::run_out_before(std::string_view what) noexcept {
    char text[kLongestLastWords];
    const int length =
        std::snprintf(text, sizeof text, "rank %s: %s, before %.*s",
                      own_name(), kNoMemory,
                      static_cast<int>(what.size()), what.data());
    give_up({text, std::min(static_cast<std::size_t>(length), sizeof text - 1)});
}

void Streams::issue_parts(const TaskPointer& task, Engine::Caller caller) {
    const std::vector<TaskPointer> parts = parts_of(task);
    if (parts.size() > 1) {
        task->times.issued_ns = now_ns();
        task->parts = parts;
        task->parts_left = parts.size();
    }
    const std::lock_guard lock(order_);
    for (std::size_t each = 0; each < parts.size(); ++each) engines_[each]->make_room();
    const std::uint64_t sequence = task->kind == Task::Kind::collective ? next_sequence_++ : 0;
    for (std::size_t each = 0; each < parts.size(); ++each) {
        parts[each]->sequence = sequence;
        engines_[each]->issue(parts[each], each ? Engine::Caller::goes_on : caller);
    }
}

// ---- When it has ended ------------------------------------------------------------------------

bool Streams::wait(const TaskPointer& task, double timeout_s) {
    if (task->parts.empty()) return engines_[0]->wait(task, timeout_s);
    const bool is_for_ever = timeout_s < 0;
    const std::int64_t until_ns = now_ns() + (is_for_ever ? 0 : nanoseconds(std::min(timeout_s, 1e9)));
    for (std::size_t each = 0; each < task->parts.size(); ++each) {
        const double left_s = std::max(0.0, static_cast<double>(until_ns - now_ns()) / 1e9);
        if (!engines_[each]->wait(task->parts[each], is_for_ever ? -1 : left_s)) return false;
    }
    // The last one to end is about to say so.
    std::unique_lock lock(mutex_);
    while (!task->is_done()) ended_.wait_for(lock, kLookAgain);
    return true;
}

bool Streams::wait_for_any() {
    std::unique_lock lock(mutex_);
    while (!closing_ && ended_count_ == ended_seen_) ended_.wait_for(lock, kLookAgain);
    ended_seen_ = ended_count_;
    return !closing_;
}

void Streams::has_ended(const TaskPointer& task) noexcept {
    const TaskPointer whole = std::exchange(task->whole, nullptr);
    const std::lock_guard lock(mutex_);
    if (whole && !ends_whole(whole, *task)) return;
    ++ended_count_;
    ended_.notify_all();
}

bool Streams::ends_whole(const TaskPointer& whole, const Task& part) noexcept {
    Times& times = whole->times;
    const auto earliest = [](std::int64_t known, std::int64_t other) {
        return known && other ? std::min(known, other) : std::max(known, other);
    };
    times.begun_ns = earliest(times.begun_ns, part.times.begun_ns);
    times.heard_ns = earliest(times.heard_ns, part.times.heard_ns);
    times.ended_ns = std::max(times.ended_ns, part.times.ended_ns);
    times.reducing_ns = std::max(times.reducing_ns, part.times.reducing_ns);  // side by side
    times.sent_bytes += part.times.sent_bytes;
    whole->rounding.error = std::max(whole->rounding.error, part.rounding.error);
    whole->rounding.chunks += part.rounding.chunks;
    whole->rounding.out_of_range += part.rounding.out_of_range;
    if (part.has_failed() && !std::exchange(whole->has_failed_part, true)) {
        keep_problem(*whole, part.problem);
    }
    if (--whole->parts_left) return false;
    whole->state.store(!whole->has_failed_part ? Task::State::done : Task::State::failed, std::memory_order_release);
    return true;
}

// ---- The end ----------------------------------------------------------------------------------

// What ends one stream ends all, for the same reason.
void Streams::give_up(std::string_view problem) noexcept {
    {
        const std::lock_guard lock(mutex_);
        if (problem_.empty()) keep(problem_, problem);
        has_failed_ = true;
    }
    for (const auto& engine : engines_) engine->wake();
}

std::string Streams::problem() {
    const std::lock_guard lock(mutex_);
    return problem_;
}

void Streams::note_fall_back(const std::string& description) {
    const std::lock_guard lock(mutex_);
    if (fallen_back_after_.empty()) fallen_back_after_ = description;
}

std::string Streams::fallen_back_after() {
    const std::lock_guard lock(mutex_);
    return fallen_back_after_;
}

void Streams::count_from_here() {
    const std::lock_guard lock(order_);
    for (const auto& engine : engines_) engine->count_from(next_sequence_ - 1);
}

std::uint64_t Streams::malformed() const {
    std::uint64_t malformed = 0;
    for (const auto& engine : engines_) malformed += engine->malformed();
    return malformed;
}

void Streams::abort(const std::string& reason) {
    {
        const std::lock_guard lock(mutex_);
        if (!closing_ && problem_.empty()) keep(problem_, reason);
    }
    end_all([&](Engine& engine) { engine.abort(reason); });
}

void Streams::close(const std::string& reason) {
    end_all([&](Engine& engine) { engine.close(reason); });
}

// Each may have to wait a second until the others have heard why, so all do so at once.
template <typename End>
void Streams::end_all(End end) {
    if (!engines_[0]->is_of_this_process()) {
        for (const auto& engine : engines_) end(*engine);
        return;
    }
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
        ended_.notify_all();
    }
    std::vector<std::thread> others;
    for (std::size_t each = 1; each < engines_.size(); ++each) {
        try {
            others.emplace_back([&, each] { end(*engines_[each]); });
        } catch (const std::exception&) {  // no thread, or no memory for one: then one after the other
            end(*engines_[each]);
        }
    }
    end(*engines_[0]);
    for (std::thread& other : others) other.join();
}

void Streams::leave_to_parent() {
    for (const auto& engine : engines_) engine->leave_to_parent();
}

}  // namespace fullwire
