#include "events/collective_events.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <queue>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "events/queues.hpp"

namespace fullwire {
namespace {

constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();
constexpr double kNever = std::numeric_limits<double>::infinity();

// Shares closer than this are one share computed in two ways: far more than rounding leaves
// behind, far less than anyone could measure.
constexpr double kSameShare = 1e-12;

// ---------------------------------------------------------------------------------------------
// Events. Ranks that do the same do it at the same times, so the events of one time wait together
// as a batch, in the order in which they were scheduled, and only batches are kept in a heap. The
// batch of a time is found in a small table; where two times claim one place in it, the older
// batch can no longer be found and gets a successor, told apart by a counter. The order of events
// thus depends on nothing but the input.

enum class What : std::uint32_t { sent, delivered };

struct Event {
    What what;
    std::uint32_t subject;  // sent: a connection; delivered: a transfer
    std::uint32_t detail;   // sent: the connection's schedule number; delivered: a seat
};

class Agenda {
  public:
    void add(double time_s, Event event) {
        if (time_s != batches_[latest_].time_s) latest_ = batch_at(time_s);
        batches_[latest_].events.push_back(event);
    }

    // When the next batch is due; never, if there is none.
    double next_time_s() const { return due_.empty() ? kNever : due_.top().time_s; }

    // Moves the next batch into `events`, whose storage serves another batch.
    void take(std::vector<Event>& events) {
        Batch& batch = batches_[due_.top().batch];
        batch.time_s = kClosed;
        events.clear();
        events.swap(batch.events);
        free_.push_back(due_.top().batch);
        due_.pop();
    }

  private:
    static constexpr double kClosed = -1;
    static constexpr int kPlaceBits = 10;

    struct Batch {
        double time_s = kClosed;
        std::vector<Event> events;
    };

    struct Due {
        double time_s;
        std::uint64_t order;
        std::uint32_t batch;
        bool operator>(const Due& other) const {
            return time_s != other.time_s ? time_s > other.time_s : order > other.order;
        }
    };

    std::uint32_t batch_at(double time_s) {
        // Multiplicative hashing: the upper bits of the product depend on every bit of the time.
        const std::uint64_t product = std::bit_cast<std::uint64_t>(time_s) * 0x9e3779b97f4a7c15;
        std::uint32_t& found = table_[product >> (64 - kPlaceBits)];
        if (batches_[found].time_s != time_s) found = open(time_s);
        return found;
    }

    std::uint32_t open(double time_s) {
        if (free_.empty()) {
            free_.push_back(static_cast<std::uint32_t>(batches_.size()));
            batches_.emplace_back();
        }
        const std::uint32_t batch = free_.back();
        free_.pop_back();
        batches_[batch].time_s = time_s;
        due_.push({time_s, opened_++, batch});
        return batch;
    }

    std::vector<Batch> batches_ = std::vector<Batch>(1);  // batch 0 stays closed
    std::vector<std::uint32_t> free_;
    std::array<std::uint32_t, 1 << kPlaceBits> table_{};
    std::uint32_t latest_ = 0;  // the batch last added to
    std::priority_queue<Due, std::vector<Due>, std::greater<>> due_;
    std::uint64_t opened_ = 0;
};

// ---------------------------------------------------------------------------------------------
// The plan, prepared for playing. Transfers are numbered through all parts. A rank has a seat in
// every part, and again for every chunk; what it sends and receives there forms two chains, each
// in the order of rounds.

struct Transfer {
    std::uint32_t route : 31;
    std::uint32_t ends_round : 1 = true;  // the next from the same seat is of a later round
    std::uint32_t next_sent = kNone;      // from the same seat
    std::uint32_t next_received = kNone;  // at the same seat
    std::uint32_t holds = kNone;          // the first transfer that its receiver may not send before
};

// Where the two chains of a seat go on.
struct Seat {
    std::uint32_t send = kNone;     // the next transfer that will be sent
    std::uint32_t receive = kNone;  // the first one still awaited
    std::uint32_t leaving = 0;      // how many are being sent, all of one round
    bool is_due = false;            // the next round waits for them only
};

// What a transfer shares with all others of its size on its connection.
struct Route {
    std::uint32_t connection;
    std::uint32_t seats_on;  // from the sender's seat to the receiver's; may wrap around zero
    double bytes;
    double delay_s;  // from its last byte sent to its last byte received and added up
};

struct Ends {
    std::uint32_t source;
    std::uint32_t target;
};

struct Script {
    std::vector<Transfer> transfers;
    std::vector<Seat> seats;  // at the beginning: of each part, each rank
    std::vector<Route> routes;
    std::vector<Ends> connections;
};

class ScriptWriter {
  public:
    ScriptWriter(const Wires& wires, const std::vector<Part>& parts,
                 const std::vector<SizeClass>& sizes)
        : latency_s_(wires.latency_s), sizes_(sizes), latest_(wires.workers) {
        std::size_t rows = 0;
        for (const Part& part : parts) rows += part.round.size();
        script_.transfers.reserve(rows);
        for (const Part& part : parts) write(part);
    }

