// The processes of a job, or some of them, as one of them sees them: exchanges, and what becomes of a step that fails.
//
// The protocol
// ------------
// An exchange has a key (which layer of which net, which of its groups, which direction; or what Python compares) and
// a number, its round. Forward passes under a key are numbered as they come; a backward pass has the number of the
// forward pass that it answers. Each member sends what it brings to the others, and takes what they send into a
// mailbox, by key and round. When all of a round is there, whoever put the last of it there calls back the one who
// waits. All get one row per member, in the order of ranks: the same input, in the same order, gives the same bits.
//
// No thread waits for an exchange. One ends with its last message; or with an error, when its timeout, or less
// (meeting/waiting.h), is over, or when a member of it has ended or abandoned the step. The watchdog looks for both.
//
// A process is in one of three states:
//
//   open       Exchanges are made.
//   failed     One has ended with an error, or devices of this process have not met. Every further one fails at once,
//              with the same text, until Python abandons the step (`abandon`). The others learn of it from a message.
//   resuming   The step was abandoned, in failure or in the middle. Nothing is exchanged but that: each process tells
//              the others the highest round that it has had, and when it has heard of all (`resume`), it is open again,
//              numbers its rounds from there on, and drops what is older. So nothing of the old step can be taken for a
//              part of the next.
//
// `epoch` counts what was abandoned. What has been prepared for an exchange in one epoch (nets are compared, by Python)
// holds in that epoch only, and an exchange that began in one cannot fail a later one.
//
// Messages go by what the processes have met by; or, once all have agreed on it, through memory between those of a host
// (host_memory.h), and outside between the hosts' leaders alone (hosts.h). Both are listened to; until all have agreed,
// what is told to all goes by both. What is not a vector goes to each process by itself. So that errors name who is
// missing, a process that has waited for a while tells those of other hosts that it has come: its leader may wait, too.
// And as what it brought may come later, by its leader, than the word that it has ended, that word counts after a
// while.
//
// Locks: `mutex_` guards all of the state. Nothing is called with it held but `watch`, and a transport's `send`, so
// that messages leave in the order of what they say; callbacks run on the thread that ends the exchange, and must not
// wait for others.
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

#include "meeting/statistics.h"
#include "meeting/watchdog.h"
#include "processes/hosts.h"
#include "processes/outside.h"
#include "processes/transport.h"

namespace gluon_syncbn {

// Where an exchange takes place.
struct Channel {
  std::string what;  // how errors begin, e.g. "SyncBatchNorm 'stem': forward pass"
  int64_t key = 0;
  std::vector<int> members;  // ranks in order, this process among them
  double timeout_seconds = 0;
};

struct Exchanged {
  Vectors rows;  // of all members, in their order
  int64_t round = 0;
  std::string error;  // empty if it did not fail
};

// As Python reads it (base/library.py).
struct State {
  int is_resuming = 0;
  int shares_memory = 0;  // whether messages go there, within hosts
  int has_lost_some = 0;  // processes did not come in time, and all have not gone on together since
  int open_tasks = 0;     // of the thread that carries messages
  int64_t highest_round = 0;
  double seconds_failed = 0;  // for how long the step has failed; 0 if it has not
};

class Processes : public Watched, public std::enable_shared_from_this<Processes> {
 public:
  using Done = std::function<void(Exchanged)>;

  static constexpr int64_t kNext = 0;  // a round that is to be numbered

  // `outside` is what the processes have met by; `can_resume` says whether others hear there of a step that is given
  // up. `advice` ends the error about a process that is missing. To be made by std::make_shared.
  Processes(int rank, int size, std::string advice, std::shared_ptr<Transport> outside, bool can_resume);

  const int rank, size;

  // The ranks of all.
  std::vector<int> everyone() const;

  // Listens to the memory that the processes of this host share; and sends by it, once all have agreed to.
  void share(std::shared_ptr<Transport> memory);
  void agree_on_memory();

  // The names of the processes' hosts; errors say them.
  void name(std::vector<std::string> names);

  // Brings a vector; `done` is called once, perhaps before this returns. If this throws, it will not be called.
  void exchange(const Channel& channel, int64_t round, std::vector<double> vector, Done done);

  // Takes in a message, from a transport.
  void receive(int from, Message message);

  // The answer of a transport: who has come to a round, whatever they have brought; nothing if it does not know.
  void hear_who_came(int64_t key, int64_t round, const std::optional<std::set<int>>& ranks);

  // What the processes have met by works no more, because of this.
  void lose_transport(const std::string& why);

  // The processes do not work together any more, because of this.
  void end(const std::string& why);

  // The step has failed in this process.
  void fail(const std::string& error);

  // Python abandons a step that is under way here, or none: then only one that has failed is abandoned. Returns why, or
  // an empty text where there is nothing to abandon.
  std::string abandon(bool is_under_way);

  // Calls back when all processes have abandoned the step; `what` begins the error if they do not.
  void resume(const std::string& what, double timeout_seconds, Done done);

