#include "processes/processes.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <numeric>

#include "meeting/rendezvous.h"

namespace gluon_syncbn {
namespace {

// After which a process that waits tells other hosts that it has come.
constexpr Seconds kWhile{1};

// For which what a process brought before it ended may be under way, handed on by leaders.
constexpr Seconds kUnderWay{5};

constexpr size_t kMostNoted = 1000;

// In a bundle, but for the last row. MPI sends up to 64 KiB at once over TCP, and asks before it sends more.
constexpr size_t kMostNumbers = 3500;

// Who has abandoned the step first, as far as the process knew that says so.
int first_of(const Message& gave_up) { return static_cast<int>(gave_up.numbers[1]); }

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
  if (is_forked()) throw RendezvousError("this process was forked from one of the job, and is none of it");
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

void Processes::exchange(const Channel& channel, int64_t round, std::vector<double> vector, Done done) {
  check_process();
  Afterwards after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    watch(shared_from_this());  // which may throw, before the round has a number
    Waiting mine{channel, round, std::move(vector), epoch_, std::move(done)};
    const std::string problem = refusal(mine);
    if (!problem.empty()) {
      end_in_error(mine, channel.what + ": " + problem + ".", after);
    } else if (channel.members.size() == 1) {
      after.calls.emplace_back(std::move(mine.done), Exchanged{{std::move(mine.vector)}, mine.round, ""});
    } else {
      mine.has_leaders = uses_memory_ && hosts_.are_several() && !hosts_.far(channel.members).empty();
      send(uses_memory_ ? memory_ : outside_, {Message::kVector, channel.key, mine.round, mine.vector},
           without_me(uses_memory_ ? hosts_.near(channel.members) : channel.members), after);
      const Address address{channel.key, mine.round};
      if (noted_.count(address) > 0) note(mine, after);
      places_[address].waiting.push_back(std::move(mine));
      waiting_ += 1;
      end_complete(address, after);
    }
  }
  carry_out(after);
}

std::string Processes::refusal(Waiting& mine) {
  if (!failure_.empty()) {
    return "the step had failed before (" + without_end(failure_) +
           "). Call gluon_syncbn.abandon_step() before the next step";
  }
  if (is_resuming_) return "the step was abandoned";
  if (!lost_.empty() && needs_outside()) return lost_;
  if (mine.round == kNext) {
    int64_t& last = last_[mine.channel.key];
    mine.round = last = std::max(last + 1, floor_);
  } else if (mine.round <= highest_given_up_) {
    return "its forward pass belongs to a step that was abandoned";
  }
  return obstacle(mine);
}

std::string Processes::obstacle(const Waiting& waiting) {
  const std::map<int, Message>& gave_up = gave_up_[resumes_];
  for (int other : waiting.channel.members) {
    if (other == rank) continue;
    if (has_left(waiting, other) && !is_over_for(waiting, other)) {
      because_of_ = because_of_.value_or(left_.at(other).because_of);
      return "process " + std::to_string(*because_of_) + " has ended";
    }
    // What it had sent before is of the step that it abandoned.
    if (gave_up.count(other) > 0 && gave_up.count(rank) == 0) {
      return "process " + std::to_string(first_of(gave_up.at(other))) +
             " abandoned the step (an exception, or gluon_syncbn.abandon_step())";
    }
  }
  return "";
}

bool Processes::has_come(const Waiting& waiting, int other) const {
  if (other == rank) return true;
  if (waiting.is_resume) {
    const auto gave_up = gave_up_.find(resumes_);
    return gave_up != gave_up_.end() && gave_up->second.count(other) > 0;
  }
  const auto place = places_.find({waiting.channel.key, waiting.round});
  if (place == places_.end()) return false;
  const auto arrived = place->second.arrived.find(other);
  return arrived != place->second.arrived.end() && !arrived->second.empty();
}

bool Processes::have_come(const Waiting& waiting, const std::vector<int>& others) const {
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

void Processes::note(Waiting& waiting, Afterwards& after) {
  if (!waiting.has_leaders || waiting.is_noted) return;
  waiting.is_noted = true;
  send(outside_, {Message::kCame, waiting.channel.key, waiting.round, {}}, hosts_.far(waiting.channel.members), after);
}

bool Processes::is_over_for(const Waiting& waiting, int other) const {
  const std::vector<int>& members = waiting.channel.members;
  const bool hands_on = waiting.has_leaders && hosts_.leader(members, rank) == other;
  return has_come(waiting, other) && (!hands_on || have_come(waiting, hosts_.far(members)));
}

void Processes::tell_hosts(Waiting& first, Place& place, Afterwards& after) {
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
    send(outside_, {Message::kBundle, first.channel.key, first.round, bundle.packed()}, hosts_.far_leaders(members),
         after);
    bundle.rows.clear();
    numbers = 0;
  }
}

void Processes::receive(int from, Message message) {
  Afterwards after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const Address address{message.key, message.round};
    if (message.kind == Message::kVector || message.kind == Message::kBundle) {
      if (message.round <= highest_given_up_) return;
      std::map<int, std::deque<std::vector<double>>>& arrived = places_[address].arrived;
      if (message.kind == Message::kVector) {
        arrived[from].push_back(std::move(message.numbers));
      } else {
        Bundle bundle = Bundle::unpacked(message.numbers);
        for (auto& [member, row] : bundle.rows) arrived[member].push_back(std::move(row));
        if (!hosts_.is_near(from) && memory_) {
          send(memory_, message, without_me(hosts_.near(bundle.members)), after);
        }
      }
      end_complete(address, after);
    } else if (message.kind == Message::kCame) {
      if (message.round <= highest_given_up_) return;
      if (noted_.size() > kMostNoted) noted_.clear();  // of rounds that were over
      noted_[address].insert(from);
      const auto place = places_.find(address);
      if (place != places_.end() && !place->second.waiting.empty()) note(place->second.waiting.front(), after);
    } else {
      if (message.kind == Message::kLeft) {
        const auto who = static_cast<int>(message.numbers[0]);
        has_lost_some_ = has_lost_some_ || who != from;
        left_.emplace(who, Left{Clock::now(), static_cast<int>(message.numbers[1])});
      } else if (message.key >= resumes_) {
        gave_up_[message.key].emplace(from, std::move(message));
      }
      end_resume(after);
      end_waiting(
          [this](Waiting& waiting) {
            const std::string problem = obstacle(waiting);
            return problem.empty() ? "" : waiting.channel.what + ": " + problem + ".";
          },
          after);
    }
  }
  carry_out(after);
}