    Script take() { return std::move(script_); }

  private:
    // The route of a rank's latest transfer: often that of its next one, too.
    struct Latest {
        std::uint32_t target = kNone;
        std::uint32_t size_class = kNone;
        std::uint32_t route = kNone;
    };

    struct Ending {
        std::uint32_t sent = kNone;
        std::uint32_t received = kNone;
        std::uint32_t holds_none = kNone;  // the first received that does not hold back any yet
    };

    void write(const Part& part) {
        const auto first = static_cast<std::uint32_t>(script_.transfers.size());
        Seat* const seats = add_seats();
        endings_.assign(latest_.size(), {});
        for (std::size_t row = 0; row < part.round.size(); ++row) {
            const auto transfer = first + static_cast<std::uint32_t>(row);
            const std::int32_t source = part.source[row];
            const std::int32_t target = part.target[row];
            script_.transfers.push_back({.route = route(source, target, part.size_class[row])});
            hold_back(part, first, transfer, endings_[source]);
            chain_sent(part, first, transfer, seats[source], endings_[source]);
            chain_received(seats[target], endings_[target], transfer);
        }
    }

    Seat* add_seats() {
        script_.seats.resize(script_.seats.size() + latest_.size());
        return script_.seats.data() + script_.seats.size() - latest_.size();
    }

    // Lets what the sender has received in earlier rounds hold back this transfer.
    void hold_back(const Part& part, std::uint32_t first, std::uint32_t transfer, Ending& sender) {
        const std::int32_t round = part.round[transfer - first];
        while (sender.holds_none != kNone && part.round[sender.holds_none - first] < round) {
            Transfer& received = script_.transfers[sender.holds_none];
            received.holds = transfer;
            sender.holds_none = received.next_received;
        }
    }

    void chain_sent(const Part& part, std::uint32_t first, std::uint32_t transfer, Seat& seat,
                    Ending& ending) {
        const std::uint32_t number = std::exchange(ending.sent, transfer);
        if (number == kNone) {
            seat.send = transfer;
            return;
        }
        Transfer& before = script_.transfers[number];
        before.next_sent = transfer;
        before.ends_round = part.round[number - first] != part.round[transfer - first];
    }

    void chain_received(Seat& seat, Ending& ending, std::uint32_t transfer) {
        const std::uint32_t before = std::exchange(ending.received, transfer);
        (before == kNone ? seat.receive : script_.transfers[before].next_received) = transfer;
        if (ending.holds_none == kNone) ending.holds_none = transfer;
    }

    std::uint32_t route(std::uint32_t source, std::uint32_t target, std::uint32_t size_class) {
        Latest& latest = latest_[source];
        if (latest.target != target || latest.size_class != size_class) {
            latest = {target, size_class, find_route(source, target, size_class)};
        }
        return latest.route;
    }

    std::uint32_t find_route(std::uint32_t source, std::uint32_t target, std::uint32_t size_class) {
        const std::uint32_t connection = find_connection(source, target);
        const std::uint64_t key = std::uint64_t{connection} << 32 | size_class;
        const auto [found, is_new] = known_routes_.try_emplace(key, script_.routes.size());
        if (is_new) {
            const auto [bytes, add_s] = sizes_[size_class];
            script_.routes.push_back({connection, target - source, bytes, latency_s_ + add_s});
        }
        return found->second;
    }

    std::uint32_t find_connection(std::uint32_t source, std::uint32_t target) {
        const std::uint64_t key = std::uint64_t{source} << 32 | target;
        const auto [found, is_new] = known_connections_.try_emplace(key, script_.connections.size());
        if (is_new) script_.connections.push_back({source, target});
        return found->second;
    }

