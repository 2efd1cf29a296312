// The Python face of the native part; its types are in src/fullwire/_native.pyi.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "events/folding.hpp"
#include "events/playing.hpp"
#include "scans/kineto_scan.hpp"
#include "sampling/packet_capture.hpp"
#include "sampling/rank_counters.hpp"
#include "packets/packets.hpp"
#include "sampling/sampler.hpp"
#include "transport/transport.hpp"

namespace nb = nanobind;

namespace {

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<const T> span_of(const Column<T>& column) {
    return {column.data(), column.shape(0)};
}

using StagedColumns =
    std::tuple<Column<std::int64_t>, Column<std::int64_t>, Column<std::int32_t>, Column<double>,
               Column<double>>;

std::pair<double, std::uint64_t> play(
    std::uint32_t seats, Column<double> bytes_per_s, Column<std::int32_t> source,
    Column<std::int32_t> target, Column<double> latency_s, Column<std::int64_t> stands_for,
    Column<std::int64_t> crossings_begin, Column<std::int32_t> link, Column<std::int32_t> weight,
    const std::vector<StagedColumns>& columns, std::uint32_t chunks, bool serial,
    const std::optional<nb::callable>& told) {
    std::vector<fullwire::StagedPart> parts;
    for (const auto& [rounds, edges_begin, connection, bytes, add_s] : columns) {
        parts.push_back({span_of(rounds), span_of(edges_begin), span_of(connection),
                         span_of(bytes), span_of(add_s)});
    }
    const auto pause = [&](std::uint64_t transfers) {  // lets Ctrl-C through
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (told) (*told)(transfers);
    };
    const fullwire::Played played = fullwire::play(
        {seats, span_of(bytes_per_s), span_of(source), span_of(target), span_of(latency_s),
         span_of(stands_for), span_of(crossings_begin), span_of(link), span_of(weight)},
        parts, chunks, serial, pause);
    return {played.time_s, played.transfers};
}

void sample(int file, std::string links, std::string mark, std::vector<int> interfaces,
            std::vector<std::string> rdma_directories, int watched) {
    const nb::gil_scoped_release no_python;  // not a line of it runs in the loop
    fullwire::sample({file, std::move(links), std::move(mark), std::move(interfaces),
                      std::move(rdma_directories), watched});
}

template <typename T>
nb::object column(const std::vector<T>& values) {
    auto* copy = new std::vector<T>(values);
    nb::capsule owner(copy, [](void* taken) noexcept { delete static_cast<std::vector<T>*>(taken); });
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(copy->data(), {copy->size()}, owner));
}

nb::tuple fold(
    std::uint32_t seats, Column<std::int32_t> source, Column<std::int32_t> target,
    Column<std::int64_t> crossings_begin, Column<std::int32_t> link,
    Column<std::int32_t> connections, Column<std::int32_t> links) {
    const fullwire::Classes found =
        fullwire::folded(seats,
                         {span_of(source), span_of(target), span_of(crossings_begin),
                          span_of(link)},
                         span_of(connections), span_of(links));
    return nb::make_tuple(column(found.seats), column(found.connections), column(found.links));
}

void feed(fullwire::KinetoScanner& scanner, nb::bytes chunk) {
    const std::string_view bytes(chunk.c_str(), chunk.size());
    nb::gil_scoped_release released;
    scanner.feed(bytes);
}

nb::list names_of(const fullwire::KinetoScanner& scanner) {
    nb::list found;
    for (const std::string& name : scanner.names.all()) {
        found.append(nb::bytes(name.data(), name.size()));
    }
    return found;
}

nb::list threads_of(const fullwire::KinetoScanner& scanner) {
    nb::list found;
    for (const std::string& name : scanner.threads()) {
        found.append(nb::bytes(name.data(), name.size()));
    }
    return found;
}

nb::list header_of(const fullwire::KinetoScanner& scanner) {
    nb::list found;
    for (const auto& [key, value] : scanner.header()) {
        found.append(nb::make_tuple(nb::bytes(key.data(), key.size()),
                                    nb::bytes(value.data(), value.size())));
    }
    return found;
}

