// Transfers between two ranks: announced by who sends, asked for by who receives.

#include <algorithm>

#include "transport/parts.hpp"

namespace fullwire {

void Engine::begin_transfer(const TaskPointer& task) {
    task->times.begun_ns = now_ns();
    task->received.assign(1, 0);
    task->transfer = next_transfer_++;
    if (task->rank >= 0) {
        Connection& connection = *connections_[static_cast<std::size_t>(task->rank)];
        if (!connection.is_open() || connection.has_left) {
            return fail(absence_of(connection, ", before " + task->description), false);
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
                      at(task.source[0].address) + task.received[0], 0, bytes == rest, 0};
    task.received[0] += bytes;
    task.times.sent_bytes += bytes;
    return true;
}

}  // namespace fullwire
