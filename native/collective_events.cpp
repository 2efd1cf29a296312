#include "collective_events.hpp"

#include <algorithm>
#include <deque>
#include <limits>
#include <queue>
#include <stdexcept>
#include <unordered_map>

namespace fullwire {
namespace {

constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();
constexpr double kNever = std::numeric_limits<double>::infinity();

// ---------------------------------------------------------------------------------------------
// Events. Those scheduled with the same delay come out in the order in which they went in, so each
// distinct delay has a plain first-in-first-out lane, and the earliest event is at the head of one
// of a few lanes. Only delays beyond the first kLanes pay for a heap. Equal times are told apart by
// a counter, so the order never depends on anything but the input.

enum class What : std::uint32_t { sent, delivered };

struct Event {
    double time_s;
    std::uint64_t order;
    What what;
    std::uint32_t subject;  // sent: a connection; delivered: a transfer
    std::uint32_t detail;   // sent: the connection's schedule number; delivered: the chunk
};

class Fifo {
  public:
    explicit Fifo(double delay_s) : delay_s_(delay_s), ring_(1024) {}
    double delay_s() const { return delay_s_; }
    bool empty() const { return first_ == last_; }
    const Event& front() const { return ring_[first_ & (ring_.size() - 1)]; }
    void pop() { ++first_; }
    void push(const Event& event) {
        if (last_ - first_ == ring_.size()) grow();
        ring_[last_++ & (ring_.size() - 1)] = event;
    }

  private:
    void grow() {
        std::vector<Event> wider(2 * ring_.size());
        const std::size_t count = last_ - first_;
        for (std::size_t i = 0; i < count; ++i) wider[i] = ring_[(first_ + i) & (ring_.size() - 1)];
        ring_ = std::move(wider);
        first_ = 0;
        last_ = count;
    }

    double delay_s_;
    std::vector<Event> ring_;  // its size is a power of two
    std::size_t first_ = 0;
    std::size_t last_ = 0;
};

class Agenda {
  public:
    // Schedules an event `delay_s` after `now_s`; `now_s` never goes back between calls.
    void after(double now_s, double delay_s, What what, std::uint32_t subject,
               std::uint32_t detail) {
        const Event event{now_s + delay_s, order_++, what, subject, detail};
        for (Fifo& lane : lanes_) {
            if (lane.delay_s() == delay_s) return lane.push(event);
        }
        if (lanes_.size() < kLanes) {
            lanes_.emplace_back(delay_s);
            return lanes_.back().push(event);
        }
        heap_.push(event);
    }

    // When the next event is due; never, if there is none.
    double next_time_s() const {
        double time_s = heap_.empty() ? kNever : heap_.top().time_s;
        for (const Fifo& lane : lanes_) {
            if (!lane.empty()) time_s = std::min(time_s, lane.front().time_s);
        }
        return time_s;
    }

    // Takes the next event due at `time_s`, or says that there is none left.
    bool take(double time_s, Event& event) {
        Fifo* chosen = nullptr;
        for (Fifo& lane : lanes_) {
            if (lane.empty() || lane.front().time_s != time_s) continue;
            if (!chosen || lane.front().order < chosen->front().order) chosen = &lane;
        }
        if (!heap_.empty() && heap_.top().time_s == time_s &&
            (!chosen || heap_.top().order < chosen->front().order)) {
            event = heap_.top();
            heap_.pop();
            return true;
        }
        if (!chosen) return false;
        event = chosen->front();
        chosen->pop();
        return true;
    }

  private:
    struct Later {
        bool operator()(const Event& a, const Event& b) const {
            return a.time_s != b.time_s ? a.time_s > b.time_s : a.order > b.order;
        }
    };
    static constexpr std::size_t kLanes = 6;
    std::vector<Fifo> lanes_;
    std::priority_queue<Event, std::vector<Event>, Later> heap_;
    std::uint64_t order_ = 0;
};

// ---------------------------------------------------------------------------------------------
// Who may send: within a part and a chunk, a rank's transfer is released once the rank has
// received everything that earlier rounds sent to it, and its own sends of earlier rounds have left.

class PartState {
  public:
    PartState(const Part& part, std::uint32_t workers, std::uint32_t chunks)
        : part_(part),
          rows_(part.round.size()),
          workers_(workers),
          next_sent_(rows_),
          next_received_(rows_),
          first_(workers),
          progress_(std::size_t{chunks} * workers),
          arrived_(std::size_t{chunks} * rows_) {
        link_rows();
        rewind();
    }