nb::dict work_of(const fullwire::KinetoScanner& scanner) {
    nb::dict found;
    const fullwire::DeviceWork& from = scanner.work;
    found["start_ns"] = column(from.start_ns);
    found["duration_ns"] = column(from.duration_ns);
    found["correlation"] = column(from.correlation);
    found["operation"] = column(from.operation);
    found["launch"] = column(from.launch);
    found["name"] = column(from.name);
    found["device"] = column(from.device);
    found["stream"] = column(from.stream);
    found["note"] = column(from.note);
    found["kind"] = column(from.kind);
    return found;
}

nb::dict launches_of(const fullwire::KinetoScanner& scanner) {
    nb::dict found;
    found["correlation"] = column(scanner.launches.correlation);
    found["time_ns"] = column(scanner.launches.time_ns);
    found["thread"] = column(scanner.launches.thread);
    return found;
}

nb::dict operators_of(const fullwire::KinetoScanner& scanner) {
    nb::dict found;
    found["start_ns"] = column(scanner.operators.start_ns);
    found["end_ns"] = column(scanner.operators.end_ns);
    found["thread"] = column(scanner.operators.thread);
    found["is_backward"] = column(scanner.operators.is_backward);
    return found;
}

nb::dict pauses_of(const fullwire::KinetoScanner& scanner) {
    nb::dict found;
    found["start_ns"] = column(scanner.pauses.start_ns);
    found["end_ns"] = column(scanner.pauses.end_ns);
    return found;
}

nb::dict marks_of(const fullwire::KinetoScanner& scanner) {
    nb::dict found;
    found["start_ns"] = column(scanner.marks.start_ns);
    found["duration_ns"] = column(scanner.marks.duration_ns);
    found["name"] = column(scanner.marks.name);
    found["thread"] = column(scanner.marks.thread);
    found["note"] = column(scanner.marks.note);
    return found;
}

nb::dict notes_of(const fullwire::KinetoScanner& scanner) {
    nb::dict found;
    const fullwire::Notes& from = scanner.notes;
    found["in_elements"] = column(from.in_elements);
    found["out_elements"] = column(from.out_elements);
    found["group_size"] = column(from.group_size);
    found["sequence"] = column(from.sequence);
    found["source"] = column(from.source);
    found["target"] = column(from.target);
    found["first_input_elements"] = column(from.first_input_elements);
    found["op"] = column(from.op);
    found["dtype"] = column(from.dtype);
    found["group"] = column(from.group);
    found["ranks"] = column(from.ranks);
    found["first_input_type"] = column(from.first_input_type);
    return found;
}

// A column of what a scan found, one value from each row.
template <typename T, typename Row, typename Take>
nb::ndarray<nb::numpy, T> column_of(const std::vector<Row>& rows, Take take) {
    auto values = std::make_unique<T[]>(rows.size());
    for (std::size_t row = 0; row < rows.size(); ++row) values[row] = static_cast<T>(take(rows[row]));
    T* const data = values.release();
    const nb::capsule owner(data, [](void* held) noexcept { delete[] static_cast<T*>(held); });
    return nb::ndarray<nb::numpy, T>(data, {rows.size()}, owner);
}

nb::bytes addresses_of(const fullwire::FlowKey& key) {
    std::array<std::uint8_t, 32> both{};
    std::memcpy(both.data(), key.source.data(), 16);
    std::memcpy(both.data() + 16, key.destination.data(), 16);
    return nb::bytes(both.data(), both.size());
}

// Who sends to whom: both addresses, ports, protocol, queue pair and point, for each flow.
nb::list keys_of(const fullwire::PacketScan& scan) {
    nb::list keys;
    for (const fullwire::FlowKey& key : scan.keys()) {
        keys.append(nb::make_tuple(addresses_of(key), key.source_port, key.destination_port,
                                   key.protocol, key.queue_pair, key.point));
    }
    return keys;
}

nb::list own_addresses_of(const fullwire::PacketScan& scan) {
    nb::list addresses;
    for (const auto& each : scan.addresses()) addresses.append(nb::bytes(each.data(), each.size()));
    return addresses;
}