void Processes::end_complete(const Address& address, Afterwards& after) {
  Place& place = places_[address];
  while (!place.waiting.empty()) {
    Waiting& first = place.waiting.front();
    tell_hosts(first, place, after);
    const std::vector<int>& members = first.channel.members;
    if (!have_come(first, members)) return;
    Exchanged all{{}, first.round, ""};
    std::string sizes;
    bool differ = false;
    for (int member : members) {
      if (member == rank) {
        all.rows.push_back(first.vector);
      } else {
        all.rows.push_back(std::move(place.arrived[member].front()));
        place.arrived[member].pop_front();
      }
      const size_t numbers = all.rows.back().size();
      differ = differ || numbers != first.vector.size();
      sizes += (sizes.empty() ? "process " : ", process ") + std::to_string(member) + ": " + std::to_string(numbers);
    }
    if (differ) {
      end_in_error(first, first.channel.what + ": the processes brought vectors of different lengths (" + sizes + ").",
                   after);
    } else {
      after.calls.emplace_back(std::move(first.done), std::move(all));
    }
    place.waiting.pop_front();
    waiting_ -= 1;
    noted_.erase(address);
  }
  const bool is_empty =
      std::all_of(place.arrived.begin(), place.arrived.end(), [](const auto& entry) { return entry.second.empty(); });
  if (is_empty) places_.erase(address);
}

void Processes::end_waiting(const std::function<std::string(Waiting&)>& error, Afterwards& after) {
  const auto end = [&](std::deque<Waiting>& all) {
    for (auto waiting = all.begin(); waiting != all.end();) {
      const std::string text = error(*waiting);
      if (text.empty()) {
        ++waiting;
        continue;
      }
      end_in_error(*waiting, text, after);
      waiting = all.erase(waiting);
      waiting_ -= 1;
    }
  };
  for (auto& entry : places_) end(entry.second.waiting);
  end(resume_);
}

void Processes::end_in_error(Waiting& waiting, const std::string& error, Afterwards& after) {
  if (waiting.epoch == epoch_) fail_step(error, after);
  after.calls.emplace_back(std::move(waiting.done), Exchanged{{}, waiting.round, error});
}

void Processes::fail_step(const std::string& error, Afterwards& after) {
  if (!failure_.empty()) return;
  failure_ = error;
  failed_at_ = Clock::now();
  if (needs_outside() && !can_resume_) after.given_up = error;
}

void Processes::fail(const std::string& error) {
  if (is_forked()) return;
  Afterwards after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    fail_step(error, after);
  }
  carry_out(after);
}

void Processes::lose_transport(const std::string& why) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!needs_outside()) return;
  }
  lose(why, {});
}

void Processes::end(const std::string& why) {
  Afterwards after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tell_all(has_ended(rank), after);
    uses_memory_ = false;
  }
  lose(why, std::move(after));
}

