// Messages between the processes of one host, through memory that they share.
//
// The memory is a file without a name (memfd_create): only the host's memory limits it, and nothing of it is left when
// the last process is gone. One process makes it and tells the others its own number and the number of the file in
// /proc. The file there has a random number in its name, which proves that it is the right one: a process of another
// container could have the same host name or the same process number.
//
// From each process to each other leads a ring, which one writes and the other reads: a stream of bytes, in which each
// message is a head and its numbers. `written` moves after the bytes before it are complete, so nobody reads more than
// that from a process that is killed in the middle. Messages that have no room wait in the writer's queue, so a message
// may be larger than a ring, and nobody waits for a process that does not read.
//
// Each process has a bell. A process that has written, or has made room in a ring that was full, rings the bell of the
// other: it counts the bell up, and then wakes the thread that sleeps on it, if that thread has said that it sleeps.
// The thread says so first and then reads the count once more, so one of the two sees the other; and it sleeps for 100
// ms at most. One thread per process takes messages in. A thread that has just sent a message does so, too, unless
// another is at it: then the last process that comes to an exchange needs no other thread. Where every process can have
// a core, the thread that has sent keeps looking for some microseconds, because to wake a thread takes longer.
//
// A process holds a lock on the file (an open file description's), which goes with the process however it ends. A child
// that is forked has neither the memory nor the thread, and closes the file.
#pragma once

#include <unistd.h>

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
  // Closes its file when it goes.
  struct File {
    explicit File(int number_) : number(number_) {}
    ~File() { close(); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    void close() {
      if (number >= 0) ::close(number);
      number = -1;
    }

    int number;  // -1 if it is not open
  };

  // New memory: others find it as long as this lives.
  struct Offer {
    explicit Offer(int size);  // for so many processes; throws std::runtime_error

    const std::string number;  // a random one
    const File file;
    std::string where;
  };

  // Joins these ranks, in order, in the memory that `where` tells of, as one of them. Throws std::runtime_error.
  HostMemory(const std::string& where, int rank, const std::vector<int>& ranks, Receive receive);

  ~HostMemory() override;

  void send(const Message& message, const std::vector<int>& ranks) override;
  bool look() noexcept override;
  void linger(const std::function<bool()>& is_over) override;
  bool has_lost(int rank) override { return is_gone(place_of(rank)); }

  // Waits until all messages are on their way, for so many seconds at most.
  void flush(double most);

  // In a process that was forked: the lock is to go with the parent.
  void forget() { file_.close(); }

 private:
  struct Segment;
  struct Bell;
  struct Ring;
  struct Header {  // of a message; its numbers follow
    int64_t kind, key, round, numbers;
  };
  // The messages on their way to one process.
  struct Outgoing {
    std::mutex mutex;
    std::deque<std::shared_ptr<const std::vector<char>>> waiting;  // messages that have no room yet
    size_t written = 0;                                            // bytes of the first of them
  };
  // The message that comes from one process.
  struct Incoming {
    Header head{};
    std::vector<double> numbers;
    size_t come = 0;  // bytes of both
  };

  // Here and below, each process is its place among the ranks.
  int place_of(int rank) const;
  std::shared_ptr<Segment> map() const;  // takes the process's lock, and maps the memory
  Bell& bell(int place) const;
  Ring& ring(int from, int to) const;
  void ring_bell(int place) const;
  bool is_gone(int place) const;
  void write(int to, Outgoing& outgoing);  // as much as has room; with its lock held
  void take_in(int from);                  // all that is there; by one thread at a time
  void serve();                            // the thread

  const std::vector<int> ranks_;
  const int place_, size_;
  File file_;  // closed in a process that was forked
  const std::shared_ptr<Segment> segment_;
  const Receive receive_;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  std::atomic<uint32_t> looks_{0};  // calls of `look` since the one that is at it began
  std::atomic<bool> is_over_{false};
  std::thread thread_;  // the last: it uses all of the above
};

}  // namespace gluon_syncbn