    // Forgets what has been played, for the next serial chunk.
    void rewind() {
        for (std::size_t i = 0; i < progress_.size(); ++i) progress_[i] = first_[i % workers_];
        std::fill(arrived_.begin(), arrived_.end(), 0);
    }

    void arrive(std::uint32_t row, std::uint32_t chunk) {
        const std::size_t base = std::size_t{chunk} * rows_;
        std::uint32_t& awaited = at(part_.target[row], chunk).receive;
        arrived_[base + row] = 1;
        while (awaited != kNone && arrived_[base + awaited]) awaited = next_received_[awaited];
    }

    // Hands every transfer that the rank may now send to `send`.
    template <typename Send>
    void release(std::uint32_t rank, std::uint32_t chunk, Send send) {
        Rows& next = at(rank, chunk);
        const std::int32_t last_round = next.receive == kNone
                                            ? std::numeric_limits<std::int32_t>::max()
                                            : part_.round[next.receive];
        while (next.send != kNone && part_.round[next.send] <= last_round) {
            const std::uint32_t row = next.send;
            next.is_held = next.leaving && part_.round[row] != next.round;
            if (next.is_held) return;
            next.send = next_sent_[row];
            next.round = part_.round[row];
            ++next.leaving;
            send(row);
        }
    }

    // Notes that a transfer has left; says whether the next round was held until then.
    bool leave(std::uint32_t row, std::uint32_t chunk) {
        Rows& next = at(part_.source[row], chunk);
        return --next.leaving == 0 && next.is_held;
    }

  private:
    struct Rows {
        std::uint32_t send = kNone;     // the next row that the rank will send
        std::uint32_t receive = kNone;  // the first row that it still waits for
        std::uint32_t leaving = 0;      // how many it is sending
        std::int32_t round = 0;         // of those
        bool is_held = false;           // the next send waits until they have left
    };

    Rows& at(std::uint32_t rank, std::uint32_t chunk) {
        return progress_[std::size_t{chunk} * workers_ + rank];
    }

    // Chains each rank's rows, from the last to the first.
    void link_rows() {
        for (std::uint32_t row = static_cast<std::uint32_t>(rows_); row-- > 0;) {
            Rows& sender = first_[part_.source[row]];
            next_sent_[row] = sender.send;
            sender.send = row;
            Rows& receiver = first_[part_.target[row]];
            next_received_[row] = receiver.receive;
            receiver.receive = row;
        }
    }

    const Part& part_;
    std::size_t rows_;
    std::uint32_t workers_;
    std::vector<std::uint32_t> next_sent_;      // after a row, by the same sender
    std::vector<std::uint32_t> next_received_;  // after a row, by the same receiver
    std::vector<Rows> first_;                   // by rank
    std::vector<Rows> progress_;                // by chunk and rank
    std::vector<std::uint8_t> arrived_;         // by chunk and row
};

// ---------------------------------------------------------------------------------------------
// Connections and the links they meet on. Link r is what rank r sends, link workers + r what it
// receives.

struct Queued {
    std::uint32_t transfer;
    std::uint32_t chunk;
};

struct Connection {
    std::uint32_t uplink;
    std::uint32_t downlink;
    bool busy = false;
    std::uint32_t waiting = 0;      // transfers behind the one being sent
    Queued sending{};               // if busy
    double remaining_bytes = 0;     // of it, as of `updated_s`
    double rate = 0;                // bytes per second; 0 until its share is settled
    double updated_s = 0;
    std::uint32_t schedule = 0;     // a "sent" event of an older schedule is stale
    std::uint32_t visit = 0;
    std::uint32_t before[2] = {};   // its neighbours among those busy on its uplink
    std::uint32_t after[2] = {};    // and on its downlink
};

struct Link {
    std::uint32_t first = kNone;  // of the busy connections on it
    std::uint32_t busy = 0;       // how many they are
    std::uint32_t unsettled = 0;  // how many have no share yet
    std::uint32_t visit = 0;
    double free_rate = 0;         // what the settled ones leave
};

class Network {
  public:
    Network(const Wires& wires, Agenda& agenda)
        : rate_(wires.bytes_per_s), agenda_(agenda), links_(2 * wires.workers) {}

