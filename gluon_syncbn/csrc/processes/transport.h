// The ways on which messages of one process reach others of its job: host_memory.h within a host, and the communicator
// (MPI or Horovod), whose messages Python carries (all.cpp).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace gluon_syncbn {

struct Message {
  enum Kind : int64_t {
    kVector,     // the vector that the process brings to an exchange
    kAbandoned,  // the process has abandoned its step: the key is the number of its next resume; the numbers are
                 // whether it uses the memory that it shares, and the first process that abandoned the step
    kLeft,       // a process has ended: the numbers are its rank, and the rank whose end was the cause
    kBundle,     // the vectors that the processes of a host bring to an exchange (hosts.h)
    kCame,       // the process came to an exchange a while ago
  };
  int64_t kind = kVector;
  int64_t key = 0;
  int64_t round = 0;  // of kAbandoned, the highest that the process has had
  std::vector<double> numbers;
};

// How often the thread that carries the communicator's messages must look for messages that arrive.
enum Need { kNotNow, kNowAndThen, kAllTheTime };

class Transport {
 public:
  // Takes in a message of a rank, on any thread.
  using Receive = std::function<void(int rank, Message message)>;

  virtual ~Transport() = default;

  // Sends a message to each of these ranks, without waiting for them.
  virtual void send(const Message& message, const std::vector<int>& ranks) = 0;

  // Takes in the messages that have arrived; false if another thread is at it. Called after messages have been sent,
  // and while something waits.
  virtual bool look() noexcept { return true; }

  // Looks for a moment, if it may well be worth it, until there is nothing to wait for.
  virtual void linger(const std::function<bool()>& /*is_over*/) {}

  // Whether a rank has ended without a word.
  virtual bool has_lost(int /*rank*/) { return false; }

  // Asks which of these ranks have come to a round; `Processes::hear_who_came` takes the answer.
  virtual void ask_who_came(int64_t /*key*/, int64_t /*round*/, const std::vector<int>& /*ranks*/) {}

  // The step has failed here or was abandoned, and no message can say so.
  virtual void abandon(const std::string& /*why*/) {}
};

}  // namespace gluon_syncbn