nb::dict totals_of(const fullwire::PacketScan& scan) {
    using fullwire::Flow;
    const auto column = [&](auto member) {
        return column_of<std::int64_t>(scan.flows(), [=](const Flow& flow) { return flow.*member; });
    };
    nb::dict totals;
    totals["first_ns"] = column(&Flow::first_ns);
    totals["last_ns"] = column(&Flow::last_ns);
    totals["packets"] = column(&Flow::packets);
    totals["payload_bytes"] = column(&Flow::payload_bytes);
    totals["wire_bytes"] = column(&Flow::wire_bytes);
    totals["retransmitted_bytes"] = column(&Flow::retransmitted_bytes);
    totals["reordered_bytes"] = column(&Flow::reordered_bytes);
    totals["lost_bytes"] = column(&Flow::lost_bytes);
    totals["missed_bytes"] = column(&Flow::missed_bytes);
    totals["supposed_packets"] = column(&Flow::supposed_packets);
    totals["direction"] = column(&Flow::direction);
    const auto round_trip = [&](auto take) {
        return column_of<std::int64_t>(
            scan.flows(), [=](const Flow& flow) { return take(flow.round_trips); });
    };
    using fullwire::RoundTrips;
    totals["rtt_samples"] = round_trip([](const RoundTrips& each) { return each.samples(); });
    totals["rtt_least_ns"] = round_trip([](const RoundTrips& each) { return each.least_ns(); });
    totals["rtt_median_ns"] =
        round_trip([](const RoundTrips& each) { return each.quantile_ns(0.5); });
    totals["rtt_long_ns"] =
        round_trip([](const RoundTrips& each) { return each.quantile_ns(0.95); });
    return totals;
}

nb::dict bins_of(const fullwire::PacketScan& scan) {
    using fullwire::Bin;
    const auto column = [&](auto member) {
        return column_of<std::int64_t>(scan.bins(), [=](const Bin& bin) { return bin.*member; });
    };
    nb::dict bins;
    bins["flow"] = column(&Bin::flow);
    bins["number"] = column(&Bin::number);
    bins["payload_bytes"] = column(&Bin::payload_bytes);
    bins["wire_bytes"] = column(&Bin::wire_bytes);
    bins["packets"] = column(&Bin::packets);
    bins["retransmits"] = column(&Bin::retransmits);
    return bins;
}

nb::dict gloo_traffic_of(const fullwire::PacketScan& scan) {
    using fullwire::GlooTraffic;
    const auto column = [&](auto take) {
        return column_of<std::int64_t>(scan.gloo_traffic(), take);
    };
    nb::dict traffic;
    traffic["flow"] = column([](const GlooTraffic& each) { return each.flow; });
    traffic["collective"] = column([](const GlooTraffic& each) { return each.slot >> 56; });
    traffic["tag"] = column([](const GlooTraffic& each) { return each.slot >> 24 & 0xffffffff; });
    traffic["asked_ns"] = column([](const GlooTraffic& each) { return each.asked_ns; });
    traffic["first_ns"] = column([](const GlooTraffic& each) { return each.first_ns; });
    traffic["last_ns"] = column([](const GlooTraffic& each) { return each.last_ns; });
    traffic["payload_bytes"] = column([](const GlooTraffic& each) { return each.payload_bytes; });
    traffic["unread_bytes"] = column([](const GlooTraffic& each) { return each.unread_bytes; });
    traffic["messages"] = column([](const GlooTraffic& each) { return each.messages; });
    return traffic;
}

nb::dict passages_of(const fullwire::PacketScan& scan) {
    using fullwire::Passage;
    const auto column = [&](auto member) {
        return column_of<std::int64_t>(scan.passages(),
                                       [=](const Passage& each) { return each.*member; });
    };
    nb::dict passages;
    passages["flow"] = column(&Passage::flow);
    passages["sequence"] = column(&Passage::sequence);
    passages["is_acknowledgement"] = column(&Passage::is_acknowledgement);
    passages["time_ns"] = column(&Passage::time_ns);
    return passages;
}

nb::dict endings_of(const fullwire::PacketScan& scan) {
    using fullwire::Ending;
    const auto column = [&](auto member) {
        return column_of<std::int64_t>(scan.endings(),
                                       [=](const Ending& each) { return each.*member; });
    };
    nb::dict endings;
    endings["flow"] = column(&Ending::flow);
    endings["time_ns"] = column(&Ending::time_ns);
    endings["bytes"] = column(&Ending::bytes);
    return endings;
}