  // This process ends.
  void leave();

  uint64_t epoch() const { return epoch_; }  // how often a step has been abandoned
  std::string failure() const;               // why the step has failed; empty if it has not
  State state() const;

  // Gives no round a lower number from here on.
  void go_to_round(int64_t floor);

  // Whether something waits for a message of what the processes have met by, or the step has failed, where that cannot
  // tell others: then it is to be looked at all the time. Or others may wait for what is to be handed on to them.
  Outside::Need need_of_carrier() const;

  OpenWaits end_overdue() override;

 private:
  struct Waiting {
    Channel channel;
    int64_t round;
    std::vector<double> vector;
    uint64_t epoch;
    Done done;
    bool is_resume = false;
    bool has_leaders = false;  // what this host brings is told to others by its leader
    bool is_told = false;      // it was
    bool is_noted = false;     // others have been told that this process has come
    Clock::time_point began = Clock::now();
    std::optional<Waited> waited = std::nullopt;  // in vain: the transport has been asked who came
    Clock::time_point asked = {};
  };
  struct Place {  // of one key and round
    // A rank may be in a round again before it is over here: two backward passes of one forward pass.
    std::map<int, std::deque<std::vector<double>>> arrived;
    std::deque<Waiting> waiting;
  };
  using Address = std::pair<int64_t, int64_t>;  // key and round

  // What is to be done when the lock is free.
  struct Afterwards {
    std::vector<std::pair<Done, Exchanged>> calls;
    std::vector<std::pair<std::shared_ptr<Transport>, bool>> looks;  // where something was sent; whether it is a vector
    std::vector<std::pair<Channel, int64_t>> questions;              // who has come to this round
    std::string given_up;
  };
  static void send(const std::shared_ptr<Transport>& transport, const Message& message, const std::vector<int>& ranks,
                   Afterwards& after);
  void carry_out(Afterwards& after);
  void lose(const std::string& why, Afterwards after);

  // All of these with the lock held.
  int64_t highest_had() const;
  bool needs_outside() const { return !uses_memory_ || hosts_.are_several(); }
  std::string refusal(Waiting& mine);
  std::string obstacle(const Waiting& waiting);  // why it cannot go on; empty if it can
  bool has_come(const Waiting& waiting, int other) const;
  bool have_come(const Waiting& waiting, const std::vector<int>& others) const;
  bool has_left(const Waiting& waiting, int other) const;
  bool is_over_for(const Waiting& waiting, int other) const;  // nothing of it is needed any more
  void tell_hosts(Waiting& first, Place& place, Afterwards& after);
  void note(Waiting& waiting, Afterwards& after);
  void end_complete(const Address& address, Afterwards& after);
  void end_resume(Afterwards& after);
  // Ends those of which `error` returns a text.
  void end_waiting(const std::function<std::string(Waiting&)>& error, Afterwards& after);
  void end_in_error(Waiting& waiting, const std::string& error, Afterwards& after);
  void fail_step(const std::string& error, Afterwards& after);
  Message has_ended(int other) const;
  void tell_all(const Message& message, Afterwards& after) const;
  std::string why_overdue(Waiting& waiting, OpenWaits& open, Afterwards& after);
  std::string missing_text(const Waiting& waiting, const std::optional<std::set<int>>& came);
  std::set<int> who_came(const Waiting& waiting) const;
  std::string name_of(int other) const;
  std::string names_of(const std::vector<int>& ranks) const;

  std::vector<int> without_me(std::vector<int> ranks) const;
  bool is_forked() const;
  void check_process() const;

  const std::string advice_;
  const std::shared_ptr<Transport> outside_;
  const bool can_resume_;
  const pid_t process_;
  mutable std::mutex mutex_;
  std::shared_ptr<Transport> memory_;
  bool uses_memory_ = false;
  Hosts hosts_;
  std::vector<std::string> names_;
  std::string failure_;  // why the step has failed
  Clock::time_point failed_at_;
  std::string lost_;  // why what the processes have met by works no more
  std::atomic<uint64_t> epoch_{0};
  bool is_resuming_ = false;
  int64_t resumes_ = 0;  // that all have completed
  int64_t floor_ = 1;    // no round has a number below it any more
  int64_t highest_given_up_ = 0;
  std::map<int64_t, int64_t> last_;  // round by key
  std::map<Address, Place> places_;
  std::map<Address, std::set<int>> noted_;             // who has said so by kCame
  std::deque<Waiting> resume_;                         // who waits for it
  std::map<int64_t, std::map<int, Message>> gave_up_;  // by the number of the resume, then by rank
  struct Left {
    Clock::time_point heard;
    int because_of;  // itself, or another that had ended before
  };
  std::map<int, Left> left_;
  std::optional<int> because_of_;  // who had ended, so that the step has failed
  bool has_lost_some_ = false;
  std::atomic<size_t> waiting_{0};
};

}  // namespace gluon_syncbn
