// Messages between processes of one host, through memory that they share.
//
// The memory is a file without a name (memfd_create): nothing limits it but the host's memory, and nothing of it is
// left when the last process is gone. One process makes it, and tells the others, by whatever they have met by, where:
// its own number and the file's in /proc. The name there has a random number in it, which proves that it is that file:
// a host name or a process number could be that of another container.
//
// From each process to each other leads a ring, which one writes and the other reads: a stream of bytes, in which each
// message is its head and its numbers. `written` moves when what is before it is there, so that of a process that is
// killed in the middle nobody reads more than that. What has no room waits in the writer's queue, so that a message may
// be larger than a ring, and nobody waits for a process that does not read.
//
// Each process has a bell. Whoever has written, or has made room in a ring that was full, rings the reader's (the
// writer's): it counts up, and then wakes the thread that sleeps on it, if one says that it does. That thread says so
// first and then looks once more, so one of the two sees the other; and it sleeps for no longer than 100 ms at a time.
// One thread per process takes in what is there; so does whoever has just sent something, if no other is at it: the
// last process to come to an exchange needs no other thread. Where every process can have a core, who has sent
// something looks for some microseconds more: to wake a thread takes longer.
//
// A process holds a lock on the file (an open file description's), which goes with it however it ends. A child that is
// forked has none of this: not the memory, not the thread, and it closes the file.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "processes/transport.h"

namespace gluon_syncbn {

class HostMemory : public Transport {
 public:
  // Memory as it is made: others find it as long as this lives.
  struct Offer {
    explicit Offer(int size);  // of so many processes; throws std::runtime_error
    ~Offer();
    Offer(const Offer&) = delete;
    Offer& operator=(const Offer&) = delete;

    int file = -1;
    std::string where;
  };

  // Joins these ranks, in order, in the memory that `where` tells of, as one of them. Throws std::runtime_error if it
  // cannot be had here.
  static std::shared_ptr<HostMemory> join(const std::string& where, int rank, const std::vector<int>& ranks,
                                          Receive receive);

  ~HostMemory() override;
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  void send(const Message& message, const std::vector<int>& ranks) override;
  bool look() noexcept override;
  void linger(const std::function<bool()>& is_over) override;
  bool has_lost(int rank) override;

  // Waits until all that was sent is on its way, for so many seconds at most.
  void flush(double most);

  // In a process that was forked: the lock is to go with the parent.
  void forget();

 private:
  struct Segment;
  struct Bell;
  struct Ring;
  struct Head {  // of a message; its numbers follow
    int64_t kind, key, round, numbers;
  };
  // The messages on their way to one process.
  struct Outgoing {
    std::mutex mutex;
    std::deque<std::shared_ptr<const std::vector<char>>> waiting;  // what has no room yet
    size_t written = 0;                                            // bytes of the first of them
  };
  // The message that comes from one process.
  struct Incoming {
    Head head{};
    std::vector<double> numbers;
    size_t come = 0;  // bytes of both
  };

  HostMemory(int file, int place, const std::vector<int>& ranks, Segment* segment, Receive receive);

  // Of these, and below, each process is its place among the ranks.
  int place_of(int rank) const;
  Bell& bell(int place) const;
  Ring& ring(int from, int to) const;
  void ring_bell(int place) const;
  bool is_gone(int place) const;
  void write(int to, Outgoing& outgoing);  // what has room; with its lock held
  void take_in(int from);                  // what is there; by one thread at a time
  void serve();                            // the thread

  int file_;  // -1 in a process that was forked
  const std::vector<int> ranks_;
  const int place_, size_;
  Segment* const segment_;
  const Receive receive_;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  std::atomic<uint32_t> looks_{0};  // that were asked for since the one at it began
  std::atomic<bool> is_over_{false};
  std::thread thread_;  // the last: it uses all of the above
};

}  // namespace gluon_syncbn