nb::dict counts_of(const fullwire::PacketScan& scan) {
    const fullwire::Counts& counts = scan.counts();
    nb::dict shown;
    shown["packets"] = counts.packets;
    shown["bytes"] = counts.bytes;
    shown["other_packets"] = counts.other_packets;
    shown["other_bytes"] = counts.other_bytes;
    shown["unread_links"] = counts.unread_links;
    shown["unread_link"] = counts.unread_link;
    shown["fragments"] = counts.fragments;
    shown["cut_headers"] = counts.cut_headers;
    shown["impossible"] = counts.impossible;
    shown["crowded_packets"] = counts.crowded_packets;
    shown["dropped"] = counts.dropped;
    shown["untimed"] = counts.untimed;
    return shown;
}

void feed_packets(fullwire::PacketScan& scan, const Column<std::uint8_t>& piece) {
    const fullwire::Bytes bytes = span_of(piece);
    const nb::gil_scoped_release others_may_run;  // several captures are read side by side
    scan.feed(bytes);
}

using SendRow = std::tuple<int, std::uint32_t, std::uint32_t, int, int>;
using ReceiveRow = std::tuple<int, std::uint32_t, std::uint32_t, bool, bool, bool, int, int>;
using BlockRow = std::pair<std::uint64_t, std::uint64_t>;
using Released = nb::call_guard<nb::gil_scoped_release>;

std::shared_ptr<fullwire::Program> program_of(std::uint32_t blocks,
                                              const std::vector<SendRow>& sends,
                                              const std::vector<ReceiveRow>& receives,
                                              bool signals) {
    auto program = std::make_shared<fullwire::Program>();
    program->blocks = blocks;
    program->signals = signals;
    for (const auto& [rank, first, count, after, after_all_of] : sends) {
        program->sends.push_back({rank, first, count, after, after_all_of});
    }
    for (const auto& [rank, first, count, reduces, from_work, completes, after, sent] : receives) {
        program->receives.push_back({rank, first, count, reduces, from_work, completes, after, sent});
    }
    return program;
}

std::vector<fullwire::Block> blocks_of(const std::vector<BlockRow>& rows) {
    std::vector<fullwire::Block> blocks;
    for (const auto& [address, bytes] : rows) blocks.push_back({address, bytes});
    return blocks;
}

fullwire::TaskPointer issue_collective(
    fullwire::Streams& streams, std::string description,
    std::shared_ptr<const fullwire::Program> program, const std::vector<BlockRow>& source,
    const std::vector<BlockRow>& work, std::optional<std::uint8_t> reduction, std::uint8_t number,
    std::uint32_t divide_by, double timeout_s, bool soon, std::optional<std::uint8_t> wire,
    double most_error) try {
    auto task = std::make_shared<fullwire::Task>();
    task->description = std::move(description);
    task->number = static_cast<fullwire::Number>(number);
    task->source = blocks_of(source);
    task->work = blocks_of(work);
    task->program = std::move(program);
    if (reduction) task->reduction = static_cast<fullwire::Reduction>(*reduction);
    task->divide_by = divide_by;
    task->timeout_s = timeout_s;
    if (wire) task->wire = static_cast<fullwire::WireFormat>(*wire);
    task->most_error = most_error;
    const nb::gil_scoped_release released;
    using Caller = fullwire::Engine::Caller;
    streams.issue(task, soon ? Caller::waits : Caller::goes_on);
    return task;
} catch (const std::bad_alloc&) {
    streams.run_out_before("a collective");
    throw std::runtime_error(streams.problem());
}

fullwire::TaskPointer issue_transfer(fullwire::Streams& streams, std::string description, bool sends,
                                     int rank, std::uint64_t tag, BlockRow block, double timeout_s) try {
    using Task = fullwire::Task;
    auto task = std::make_shared<Task>();
    task->description = std::move(description);
    task->kind = sends ? Task::Kind::send : Task::Kind::receive;
    task->rank = rank;
    task->tag = tag;
    (sends ? task->source : task->work).push_back({block.first, block.second});
    task->timeout_s = timeout_s;
    const nb::gil_scoped_release released;
    // To torch an isend and a send are the same call.
    streams.issue(task, fullwire::Engine::Caller::may_wait);
    return task;
} catch (const std::bad_alloc&) {
    streams.run_out_before("a transfer");
    throw std::runtime_error(streams.problem());
}