    std::uint32_t add(std::uint32_t source, std::uint32_t target) {
        const auto workers = static_cast<std::uint32_t>(links_.size() / 2);
        connections_.push_back({source, workers + target});
        waiting_.emplace_back();
        return static_cast<std::uint32_t>(connections_.size() - 1);
    }

    void enqueue(std::uint32_t id, Queued transfer, double bytes) {
        if (connections_[id].busy) {
            waiting_[id].push_back(transfer);
            ++connections_[id].waiting;
        } else {
            begin(id, transfer, bytes);
        }
    }

    bool is_current(std::uint32_t id, std::uint32_t schedule) const {
        return connections_[id].schedule == schedule;
    }

    // What the connection was sending has left.
    Queued finish(std::uint32_t id) {
        Connection& connection = connections_[id];
        connection.busy = false;
        leave(connection, connection.uplink, 0);
        leave(connection, connection.downlink, 1);
        return connection.sending;
    }

    bool has_waiting(std::uint32_t id) const { return connections_[id].waiting > 0; }

    Queued take_waiting(std::uint32_t id) {
        const Queued next = waiting_[id].front();
        waiting_[id].pop_front();
        --connections_[id].waiting;
        return next;
    }

    void begin(std::uint32_t id, Queued transfer, double bytes) {
        Connection& connection = connections_[id];
        connection.busy = true;
        connection.sending = transfer;
        connection.remaining_bytes = bytes;
        connection.rate = 0;
        join(id, connection.uplink, 0);
        join(id, connection.downlink, 1);
        begun_.push_back(id);
    }

    // Settles the shares of everything that changed since the clock last moved.
    void settle(double now_s) {
        ++epoch_;
        for (std::uint32_t id : begun_) {
            const Connection& connection = connections_[id];
            if (alone(connection)) {
                set_rate(id, rate_, now_s);
            } else {
                share_component(connection.uplink, now_s);
            }
        }
        for (std::uint32_t link : left_) {
            if (links_[link].busy) share_component(link, now_s);
        }
        begun_.clear();
        left_.clear();
    }

  private:
    bool alone(const Connection& connection) const {
        return links_[connection.uplink].busy == 1 && links_[connection.downlink].busy == 1;
    }

    // The busy connections of a link form a list: through side 0 of its members on an uplink,
    // through side 1 on a downlink.
    void join(std::uint32_t id, std::uint32_t number, int side) {
        Link& link = links_[number];
        connections_[id].before[side] = kNone;
        connections_[id].after[side] = link.first;
        if (link.first != kNone) connections_[link.first].before[side] = id;
        link.first = id;
        ++link.busy;
    }

    void leave(const Connection& connection, std::uint32_t number, int side) {
        Link& link = links_[number];
        const std::uint32_t before = connection.before[side];
        const std::uint32_t after = connection.after[side];
        (before == kNone ? link.first : connections_[before].after[side]) = after;
        if (after != kNone) connections_[after].before[side] = before;
        if (--link.busy) left_.push_back(number);
    }

    template <typename Visit>
    void each_busy(std::uint32_t number, Visit visit) const {
        const int side = number < links_.size() / 2 ? 0 : 1;
        for (std::uint32_t id = links_[number].first; id != kNone;
             id = connections_[id].after[side]) {
            visit(id);
        }
    }

    void set_rate(std::uint32_t id, double rate, double now_s) {
        Connection& connection = connections_[id];
        if (connection.rate == rate) return;
        if (connection.rate > 0) {
            const double moved = connection.rate * (now_s - connection.updated_s);
            connection.remaining_bytes = std::max(0.0, connection.remaining_bytes - moved);
        }
        connection.rate = rate;
        connection.updated_s = now_s;
        ++connection.schedule;
        agenda_.after(now_s, connection.remaining_bytes / rate, What::sent, id,
                      connection.schedule);
    }

