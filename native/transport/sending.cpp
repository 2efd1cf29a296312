// What goes out: notes first, then transfers that were asked for, then the collective, in chunks.

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/parts.hpp"

namespace fullwire {

void Engine::transmit(Connection& connection) {
    while (!connection.is_broken) {
        if (connection.out.what == Connection::Out::What::nothing) {
            if (!choose_next(connection)) return;
            seal(connection);
        }
        if (!push(connection)) return;
    }
}

void Engine::transmit_all() {
    for (auto& connection : connections_) {
        if (connection && connection->is_open() && !connection->is_full) transmit(*connection);
    }
}

void Engine::seal(Connection& connection) {
    Connection::Out& out = connection.out;
    out.head.has_checksum = checks_ ? 1 : 0;
    if (checks_) out.head.checksum = crc32c(out.payload, out.head.length);
    out.head.check = out.head.right_check();
    if (!connection.seals) return;
    const std::size_t bytes = RecordCipher::sealed_bytes(sizeof(Head) + out.head.length);
    try {
        if (connection.out_record.size() < bytes) connection.out_record.resize(bytes);
        out.record_bytes = connection.seals->seal(connection.out_record.data(), &out.head,
                                                  sizeof(Head), out.payload, out.head.length);
    } catch (const std::bad_alloc&) {
        // A frame that is not sealed would go out in clear. It is dropped, and the group ends; where the
        // group has ended already, its cause is sent in so few words that they need no memory.
        out.what = Connection::Out::What::nothing;
        if (failed_) connection.keep_last_words(problem_);
        throw;
    }
}

bool Engine::choose_next(Connection& connection) {
    if (connection.last_words_bytes) {
        Head head;
        head.kind = kAbort;
        head.length = static_cast<std::uint32_t>(std::exchange(connection.last_words_bytes, 0));
        connection.out = {Connection::Out::What::note, head, connection.last_words.data(), 0, false, 0};
        return true;
    }
    if (!connection.notes.empty()) {
        auto& [head, text] = connection.notes.front();
        connection.out_note = std::move(text);
        connection.out = {Connection::Out::What::note, head, connection.out_note.data(), 0, false, 0};
        connection.notes.pop_front();
        return true;
    }
    return choose_transfer(connection) || choose_collective(connection);
}

bool Engine::choose_collective(Connection& connection) {
    if (!current_ || connection.next_send >= connection.sends.size()) return false;
    if (current_->wire) return choose_packed(connection);
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
                      bytes == rest, 0};
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
    while (out.done < out.all_bytes()) {
        const ssize_t sent = send_rest(connection);
        if (sent >= 0 || errno == EINTR) continue;
        if (errno == EAGAIN || errno == EWOULDBLOCK) {
            connection.is_full = true;
            return false;
        }
        if (errno == ENOMEM || errno == ENOBUFS) throw std::bad_alloc();  // the kernel's own
        connection.is_broken = true;
        return false;
    }
    out.record_bytes = 0;
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

ssize_t Engine::send_rest(Connection& connection) {
    Connection::Out& out = connection.out;
    iovec parts[2];
    std::size_t count = 0;
    if (out.record_bytes) {
        parts[count++] = {connection.out_record.data() + out.done, out.record_bytes - out.done};
    } else {
        if (out.done < sizeof(Head)) {
            parts[count++] = {reinterpret_cast<char*>(&out.head) + out.done,
                              sizeof(Head) - out.done};
        }
        const std::size_t payload_done = out.done > sizeof(Head) ? out.done - sizeof(Head) : 0;
        if (payload_done < out.head.length) {
            parts[count++] = {const_cast<char*>(out.payload) + payload_done,
                              out.head.length - payload_done};
        }
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(connection.socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent > 0) {
        const auto bytes = static_cast<std::size_t>(sent);
        const bool is_note = out.what == Connection::Out::What::note;
        connection.notes_since_data_bytes = is_note ? connection.notes_since_data_bytes + bytes : 0;
        out.done += bytes;
    }
    return sent;
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

}  // namespace fullwire
