#include "events/playing.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <queue>
#include <stdexcept>
#include <utility>

#include "events/agenda.hpp"
#include "events/queues.hpp"
#include "events/shared_links.hpp"

namespace fullwire {
namespace {

constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

// Events closer than this part of the time that has passed are of one instant, computed in two ways.
constexpr double kSameInstant = 1e-12;

constexpr std::size_t kManyReady = 64;

// ---------------------------------------------------------------------------------------------
// The plan, prepared for playing. An edge is a connection in a stage: it transfers once a round.
// What a seat sends and receives in a part is a list of edges, stage by stage.

struct Edge {
    std::uint32_t connection;
    std::uint32_t stage;     // counted through all parts
    std::uint32_t sender;    // places: a seat has one in every part
    std::uint32_t receiver;
    double bytes;
    double delay_s;  // from its last byte sent to its last byte received and added up
    std::uint32_t delay = 0;  // its place among all different delays
};

// An edge at one of its ends.
struct Listed {
    std::uint32_t edge;
    std::uint32_t stage;
};

struct Script {
    std::vector<Edge> edges;
    std::vector<std::int64_t> rounds;       // by stage
    std::vector<std::uint32_t> sent_begin;  // by place, one more; then edges in order of stages
    std::vector<Listed> sent;
    std::vector<std::uint32_t> received_begin;
    std::vector<Listed> received;
    std::uint32_t places = 0;
    std::uint32_t delays = 0;  // different ones
    std::uint64_t transfers = 0;
};

// Sorts edges by their place at one end; within a place they stay in order.
void list_by_place(const std::vector<Edge>& edges, std::uint32_t places, std::uint32_t Edge::*end,
                   std::vector<std::uint32_t>& begin, std::vector<Listed>& list) {
    begin.assign(places + 1, 0);
    for (const Edge& edge : edges) ++begin[edge.*end + 1];
    for (std::uint32_t place = 0; place < places; ++place) begin[place + 1] += begin[place];
    list.resize(edges.size());
    std::vector<std::uint32_t> next(begin.begin(), begin.end() - 1);
    for (std::uint32_t id = 0; id < edges.size(); ++id) {
        list[next[edges[id].*end]++] = {id, edges[id].stage};
    }
}

Script written(const Routing& routing, const std::vector<StagedPart>& parts) {
    Script script;
    for (std::uint32_t number = 0; number < parts.size(); ++number) {
        const StagedPart& part = parts[number];
        const std::uint32_t place = number * routing.seats;
        for (std::size_t each = 0; each < part.rounds.size(); ++each) {
            const auto stage = static_cast<std::uint32_t>(script.rounds.size());
            script.rounds.push_back(part.rounds[each]);
            for (auto row = part.edges_begin[each]; row < part.edges_begin[each + 1]; ++row) {
                const auto connection = static_cast<std::uint32_t>(part.connection[row]);
                script.edges.push_back({connection, stage,
                                        place + routing.source[connection],
                                        place + routing.target[connection], part.bytes[row],
                                        routing.latency_s[connection] + part.add_s[row]});
                script.transfers += part.rounds[each] * routing.stands_for[connection];
            }
        }
    }
    std::map<double, std::uint32_t> delays;
    for (Edge& edge : script.edges) {
        const auto next = static_cast<std::uint32_t>(delays.size());
        edge.delay = delays.try_emplace(edge.delay_s, next).first->second;
    }
    script.delays = static_cast<std::uint32_t>(delays.size());
    script.places = static_cast<std::uint32_t>(parts.size()) * routing.seats;
    list_by_place(script.edges, script.places, &Edge::sender, script.sent_begin, script.sent);
    list_by_place(script.edges, script.places, &Edge::receiver, script.received_begin,
                  script.received);
    return script;
}

// ---------------------------------------------------------------------------------------------
// Who may send: a seat's next round is released once it has received everything of earlier rounds,
// and its own sends of earlier rounds have left.

class Rounds {
  public:
    Rounds(const Script& script, std::uint32_t chunks) : script_(script) { begin(chunks); }

    // Puts every seat of so many chunks back to its first round.
    void begin(std::uint32_t chunks) {
        seats_.assign(std::size_t{chunks} * script_.places, {});
        arrived_.assign(chunks * script_.edges.size(), 0);
        for (std::uint32_t chunk = 0; chunk < chunks; ++chunk) {
            for (std::uint32_t place = 0; place < script_.places; ++place) {
                Seat& seat = seat_of(chunk, place);
                seat.sending = script_.sent_begin[place];
                seat.receiving = script_.received_begin[place];
                await(seat, chunk, place);
            }
        }
    }

