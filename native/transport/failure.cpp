// What ranks tell each other, and how they find out who is gone, late or does something else.

#include <sys/ioctl.h>
#include <sys/socket.h>

#include <linux/sockios.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <limits>

#include "transport/parts.hpp"

namespace fullwire {

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
            connection.reason = connection.note;
            const std::string* missed = misses(connection);
            if (missed) fail(absence_of(connection, ", in the middle of " + *missed), true);
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

// Returns the rank that has not acknowledged most of the data that the kernel has for it, and how much.
// The notes by which ranks ask each other what is late are on their way, too, and are not what is late.
std::pair<int, std::uint64_t> Engine::most_on_the_way() const {
    std::pair<int, std::uint64_t> most{-1, 0};
    for (const auto& connection : connections_) {
        if (!connection || !connection->is_open()) continue;
        int bytes = 0;
        ::ioctl(connection->socket, SIOCOUTQ, &bytes);
        const auto unacknowledged = static_cast<std::uint64_t>(std::max(bytes, 0));
        const std::uint64_t notes = std::min(unacknowledged, connection->notes_since_data_bytes);
        if (unacknowledged - notes > most.second) most = {connection->rank, unacknowledged - notes};
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
        return now - task->times.begun_ns > nanoseconds(task->timeout_s);
    };
    const auto late = std::find_if(transfers.begin(), transfers.end(), is_over);
    if (late != transfers.end()) {
        return fail(name_of(rank_) + ": " + (*late)->description +
                        " did not finish before the timeout of " +
                        seconds(nanoseconds((*late)->timeout_s)) + " was over" + what_is_missing(**late),
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

std::string Engine::what_is_missing(const Task& transfer) const {
    const auto is_this = [&](const TaskPointer& each) { return each.get() == &transfer; };
    if (std::any_of(sending_.begin(), sending_.end(), is_this)) {
        return ", for " + name_of(transfer.rank) + " has not asked for it";
    }
    if (transfer.kind == Task::Kind::send || transfer.from >= 0) return "";
    return ", for " + (transfer.rank < 0 ? "no rank" : name_of(transfer.rank)) + " has" +
           (transfer.rank < 0 ? "" : " not") + " sent it";
}

void Engine::suspect(std::uint64_t sequence, bool is_late) {
    if (failed_ || suspected_ns_ || (!is_late && !is_first_)) return;
    suspected_ns_ = now_ns();
    judge_ = first_present();
    if (judge_ == rank_) return open_case(sequence, is_late);
    say(*connections_[static_cast<std::size_t>(judge_)], kSuspect, sequence, is_late ? 1 : 0);
}

int Engine::first_present() const {
    for (const auto& connection : connections_) {
        if (!connection) return rank_;
        if (connection->is_open() && !connection->has_left) return connection->rank;
    }
    return rank_;
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
    if (suspected_ns_ && !failed_ && !case_ && now - suspected_ns_ > 4 * kGraceNs) {
        const std::string* own = current_ ? &current_->description : nullptr;
        return fail((own ? *own : "a collective") + " came to no end, and " + name_of(judge_) +
                        " does not say why",
                    true);
    }
    if (!case_ || failed_) return;
    const std::string* own = description_of(case_->sequence);
    const auto [towards, bytes] = most_on_the_way();
    case_->heard[static_cast<std::size_t>(rank_)] =
        Case::Heard{own != nullptr, own ? *own : "", towards, bytes};
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
        const Connection* connection = connections_[rank].get();
        const std::string what = connection && connection->has_left     ? "has left the group"
                                 : connection && !connection->is_open() ? "is gone"
                                 : !heard                               ? "does not answer"
                                 : !heard->has_called                   ? "has not called it"
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

std::string Engine::absence_of(const Connection& connection, const std::string& when) const {
    const std::string name = name_of(connection.rank);
    if (!connection.has_left) return name + " is gone: " + connection.loss + when;
    const std::string& reason = connection.reason;
    return name + " has left the group" + when + (reason.empty() ? "" : "; in another group it was told: " + reason);
}

// Whatever else comes from there is not looked at; but it is told why, like all others.
void Engine::refuse(Connection& connection, const std::string& what) {
    ++malformed_;
    connection.sink = Connection::Sink::nowhere;
    connection.left = std::numeric_limits<std::size_t>::max();
    connection.head = Head{};
    fail(name_of(connection.rank) + " sent " + name_of(rank_) + " " + what, true);
}

void Engine::fail(std::string_view problem, bool tell_others) noexcept {
    if (failed_) return;
    failed_ = true;
    for (auto& connection : connections_) {
        if (!connection) continue;
        let_go_of_tasks(*connection);
        if (tell_others && connection->is_open()) tell_why(*connection, problem);
    }
    case_.reset();
    {
        const std::lock_guard lock(mutex_);
        keep(problem_, problem);
    }
    if (!closing_) streams_.give_up(problem);
    end_all_that_is_open(problem);
}

void Engine::let_go_of_tasks(Connection& connection) noexcept {
    // Nobody may look at a tensor from here on: what of one is half sent is copied, or sent while its
    // task is still open where there is no memory for a copy. A record is a copy already.
    Connection::Out& out = connection.out;
    using What = Connection::Out::What;
    if (out.what == What::collective || out.what == What::transfer) {
        out.what = What::note;
        if (!out.record_bytes && !out.done) {
            out.what = What::nothing;
        } else if (!out.record_bytes) {
            try {
                connection.spill.assign(out.payload, out.payload + out.head.length);
                out.payload = connection.spill.data();
            } catch (const std::bad_alloc&) {
                if (!flushes_in_time(connection)) connection.close();
                out.what = What::nothing;
            }
        }
    }
    connection.transfer = nullptr;
    connection.early.clear();
    connection.early_bytes = 0;
    connection.sends.clear();
    connection.receives.clear();
    connection.next_send = connection.next_receive = 0;
    if (connection.sink != Connection::Sink::head) connection.sink = Connection::Sink::nowhere;
}

bool Engine::flushes_in_time(Connection& connection) noexcept {
    const std::int64_t until_ns = now_ns() + kGoodbyeNs;
    while (connection.out.done < connection.out.all_bytes()) {
        const ssize_t sent = send_rest(connection);
        if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) return false;
        if (sent < 0 && now_ns() > until_ns) return false;
        pollfd until_free{connection.socket, POLLOUT, 0};
        if (sent < 0) ::poll(&until_free, 1, kTickMs);
    }
    return true;
}

void Engine::tell_why(Connection& connection, std::string_view problem) noexcept {
    try {
        say(connection, kAbort, 0, 0, std::string(problem));
    } catch (const std::bad_alloc&) {
        connection.keep_last_words(problem);
    }
}

void Engine::say_last_words(int socket, const char* rank, const char* lacking, const Keys* keys) noexcept {
    struct {
        Head head;
        char text[kLongestLastWords];
    } words{};
    const int length = std::snprintf(words.text, sizeof words.text, "rank %s: %s", rank, lacking);
    words.head.kind = kAbort;
    words.head.length =
        static_cast<std::uint32_t>(std::min(static_cast<std::size_t>(length), sizeof words.text - 1));
    words.head.check = words.head.right_check();
    const std::size_t bytes = sizeof(Head) + words.head.length;
    if (!keys) {
        (void)::send(socket, &words, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
        return;
    }
    try {
        std::array<char, RecordCipher::sealed_bytes(sizeof words)> record;
        const std::size_t sealed =
            RecordCipher(keys->sends, RecordCipher::Way::seals).seal(record.data(), &words, bytes, nullptr, 0);
        (void)::send(socket, record.data(), sealed, MSG_DONTWAIT | MSG_NOSIGNAL);
    } catch (const std::exception&) {  // libcrypto has no memory either, and nothing goes out in clear
    }
}

// This process lacks something; every rank is told what, and whose process it is.
void Engine::run_out(const char* lacking) noexcept {
    char text[kLongestLastWords];
    const int length = std::snprintf(
        text, sizeof text, "rank %s: %s%s%s", names_[static_cast<std::size_t>(rank_)].c_str(), lacking,
        current_ ? ", in " : "", current_ ? current_->description.c_str() : "");
    fail({text, std::min(static_cast<std::size_t>(length), sizeof text - 1)}, true);
}

std::string Engine::problem() {
    const std::lock_guard lock(mutex_);
    return problem_;
}

std::string Engine::name_of(int rank) const {
    return "rank " + names_[static_cast<std::size_t>(rank)];
}

}  // namespace fullwire
