// The processes of a job, or some of them, as one of them sees them: their exchanges, and steps that fail.
//
// The protocol
// ------------
// An exchange has a key (the layer, the members, the direction; or a subject that Python compares) and a number, its
// round. Forward passes under a key are numbered as they come; a backward pass has the number of its forward pass. Each
// member sends its vector to the others, and puts vectors that arrive into a mailbox, by key and round. When all
// vectors of a round are there, the thread that put the last one there calls the waiting device back. All members get
// one row per member, in the order of ranks: the same input, in the same order, gives the same bits.
//
// No thread waits for an exchange. It ends with its last message, or with an error: when its timeout, or less
// (meeting/waiting.h), is over, when a member has ended, or when any process has abandoned the step. The watchdog looks
// for all of these.
//
// A process is in one of three states:
//
//   open       Exchanges are made.
//   failed     An exchange has ended with an error, or devices of this process have not met. Every further exchange
//              fails at once, with the same text, until Python abandons the step (`abandon`) and so tells the others.
//   resuming   The step was abandoned, after a failure or in the middle. Each process tells the others the highest
//              round that it has had. When it has heard of all (`resume`), it is open again, numbers its rounds from
//              there on, and drops older messages. So no message of the old step can be taken for a part of the next.
//              A process may abandon several steps before it goes on. Abandoned steps are numbered, and each process
//              abandons all of them, one after the other: each fails in all processes.
//
// `epoch` counts abandoned steps. Python prepares an exchange (it compares nets) for one epoch only, and an exchange
// that began in one epoch cannot fail a later one.
//
// Messages go through the communicator; or, once all processes have agreed on it, through memory within a host
// (host_memory.h), and through the communicator between the leaders of hosts alone (hosts.h). A process listens to
// both; until all have agreed, messages to all go both ways. Messages other than vectors go to each process by itself.
// Errors name the missing processes, so a process that has waited for a while tells other hosts that it has come: its
// leader may wait, too. The leader may also deliver the vector of a process after the process has said that it ends, so
// that message counts after a while.
//
// Locks: `mutex_` guards all of the state. Under it, only `watch` and the `send` of a transport are called, so that
// messages leave in the order of events. Callbacks run on the thread that ends the exchange, and must not wait.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "meeting/rendezvous.h"
#include "meeting/watchdog.h"
#include "processes/hosts.h"
#include "processes/transport.h"

namespace gluon_syncbn {

// Where an exchange takes place.
struct Channel {
  std::string what;  // how errors begin, e.g. "SyncBatchNorm 'stem': forward pass"
  int64_t key = 0;
  std::vector<int> members;  // ranks in order, this process among them
  double timeout_seconds = 0;
};

// As Python reads it (base/library.py).
struct State {
  int is_resuming = 0;
  int shares_memory = 0;      // whether messages go through memory within hosts
  int has_lost_some = 0;      // processes did not come in time, and all have not gone on together since
  int open_tasks = 0;         // of the thread that carries messages
  double seconds_failed = 0;  // since the step has failed; 0 if it has not
  int64_t epoch = 0;          // the number of abandoned steps
};

class Processes : public Watched, public std::enable_shared_from_this<Processes> {
 public:
  static constexpr int64_t kNext = 0;  // a round that is to be numbered
  static constexpr int64_t kNoNumber = -1;

  // `outside` is the communicator; `can_resume` says whether it tells others of a step that is abandoned, and shows
  // which have come to a round; if not, it is asked. `advice` ends the error about a missing process. To be made by
  // std::make_shared.
  Processes(int rank, int size, std::string advice, std::shared_ptr<Transport> outside, bool can_resume);

  const int rank, size;

  // All ranks.
  std::vector<int> everyone() const;

  // Listens to the memory that the processes of this host share; and sends through it, once all have agreed to.
  void share(std::shared_ptr<Transport> memory);
  void agree_on_memory();

  // Sets the names of the processes' hosts, for errors.
  void name(std::vector<std::string> names);

  // Brings a vector; `done` is called once, perhaps before this returns. If this throws, it will not be called.
  void exchange(const Channel& channel, int64_t round, std::vector<double> vector, Then done);

  // Takes in a message, from a transport.
  void receive(int from, Message message);

  // Takes the answer of a transport: the ranks that have come to a round; nothing if it does not know.
  void hear_who_came(int64_t key, int64_t round, const std::optional<std::set<int>>& ranks);

  // The communicator does not work any more.
  void lose_transport(const std::string& why);

  // The processes do not work together any more.
  void end(const std::string& why);

  // The step has failed in this process.
  void fail(const std::string& error);

  // Abandons the step, if it has failed or `is_under_way`. Several threads may abandon one step; it has a number then.
  // Returns why, or an empty text if there is nothing to abandon.
  std::string abandon(bool is_under_way, int64_t step = kNoNumber);

  // Calls back when all processes have abandoned the step; `what` begins the error if they do not.
  void resume(const std::string& what, double timeout_seconds, Then done);

  // This process ends.
  void leave();