    // Max-min fair shares for all connections that can influence the one link: the link with the
    // least to give per connection settles first, again and again (progressive filling).
    void share_component(std::uint32_t first_link, double now_s) {
        if (links_[first_link].visit == epoch_) return;
        collect_component(first_link);
        using Offer = std::pair<double, std::uint32_t>;
        std::priority_queue<Offer, std::vector<Offer>, std::greater<Offer>> offers;
        for (std::uint32_t link : component_) {
            links_[link].free_rate = rate_;
            links_[link].unsettled = links_[link].busy;
            offers.push({offer(links_[link]), link});
        }
        while (!offers.empty()) {
            const auto [share, link] = offers.top();
            offers.pop();
            if (links_[link].unsettled == 0) continue;
            if (share != offer(links_[link])) {  // others on it have settled since
                offers.push({offer(links_[link]), link});
                continue;
            }
            each_busy(link, [&](std::uint32_t id) {
                if (connections_[id].visit != epoch_) settle_share(id, share, now_s);
            });
        }
    }

    double offer(const Link& link) const { return link.free_rate / link.unsettled; }

    void settle_share(std::uint32_t id, double share, double now_s) {
        Connection& connection = connections_[id];
        connection.visit = epoch_;
        for (std::uint32_t link : {connection.uplink, connection.downlink}) {
            links_[link].free_rate = std::max(0.0, links_[link].free_rate - share);
            --links_[link].unsettled;
        }
        set_rate(id, share, now_s);
    }

    void collect_component(std::uint32_t first_link) {
        component_.assign(1, first_link);
        links_[first_link].visit = epoch_;
        for (std::size_t i = 0; i < component_.size(); ++i) {
            each_busy(component_[i], [&](std::uint32_t id) {
                for (std::uint32_t link : {connections_[id].uplink, connections_[id].downlink}) {
                    if (links_[link].visit == epoch_) continue;
                    links_[link].visit = epoch_;
                    component_.push_back(link);
                }
            });
        }
    }

    double rate_;
    Agenda& agenda_;
    std::vector<Link> links_;
    std::vector<Connection> connections_;
    std::vector<std::deque<Queued>> waiting_;  // apart, so that what is hot stays small
    std::vector<std::uint32_t> begun_;
    std::vector<std::uint32_t> left_;
    std::vector<std::uint32_t> component_;
    std::uint32_t epoch_ = 0;
};

// ---------------------------------------------------------------------------------------------

class Player {
  public:
    Player(const Wires& wires, const std::vector<Part>& parts, const std::vector<SizeClass>& sizes,
           std::uint32_t chunks_at_once)
        : wires_(wires), parts_(parts), sizes_(sizes), network_(wires, agenda_) {
        std::uint32_t rows = 0;
        for (const Part& part : parts) {
            states_.emplace_back(part, wires.workers, chunks_at_once);
            first_row_.push_back(rows);
            rows += static_cast<std::uint32_t>(part.round.size());
        }
        connect(rows);
    }

    std::uint64_t transfers() const { return transfers_; }

    // Plays chunks 0 ... chunks-1 from `now_s`, and returns when the last transfer was received.
    double play(std::uint32_t chunks, double now_s, const std::function<void()>& pause) {
        release_first(chunks);
        network_.settle(now_s);
        double end_s = now_s;
        Event event{};
        for (double time_s = agenda_.next_time_s(); time_s < kNever;
             time_s = agenda_.next_time_s()) {
            while (agenda_.take(time_s, event)) {
                if (is_stale(event)) continue;
                end_s = time_s;
                handle(event);
                if ((++handled_ & 0xfffff) == 0) pause();
            }
            network_.settle(time_s);
        }
        return end_s;
    }

    void rewind() {
        for (PartState& state : states_) state.rewind();
    }

  private:
    // Names the connection of every transfer; ranks that exchange several share one.
    void connect(std::uint32_t rows) {
        connection_of_.resize(rows);
        std::unordered_map<std::uint64_t, std::uint32_t> known;
        std::vector<std::pair<std::int32_t, std::uint32_t>> latest(wires_.workers, {-1, kNone});
        for (std::size_t p = 0; p < parts_.size(); ++p) {
            for (std::uint32_t row = 0; row < parts_[p].source.size(); ++row) {
                const std::uint32_t source = parts_[p].source[row];
                const std::int32_t target = parts_[p].target[row];
                if (latest[source].first != target) {
                    const std::uint64_t key = std::uint64_t{source} << 32 | std::uint32_t(target);
                    auto [found, is_new] = known.try_emplace(key, kNone);
                    if (is_new) found->second = network_.add(source, target);
                    latest[source] = {target, found->second};
                }
                connection_of_[first_row_[p] + row] = latest[source].second;
            }
        }
    }