nb::tuple rounding_of(const fullwire::Task& task) {
    const fullwire::Rounding& rounding = task.rounding;
    return nb::make_tuple(rounding.error, rounding.chunks, rounding.out_of_range);
}

template <typename T>
using Given = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Changed = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

fullwire::WireFormat format_of(std::uint8_t format, std::size_t count, std::size_t packed_bytes) {
    const auto found = static_cast<fullwire::WireFormat>(format);
    if (fullwire::packed_bytes(found, count) != packed_bytes) {
        throw std::invalid_argument("packed numbers take another number of bytes");
    }
    return found;
}

bool pack_numbers(std::uint8_t format, const Given<float>& values, const Changed<std::uint8_t>& packed,
                  std::uint8_t instructions) {
    const auto wire = format_of(format, values.size(), packed.size());
    const nb::gil_scoped_release released;
    return fullwire::pack(wire, packed.data(), values.data(), values.size(),
                          static_cast<fullwire::Instructions>(instructions));
}

void unpack_numbers(std::uint8_t format, const Given<std::uint8_t>& packed,
                    const Changed<float>& values, bool adds, std::uint8_t instructions) {
    const auto wire = format_of(format, values.size(), packed.size());
    const auto with = static_cast<fullwire::Instructions>(instructions);
    const nb::gil_scoped_release released;
    if (adds) {
        fullwire::add_packed(wire, values.data(), values.data(), packed.data(), values.size(), with);
    } else {
        fullwire::unpack(wire, values.data(), packed.data(), values.size(), with);
    }
}

nb::tuple times_of(const fullwire::Task& task) {
    const fullwire::Times& times = task.times;
    return nb::make_tuple(times.issued_ns, times.begun_ns, times.heard_ns, times.ended_ns,
                          times.reducing_ns, times.sent_bytes);
}

// By rank: what encrypts what is sent there, and what comes from there; nothing without encryption.
using KeyRow = std::pair<nb::bytes, nb::bytes>;

std::string text_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

std::vector<fullwire::Keys> ciphers_of(const std::vector<KeyRow>& rows) {
    std::vector<fullwire::Keys> keys;
    for (const auto& [sends, receives] : rows) keys.push_back({text_of(sends), text_of(receives)});
    return keys;
}

std::shared_ptr<fullwire::Streams> streams_of(int rank, std::vector<int> sockets,
                                              std::vector<std::string> names, std::string group,
                                              double silence_s, int spin_us, bool checks,
                                              const std::vector<KeyRow>& keys) {
    return std::make_shared<fullwire::Streams>(
        fullwire::Engine::Manner{rank, std::move(names), std::move(group), silence_s, spin_us, checks},
        std::move(sockets), ciphers_of(keys));
}

nb::bytes bytes_of(const std::string& text) { return nb::bytes(text.data(), text.size()); }