void Processes::lose(const std::string& why, Afterwards after) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    lost_ = why;
    end_waiting([&](Waiting& waiting) { return waiting.channel.what + ": " + why + "."; }, after);
  }
  carry_out(after);
}

std::string Processes::abandon(bool is_under_way) {
  if (is_forked()) return "";
  Afterwards after;
  std::string why;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.empty() && !is_under_way) return "";
    why = failure_.empty() ? "gluon_syncbn.abandon_step() was called in the middle of a step" : failure_;
    failure_.clear();
    is_resuming_ = true;
    epoch_ += 1;
    std::map<int, Message>& gave_up = gave_up_[resumes_];
    const int first = gave_up.empty() ? rank : first_of(gave_up.begin()->second);
    Message mine{Message::kGaveUp, resumes_, highest_had(), {uses_memory_ ? 1.0 : 0.0, static_cast<double>(first)}};
    if (gave_up.emplace(rank, mine).second) tell_all(mine, after);
  }
  carry_out(after);
  return why;
}

void Processes::resume(const std::string& what, double timeout_seconds, Done done) {
  check_process();
  Afterwards after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Waiting mine{{what, 0, everyone(), timeout_seconds}, 0, {}, epoch_, std::move(done), true};
    if (!can_resume_ && needs_outside()) {
      end_in_error(mine, what + ": " + (lost_.empty() ? "the processes cannot go on together" : lost_) + ".", after);
    } else {
      watch(shared_from_this());
      const std::string problem = obstacle(mine);
      if (!problem.empty()) {
        end_in_error(mine, what + ": " + problem + ".", after);
      } else {
        resume_.push_back(std::move(mine));
        waiting_ += 1;
        end_resume(after);
      }
    }
  }
  carry_out(after);
  outside_->look();
}

void Processes::end_resume(Afterwards& after) {
  if (resume_.empty() || gave_up_[resumes_].size() < static_cast<size_t>(size)) return;
  bool all_use_memory = true;
  for (const auto& entry : gave_up_[resumes_]) {
    highest_given_up_ = std::max(highest_given_up_, entry.second.round);
    all_use_memory = all_use_memory && entry.second.numbers[0] == 1;
  }
  uses_memory_ = all_use_memory;
  gave_up_.erase(resumes_++);
  for (auto entry = places_.begin(); entry != places_.end();) {
    const bool is_old = entry->first.second <= highest_given_up_ && entry->second.waiting.empty();
    entry = is_old ? places_.erase(entry) : std::next(entry);
  }
  for (auto entry = noted_.begin(); entry != noted_.end();) {
    entry = entry->first.second <= highest_given_up_ ? noted_.erase(entry) : std::next(entry);
  }
  floor_ = highest_given_up_ + 1;
  is_resuming_ = has_lost_some_ = false;
  because_of_ = std::nullopt;
  lost_.clear();
  for (Waiting& waiting : resume_) after.calls.emplace_back(std::move(waiting.done), Exchanged{{}, floor_, ""});
  waiting_ -= resume_.size();
  resume_.clear();
}

void Processes::leave() {
  if (is_forked()) return;
  Afterwards after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tell_all(has_ended(rank), after);
  }
  carry_out(after);
}

Message Processes::has_ended(int other) const {
  const int because_of = other == rank ? because_of_.value_or(rank) : other;
  return {Message::kLeft, 0, 0, {static_cast<double>(other), static_cast<double>(because_of)}};
}

void Processes::tell_all(const Message& message, Afterwards& after) const {
  const std::vector<int> others = without_me(everyone());
  if (memory_) send(memory_, message, hosts_.near(others), after);
  // To all, as long as some may not listen to the memory.
  if (can_resume_) send(outside_, message, uses_memory_ ? hosts_.far(others) : others, after);
}

void Processes::send(const std::shared_ptr<Transport>& transport, const Message& message, const std::vector<int>& ranks,
                     Afterwards& after) {
  if (ranks.empty()) return;
  transport->send(message, ranks);
  after.looks.emplace_back(transport, message.kind == Message::kVector);
}

void Processes::carry_out(Afterwards& after) {
  for (auto& [transport, is_vector] : after.looks) {
    transport->look();
    if (is_vector) transport->linger([this] { return waiting_ == 0; });
  }
  if (!after.given_up.empty()) outside_->give_up(after.given_up);
  for (const auto& [channel, round] : after.questions) outside_->ask_who_came(channel.key, round, channel.members);
  for (auto& [done, with] : after.calls) done(std::move(with));
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
  return {is_resuming_, uses_memory_, has_lost_some_, 0, highest_had(), failed};
}

