// The network between hosts that are made on one machine: slow, lossy, and broken as it is told.
//
//     network HOSTS PREFIX
//
// Makes one TUN device per host, PREFIX1 to PREFIX<HOSTS>, which the caller moves into the host's namespace, and
// forwards IP packets between them by the last byte of their address. Each host has a link of a given rate to a switch;
// a packet is sent over the link of its source and then over that of its destination, one after the other, and arrives
// after a delay. What waits too long for a link is dropped, as by a switch whose memory is full.
//
// Reads commands from its standard input, and ends with it, and the devices with it:
//     network MICROSECONDS MEGABITS_PER_SECOND LOST_PER_MILLION    of all links from now on
//     cut HOST, join HOST                                          nothing passes the link of this host, or all again
//     counts                                                       prints the packets, bytes and losses until now
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <queue>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using Seconds = std::chrono::duration<double>;

constexpr double kLongestQueue = 0.1;     // seconds that a packet waits for a link, at most
constexpr size_t kLargestPacket = 65536;  // bytes
constexpr int kPacketsAtATime = 64;       // from one device, before the others have their turn
constexpr uint8_t kVersion4 = 4;          // of IP
constexpr size_t kDestinationEnd = 19;    // the last byte of its destination's address

Time later(Time time, double seconds) { return time + std::chrono::duration_cast<Clock::duration>(Seconds(seconds)); }

struct Packet {
  Time due;
  uint64_t number;  // packets that are due at one time arrive in order
  int host;
  std::vector<char> bytes;
};

struct IsLater {
  bool operator()(const Packet& a, const Packet& b) const {
    return a.due != b.due ? a.due > b.due : a.number > b.number;
  }
};

struct Link {
  int device = -1;
  Time sends_until, receives_until;
  bool is_cut = false;
};

int make_device(const std::string& name) {
  const int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  ifreq request{};
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  std::strncpy(request.ifr_name, name.c_str(), IFNAMSIZ - 1);
  if (device < 0 || ioctl(device, TUNSETIFF, &request) < 0) {
    std::perror(("network: " + name).c_str());
    std::exit(1);
  }
  return device;
}

class Network {
 public:
  Network(int hosts, const std::string& prefix) : links_(hosts) {
    for (int host = 0; host < hosts; ++host) links_[host].device = make_device(prefix + std::to_string(host + 1));
  }

  void run() {
    std::vector<pollfd> watched{{STDIN_FILENO, POLLIN, 0}};
    for (const Link& link : links_) watched.push_back({link.device, POLLIN, 0});
    while (true) {
      const timespec wait = until_next();
      ppoll(watched.data(), watched.size(), under_way_.empty() ? nullptr : &wait, nullptr);
      if (watched[0].revents && !obey()) return;
      for (size_t host = 0; host < links_.size(); ++host) {
        if (watched[host + 1].revents & POLLIN) take_in(static_cast<int>(host));
        if (watched[host + 1].revents & ~POLLIN) watched[host + 1].fd = -1;  // the host is gone
      }
      deliver();
    }
  }

 private:
  timespec until_next() const {
    if (under_way_.empty()) return {};
    const auto left = std::max(Clock::duration::zero(), under_way_.top().due - Clock::now());
    const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
    return {static_cast<time_t>(nanoseconds / 1000000000), static_cast<long>(nanoseconds % 1000000000)};
  }

  void take_in(int source) {
    char buffer[kLargestPacket];
    for (int count = 0; count < kPacketsAtATime; ++count) {
      const ssize_t size = read(links_[source].device, buffer, sizeof buffer);
      if (size <= 0) return;
      const int host = static_cast<uint8_t>(buffer[kDestinationEnd]) - 1;
      const bool is_for_a_host = static_cast<uint8_t>(buffer[0]) >> 4 == kVersion4 && host >= 0 &&
                                 host < static_cast<int>(links_.size()) && host != source;
      if (is_for_a_host) send(source, host, buffer, size);
    }
  }

  void send(int source, int host, const char* bytes, ssize_t size) {
    Link &from = links_[source], &to = links_[host];
    const Time now = Clock::now();
    const double seconds = 8e-6 * size / megabits_;
    const Time sent = later(std::max(now, from.sends_until), seconds);
    const Time received = std::max(sent, later(to.receives_until, seconds));
    const bool is_lost = chance_(random_) * 1e6 < lost_per_million_;
    if (from.is_cut || to.is_cut || is_lost || received > later(now, kLongestQueue + seconds)) {
      ++lost_;
      return;
    }
    from.sends_until = sent;
    to.receives_until = received;
    ++packets_;
    bytes_ += size;
    under_way_.push({later(received, 1e-6 * microseconds_), packets_, host, {bytes, bytes + size}});
  }

  void deliver() {
    while (!under_way_.empty() && under_way_.top().due <= Clock::now()) {
      const Packet& packet = under_way_.top();
      const Link& to = links_[packet.host];
      if (to.is_cut || write(to.device, packet.bytes.data(), packet.bytes.size()) < 0) ++lost_;
      under_way_.pop();
    }
  }

  // What the standard input says; false at its end.
  bool obey() {
    char buffer[4096];
    const ssize_t size = read(STDIN_FILENO, buffer, sizeof buffer);
    if (size <= 0) return false;
    pending_.append(buffer, size);
    for (size_t end; (end = pending_.find('\n')) != std::string::npos; pending_.erase(0, end + 1)) {
      std::istringstream words(pending_.substr(0, end));
      std::string verb;
      words >> verb;
      if (verb == "network") {
        words >> microseconds_ >> megabits_ >> lost_per_million_;
      } else if (verb == "counts") {
        std::printf("%llu %llu %llu\n", static_cast<unsigned long long>(packets_),
                    static_cast<unsigned long long>(bytes_), static_cast<unsigned long long>(lost_));
        std::fflush(stdout);
      } else {
        size_t host = 0;
        words >> host;
        links_.at(host - 1).is_cut = verb == "cut";
      }
    }
    return true;
  }

  std::vector<Link> links_;
  std::priority_queue<Packet, std::vector<Packet>, IsLater> under_way_;
  std::mt19937_64 random_{std::random_device{}()};
  std::uniform_real_distribution<double> chance_{0, 1};
  double microseconds_ = 50, megabits_ = 10000, lost_per_million_ = 0;
  uint64_t packets_ = 0, bytes_ = 0, lost_ = 0;
  std::string pending_;
};

}  // namespace

int main(int count, char** words) {
  if (count != 3) {
    std::fprintf(stderr, "usage: network HOSTS PREFIX\n");
    return 2;
  }
  // It is the network's hardware: it does not wait for processes of the hosts, where it may.
  const sched_param first{1};
  sched_setscheduler(0, SCHED_RR, &first);
  prctl(PR_SET_TIMERSLACK, 1);
  Network network(std::atoi(words[1]), words[2]);
  std::puts("ready");
  std::fflush(stdout);
  network.run();
}