void define_transport(nb::module_& module) {
    using fullwire::Streams;
    using fullwire::Task;
    nb::class_<fullwire::Program>(module, "TransportProgram")
        .def(nb::new_(&program_of), nb::arg("blocks"), nb::arg("sends"), nb::arg("receives"),
             nb::arg("signals"));
    nb::class_<Task>(module, "TransportTask")
        .def_ro("description", &Task::description)
        .def_prop_ro("is_done", &Task::is_done)
        .def_prop_ro("problem", [](const Task& task) {
            return task.has_failed() ? std::optional<std::string>(task.problem) : std::nullopt;
        })
        .def_prop_ro("sender", [](const Task& task) { return task.from; })
        .def_prop_ro("ended_ns", [](const Task& task) { return task.times.ended_ns; })
        .def_prop_ro("times", &times_of)
        .def_prop_ro("rounding", &rounding_of);
    nb::class_<Streams>(module, "TransportStreams")
        .def(nb::new_(&streams_of), nb::arg("rank"), nb::arg("sockets"), nb::arg("names"),
             nb::arg("group"), nb::arg("silence_s"), nb::arg("spin_us"), nb::arg("checks") = false,
             nb::arg("keys") = std::vector<KeyRow>{})
        .def(
            "add",
            [](Streams& streams, std::vector<int> sockets, const std::vector<KeyRow>& keys) {
                streams.add(std::move(sockets), ciphers_of(keys));
            },
            nb::arg("sockets"), nb::arg("keys") = std::vector<KeyRow>{})
        .def("largest_part", &Streams::largest_part, nb::arg("size_bytes"))
        .def("collective", &issue_collective, nb::arg("description"), nb::arg("program"),
             nb::arg("source"), nb::arg("work"), nb::arg("reduction").none(), nb::arg("number"),
             nb::arg("divide_by"), nb::arg("timeout_s"), nb::arg("soon"),
             nb::arg("wire").none() = nb::none(), nb::arg("most_error") = 0.0)
        .def("transfer", &issue_transfer, nb::arg("description"), nb::arg("sends"),
             nb::arg("rank"), nb::arg("tag"), nb::arg("block"), nb::arg("timeout_s"))
        .def("wait", &Streams::wait, nb::arg("task"), nb::arg("timeout_s"), Released())
        .def("wait_for_any", &Streams::wait_for_any, Released())
        .def("count_from_here", &Streams::count_from_here)
        .def("abort", &Streams::abort, nb::arg("reason"), Released())
        .def(
            "give_up",
            [](Streams& streams, const std::string& problem) { streams.give_up(problem); },
            nb::arg("problem"), Released())
        .def("close", &Streams::close, nb::arg("reason") = "", Released())
        .def("leave_to_parent", &Streams::leave_to_parent)
        .def_prop_ro("problem", &Streams::problem)
        .def_prop_ro("fallen_back_after", &Streams::fallen_back_after)
        .def_prop_ro("malformed", &Streams::malformed);
    module.def("packed_bytes", [](std::uint8_t format, std::size_t count) {
        return fullwire::packed_bytes(static_cast<fullwire::WireFormat>(format), count);
    }, nb::arg("format"), nb::arg("count"));
    constexpr auto kBest = static_cast<std::uint8_t>(fullwire::Instructions::best);
    module.def("pack_numbers", &pack_numbers, nb::arg("format"), nb::arg("values"),
               nb::arg("packed"), nb::arg("instructions") = kBest);
    module.def("unpack_numbers", &unpack_numbers, nb::arg("format"), nb::arg("packed"),
               nb::arg("values"), nb::arg("adds") = false, nb::arg("instructions") = kBest);
    module.def("encryption_problem", &fullwire::encryption_problem);
    module.def(
        "x25519_public",
        [](const nb::bytes& own) { return bytes_of(fullwire::x25519_public(text_of(own))); },
        nb::arg("private_key"));
    module.def(
        "x25519_shared",
        [](const nb::bytes& own, const nb::bytes& other) {
            return bytes_of(fullwire::x25519_shared(text_of(own), text_of(other)));
        },
        nb::arg("private_key"), nb::arg("other_public_key"));
}

void run_capture(fullwire::PacketCapture& capture, int watched) {
    const nb::gil_scoped_release no_python;  // as in sample
    capture.run(watched);
}

std::uint64_t read_packets(fullwire::PacketScan& scan, int file, unsigned threads,
                           std::uint64_t enough_bytes) {
    const nb::gil_scoped_release others_may_run;
    return scan.read(file, threads, enough_bytes);
}

auto looks_of(fullwire::RankCounters& counters) {
    auto* kept = new std::vector<double>(counters.take());
    const nb::capsule owner(kept, [](void* rows) noexcept {
        delete static_cast<std::vector<double>*>(rows);
    });
    return nb::ndarray<nb::numpy, double, nb::ndim<1>>(kept->data(), {kept->size()}, owner);
}

}  // namespace

