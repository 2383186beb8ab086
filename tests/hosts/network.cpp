// The network between hosts that are made on one machine: slow, lossy, and broken as it is told.
//
//     network HOSTS PREFIX MICROSECONDS MEGABITS_PER_SECOND LOST_PER_MILLION
//
// Makes one TUN device per host, PREFIX1 to PREFIX<HOSTS>, which the caller moves into the host's namespace, and
// forwards IP packets between them by the last byte of their address. Each host has a link of a given rate to a switch;
// a packet is sent over the link of its source and then over that of its destination, one after the other, and arrives
// after a delay. What waits too long for a link is dropped, as by a switch whose memory is full.
//
// Reads commands from its standard input, and ends with it, and the devices with it:
//     cut HOST, join HOST    nothing passes the link of this host, or all again
//     counts                 prints the packets, bytes and losses until now
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <queue>
#include <random>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

namespace {

constexpr double kLongestQueue = 0.1;     // seconds that a packet waits for a link, at most
constexpr size_t kLargestPacket = 65536;  // bytes
constexpr int kPacketsAtATime = 64;       // from one device, before the others have their turn
constexpr uint8_t kVersion4 = 4;          // of IP
constexpr size_t kDestinationEnd = 19;    // the last byte of its destination's address

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Packet {
  double due;       // seconds, as all times
  uint64_t number;  // packets that are due at one time arrive in order
  int host;
  std::vector<char> bytes;

  bool operator<(const Packet& other) const {  // the last of a queue is the next
    return std::tie(due, number) > std::tie(other.due, other.number);
  }
};

struct Link {
  int device = -1;
  double sends_until = 0, receives_until = 0;
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
  explicit Network(char** words)
      : links_(std::atoi(words[0])),
        microseconds_(std::atof(words[2])),
        megabits_(std::atof(words[3])),
        lost_per_million_(std::atof(words[4])) {
    int host = 0;
    for (Link& link : links_) link.device = make_device(words[1] + std::to_string(++host));
  }

  void run() {
    std::vector<pollfd> watched{{STDIN_FILENO, POLLIN, 0}};
    for (const Link& link : links_) watched.push_back({link.device, POLLIN, 0});
    while (true) {
      const double seconds = under_way_.empty() ? 1 : std::max(0.0, under_way_.top().due - now());
      const timespec wait{static_cast<time_t>(seconds), static_cast<long>(1e9 * std::fmod(seconds, 1))};
      ppoll(watched.data(), watched.size(), &wait, nullptr);
      if (watched[0].revents && !obey()) return;
      for (size_t host = 0; host < links_.size(); ++host) {
        if (watched[host + 1].revents & POLLIN) take_in(static_cast<int>(host));
        if (watched[host + 1].revents & ~POLLIN) watched[host + 1].fd = -1;  // the host is gone
      }
      deliver();
    }
  }

 private:
  void take_in(int source) {
    char buffer[kLargestPacket];
    for (int count = 0; count < kPacketsAtATime; ++count) {
      const ssize_t size = read(links_[source].device, buffer, sizeof buffer);
      if (size <= 0) return;
      const int host = static_cast<uint8_t>(buffer[kDestinationEnd]) - 1;
      const bool is_a_host = host >= 0 && host < static_cast<int>(links_.size()) && host != source;
      if (is_a_host && static_cast<uint8_t>(buffer[0]) >> 4 == kVersion4) send(source, host, buffer, size);
    }
  }

  void send(int source, int host, const char* bytes, ssize_t size) {
    Link &from = links_[source], &to = links_[host];
    const double began = now(), seconds = 8e-6 * size / megabits_;
    const double sent = std::max(began, from.sends_until) + seconds;
    const double received = std::max(sent, to.receives_until + seconds);
    const bool is_lost = chance_(random_) * 1e6 < lost_per_million_;
    if (from.is_cut || to.is_cut || is_lost || received > began + kLongestQueue + seconds) {
      ++lost_;
      return;
    }
    from.sends_until = sent;
    to.receives_until = received;
    ++packets_;
    bytes_ += size;
    under_way_.push({received + 1e-6 * microseconds_, packets_, host, {bytes, bytes + size}});
  }

  void deliver() {
    while (!under_way_.empty() && under_way_.top().due <= now()) {
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
    std::istringstream words(std::string(buffer, size));  // whole lines: what is so short is written in one piece
    for (std::string verb; words >> verb;) {
      if (verb == "counts") {
        std::cout << packets_ << ' ' << bytes_ << ' ' << lost_ << std::endl;
        continue;
      }
      size_t host = 0;
      words >> host;
      links_.at(host - 1).is_cut = verb == "cut";
    }
    return true;
  }

  std::vector<Link> links_;
  const double microseconds_, megabits_, lost_per_million_;
  std::priority_queue<Packet> under_way_;
  std::mt19937_64 random_{std::random_device{}()};
  std::uniform_real_distribution<double> chance_{0, 1};
  uint64_t packets_ = 0, bytes_ = 0, lost_ = 0;
};

}  // namespace

int main(int, char** words) {
  // It is the network's hardware: it does not wait for processes of the hosts, where it may.
  const sched_param first{1};
  sched_setscheduler(0, SCHED_RR, &first);
  prctl(PR_SET_TIMERSLACK, 1);
  Network network(words + 1);
  std::cout << "ready" << std::endl;
  network.run();
}