    void release_first(std::uint32_t chunks) {
        for (std::uint32_t chunk = 0; chunk < chunks; ++chunk) {
            for (std::size_t part = 0; part < parts_.size(); ++part) {
                for (std::uint32_t rank = 0; rank < wires_.workers; ++rank) {
                    release(part, rank, chunk);
                }
            }
        }
    }

    bool is_stale(const Event& event) const {
        return event.what == What::sent && !network_.is_current(event.subject, event.detail);
    }

    void handle(const Event& event) {
        if (event.what == What::delivered) {
            receive(event.subject, event.detail);
            return;
        }
        const Queued sent = network_.finish(event.subject);
        if (network_.has_waiting(event.subject)) {
            const Queued next = network_.take_waiting(event.subject);
            network_.begin(event.subject, next, size_of(next.transfer).bytes);
        }
        leave(sent);
        const double delay_s = wires_.latency_s + size_of(sent.transfer).add_s;
        if (delay_s > 0) {
            agenda_.after(event.time_s, delay_s, What::delivered, sent.transfer, sent.chunk);
        } else {
            receive(sent.transfer, sent.chunk);
        }
    }

    void leave(const Queued& sent) {
        const std::size_t part = part_of(sent.transfer);
        const std::uint32_t row = sent.transfer - first_row_[part];
        if (states_[part].leave(row, sent.chunk)) {
            release(part, parts_[part].source[row], sent.chunk);
        }
    }

    void receive(std::uint32_t transfer, std::uint32_t chunk) {
        ++transfers_;
        const std::size_t part = part_of(transfer);
        const std::uint32_t row = transfer - first_row_[part];
        states_[part].arrive(row, chunk);
        release(part, parts_[part].target[row], chunk);
    }

    void release(std::size_t part, std::uint32_t rank, std::uint32_t chunk) {
        states_[part].release(rank, chunk, [&](std::uint32_t row) {
            const std::uint32_t transfer = first_row_[part] + row;
            network_.enqueue(connection_of_[transfer], {transfer, chunk}, size_of(transfer).bytes);
        });
    }

    std::size_t part_of(std::uint32_t transfer) const {
        std::size_t part = first_row_.size() - 1;
        while (first_row_[part] > transfer) --part;
        return part;
    }

    const SizeClass& size_of(std::uint32_t transfer) const {
        const std::size_t part = part_of(transfer);
        return sizes_[parts_[part].size_class[transfer - first_row_[part]]];
    }

    const Wires& wires_;
    const std::vector<Part>& parts_;
    const std::vector<SizeClass>& sizes_;
    Agenda agenda_;
    Network network_;
    std::vector<PartState> states_;
    std::vector<std::uint32_t> first_row_;      // of each part, in the numbering of all transfers
    std::vector<std::uint32_t> connection_of_;  // each transfer
    std::uint64_t transfers_ = 0;
    std::uint64_t handled_ = 0;
};

}  // namespace

Outcome play(const Wires& wires, const std::vector<Part>& parts,
             const std::vector<SizeClass>& sizes, std::uint32_t chunks, bool serial,
             const std::function<void()>& pause) {
    std::uint64_t expected = 0;
    for (const Part& part : parts) expected += std::uint64_t{chunks} * part.round.size();
    const std::uint32_t at_once = serial ? 1 : chunks;
    Player player(wires, parts, sizes, at_once);
    double time_s = player.play(at_once, 0.0, pause);
    for (std::uint32_t chunk = 1; serial && chunk < chunks; ++chunk) {
        player.rewind();
        time_s = player.play(1, time_s, pause);
    }
    if (player.transfers() != expected) {
        throw std::logic_error("a plan waits for itself: some transfers were never released");
    }
    return {time_s, player.transfers()};
}

}  // namespace fullwire