NB_MODULE(_native, module) {
    // Torch keeps process groups, and so engines, until the interpreter is gone; and who interrupts a
    // scan wants its end, and no list of what it held.
    nb::set_leak_warnings(false);
    define_transport(module);
    nb::class_<fullwire::KinetoScanner>(module, "KinetoScanner")
        .def(nb::init<std::size_t>(), nb::arg("most_value_bytes"))
        .def("feed", &feed, nb::arg("chunk"))
        .def_prop_ro("is_whole", &fullwire::KinetoScanner::is_whole)
        .def_prop_ro("damage", &fullwire::KinetoScanner::damage)
        .def_prop_ro("bytes_read", &fullwire::KinetoScanner::bytes_read)
        .def_prop_ro("events", &fullwire::KinetoScanner::events)
        .def_prop_ro("unusable", &fullwire::KinetoScanner::unusable)
        .def_prop_ro("processes", &fullwire::KinetoScanner::processes)
        .def("header", &header_of)
        .def("names", &names_of)
        .def("threads", &threads_of)
        .def("work", &work_of)
        .def("launches", &launches_of)
        .def("operators", &operators_of)
        .def("pauses", &pauses_of)
        .def("marks", &marks_of)
        .def("notes", &notes_of);
    module.def("play", &play, nb::arg("seats"), nb::arg("bytes_per_s"),
               nb::arg("source"), nb::arg("target"), nb::arg("latency_s"), nb::arg("stands_for"),
               nb::arg("crossings_begin"), nb::arg("link"), nb::arg("weight"), nb::arg("parts"),
               nb::arg("chunks"), nb::arg("serial"), nb::arg("told").none());
    module.def("fold", &fold, nb::arg("seats"), nb::arg("source"), nb::arg("target"),
               nb::arg("crossings_begin"), nb::arg("link"), nb::arg("connections"),
               nb::arg("links"));
    module.def("sample", &sample, nb::arg("file"), nb::arg("links"), nb::arg("mark"),
               nb::arg("interfaces"), nb::arg("rdma_directories"), nb::arg("watched"));
    nb::class_<fullwire::PacketCapture>(module, "PacketCapture")
        .def(nb::init<int, const std::vector<std::pair<std::string, int>>&>(), nb::arg("file"),
             nb::arg("sockets"))
        .def("run", &run_capture, nb::arg("watched"));
    nb::class_<fullwire::RankCounters>(module, "RankCounters")
        .def(nb::init<std::size_t>(), nb::arg("ranks"))
        .def("add_thread", &fullwire::RankCounters::add_thread, nb::arg("rank"), nb::arg("file"),
             nb::arg("communicates"))
        .def("add_main_thread", &fullwire::RankCounters::add_main_thread, nb::arg("rank"),
             nb::arg("file"), nb::arg("polls_for_ranks"))
        .def("add_network", &fullwire::RankCounters::add_network, nb::arg("socket"))
        .def("set_owners", &fullwire::RankCounters::set_owners, nb::arg("network"),
             nb::arg("owners"))
        .def("add_interfaces", &fullwire::RankCounters::add_interfaces, nb::arg("file"),
             nb::arg("ranks"), nb::arg("with_loopback"))
        .def("add_ports", &fullwire::RankCounters::add_ports, nb::arg("files"), nb::arg("ranks"))
        .def("watch", &fullwire::RankCounters::watch, nb::arg("seconds"), nb::arg("share"),
             nb::arg("least_s"), nb::arg("most_s"), Released())
        .def("take", &looks_of)
        .def_prop_ro("took_s", &fullwire::RankCounters::took_s);
    nb::class_<fullwire::PacketScan>(module, "PacketScan")
        .def(nb::init<>())
        .def("feed", &feed_packets, nb::arg("piece"))
        .def("read", &read_packets, nb::arg("file"), nb::arg("threads"), nb::arg("enough_bytes"))
        .def("finish", &fullwire::PacketScan::finish)
        .def("damage", &fullwire::PacketScan::damage)
        .def("shift", &fullwire::PacketScan::shift)
        .def("counts", &counts_of)
        .def("addresses", &own_addresses_of)
        .def("endpoints", &keys_of)
        .def("totals", &totals_of)
        .def("bins", &bins_of)
        .def("gloo_traffic", &gloo_traffic_of)
        .def("passages", &passages_of)
        .def("endings", &endings_of);
}
