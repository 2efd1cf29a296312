// What comes in: everything is read, and added up or put where it belongs.

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/parts.hpp"

namespace fullwire {

void Engine::receive(Connection& connection) {
    using Sink = Connection::Sink;
    if (connection.opens) return receive_records(connection);
    for (int round = 0; round < 4 && connection.is_open(); ++round) {
        iovec parts[2];
        std::size_t count = 0, direct = 0;
        char* place = nullptr;
        const bool is_packed = current_ && current_->wire;
        if (connection.sink == Sink::transfer) {
            place = at(connection.transfer->work[0].address) + connection.transfer->received[0];
        } else if (connection.sink == Sink::collective && is_packed) {
            place = connection.chunk.data() + (connection.head.length - connection.left);
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
            if (is_packed || !current_->program->receives[index].reduces) room = kLookAhead;
        }
        parts[count++] = {scratch_.data(), room};
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = count;
        const ssize_t got = ::recvmsg(connection.socket, &message, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (!has_arrived(connection, got)) return;
        const std::size_t all = static_cast<std::size_t>(got);
        const std::size_t in_place = std::min(all, direct);
        if (in_place) take_payload(connection, place, in_place, true);
        for (std::size_t done = in_place; done < all && connection.is_open();) {
            done += look_at(connection, scratch_.data() + (done - in_place), all - done);
        }
        if (all < direct + room) return;
        if (round == 1) transmit_all();  // the other direction is not to fall silent meanwhile
    }
}

// Says whether a read has brought anything; at its end the connection is lost.
bool Engine::has_arrived(Connection& connection, ssize_t got) {
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (got < 0 && (errno == ENOMEM || errno == ENOBUFS)) throw std::bad_alloc();  // the kernel's own
    if (got <= 0) {
        lost(connection, connection.in_record_bytes ? "its connection was cut in the middle of a record"
                                                    : "its connection was closed");
        return false;
    }
    connection.heard_ns = now_ns();
    connection.pinged_ns = 0;
    return true;
}

std::size_t Engine::Connection::record_left() const {
    std::uint32_t rest = 0;
    if (in_record_bytes < kRecordHeadBytes) return kRecordHeadBytes - in_record_bytes;
    std::memcpy(&rest, in_record.data(), sizeof rest);
    return kRecordHeadBytes + rest - in_record_bytes;
}

// A record is looked at once it is whole and known to be the next one of its sender.
void Engine::receive_records(Connection& connection) {
    for (int round = 0; round < 4 && connection.is_open(); ++round) {
        const std::size_t wanted = connection.in_record_bytes + connection.record_left() + kLookAhead;
        if (connection.in_record.size() < wanted) connection.in_record.resize(wanted);
        const std::size_t room = wanted - connection.in_record_bytes;
        const ssize_t got = ::recv(connection.socket,
                                   connection.in_record.data() + connection.in_record_bytes, room,
                                   MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (!has_arrived(connection, got)) return;
        connection.in_record_bytes += static_cast<std::size_t>(got);
        open_records(connection);
        if (static_cast<std::size_t>(got) < room) return;
        if (round == 1) transmit_all();
    }
}

void Engine::open_records(Connection& connection) {
    char* const begin = connection.in_record.data();
    std::size_t done = 0;
    while (!connection.is_refused && connection.is_open()) {
        const std::size_t there = connection.in_record_bytes - done;
        std::uint32_t length = 0;
        if (there < kRecordHeadBytes) break;
        std::memcpy(&length, begin + done, sizeof length);
        if (length < kTagBytes || length > sizeof(Head) + kLargestChunk + kTagBytes) {
            connection.is_refused = true;
            refuse(connection, "what is no record of this group");
            break;
        }
        const std::size_t bytes = kRecordHeadBytes + length;
        if (there < bytes) break;
        char* const record = begin + done;
        done += bytes;
        if (!connection.opens->open(record, bytes)) {
            connection.is_refused = true;
            refuse(connection, "a record that was damaged, replayed, moved or left out on the way");
            break;
        }
        const std::size_t text_bytes = length - kTagBytes;
        for (std::size_t seen = 0; seen < text_bytes && connection.is_open();) {
            seen += look_at(connection, record + kRecordHeadBytes + seen, text_bytes - seen);
        }
    }
    if (connection.is_refused) done = connection.in_record_bytes;
    std::memmove(begin, begin + done, connection.in_record_bytes - done);
    connection.in_record_bytes -= done;
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
            if (current_->wire ? head.length != next_chunk_bytes(connection) : head.length > rest) {
                return suspect(head.number, false);
            }
            if (current_->wire) connection.chunk.resize(head.length);
            connection.sink = Sink::collective;
            return;
        }
    }
    const bool is_ahead = !current_ || head.number > current_->sequence;
    if (is_ahead && connection.early_bytes + head.length > most_early_bytes()) {
        return refuse(connection, "more than it had been told to");
    }
    connection.early.push_back({head.number, head.signature, head.extra, {}});
    connection.early.back().bytes.reserve(head.length);
    connection.early_bytes += head.length;
    connection.sink = Sink::early;
}

// A broadcast that we have not come to keeps its root, and nobody else: so others can be ahead of us
// by one collective for each rank, and begin with another one.
std::size_t Engine::most_early_bytes() const { return (connections_.size() + 1) * kEagerBytes; }

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
            if (current_->wire) {
                char* const chunk = connection.chunk.data();
                const std::size_t before = connection.head.length - connection.left - count;
                if (!in_place && count) std::memcpy(chunk + before, bytes, count);
                if (!is_whole) break;
                arrived(connection, chunk, connection.head.length, false);
                if (connection.sink == Sink::nowhere) break;  // the group has ended over it
            } else {
                arrived(connection, bytes, count, in_place);
            }
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
    if (current_->wire) return packing_.received[after] > packing_.received[index];
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
    if (task.wire) {
        if (!take_chunk(connection, bytes, count)) return;
    } else if (task.program->receives[index].reduces) {
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
        if (current_->wire && length != next_chunk_bytes(connection)) {
            return suspect(current_->sequence, false);
        }
        const std::vector<char> bytes = std::move(connection.early.front().bytes);
        connection.early.pop_front();
        connection.early_bytes -= length;
        const std::size_t left = std::exchange(connection.left, 0);
        connection.heard_ns = now_ns();
        arrived(connection, bytes.data(), length, false);
        if (failed_) return;
        connection.left = left;
    }
}

void Engine::take_all_early() {
    for (auto& connection : connections_) {
        if (connection && !connection->early.empty()) take_early(*connection);
    }
}

}  // namespace fullwire