  uint64_t epoch() const { return epoch_; }  // the number of abandoned steps
  std::string failure() const;               // why the step has failed; empty if it has not
  State state() const;

  // How often the communicator must be looked at: all the time while something waits for it, or while a step has failed
  // of which it cannot tell others; now and then while this process may have to hand messages on.
  Need need_of_carrier() const;

  OpenWaits end_overdue() override;

 private:
  struct Waiting {
    // The text of an error, or an empty one.
    std::string error(const std::string& problem) const {
      return problem.empty() ? "" : channel.what + ": " + problem + ".";
    }

    Channel channel;
    int64_t round;
    std::vector<double> vector;
    uint64_t epoch;
    Then done;
    bool is_resume = false;
    bool has_leaders = false;  // the leader of this host sends its vectors to others
    bool is_told = false;      // it has done so
    bool is_noted = false;     // others have been told that this process has come
    Clock::time_point began = Clock::now();
    std::optional<Waited> waited = std::nullopt;  // in vain: the transport has been asked which ranks came
    Clock::time_point asked = {};
  };
  struct OpenRound {  // of one key and round
    // A rank may be in a round again before it is over here: two backward passes of one forward pass.
    std::map<int, std::deque<std::vector<double>>> arrived;
    std::deque<Waiting> waiting;
  };
  using Address = std::pair<int64_t, int64_t>;  // key and round

  // Calls for the time when the lock is free.
  struct Afterwards {
    std::vector<std::pair<Then, Outcome>> calls;
    std::vector<std::pair<std::shared_ptr<Transport>, bool>> looks;  // where a message was sent; whether it is a vector
    std::vector<std::pair<Channel, int64_t>> questions;              // which ranks have come to this round
    std::string abandoned;                                           // why
  };
  // Runs `work` with the lock, and then all calls that it has left in `afterwards_` without it; nothing in a process
  // that was forked, where the lock may be held for ever.
  template <typename Work>
  void locked(const Work& work);

  // All of these need the lock.
  bool is_resuming() const;
  int64_t highest_had() const;
  bool needs_outside() const { return !uses_memory_ || hosts_.are_several(); }
  std::string refusal(Waiting& mine);            // an error, if the exchange cannot begin
  std::string obstacle(const Waiting& waiting);  // an error, if the exchange cannot end well
  bool has_come(const Waiting& waiting, int other);
  bool have_come(const Waiting& waiting, const std::vector<int>& others);
  bool has_left(const Waiting& waiting, int other) const;
  bool is_over_for(const Waiting& waiting, int other);  // whether `other` is needed no more
  void tell_hosts(Waiting& first, OpenRound& place);
  void note(Waiting& waiting);
  void end_complete(const Address& address);
  void end_resume();
  void end_waiting(const std::function<std::string(Waiting&)>& error);  // ends each for which `error` returns a text
  void end_in_error(Waiting& waiting, const std::string& error);
  void fail_step(const std::string& error);
  Message has_ended(int other) const;
  void tell_all(const Message& message);
  void send(const std::shared_ptr<Transport>& transport, const Message& message, const std::vector<int>& ranks);
  std::string why_overdue(Waiting& waiting, OpenWaits& open);
  std::string missing_text(const Waiting& waiting, const std::optional<std::set<int>>& came);
  std::set<int> who_came(const Waiting& waiting);

  std::vector<int> without_me(std::vector<int> ranks) const;
  bool is_forked() const;
  void check_process() const;

  const std::string advice_;
  const std::shared_ptr<Transport> outside_;
  const bool can_resume_;
  const pid_t process_;
  mutable std::mutex mutex_;
  Afterwards afterwards_;
  std::shared_ptr<Transport> memory_;
  bool uses_memory_ = false;
  Hosts hosts_;
  std::vector<std::string> names_;
  std::string failure_;  // why the step has failed
  Clock::time_point failed_at_;
  std::string lost_;  // why the communicator does not work any more
  std::atomic<uint64_t> epoch_{0};
  int64_t resumes_ = 0;              // that all have completed
  int64_t last_step_ = kNoNumber;    // that this process has abandoned
  int64_t highest_abandoned_ = 0;    // the round up to which all belong to steps that were abandoned
  std::map<int64_t, int64_t> last_;  // round by key
  std::map<Address, OpenRound> places_;
  std::map<Address, std::set<int>> noted_;               // ranks that have sent kCame
  std::deque<Waiting> resume_;                           // those that wait for it
  std::map<int64_t, std::map<int, Message>> abandoned_;  // by the number of the resume, then by rank
  struct Departure {
    Clock::time_point heard;
    int because_of;  // itself, or another that had ended before
  };
  std::map<int, Departure> left_;
  std::optional<int> because_of_;  // the process whose end made the step fail
  bool has_lost_some_ = false;
  std::atomic<size_t> waiting_{0};
};

// The processes that Python knows by this id (all.cpp).
std::shared_ptr<Processes> find_processes(int64_t id);

}  // namespace gluon_syncbn