    double latency_s_;
    const std::vector<SizeClass>& sizes_;
    Script script_;
    std::vector<Latest> latest_;   // by rank
    std::vector<Ending> endings_;  // by rank, of the part being written
    std::unordered_map<std::uint64_t, std::uint32_t> known_connections_;
    std::unordered_map<std::uint64_t, std::uint32_t> known_routes_;
};

// ---------------------------------------------------------------------------------------------
// Who may send: within a part and a chunk, a rank's transfer is released once the rank has
// received everything that earlier rounds sent to it, and its own sends of earlier rounds have
// left. So the transfers of one round are released together.

class Progress {
  public:
    Progress(const Script& script, std::uint32_t chunks)
        : script_(script), early_(chunks * script.transfers.size()) {
        begin(chunks);
    }

    // Puts every seat of so many chunks back to its first transfers.
    void begin(std::uint32_t chunks) {
        seats_.clear();
        for (std::uint32_t chunk = 0; chunk < chunks; ++chunk) {
            seats_.insert(seats_.end(), script_.seats.begin(), script_.seats.end());
        }
    }

    std::uint32_t seats() const { return static_cast<std::uint32_t>(seats_.size()); }

    // Hands the transfers of the seat's next round to `send`, if it may begin.
    template <typename Send>
    void release(std::uint32_t number, Send send) {
        Seat& seat = seats_[number];
        const std::uint32_t held =
            seat.receive == kNone ? kNone : script_.transfers[seat.receive].holds;
        for (bool goes_on = seat.leaving == 0 && seat.send != held; goes_on;) {
            const Transfer& next = script_.transfers[seat.send];
            ++seat.leaving;
            send(std::exchange(seat.send, next.next_sent));
            goes_on = !next.ends_round;
        }
        seat.is_due = seat.send != held;
    }

    // Notes that a transfer has left; says whether the next round waited for that only.
    bool leave(std::uint32_t number) {
        Seat& seat = seats_[number];
        return --seat.leaving == 0 && seat.is_due;
    }

    // Notes that the transfer was received; says whether it was the one awaited.
    bool receive(std::uint32_t transfer, std::uint32_t number) {
        Seat& seat = seats_[number];
        if (seat.receive != transfer) {
            early_[early_bit(transfer, number)] = true;
            ++early_count_;
            return false;
        }
        do {
            seat.receive = script_.transfers[seat.receive].next_received;
        } while (seat.receive != kNone && was_early(seat.receive, number));
        return true;
    }

  private:
    bool was_early(std::uint32_t transfer, std::uint32_t seat) {
        if (early_count_ == 0) return false;  // nearly always, where all send at the same times
        auto early = early_[early_bit(transfer, seat)];
        if (!early) return false;
        early = false;
        --early_count_;
        return true;
    }

    std::size_t early_bit(std::uint32_t transfer, std::uint32_t seat) const {
        return seat / script_.seats.size() * script_.transfers.size() + transfer;
    }

    const Script& script_;
    std::vector<Seat> seats_;
    std::vector<bool> early_;  // by chunk and transfer: received while another was awaited
    std::size_t early_count_ = 0;
};

// ---------------------------------------------------------------------------------------------
// Connections and the links they meet on. Link r is what rank r sends, link workers + r what it
// receives.
//
// Shares are max-min fair. Each link has a level: what it gives to a connection at most where it
// is full, and the whole rate where it is not. The rate of a connection is the lower level of its
// two links. Whether that holds can be told link by link, so a change is settled from where it
// happened outwards: first among the links that connections joined or left, then with the links
// that felt the difference, and so on until none does.

struct Parcel {
    std::uint32_t transfer;
    std::uint32_t seat;  // where it will be received
};

// What every transfer touches comes first, and shares one cache line.
struct alignas(64) Connection {
    std::uint32_t links[2];       // its uplink and its downlink
    std::uint32_t schedule = 0;   // a "sent" event of an older schedule is stale
    bool busy = false;
    bool untimed = false;         // the end of what it sends is to be scheduled
    Parcel sending{};             // if busy
    Queue waiting{};              // behind it
    double remaining_bytes = 0;   // of what it sends, as of `updated_s`
    double rate = 0;              // bytes per second; 0 until settled
    double updated_s = 0;
    double share = 0;             // what the filling that settled it gave it
    std::uint32_t filling = 0;    // which one that was
    std::uint32_t before[2] = {}; // its neighbours among the busy connections of its links
    std::uint32_t after[2] = {};
};

struct Link {
    std::uint32_t busy = 0;       // so many connections share it
    std::uint32_t first = kNone;  // of them
    double level = 0;
    double free_rate = 0;         // what the settled ones leave
    std::uint32_t unsettled = 0;  // so many have no share yet
    std::uint32_t region = 0;     // the latest that it belonged to
    double offer() const { return free_rate / unsettled; }
};

// What a link can give to each of its connections without a share yet.
struct Offer {
    double share;
    std::uint32_t link;
    std::uint32_t only;  // by a link around the region: the one connection that it is for
    bool operator>(const Offer& other) const {
        if (share != other.share) return share > other.share;
        return link != other.link ? link > other.link : only > other.only;
    }
};

class Network {
  public:
    Network(const Wires& wires, const std::vector<Ends>& connections, Agenda& agenda)
        : workers_(wires.workers), rate_(wires.bytes_per_s), agenda_(agenda),
          links_(2 * std::size_t{wires.workers}) {
        connections_.reserve(connections.size());
        for (const auto [source, target] : connections) {
            connections_.push_back({.links = {source, workers_ + target}});
        }
    }