    // Hands the edges of the seat's next round to `send`, if it may begin.
    template <typename Send>
    void release(std::uint32_t chunk, std::uint32_t place, Send send) {
        Seat& seat = seat_of(chunk, place);
        const std::uint32_t end = script_.sent_begin[place + 1];
        if (seat.leaving > 0 || seat.sending == end || is_held(seat, place)) return;
        const std::uint32_t stage = script_.sent[seat.sending].stage;
        std::uint32_t next = seat.sending;
        for (; next < end && script_.sent[next].stage == stage; ++next) {
            ++seat.leaving;
            send(script_.sent[next].edge);
        }
        if (++seat.sent_rounds == script_.rounds[stage]) {
            seat.sent_rounds = 0;
            seat.sending = next;
        }
    }

    // Notes that a transfer has left; says whether the seat sends no other now.
    bool leave(std::uint32_t chunk, std::uint32_t place) {
        return --seat_of(chunk, place).leaving == 0;
    }

    // Notes that a transfer was received; says whether the seat has gone on to a later round.
    bool receive(std::uint32_t chunk, std::uint32_t edge, std::uint32_t place) {
        const std::int64_t before = arrived_[chunk * script_.edges.size() + edge]++;
        Seat& seat = seat_of(chunk, place);
        const std::uint32_t awaited = script_.received[seat.receiving].stage;
        if (script_.edges[edge].stage != awaited || before != seat.received_rounds) return false;
        if (--seat.missing > 0) return false;
        go_on(seat, awaited, script_.received_begin[place + 1]);
        await(seat, chunk, place);
        return true;
    }

  private:
    struct Seat {
        std::uint32_t sending = 0;    // the first edge of its next stage, in the list of what it sends
        std::uint32_t receiving = 0;  // of the stage that it has not wholly received
        std::uint32_t leaving = 0;    // how many are being sent, all of one round
        std::uint32_t missing = 0;    // how many the awaited round still lacks
        std::int64_t sent_rounds = 0;
        std::int64_t received_rounds = 0;
    };

    Seat& seat_of(std::uint32_t chunk, std::uint32_t place) {
        return seats_[std::size_t{chunk} * script_.places + place];
    }

    bool is_held(const Seat& seat, std::uint32_t place) const {
        if (seat.receiving == script_.received_begin[place + 1]) return false;
        const std::uint32_t sends = script_.sent[seat.sending].stage;
        const std::uint32_t awaits = script_.received[seat.receiving].stage;
        return awaits != sends ? awaits < sends : seat.received_rounds < seat.sent_rounds;
    }

    // Finds the first round, from the awaited one on, that has not wholly arrived.
    void await(Seat& seat, std::uint32_t chunk, std::uint32_t place) {
        const std::uint32_t end = script_.received_begin[place + 1];
        const std::size_t first = chunk * script_.edges.size();
        while (seat.receiving < end) {
            const std::uint32_t stage = script_.received[seat.receiving].stage;
            seat.missing = 0;
            for (std::uint32_t next = seat.receiving;
                 next < end && script_.received[next].stage == stage; ++next) {
                const std::uint32_t edge = script_.received[next].edge;
                seat.missing += arrived_[first + edge] <= seat.received_rounds;
            }
            if (seat.missing > 0) return;
            go_on(seat, stage, end);
        }
    }

    void go_on(Seat& seat, std::uint32_t stage, std::uint32_t end) const {
        if (++seat.received_rounds < script_.rounds[stage]) return;
        seat.received_rounds = 0;
        while (seat.receiving < end && script_.received[seat.receiving].stage == stage) {
            ++seat.receiving;
        }
    }

    const Script& script_;
    std::vector<Seat> seats_;            // by chunk and place
    std::vector<std::int64_t> arrived_;  // by chunk and edge: how many rounds
};

// ---------------------------------------------------------------------------------------------
// When each connection's transfer will have left; a connection has one such time at the most.

class Departures {
  public:
    explicit Departures(std::size_t connections) : scheduled_(connections) {}

    double next_time_s() { return agenda_.next_time_s(); }