int64_t Processes::highest_had() const {
  int64_t highest = floor_;
  for (const auto& entry : last_) highest = std::max(highest, entry.second);
  return highest;
}

void Processes::go_to_round(int64_t floor) {
  std::lock_guard<std::mutex> lock(mutex_);
  floor_ = std::max(floor_, floor);
}

Outside::Need Processes::need_of_carrier() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (needs_outside() ? waiting_ > 0 : !can_resume_ && !failure_.empty()) return Outside::kAllTheTime;
  return uses_memory_ && hosts_.are_several() ? Outside::kNowAndThen : Outside::kNotNow;
}

OpenWaits Processes::end_overdue() {
  OpenWaits open;
  if (waiting_ == 0 || is_forked()) return open;
  std::shared_ptr<Transport> memory;
  std::vector<int> near;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (uses_memory_) memory = memory_;  // else not all may have come there yet
    near = without_me(hosts_.near(everyone()));
  }
  std::vector<int> lost;
  std::copy_if(near.begin(), near.end(), std::back_inserter(lost),
               [&](int other) { return memory && memory->has_lost(other); });
  // What they had sent before is taken in first.
  const bool has_taken_in = memory && memory->look();
  Afterwards after;
  for (int other : has_taken_in ? lost : std::vector<int>()) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (left_.count(other) == 0 && can_resume_) send(outside_, has_ended(other), hosts_.far(everyone()), after);
    }
    receive(other, has_ended(other));
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    has_lost_some_ = has_lost_some_ || !lost.empty();
    end_waiting(
        [&](Waiting& waiting) {
          const std::string problem = obstacle(waiting);
          return problem.empty() ? why_overdue(waiting, open, after) : waiting.channel.what + ": " + problem + ".";
        },
        after);
  }
  carry_out(after);
  return open;
}

std::string Processes::why_overdue(Waiting& waiting, OpenWaits& open, Afterwards& after) {
  const Clock::time_point until = waiting.began + ticks(waiting.channel.timeout_seconds);
  if (Clock::now() - waiting.began > ticks(std::min(kWhile.count(), waiting.channel.timeout_seconds / 4))) {
    note(waiting, after);
  }
  if (!waiting.waited) {
    waiting.waited = ended_wait(waiting.began, waiting.channel.timeout_seconds, true);
    if (!waiting.waited) {
      open.add(waiting.began, until);
      return "";
    }
    if (uses_memory_ || waiting.is_resume || !outside_->must_be_asked()) {
      const std::string error = missing_text(waiting, who_came(waiting));
      // They may wait for something of this process that only the end of what they have met by releases.
      if (waiting.is_resume && !can_resume_) after.given_up = error;
      return error;
    }
    waiting.asked = Clock::now();
    after.questions.emplace_back(waiting.channel, waiting.round);
  }
  const Clock::time_point answered = waiting.asked + ticks(waiting_times().grace.count());
  if (Clock::now() >= answered) return missing_text(waiting, std::nullopt);
  open.add(waiting.began, answered);
  return "";
}

void Processes::hear_who_came(int64_t key, int64_t round, const std::optional<std::set<int>>& ranks) {
  Afterwards after;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    end_waiting(
        [&](Waiting& waiting) -> std::string {
          const bool is_asked = waiting.waited && waiting.channel.key == key && waiting.round == round;
          return is_asked ? missing_text(waiting, ranks) : "";
        },
        after);
  }
  carry_out(after);
}

std::set<int> Processes::who_came(const Waiting& waiting) const {
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
  const Waited& waited = *waiting.waited;
  const std::vector<int>& members = waiting.channel.members;
  if (!came) {
    const std::string whom = "the other " + std::to_string(members.size() - 1) + " processes";
    return waiting.channel.what + " " + waited.text(whom) + "; which of them came is not known. " +
           waited.advice(advice_);
  }
  std::vector<int> arrived, missing;
  for (int member : members) (member == rank || came->count(member) > 0 ? arrived : missing).push_back(member);
  const std::string whom = std::to_string(missing.size()) + " of " + std::to_string(members.size()) + " processes";
  return waiting.channel.what + " " + waited.text(whom) + ". Arrived: " + names_of(arrived) +
         ". Missing: " + names_of(missing) + ". " + waited.advice(advice_);
}

std::string Processes::name_of(int other) const {
  const std::string name = "process " + std::to_string(other);
  const auto place = static_cast<size_t>(other);
  return place < names_.size() ? name + " (" + names_[place] + ")" : name;
}

std::string Processes::names_of(const std::vector<int>& ranks) const {
  std::string text;
  for (int other : ranks) text += (text.empty() ? "" : ", ") + name_of(other);
  return text.empty() ? "none, any more" : text;
}

}  // namespace gluon_syncbn