    void send(std::uint32_t id, Parcel parcel, double bytes) {
        Connection& connection = connections_[id];
        if (connection.busy) {
            queues_.push(connection.waiting, parcel);
            return;
        }
        connection.busy = true;
        connection.sending = parcel;
        connection.remaining_bytes = bytes;
        connection.rate = 0;
        join(id, 0);
        join(id, 1);
        time_again(id);
    }

    bool is_current(const Event& sent) const {
        return connections_[sent.subject].schedule == sent.detail;
    }

    // What the connection was sending has left; what waits, if anything, follows at its rate.
    template <typename Bytes>
    Parcel finish(std::uint32_t id, double now_s, Bytes bytes_of) {
        Connection& connection = connections_[id];
        const Parcel sent = connection.sending;
        if (connection.waiting.is_empty()) {
            connection.busy = false;
            leave(id, 0);
            leave(id, 1);
        } else {
            connection.sending = queues_.pop(connection.waiting);
            connection.remaining_bytes = bytes_of(connection.sending.transfer);
            connection.updated_s = now_s;
            time_again(id);
        }
        return sent;
    }

    // Settles what has changed since the clock last moved.
    void settle(double now_s) {
        if (!changed_.empty()) share(now_s);
        for (const std::uint32_t id : untimed_) {
            Connection& connection = connections_[id];
            if (connection.rate == 0) {  // it met no other
                connection.rate = rate_;
                connection.updated_s = now_s;
            }
            connection.untimed = false;
            const double end_s = now_s + connection.remaining_bytes / connection.rate;
            agenda_.add(end_s, {What::sent, id, ++connection.schedule});
        }
        untimed_.clear();
    }

  private:
    void time_again(std::uint32_t id) {
        if (connections_[id].untimed) return;
        connections_[id].untimed = true;
        untimed_.push_back(id);
    }

    // The busy connections of a link form a list, through side 0 of its members if it is an
    // uplink and side 1 if it is a downlink. One alone needs no neighbours.
    void join(std::uint32_t id, int side) {
        const std::uint32_t number = connections_[id].links[side];
        Link& link = links_[number];
        if (link.busy++ > 0) {
            if (link.busy == 2) connections_[link.first].after[side] = kNone;
            connections_[link.first].before[side] = id;
            connections_[id].after[side] = link.first;
            changed_.push_back(number);
        }
        link.first = id;
    }

    void leave(std::uint32_t id, int side) {
        const std::uint32_t number = connections_[id].links[side];
        Link& link = links_[number];
        if (--link.busy == 0) return;
        const std::uint32_t before = connections_[id].before[side];
        const std::uint32_t after = connections_[id].after[side];
        (link.first == id ? link.first : connections_[before].after[side]) = after;
        if (after != kNone) connections_[after].before[side] = before;
        changed_.push_back(number);
    }

    template <typename Visit>
    void each_busy(std::uint32_t number, Visit visit) const {
        const int side = number < workers_ ? 0 : 1;
        std::uint32_t id = links_[number].first;
        for (std::uint32_t left = links_[number].busy; left > 0; --left) {
            visit(id);
            id = connections_[id].after[side];
        }
    }

    void share(double now_s) {
        ++region_;
        inside_.clear();
        for (const std::uint32_t link : changed_) include(link);
        changed_.clear();
        for (std::size_t filled = 0; filled < inside_.size();) {
            filled = inside_.size();
            fill();
            widen();
        }
        for (const std::uint32_t id : settled_) {
            if (is_different(connections_[id])) set_rate(id, now_s);
        }
    }