    void set(std::uint32_t id, double time_s) {
        Scheduled& now = scheduled_[id];
        if (now.batch != kNone) agenda_.cancel(now.batch);
        now.batch = agenda_.add(time_s, {id, ++now.number});
    }

    // Takes those that leave until then, by time and then by number.
    const std::vector<std::uint32_t>& take(double until_s) {
        due_.clear();
        std::size_t first = 0;  // of the latest time
        for (double before_s = 0, time_s; (time_s = agenda_.next_time_s()) <= until_s;) {
            if (std::exchange(before_s, time_s) != time_s) first = due_.size();
            agenda_.take([&](const Departure& departure) {
                Scheduled& known = scheduled_[departure.connection];
                if (known.number != departure.number) return;  // it was given another time
                known.batch = kNone;
                due_.push_back(departure.connection);
            });
            const auto begin = due_.begin() + static_cast<std::ptrdiff_t>(first);
            if (!std::is_sorted(begin, due_.end())) std::sort(begin, due_.end());
        }
        return due_;
    }

  private:
    struct Departure {
        std::uint32_t connection;
        std::uint32_t number;
    };

    struct Scheduled {
        std::uint32_t batch = kNone;
        std::uint32_t number = 0;
    };

    Agenda<Departure> agenda_;
    std::vector<Scheduled> scheduled_;  // by connection
    std::vector<std::uint32_t> due_;
};

struct Delivery {
    double time_s;
    std::uint32_t chunk;
    std::uint32_t edge;
};

// What has left and is yet to arrive. Time only goes on, so of transfers with the same delay the first
// to leave is the first to arrive: each delay has a row of its own, and only their heads are compared.
class Deliveries {
  public:
    explicit Deliveries(std::size_t delays) : rows_(delays) {}

    double next_time_s() const { return heads_.empty() ? kNever : heads_.top().time_s; }

    void add(std::uint32_t delay, const Delivery& delivery) {
        if (rows_[delay].empty()) heads_.push({delivery.time_s, delay});
        rows_[delay].push_back(delivery);
    }

    // Removes the next and returns it.
    Delivery take() {
        std::deque<Delivery>& row = rows_[heads_.top().delay];
        const Delivery next = row.front();
        row.pop_front();
        const std::uint32_t delay = heads_.top().delay;
        heads_.pop();
        if (!row.empty()) heads_.push({row.front().time_s, delay});
        return next;
    }

  private:
    struct Head {
        double time_s;
        std::uint32_t delay;
        bool operator>(const Head& other) const {
            return time_s != other.time_s ? time_s > other.time_s : delay > other.delay;
        }
    };

    std::vector<std::deque<Delivery>> rows_;  // by delay
    std::priority_queue<Head, std::vector<Head>, std::greater<>> heads_;
};

// ---------------------------------------------------------------------------------------------

struct Parcel {
    std::uint32_t connection;
    std::uint32_t chunk;
    std::uint32_t edge;
    bool operator<(const Parcel& other) const {
        if (connection != other.connection) return connection < other.connection;
        return chunk != other.chunk ? chunk < other.chunk : edge < other.edge;
    }
};

// What a connection is sending, and what waits for it.
struct Lane {
    bool is_joined = false;  // to the links
    bool is_busy = false;
    Parcel sending{};
    double remaining_bytes = 0;
    double updated_s = 0;
    double rate = 0;
    Queue waiting;
};

class Player {
  public:
    Player(const Routing& routing, const Script& script, std::uint32_t chunks_at_once)
        : script_(script), stands_for_(routing.stands_for),
          links_(routing.bytes_per_s, routing.crossings_begin, routing.link, routing.weight),
          departures_(routing.source.size()), lanes_(routing.source.size()),
          rounds_(script, chunks_at_once), deliveries_(script.delays) {}

    std::uint64_t transfers() const { return transfers_; }

    // Plays so many chunks from `now_s`, and returns when the last transfer was received.
    double play(std::uint32_t chunks, double now_s,
                const std::function<void(std::uint64_t)>& pause) {
        rounds_.begin(chunks);
        for (std::uint32_t chunk = 0; chunk < chunks; ++chunk) {
            for (std::uint32_t place = 0; place < script_.places; ++place) release(chunk, place);
        }
        start(now_s);
        double end_s = now_s;
        while ((now_s = next_time_s()) < kNever) {
            end_s = now_s;
            const double until_s = now_s * (1 + kSameInstant);
            for (const std::uint32_t id : departures_.take(until_s)) finish(id, now_s);
            while (deliveries_.next_time_s() <= until_s) {
                const Delivery next = deliveries_.take();
                receive(next.chunk, next.edge);
            }
            start(now_s);
            if (++instants_ % 1024 == 0) pause(transfers_);
        }
        return end_s;
    }

