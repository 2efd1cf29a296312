// Connections over the links of a network, each at its max-min fair rate.
//
// A link that is full has a level: what it gives to a connection at most. A connection's rate is the
// lowest level on its way. Whether that holds can be told link by link, so a change is settled from
// where it happened outwards: first among the links that connections joined or left, then with the
// links that felt the difference, and so on until none does.

#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <span>
#include <vector>

namespace fullwire {

class SharedLinks {
  public:
    SharedLinks(std::span<const double> bytes_per_s, std::span<const std::int64_t> crossings_begin,
                std::span<const std::int32_t> link, std::span<const std::int32_t> weight);

    void join(std::uint32_t connection);
    void leave(std::uint32_t connection);

    // Settles what has changed, and lists the connections whose rate did.
    const std::vector<std::uint32_t>& settle();
    double rate(std::uint32_t connection) const { return connections_[connection].rate; }

  private:
    static constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();
    static constexpr double kUnlimited = std::numeric_limits<double>::infinity();

    struct Crossing {
        std::uint32_t link;
        std::uint32_t connection;
        double weight;
        std::uint32_t before = kNone;  // among the busy ones of the link
        std::uint32_t after = kNone;
    };

    struct Connection {
        std::uint32_t first = 0;  // of its crossings
        std::uint32_t end = 0;
        double rate = 0;
        double alone = kUnlimited;  // its rate where it meets no other
        double share = 0;           // of the filling now under way
        std::uint32_t filling = 0;  // its number
        std::uint32_t bounded = 0;  // the latest filling that knows what is outside of it
        bool is_new = false;
    };

    struct Link {
        double bytes_per_s = 0;
        double level = kUnlimited;
        double free_rate = 0;        // what the settled ones leave
        double unsettled = 0;        // the weight of those without a share yet
        std::uint32_t busy = 0;      // so many connections share it
        std::uint32_t first = kNone; // crossing of them
        std::uint32_t region = 0;    // the latest that it belonged to
        double offer() const { return free_rate / unsettled; }
    };

    // What a link can give to each of its connections without a share yet; or what the links around
    // the region leave to one connection.
    struct Offer {
        double share;
        std::uint32_t link;
        std::uint32_t only;
        bool operator>(const Offer& other) const {
            if (share != other.share) return share > other.share;
            return link != other.link ? link > other.link : only > other.only;
        }
    };

    template <typename Visit>
    void each_crossing(std::uint32_t connection, Visit visit) const;
    template <typename Visit>
    void each_busy(std::uint32_t link, Visit visit) const;

    void share();
    void include(std::uint32_t link);
    bool is_inside(std::uint32_t link) const { return links_[link].region == region_; }
    void fill();
    void offer_afresh(std::uint32_t link);
    double bound_outside(std::uint32_t connection) const;
    void take_up(const Offer& least);
    bool is_settled(std::uint32_t connection) const {
        return connections_[connection].filling == filling_;
    }
    void settle_on(std::uint32_t connection, double share);
    void widen();
    bool is_overfull(std::uint32_t link) const;

    std::vector<Link> links_;
    std::vector<Crossing> crossings_;
    std::vector<Connection> connections_;
    std::vector<std::uint32_t> joined_;
    std::vector<std::uint32_t> changed_;    // links that one of several connections joined or left
    std::vector<std::uint32_t> different_;  // connections whose rate has changed
    std::vector<std::uint32_t> inside_;     // links of the region being settled
    std::vector<std::uint32_t> settled_;    // connections, by the filling now under way
    std::priority_queue<Offer, std::vector<Offer>, std::greater<>> offers_;
    std::uint32_t region_ = 0;
    std::uint32_t filling_ = 0;
};

}  // namespace fullwire
