// What a plain program over libpcap does: payload bytes of each direction of TCP over IPv4.

#include <arpa/inet.h>
#include <pcap/pcap.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { PLACES = 1 << 16 };

struct flow {
    uint8_t ends[12];
    uint64_t packets, payload_bytes;
};

static struct flow flows[PLACES];

static struct flow *flow_of(const uint8_t *addresses, const uint8_t *ports) {
    uint8_t ends[12];
    uint32_t words[3];
    memcpy(ends, addresses, 8);
    memcpy(ends + 8, ports, 4);
    memcpy(words, ends, 12);
    uint32_t place = (words[0] * 2654435761u ^ words[1] * 2246822519u ^ words[2] * 3266489917u);
    for (place >>= 16;; place = (place + 1) % PLACES) {
        struct flow *flow = &flows[place];
        if (flow->packets == 0) memcpy(flow->ends, ends, 12);
        if (memcmp(flow->ends, ends, 12) == 0) return flow;
    }
}

int main(int count, char **words) {
    char error[PCAP_ERRBUF_SIZE];
    pcap_t *capture = count == 2 ? pcap_open_offline(words[1], error) : NULL;
    if (!capture) return 1;
    struct pcap_pkthdr *header;
    const uint8_t *data;
    while (pcap_next_ex(capture, &header, &data) == 1) {
        if (header->caplen < 54 || data[12] != 8 || data[13] != 0 || data[23] != 6) continue;
        const uint8_t *ip = data + 14;
        const uint8_t *tcp = ip + (ip[0] & 15) * 4;
        uint16_t total;
        memcpy(&total, ip + 2, 2);
        struct flow *flow = flow_of(ip + 12, tcp);
        flow->packets++;
        flow->payload_bytes += ntohs(total) - (ip[0] & 15) * 4 - (tcp[12] >> 4) * 4;
    }
    for (int place = 0; place < PLACES; place++) {
        if (flows[place].packets) {
            printf("%llu %llu\n", (unsigned long long)flows[place].packets,
                   (unsigned long long)flows[place].payload_bytes);
        }
    }
    pcap_close(capture);
    return 0;
}