  private:
    double next_time_s() {
        return std::min(departures_.next_time_s(), deliveries_.next_time_s());
    }

    void finish(std::uint32_t id, double now_s) {
        const Parcel sent = lanes_[id].sending;
        const Edge& edge = script_.edges[sent.edge];
        lanes_[id].is_busy = false;
        idle_.push_back(id);
        if (rounds_.leave(sent.chunk, edge.sender)) release(sent.chunk, edge.sender);
        if (edge.delay_s > 0) {
            deliveries_.add(edge.delay, {now_s + edge.delay_s, sent.chunk, sent.edge});
        } else {
            receive(sent.chunk, sent.edge);
        }
    }

    void receive(std::uint32_t chunk, std::uint32_t number) {
        const Edge& edge = script_.edges[number];
        transfers_ += stands_for_[edge.connection];
        if (rounds_.receive(chunk, number, edge.receiver)) release(chunk, edge.receiver);
    }

    void release(std::uint32_t chunk, std::uint32_t place) {
        rounds_.release(chunk, place, [&](std::uint32_t edge) {
            ready_.push_back({script_.edges[edge].connection, chunk, edge});
        });
    }

    // Sends what has become ready at this instant, and shares the links anew. A connection that goes
    // on with another transfer stays where it is.
    void start(double now_s) {
        sort_ready();
        for (const Parcel& parcel : ready_) {
            queues_.push(lanes_[parcel.connection].waiting, parcel);
            idle_.push_back(parcel.connection);
        }
        ready_.clear();
        for (const std::uint32_t id : idle_) go_on(id, now_s);
        idle_.clear();
        for (const std::uint32_t id : links_.settle()) time_again(id, now_s);
    }

    // Where ranks are alike, they become ready in their order, which may begin anywhere. A merge takes
    // memory of its own, which few of them are not worth.
    void sort_ready() {
        const auto turn = std::is_sorted_until(ready_.begin(), ready_.end());
        if (turn == ready_.end()) return;
        if (ready_.size() >= kManyReady && std::is_sorted(turn, ready_.end())) {
            std::inplace_merge(ready_.begin(), turn, ready_.end());
        } else {
            std::sort(ready_.begin(), ready_.end());
        }
    }

    void go_on(std::uint32_t id, double now_s) {
        Lane& lane = lanes_[id];
        if (lane.is_busy) return;
        if (lane.waiting.is_empty()) {
            if (std::exchange(lane.is_joined, false)) links_.leave(id);
            return;
        }
        if (!std::exchange(lane.is_joined, true)) {
            links_.join(id);
            lane.rate = 0;
        }
        lane.is_busy = true;
        lane.sending = queues_.pop(lane.waiting);
        lane.remaining_bytes = script_.edges[lane.sending.edge].bytes;
        lane.updated_s = now_s;
        if (lane.rate > 0) departures_.set(id, now_s + lane.remaining_bytes / lane.rate);
    }

    void time_again(std::uint32_t id, double now_s) {
        Lane& lane = lanes_[id];
        const double passed_s = now_s - lane.updated_s;
        if (passed_s > 0) {
            lane.remaining_bytes = std::max(0.0, lane.remaining_bytes - lane.rate * passed_s);
        }
        lane.updated_s = now_s;
        lane.rate = links_.rate(id);
        departures_.set(id, now_s + lane.remaining_bytes / lane.rate);
    }