    void include(std::uint32_t number) {
        if (is_inside(number)) return;
        links_[number].region = region_;
        inside_.push_back(number);
    }

    bool is_inside(std::uint32_t number) const { return links_[number].region == region_; }

    // Progressive filling of the region: of all that links can offer per connection the least is
    // taken up first, again and again. Links around the region keep their levels.
    void fill() {
        ++filling_;
        settled_.clear();
        for (const std::uint32_t number : inside_) offer_afresh(number);
        while (!offers_.empty()) {
            const Offer least = offers_.top();
            offers_.pop();
            if (least.only == kNone) {
                take_up(least);
            } else if (!is_settled(least.only)) {
                settle_on(least.only, least.share);
            }
        }
    }

    void offer_afresh(std::uint32_t number) {
        Link& link = links_[number];
        if (link.busy == 0) return;
        link.level = link.free_rate = rate_;
        link.unsettled = link.busy;
        offers_.push({link.offer(), number, kNone});
        each_busy(number, [&](std::uint32_t id) {
            const auto [uplink, downlink] = connections_[id].links;
            const std::uint32_t other = number == uplink ? downlink : uplink;
            if (!is_inside(other) && limits(other)) offers_.push({links_[other].level, other, id});
        });
    }

    void take_up(const Offer& least) {
        Link& link = links_[least.link];
        if (link.unsettled == 0) return;
        if (least.share != link.offer()) {  // others on it have settled since
            offers_.push({link.offer(), least.link, kNone});
            return;
        }
        link.level = least.share;
        each_busy(least.link, [&](std::uint32_t id) {
            if (!is_settled(id)) settle_on(id, least.share);
        });
    }

    bool is_settled(std::uint32_t id) const { return connections_[id].filling == filling_; }

    void settle_on(std::uint32_t id, double share) {
        connections_[id].filling = filling_;
        connections_[id].share = share;
        settled_.push_back(id);
        for (const std::uint32_t number : connections_[id].links) {
            Link& link = links_[number];
            link.free_rate = std::max(0.0, link.free_rate - share);
            --link.unsettled;
        }
    }

    // Takes in the links that feel the difference.
    void widen() {
        for (const std::uint32_t id : settled_) {
            if (!is_different(connections_[id])) continue;
            for (const std::uint32_t number : connections_[id].links) {
                if (is_inside(number)) continue;
                if (limits(number) || is_overfull(number)) include(number);
            }
        }
    }

    static bool is_different(const Connection& connection) {
        return std::abs(connection.share - connection.rate) > kSameShare * connection.share;
    }

    // A link with one connection leaves it the whole rate, whatever its level once was.
    bool limits(std::uint32_t number) const {
        return links_[number].busy > 1 && links_[number].level < rate_;
    }

    bool is_overfull(std::uint32_t number) const {
        double load = 0;
        each_busy(number, [&](std::uint32_t id) {
            load += is_settled(id) ? connections_[id].share : connections_[id].rate;
        });
        return load > rate_ * (1 + kSameShare);
    }

    void set_rate(std::uint32_t id, double now_s) {
        Connection& connection = connections_[id];
        const double moved = connection.rate * (now_s - connection.updated_s);
        connection.remaining_bytes = std::max(0.0, connection.remaining_bytes - moved);
        connection.rate = connection.share;
        connection.updated_s = now_s;
        time_again(id);
    }

    std::uint32_t workers_;
    double rate_;
    Agenda& agenda_;
    std::vector<Link> links_;
    std::vector<Connection> connections_;
    QueueStore<Parcel> queues_;
    std::vector<std::uint32_t> untimed_;  // connections
    std::vector<std::uint32_t> changed_;  // links that one of several connections joined or left
    std::vector<std::uint32_t> inside_;   // links of the region being settled
    std::uint32_t region_ = 0;            // its number
    std::priority_queue<Offer, std::vector<Offer>, std::greater<>> offers_;
    std::vector<std::uint32_t> settled_;  // connections, by the filling now under way
    std::uint32_t filling_ = 0;           // its number
};

// ---------------------------------------------------------------------------------------------

class Player {
  public:
    Player(const Wires& wires, const Script& script, std::uint32_t chunks_at_once)
        : script_(script),
          network_(wires, script.connections, agenda_),
          progress_(script, chunks_at_once) {}

    std::uint64_t transfers() const { return transfers_; }

