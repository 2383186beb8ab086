#include "processes/processes.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <numeric>

namespace gluon_syncbn {
namespace {

// A process that has waited for so long tells other hosts that it has come.
constexpr Seconds kWhile{1};

// For so long, leaders may still hand on the vectors of a process that has ended.
constexpr Seconds kUnderWay{5};

constexpr size_t kMostNoted = 1000;

// Numbers in a bundle, but for its last row. MPI sends up to 64 KiB at once over TCP, and asks before it sends more.
constexpr size_t kMostNumbers = 3500;

// The process that abandoned the step first, as far as the sender knew.
int first_of(const Message& abandoned) { return static_cast<int>(abandoned.numbers[1]); }

std::string without_end(const std::string& text) { return text.substr(0, text.find_last_not_of('.') + 1); }

}  // namespace

Processes::Processes(int rank_, int size_, std::string advice, std::shared_ptr<Transport> outside, bool can_resume)
    : rank(rank_),
      size(size_),
      advice_(std::move(advice)),
      outside_(std::move(outside)),
      can_resume_(can_resume),
      process_(getpid()) {}

std::vector<int> Processes::everyone() const {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::vector<int> Processes::without_me(std::vector<int> ranks) const {
  ranks.erase(std::find(ranks.begin(), ranks.end(), rank));
  return ranks;
}

bool Processes::is_forked() const { return getpid() != process_; }

void Processes::check_process() const {
  if (is_forked())
    throw RendezvousError(
        "this process was forked from one of the job, and is none of it: train in the processes that the launcher has "
        "started.");
}

void Processes::share(std::shared_ptr<Transport> memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  memory_.swap(memory);  // the other one goes after the lock: its thread may be about to take that
  uses_memory_ = false;
  hosts_ = memory_ ? Hosts(names_, rank) : Hosts();
}

void Processes::agree_on_memory() {
  std::lock_guard<std::mutex> lock(mutex_);
  uses_memory_ = true;
}

void Processes::name(std::vector<std::string> names) {
  std::lock_guard<std::mutex> lock(mutex_);
  names_ = std::move(names);
}

template <typename Work>
void Processes::locked(const Work& work) {
  if (is_forked()) return;
  Afterwards after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    work();
    std::swap(after, afterwards_);
  }
  for (auto& [transport, is_vector] : after.looks) {
    transport->look();
    if (is_vector) transport->linger([this] { return waiting_ == 0; });
  }
  if (!after.abandoned.empty()) outside_->abandon(after.abandoned);
  for (const auto& [channel, round] : after.questions) outside_->ask_who_came(channel.key, round, channel.members);
  for (const auto& [done, with] : after.calls) done(with);
}

void Processes::exchange(const Channel& channel, int64_t round, std::vector<double> vector, Then done) {
  check_process();
  locked([&] {
    watch(shared_from_this());  // which may throw, before the round has a number
    Waiting mine{channel, round, std::move(vector), epoch_, std::move(done)};
    const std::string error = refusal(mine);
    if (!error.empty()) {
      end_in_error(mine, error);
    } else {
      mine.has_leaders = uses_memory_ && hosts_.are_several() && !hosts_.far(channel.members).empty();
      send(uses_memory_ ? memory_ : outside_, {Message::kVector, channel.key, mine.round, mine.vector},
           without_me(uses_memory_ ? hosts_.near(channel.members) : channel.members));
      const Address address{channel.key, mine.round};
      if (noted_.count(address) > 0) note(mine);
      places_[address].waiting.push_back(std::move(mine));
      waiting_ += 1;
      end_complete(address);
    }
  });
}

std::string Processes::refusal(Waiting& mine) {
  if (!failure_.empty()) {
    return mine.error("the step had failed before (" + without_end(failure_) +
                      "). Call gluon_syncbn.abandon_step() before the next step");
  }
  if (is_resuming()) return mine.error("the step was abandoned");
  if (!lost_.empty() && needs_outside()) return mine.error(lost_);
  if (mine.round == kNext) {
    int64_t& last = last_[mine.channel.key];
    mine.round = last = std::max(last, highest_abandoned_) + 1;
  } else if (mine.round <= highest_abandoned_) {
    return mine.error("its forward pass belongs to a step that was abandoned");
  }
  return obstacle(mine);
}

std::string Processes::obstacle(const Waiting& waiting) {
  for (int other : waiting.channel.members) {
    if (other != rank && has_left(waiting, other) && !is_over_for(waiting, other)) {
      because_of_ = because_of_.value_or(left_.at(other).because_of);
      return waiting.error("process " + std::to_string(*because_of_) + " has ended");
    }
  }
  // Also one that is no member: all go on together. Vectors that it had sent before belong to the step that it
  // abandoned.
  const std::map<int, Message>& abandoned = abandoned_[resumes_];
  if (abandoned.empty() || is_resuming()) return "";
  return waiting.error("process " + std::to_string(first_of(abandoned.begin()->second)) +
                       " abandoned the step (an exception, or gluon_syncbn.abandon_step())");
}

bool Processes::has_come(const Waiting& waiting, int other) {
  if (other == rank) return true;
  if (waiting.is_resume) return abandoned_[resumes_].count(other) > 0;
  const auto place = places_.find({waiting.channel.key, waiting.round});
  return place != places_.end() && !place->second.arrived[other].empty();
}

bool Processes::have_come(const Waiting& waiting, const std::vector<int>& others) {
  return std::all_of(others.begin(), others.end(), [&](int other) { return has_come(waiting, other); });
}

bool Processes::has_left(const Waiting& waiting, int other) const {
  const auto left = left_.find(other);
  if (left == left_.end()) return false;
  const std::vector<int>& members = waiting.channel.members;
  const auto leads = [&](int member) { return hosts_.leader(members, member) == member; };
  if (!waiting.has_leaders || hosts_.is_near(other) || (leads(other) && leads(rank))) return true;
  return Clock::now() - left->second.heard > ticks(std::min(kUnderWay.count(), waiting.channel.timeout_seconds / 2));
}

void Processes::note(Waiting& waiting) {
  if (!waiting.has_leaders || waiting.is_noted) return;
  waiting.is_noted = true;
  send(outside_, {Message::kCame, waiting.channel.key, waiting.round, {}}, hosts_.far(waiting.channel.members));
}

bool Processes::is_over_for(const Waiting& waiting, int other) {
  const std::vector<int>& members = waiting.channel.members;
  const bool hands_on = waiting.has_leaders && hosts_.leader(members, rank) == other;
  return has_come(waiting, other) && (!hands_on || have_come(waiting, hosts_.far(members)));
}

void Processes::tell_hosts(Waiting& first, OpenRound& place) {
  const std::vector<int>& members = first.channel.members;
  if (!first.has_leaders || first.is_told || hosts_.leader(members, rank) != rank) return;
  const std::vector<int> near = hosts_.near(members);
  if (!have_come(first, near)) return;
  first.is_told = true;
  Bundle bundle{members, {}};
  size_t numbers = 0;
  for (int member : near) {
    bundle.rows.emplace_back(member, member == rank ? first.vector : place.arrived[member].front());
    numbers += bundle.rows.back().second.size();
    if (numbers < kMostNumbers && member != near.back()) continue;
    send(outside_, {Message::kBundle, first.channel.key, first.round, bundle.packed()}, hosts_.far_leaders(members));
    bundle.rows.clear();
    numbers = 0;
  }
}

void Processes::receive(int from, Message message) {
  locked([&] {
    const Address address{message.key, message.round};
    if (message.kind == Message::kLeft || message.kind == Message::kAbandoned) {
      if (message.kind == Message::kLeft) {
        const auto who = static_cast<int>(message.numbers[0]);
        has_lost_some_ = has_lost_some_ || who != from;
        left_.emplace(who, Departure{Clock::now(), static_cast<int>(message.numbers[1])});
      } else if (message.key >= resumes_) {
        abandoned_[message.key].emplace(from, std::move(message));
        end_resume();
      }
      end_waiting([this](Waiting& waiting) { return obstacle(waiting); });
    } else if (message.round <= highest_abandoned_) {
      return;
    } else if (message.kind == Message::kCame) {
      if (noted_.size() > kMostNoted) noted_.clear();  // of rounds that are over
      noted_[address].insert(from);
      const auto place = places_.find(address);
      if (place != places_.end() && !place->second.waiting.empty()) note(place->second.waiting.front());
    } else {
      std::map<int, std::deque<std::vector<double>>>& arrived = places_[address].arrived;
      if (message.kind == Message::kVector) {
        arrived[from].push_back(std::move(message.numbers));
      } else {
        Bundle bundle = Bundle::unpacked(message.numbers);
        for (auto& [member, row] : bundle.rows) arrived[member].push_back(std::move(row));
        if (!hosts_.is_near(from) && memory_) send(memory_, message, without_me(hosts_.near(bundle.members)));
      }
      end_complete(address);
    }
  });
}

void Processes::end_complete(const Address& address) {
  OpenRound& place = places_[address];
  while (!place.waiting.empty()) {
    Waiting& first = place.waiting.front();
    tell_hosts(first, place);
    const std::vector<int>& members = first.channel.members;
    if (!have_come(first, members)) return;
    Vectors rows;
    for (int member : members) {
      if (member == rank) {
        rows.push_back(first.vector);
      } else {
        rows.push_back(std::move(place.arrived[member].front()));
        place.arrived[member].pop_front();
      }
    }
    const std::string lengths =
        different_lengths(rows, [&](size_t row) { return "process " + std::to_string(members[row]); });
    if (lengths.empty()) {
      afterwards_.calls.emplace_back(std::move(first.done),
                                     Outcome{std::make_shared<const Vectors>(std::move(rows)), first.round, ""});
    } else {
      end_in_error(first, first.error("the processes brought vectors of different lengths (" + lengths + ")"));
    }
    place.waiting.pop_front();
    waiting_ -= 1;
    noted_.erase(address);
  }
  const bool is_empty =
      std::all_of(place.arrived.begin(), place.arrived.end(), [](const auto& entry) { return entry.second.empty(); });
  if (is_empty) places_.erase(address);
}

void Processes::end_waiting(const std::function<std::string(Waiting&)>& error) {
  const auto end = [&](std::deque<Waiting>& all) {
    for (auto waiting = all.begin(); waiting != all.end();) {
      const std::string text = error(*waiting);
      if (text.empty()) {
        ++waiting;
        continue;
      }
      end_in_error(*waiting, text);
      waiting = all.erase(waiting);
      waiting_ -= 1;
    }
  };
  for (auto& entry : places_) end(entry.second.waiting);
  end(resume_);
}

void Processes::end_in_error(Waiting& waiting, const std::string& error) {
  if (waiting.epoch == epoch_) fail_step(error);
  afterwards_.calls.emplace_back(std::move(waiting.done), Outcome{nullptr, waiting.round, error});
}

void Processes::fail_step(const std::string& error) {
  if (!failure_.empty()) return;
  failure_ = error;
  failed_at_ = Clock::now();
  if (needs_outside() && !can_resume_) afterwards_.abandoned = error;
}

void Processes::fail(const std::string& error) {
  locked([&] { fail_step(error); });
}

void Processes::lose_transport(const std::string& why) {
  locked([&] {
    if (!needs_outside()) return;
    lost_ = why;
    end_waiting([&](Waiting& waiting) { return waiting.error(why); });
  });
}

void Processes::end(const std::string& why) {
  locked([&] {
    tell_all(has_ended(rank));
    uses_memory_ = false;
  });
  lose_transport(why);
}

std::string Processes::abandon(bool is_under_way, int64_t step) {
  std::string why;
  locked([&] {
    const bool others_wait = !abandoned_[resumes_].empty() && !is_resuming();  // for this process to abandon it, too
    if (failure_.empty() && !is_under_way && !others_wait) return;
    why = failure_.empty() ? "gluon_syncbn.abandon_step() was called in the middle of a step" : failure_;
    failure_.clear();
    epoch_ += 1;
    end_waiting([](Waiting& waiting) { return waiting.is_resume ? "" : waiting.error("the step was abandoned"); });
    const bool is_same = step != kNoNumber && step == last_step_;
    last_step_ = step;
    if (is_resuming() && is_same) return;
    int64_t number = resumes_;
    while (abandoned_[number].count(rank) > 0) number += 1;
    std::map<int, Message>& abandoned = abandoned_[number];
    const int first = abandoned.empty() ? rank : first_of(abandoned.begin()->second);
    Message mine{Message::kAbandoned, number, highest_had(), {uses_memory_ ? 1.0 : 0.0, static_cast<double>(first)}};
    abandoned.emplace(rank, mine);
    tell_all(mine);
  });
  return why;
}

void Processes::resume(const std::string& what, double timeout_seconds, Then done) {
  check_process();
  locked([&] {
    watch(shared_from_this());
    Waiting mine{{what, 0, everyone(), timeout_seconds}, 0, {}, epoch_, std::move(done), true};
    const bool can_hear = can_resume_ || !needs_outside();
    const std::string error =
        can_hear ? obstacle(mine) : mine.error(lost_.empty() ? "the processes cannot go on together" : lost_);
    if (!error.empty()) return end_in_error(mine, error);
    resume_.push_back(std::move(mine));
    waiting_ += 1;
    end_resume();
  });
  outside_->look();
}

void Processes::end_resume() {
  if (resume_.empty() || abandoned_[resumes_].size() < static_cast<size_t>(size)) return;
  bool all_use_memory = true;
  for (const auto& entry : abandoned_[resumes_]) {
    highest_abandoned_ = std::max(highest_abandoned_, entry.second.round);
    all_use_memory = all_use_memory && entry.second.numbers[0] == 1;
  }
  uses_memory_ = all_use_memory;
  abandoned_.erase(resumes_++);
  for (auto entry = places_.begin(); entry != places_.end();) {
    const bool is_old = entry->first.second <= highest_abandoned_ && entry->second.waiting.empty();
    entry = is_old ? places_.erase(entry) : std::next(entry);
  }
  for (auto entry = noted_.begin(); entry != noted_.end();) {
    entry = entry->first.second <= highest_abandoned_ ? noted_.erase(entry) : std::next(entry);
  }
  has_lost_some_ = false;
  because_of_ = std::nullopt;
  lost_.clear();
  for (Waiting& waiting : resume_) afterwards_.calls.emplace_back(std::move(waiting.done), Outcome{});
  waiting_ -= resume_.size();
  resume_.clear();
}

void Processes::leave() {
  locked([&] { tell_all(has_ended(rank)); });
}

Message Processes::has_ended(int other) const {
  const int because_of = other == rank ? because_of_.value_or(rank) : other;
  return {Message::kLeft, 0, 0, {static_cast<double>(other), static_cast<double>(because_of)}};
}

void Processes::tell_all(const Message& message) {
  const std::vector<int> others = without_me(everyone());
  if (memory_) send(memory_, message, hosts_.near(others));
  // To all processes, as long as some may not listen to the memory.
  if (can_resume_) send(outside_, message, uses_memory_ ? hosts_.far(others) : others);
}

void Processes::send(const std::shared_ptr<Transport>& transport, const Message& message,
                     const std::vector<int>& ranks) {
  if (ranks.empty()) return;
  transport->send(message, ranks);
  afterwards_.looks.emplace_back(transport, message.kind == Message::kVector);
}

std::string Processes::failure() const {
  if (is_forked()) return "";
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

State Processes::state() const {
  if (is_forked()) return {};
  std::lock_guard<std::mutex> lock(mutex_);
  const double failed = failure_.empty() ? 0 : Seconds(Clock::now() - failed_at_).count();
  return {is_resuming(), uses_memory_, has_lost_some_, 0, failed, static_cast<int64_t>(epoch_)};
}

bool Processes::is_resuming() const {
  const auto found = abandoned_.find(resumes_);
  return found != abandoned_.end() && found->second.count(rank) > 0;
}

int64_t Processes::highest_had() const {
  int64_t highest = highest_abandoned_;
  for (const auto& entry : last_) highest = std::max(highest, entry.second);
  return highest;
}

Need Processes::need_of_carrier() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (needs_outside() ? waiting_ > 0 : !can_resume_ && !failure_.empty()) return kAllTheTime;
  return uses_memory_ && hosts_.are_several() ? kNowAndThen : kNotNow;
}

OpenWaits Processes::end_overdue() {
  OpenWaits open;
  if (is_forked()) return open;
  std::shared_ptr<Transport> memory;
  std::vector<int> lost;
  {
    // Under the lock: a thread that has called `watch` opens its wait before it lets go of the lock.
    std::lock_guard<std::mutex> lock(mutex_);
    if (waiting_ == 0) return open;
    if (uses_memory_) memory = memory_;  // otherwise some processes may not have joined it yet
    lost = without_me(hosts_.near(everyone()));
  }
  lost.erase(std::remove_if(lost.begin(), lost.end(), [&](int other) { return !memory || !memory->has_lost(other); }),
             lost.end());
  // Messages that they had sent before are taken in first.
  const bool has_taken_in = memory && memory->look();
  locked([&] {
    has_lost_some_ = has_lost_some_ || !lost.empty();
    for (int other : has_taken_in ? lost : std::vector<int>()) {
      const bool is_new = left_.emplace(other, Departure{Clock::now(), other}).second;
      if (is_new && can_resume_) send(outside_, has_ended(other), hosts_.far(everyone()));
    }
    end_waiting([&](Waiting& waiting) {
      const std::string error = obstacle(waiting);
      return error.empty() ? why_overdue(waiting, open) : error;
    });
  });
  return open;
}

std::string Processes::why_overdue(Waiting& waiting, OpenWaits& open) {
  const Clock::time_point until = waiting.began + ticks(waiting.channel.timeout_seconds);
  if (Clock::now() - waiting.began > ticks(std::min(kWhile.count(), waiting.channel.timeout_seconds / 4))) {
    note(waiting);
  }
  if (!waiting.waited) {
    waiting.waited = ended_wait(waiting.began, waiting.channel.timeout_seconds, true);
    if (!waiting.waited) {
      open.add(waiting.began, until);
      return "";
    }
    if (uses_memory_ || waiting.is_resume || can_resume_) {
      const std::string error = missing_text(waiting, who_came(waiting));
      // The others may wait for this process until the communicator ends.
      if (waiting.is_resume && !can_resume_) afterwards_.abandoned = error;
      return error;
    }
    waiting.asked = Clock::now();
    afterwards_.questions.emplace_back(waiting.channel, waiting.round);
  }
  const Clock::time_point answered = waiting.asked + ticks(waiting_times().grace.count());
  if (Clock::now() >= answered) return missing_text(waiting, std::nullopt);
  open.add(waiting.began, answered);
  return "";
}

void Processes::hear_who_came(int64_t key, int64_t round, const std::optional<std::set<int>>& ranks) {
  locked([&] {
    end_waiting([&](Waiting& waiting) {
      const bool is_asked = waiting.waited && waiting.channel.key == key && waiting.round == round;
      return is_asked ? missing_text(waiting, ranks) : "";
    });
  });
}

std::set<int> Processes::who_came(const Waiting& waiting) {
  std::set<int> came;
  const std::vector<int>& members = waiting.channel.members;
  const auto noted = noted_.find({waiting.channel.key, waiting.round});
  for (int member : members) {
    if (has_come(waiting, member) || (noted != noted_.end() && noted->second.count(member) > 0)) came.insert(member);
  }
  if (came.size() < members.size()) return came;
  // All have come, and a leader hands nothing on.
  const int mine = hosts_.leader(members, rank);
  for (int member : members) {
    if (!has_come(waiting, member)) came.erase(mine == rank ? hosts_.leader(members, member) : mine);
  }
  return came;
}

std::string Processes::missing_text(const Waiting& waiting, const std::optional<std::set<int>>& came) {
  has_lost_some_ = true;
  const auto& [what, key, members, timeout_seconds] = waiting.channel;
  std::vector<std::string> arrived, missing;
  for (int member : members) {
    const std::string name = "process " + std::to_string(member);
    const auto place = static_cast<size_t>(member);
    const bool is_there = member == rank || (came && came->count(member) > 0);
    (is_there ? arrived : missing).push_back(place < names_.size() ? name + " (" + names_[place] + ")" : name);
  }
  if (came && !missing.empty()) return waiting.waited->error(what, "processes", arrived, missing, advice_);
  const std::string whom = "the other " + std::to_string(members.size() - 1) + " processes";
  return what + " " + waiting.waited->text(whom) + "; " +
         (came ? "all of them have come, but not their vectors" : "which of them came is not known") + ". " +
         waiting.waited->advice(advice_);
}

}  // namespace gluon_syncbn