    const Script& script_;
    std::span<const std::int64_t> stands_for_;
    SharedLinks links_;
    Departures departures_;
    std::vector<Lane> lanes_;
    QueueStore<Parcel> queues_;
    Rounds rounds_;
    std::vector<Parcel> ready_;        // released at this instant
    std::vector<std::uint32_t> idle_;  // connections that ended a transfer now, or have a new one
    Deliveries deliveries_;
    std::uint64_t transfers_ = 0;
    std::uint64_t instants_ = 0;
};

void refuse_unless(bool holds, const char* expected) {
    if (!holds) throw std::invalid_argument(expected);
}

bool is_amount(double value) { return value >= 0 && std::isfinite(value); }

// Everything that is followed later is looked at here once.
void check(const Routing& routing) {
    const std::size_t connections = routing.source.size();
    refuse_unless(routing.target.size() == connections && routing.latency_s.size() == connections &&
                      routing.stands_for.size() == connections &&
                      routing.crossings_begin.size() == connections + 1 &&
                      routing.weight.size() == routing.link.size(),
                  "columns of connections differ in length");
    refuse_unless(connections < kNone && routing.link.size() < kNone &&
                      routing.bytes_per_s.size() < kNone,
                  "expected fewer than four thousand million connections, links and crossings");
    for (const double rate : routing.bytes_per_s) {
        refuse_unless(is_amount(rate) && rate > 0,
                      "bytes per second: expected finite numbers above 0");
    }
    std::int64_t begin = 0;
    for (std::size_t id = 0; id < connections; ++id) {
        const auto is_seat = [&](std::int32_t seat) {
            return seat >= 0 && static_cast<std::uint32_t>(seat) < routing.seats;
        };
        refuse_unless(is_seat(routing.source[id]) && is_seat(routing.target[id]),
                      "a connection names a seat that cannot be");
        refuse_unless(is_amount(routing.latency_s[id]), "latency: expected finite numbers, 0 or more");
        refuse_unless(routing.stands_for[id] > 0, "a connection stands for at least itself");
        refuse_unless(routing.crossings_begin[id] == begin && routing.crossings_begin[id + 1] >= begin,
                      "links of connections: expected them one after another");
        begin = routing.crossings_begin[id + 1];
    }
    refuse_unless(static_cast<std::size_t>(begin) == routing.link.size(),
                  "links of connections: expected them one after another");
    for (std::size_t each = 0; each < routing.link.size(); ++each) {
        refuse_unless(routing.link[each] >= 0 &&
                          static_cast<std::size_t>(routing.link[each]) < routing.bytes_per_s.size() &&
                          routing.weight[each] > 0,
                      "a connection crosses a link that cannot be");
    }
}

void check(const StagedPart& part, std::size_t connections) {
    const std::size_t stages = part.rounds.size();
    const std::size_t rows = part.connection.size();
    refuse_unless(part.bytes.size() == rows && part.add_s.size() == rows &&
                      part.edges_begin.size() == stages + 1 && part.edges_begin[0] == 0,
                  "columns of one part differ in length");
    for (std::size_t stage = 0; stage < stages; ++stage) {
        refuse_unless(part.rounds[stage] > 0 &&
                          part.edges_begin[stage + 1] >= part.edges_begin[stage],
                      "a stage has rounds or transfers that cannot be");
    }
    refuse_unless(static_cast<std::size_t>(part.edges_begin[stages]) == rows && rows < kNone,
                  "columns of one part differ in length");
    for (std::size_t row = 0; row < rows; ++row) {
        const std::int32_t connection = part.connection[row];
        refuse_unless(connection >= 0 && static_cast<std::size_t>(connection) < connections,
                      "a transfer names a connection that cannot be");
        refuse_unless(is_amount(part.bytes[row]) && is_amount(part.add_s[row]),
                      "sizes that cannot be: expected finite numbers, 0 or more");
    }
}

}  // namespace

Played play(const Routing& routing, const std::vector<StagedPart>& parts, std::uint32_t chunks,
            bool serial, const std::function<void(std::uint64_t)>& pause) {
    check(routing);
    for (const StagedPart& part : parts) check(part, routing.source.size());
    refuse_unless(chunks > 0, "chunks: expected at least 1");
    const Script script = written(routing, parts);
    const double seats = double(chunks) * double(parts.size()) * double(routing.seats);
    refuse_unless(seats < kNone, "expected fewer than four thousand million seats times chunks");
    const std::uint32_t at_once = serial ? 1 : chunks;
    Player player(routing, script, at_once);
    double time_s = 0;
    for (std::uint32_t played = 0; played < chunks; played += at_once) {
        time_s = player.play(at_once, time_s, pause);
    }
    if (player.transfers() != chunks * script.transfers) {
        throw std::logic_error("a plan waits for itself: some transfers were never released");
    }
    return {time_s, player.transfers()};
}

}  // namespace fullwire