    // Plays so many chunks from `now_s`, and returns when the last transfer was received.
    double play(std::uint32_t chunks, double now_s, const std::function<void()>& pause) {
        progress_.begin(chunks);
        for (std::uint32_t seat = 0; seat < progress_.seats(); ++seat) release(seat);
        network_.settle(now_s);
        double end_s = now_s;
        while ((now_s = agenda_.next_time_s()) < kNever) {
            do {
                if (play_batch(now_s)) end_s = now_s;
            } while (agenda_.next_time_s() == now_s);
            network_.settle(now_s);
            if (++instants_ % 1024 == 0) pause();
        }
        return end_s;
    }

  private:
    // Says whether anything happened: all events of a batch may be stale.
    bool play_batch(double now_s) {
        bool happened = false;
        agenda_.take(events_);
        for (const Event& event : events_) {
            if (event.what == What::delivered) {
                happened = true;
                receive({event.subject, event.detail});
            } else if (network_.is_current(event)) {
                happened = true;
                finish(event.subject, now_s);
            }
        }
        return happened;
    }

    void finish(std::uint32_t connection, double now_s) {
        const auto bytes_of = [&](std::uint32_t transfer) { return route_of(transfer).bytes; };
        const Parcel sent = network_.finish(connection, now_s, bytes_of);
        const Route& route = route_of(sent.transfer);
        const std::uint32_t sender = sent.seat - route.seats_on;
        if (progress_.leave(sender)) release(sender);
        if (route.delay_s > 0) {
            agenda_.add(now_s + route.delay_s, {What::delivered, sent.transfer, sent.seat});
        } else {
            receive(sent);
        }
    }

    void receive(Parcel arrived) {
        ++transfers_;
        if (progress_.receive(arrived.transfer, arrived.seat)) release(arrived.seat);
    }

    void release(std::uint32_t seat) {
        progress_.release(seat, [&](std::uint32_t transfer) {
            const Route& route = route_of(transfer);
            network_.send(route.connection, {transfer, seat + route.seats_on}, route.bytes);
        });
    }

    const Route& route_of(std::uint32_t transfer) const {
        return script_.routes[script_.transfers[transfer].route];
    }

    const Script& script_;
    Agenda agenda_;
    Network network_;
    Progress progress_;
    std::vector<Event> events_;  // of the batch being played
    std::uint64_t transfers_ = 0;
    std::uint64_t instants_ = 0;
};

// What the columns cannot be blamed for; ranks and size classes are checked where they come in.
void check(const Wires& wires, const std::vector<Part>& parts, const std::vector<SizeClass>& sizes,
           std::uint32_t chunks) {
    const auto refuse_unless = [](bool holds, const char* expected) {
        if (!holds) throw std::invalid_argument(expected);
    };
    const auto is_amount = [](double value) { return value >= 0 && std::isfinite(value); };
    refuse_unless(is_amount(wires.bytes_per_s) && wires.bytes_per_s > 0,
                  "bytes per second: expected a finite number above 0");
    refuse_unless(is_amount(wires.latency_s), "latency: expected a finite number, 0 or more");
    for (const auto [bytes, add_s] : sizes) {
        refuse_unless(is_amount(bytes) && is_amount(add_s),
                      "size classes: expected finite numbers, 0 or more");
    }
    refuse_unless(chunks > 0, "chunks: expected at least 1");
    std::uint64_t transfers = 0;
    for (const Part& part : parts) transfers += part.round.size();
    const double seats = double(chunks) * double(parts.size()) * double(wires.workers);
    refuse_unless(transfers < kNone && seats < kNone && wires.workers < kNone / 2,
                  "expected fewer than four thousand million transfers, ranks times chunks");
}

}  // namespace

Outcome play(const Wires& wires, const std::vector<Part>& parts,
             const std::vector<SizeClass>& sizes, std::uint32_t chunks, bool serial,
             const std::function<void()>& pause) {
    check(wires, parts, sizes, chunks);
    const Script script = ScriptWriter(wires, parts, sizes).take();
    const std::uint32_t at_once = serial ? 1 : chunks;
    Player player(wires, script, at_once);
    double time_s = 0;
    for (std::uint32_t played = 0; played < chunks; played += at_once) {
        time_s = player.play(at_once, time_s, pause);
    }
    if (player.transfers() != std::uint64_t{chunks} * script.transfers.size()) {
        throw std::logic_error("a plan waits for itself: some transfers were never released");
    }
    return {time_s, player.transfers()};
}

}  // namespace fullwire
