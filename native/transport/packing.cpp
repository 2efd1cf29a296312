// Collectives whose float32 numbers travel in a wire format, chunk by chunk.
//
// A rank rounds what it sends to the owner of a block. The owner adds in float32, rounds the sum once
// and keeps the rounded sum, which it sends to all: so ranks end with the same bits. A chunk says its
// own format, because fp16 sends as bf16 what is beyond its range.

#include <algorithm>
#include <cstring>

#include "transport/parts.hpp"

namespace fullwire {

namespace {

// What a chunk begins with on the wire.
struct ChunkHead {
    std::uint8_t format = 0;
    std::uint8_t unused[3] = {};
    float error = 0;  // of what has been rounded so far, over the limit
};

constexpr std::size_t kChunkNumbers = std::size_t{64} << 10;
constexpr std::size_t kLeastChunkNumbers = std::size_t{4} << 10;
constexpr std::size_t kChunksOfBlock = 8;    // so that the owner sends on while others still send
constexpr std::size_t kSampledBlocks = 64;   // the error is measured in one of so many blocks

static_assert(sizeof(ChunkHead) + kChunkNumbers * sizeof(float) / 2 <= kLargestChunk);

float* numbers(const Block& block, std::uint64_t first) {
    return reinterpret_cast<float*>(at(block.address)) + first;
}

}  // namespace

std::size_t Engine::Packing::bytes_of(const Chunk& chunk) const {
    return sizeof(ChunkHead) + packed_bytes(format, chunk.count);
}

std::uint64_t Engine::Packing::bytes_of(std::uint32_t first_block, std::uint32_t blocks) const {
    std::uint64_t bytes = 0;
    for (std::uint32_t each = first_chunk[first_block]; each < first_chunk[first_block + blocks]; ++each) {
        bytes += bytes_of(chunks[each]);
    }
    return bytes;
}

// Every rank cuts alike, because every rank knows the sizes of all blocks.
void Engine::prepare_packing(Task& task) {
    Packing& packing = packing_;
    const Program& program = *task.program;
    if (*task.wire != WireFormat::float32 && has_fallen_back_) task.wire = WireFormat::float32;
    packing.format = *task.wire;
    packing.error = 0;
    packing.chunks.clear();
    packing.first_chunk.assign(1, 0);
    packing.contributions.assign(program.blocks, 0);
    packing.received.assign(program.receives.size(), 0);
    std::vector<bool> is_passed_on(program.blocks, false);
    for (const Send& send : program.sends) {
        if (task.reduction && send.after < 0) continue;
        for (std::uint32_t each = 0; each < send.blocks; ++each) is_passed_on[send.first_block + each] = true;
    }
    for (const Receive& receive : program.receives) {
        for (std::uint32_t each = 0; receive.reduces && each < receive.blocks; ++each) {
            ++packing.contributions[receive.first_block + each];
        }
    }
    const auto count_of = [&](std::uint32_t block) {
        return std::max(task.source[block].bytes, task.work[block].bytes) / sizeof(float);
    };
    std::uint64_t largest = 0;
    for (std::uint32_t block = 0; block < program.blocks; ++block) {
        largest = std::max<std::uint64_t>(largest, count_of(block));
    }
    // Half as many of those that take twice the bytes.
    const std::size_t most = packing.format == WireFormat::float32 ? kChunkNumbers / 2 : kChunkNumbers;
    const std::size_t whole_blocks = largest / kChunksOfBlock / kWireBlock * kWireBlock;
    const std::size_t step = std::clamp(whole_blocks, kLeastChunkNumbers, most);
    std::uint64_t passed_on_bytes = 0;
    for (std::uint32_t block = 0; block < program.blocks; ++block) {
        for (std::uint64_t first = 0; first < count_of(block); first += step) {
            Chunk chunk{block, first, std::min<std::uint64_t>(step, count_of(block) - first), passed_on_bytes};
            if (is_passed_on[block]) passed_on_bytes += packing.bytes_of(chunk);
            chunk.is_passed_on = is_passed_on[block];
            packing.chunks.push_back(chunk);
        }
        packing.first_chunk.push_back(static_cast<std::uint32_t>(packing.chunks.size()));
    }
    if (packing.passed_on.size() < passed_on_bytes) packing.passed_on.resize(passed_on_bytes);
}

// Writes a chunk as it goes over the wire. `error` is what others have told of its numbers.
void Engine::pack_chunk(Task& task, char* to, const float* values, std::size_t count, float error) {
    ChunkHead head;
    WireFormat format = packing_.format;
    char* const packed = to + sizeof head;
    if (!pack(format, packed, values, count)) {
        format = WireFormat::bf16;
        pack(format, packed, values, count);
        ++task.rounding.out_of_range;
    }
    ++task.rounding.chunks;
    if (format != WireFormat::float32) {
        const double own = relative_squared_error(format, values, packed, count, kSampledBlocks);
        task.rounding.error = std::max(task.rounding.error, own);
        error = std::max(error, static_cast<float>(own / task.most_error));
    }
    head.format = static_cast<std::uint8_t>(format);
    head.error = error;
    std::memcpy(to, &head, sizeof head);
}

// Rounds a chunk that is final, keeps the rounded numbers, and has them ready for all who get them.
void Engine::finish_chunk(Task& task, Chunk& chunk) {
    float* const values = numbers(task.work[chunk.block], chunk.first);
    if (task.divide_by > 1 && packing_.contributions[chunk.block]) {
        divide(task.number, values, chunk.count, task.divide_by);
    }
    if (chunk.is_passed_on) {
        chunk.error = std::max(chunk.error, untold_error_);
        char* const packed = packing_.passed_on.data() + chunk.passed_on_at;
        pack_chunk(task, packed, values, chunk.count, chunk.error);
        ChunkHead head;
        std::memcpy(&head, packed, sizeof head);
        unpack(static_cast<WireFormat>(head.format), values, packed + sizeof head, chunk.count);
        packing_.error = std::max(packing_.error, head.error);
        packing_.tells = true;
    } else {
        packing_.untold = std::max(packing_.untold, chunk.error);
    }
    chunk.is_final = true;
}

bool Engine::choose_packed(Connection& connection) {
    Task& task = *current_;
    const Send& send = task.program->sends[connection.sends[connection.next_send]];
    const std::uint32_t first = packing_.first_chunk[send.first_block];
    const std::uint32_t end = packing_.first_chunk[send.first_block + send.blocks];
    const std::uint32_t number = first + static_cast<std::uint32_t>(connection.sent_of_range);
    Chunk& chunk = packing_.chunks[number];
    const std::size_t bytes = packing_.bytes_of(chunk);
    if (send.after >= 0 && !chunk.is_final) return false;
    if (connection.sent + bytes > kEagerBytes && connection.granted_sequence < task.sequence) return false;
    const std::int64_t began_ns = now_ns();
    const char* payload = packing_.passed_on.data() + chunk.passed_on_at;
    if (chunk.is_passed_on && !chunk.is_final) {
        finish_chunk(task, chunk);  // this rank's part of a gather
    } else if (!chunk.is_passed_on) {
        if (connection.packed.size() < bytes) connection.packed.resize(bytes);
        pack_chunk(task, connection.packed.data(), numbers(task.source[chunk.block], chunk.first),
                   chunk.count, 0);
        payload = connection.packed.data();
    }
    task.times.reducing_ns += now_ns() - began_ns;
    Head head;
    head.kind = kData;
    head.number = task.sequence;
    head.signature = task.signature;
    head.extra = connection.to_send;
    head.length = static_cast<std::uint32_t>(bytes);
    const bool ends_send = number + 1 == end;
    connection.out = {Connection::Out::What::collective, head, payload, 0, ends_send, 0};
    connection.sent += bytes;
    ++connection.sent_of_range;
    if (ends_send) {
        ++connection.next_send;
        connection.sent_of_range = 0;
    }
    task.times.sent_bytes += bytes;
    return true;
}

std::size_t Engine::next_chunk_bytes(const Connection& connection) const {
    const std::uint32_t index = connection.receives[connection.next_receive];
    const Receive& receive = current_->program->receives[index];
    return packing_.bytes_of(
        packing_.chunks[packing_.first_chunk[receive.first_block] + packing_.received[index]]);
}

// Adds a whole chunk, or puts it where it belongs; false if it is none that this version knows.
bool Engine::take_chunk(Connection& connection, const char* bytes, std::size_t count) {
    const std::int64_t began_ns = now_ns();
    Task& task = *current_;
    const std::uint32_t index = connection.receives[connection.next_receive];
    const Receive& receive = task.program->receives[index];
    const std::uint32_t first = packing_.first_chunk[receive.first_block];
    const std::uint32_t end = packing_.first_chunk[receive.first_block + receive.blocks];
    Chunk& chunk = packing_.chunks[first + packing_.received[index]];
    ChunkHead head;
    std::memcpy(&head, bytes, sizeof head);
    const auto format = static_cast<WireFormat>(head.format);
    const bool is_agreed = format == packing_.format || (packing_.format == WireFormat::fp16 && format == WireFormat::bf16);
    if (!is_agreed || !(head.error >= 0)) {
        refuse(connection, "a chunk in wire format " + std::to_string(head.format) +
                               ", but the ranks had agreed on another");
        return false;
    }
    float* const values = numbers(task.work[chunk.block], chunk.first);
    chunk.error = std::max(chunk.error, head.error);
    if (receive.reduces) {
        const float* own = receive.from_work ? values : numbers(task.source[chunk.block], chunk.first);
        add_packed(format, values, own, bytes + sizeof head, chunk.count);
        if (++chunk.added == packing_.contributions[chunk.block]) finish_chunk(task, chunk);
    } else {
        unpack(format, values, bytes + sizeof head, chunk.count);
        packing_.error = std::max(packing_.error, head.error);
        if (chunk.is_passed_on) std::memcpy(packing_.passed_on.data() + chunk.passed_on_at, bytes, count);
        chunk.is_final = true;
    }
    if (first + ++packing_.received[index] == end) task.received[index] = task.receive_ranges[index].bytes;
    task.times.reducing_ns += now_ns() - began_ns;
    return true;
}

// Every rank has got the same chunks of a gather, and so the same errors: all fall back together. What
// a reduce-scatter has lost is told in the next gather.
void Engine::judge_rounding(const Task& task) {
    untold_error_ = std::max(packing_.tells ? 0 : untold_error_, packing_.untold);
    if (packing_.error > 1 && !has_fallen_back_) {
        has_fallen_back_ = true;
        streams_.note_fall_back(task.description);
    }
    packing_.tells = false;
    packing_.untold = 0;
}

}  // namespace fullwire
