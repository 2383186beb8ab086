#include "processes/host_memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

namespace gluon_syncbn {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kLayout = 0x676c756f6e000001;  // of the memory: its version
constexpr size_t kRings = 16 << 20;              // bytes of all rings together, if each has its least
constexpr size_t kLeast = 64 << 10, kMost = 1 << 20;
constexpr int kMostProcesses = 64;  // whose rings take 256 MiB
constexpr timespec kSlice{0, 100'000'000};
constexpr std::chrono::microseconds kLinger{20};

size_t room_per_ring(int size) {
  const size_t each = kRings / static_cast<size_t>(size) / static_cast<size_t>(size);
  return std::clamp(each / 64 * 64, kLeast, kMost);
}

std::string system_error(const std::string& what) { return what + ": " + std::strerror(errno); }

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* most) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, most, nullptr, 0);
}

std::string random_number() {
  std::random_device random;
  return std::to_string((static_cast<uint64_t>(random()) << 32) | random());
}

std::string name_of(const std::string& number) { return "gluon_syncbn." + number; }

// The file that an offer names. Its name is read before it is opened: to open another file of another process could do
// something to it. The offer, and so the name, lives until all processes have answered.
int opened(const std::string& where) {
  std::istringstream words(where);
  std::string process, file, number;
  words >> process >> file >> number;
  const std::string path = "/proc/" + process + "/fd/" + file, wanted = "/memfd:" + name_of(number) + " ";
  char target[PATH_MAX] = {};
  if (readlink(path.c_str(), target, sizeof target - 1) < 0 || std::string(target).compare(0, wanted.size(), wanted)) {
    throw std::runtime_error("the memory is of another host, or of another container");
  }
  const int found = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (found < 0) throw std::runtime_error(system_error("the memory of another process cannot be opened"));
  return found;
}

struct flock lock_of(int place) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = place;
  lock.l_len = 1;
  return lock;
}

}  // namespace

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "processes share atomics");

struct HostMemory::Bell {
  alignas(64) std::atomic<uint32_t> rung;
  std::atomic<uint32_t> sleeps;
};

struct HostMemory::Ring {
  alignas(64) std::atomic<uint64_t> written;  // bytes that ever were
  std::atomic<uint32_t> is_full;              // the writer waits for room
  alignas(64) std::atomic<uint64_t> read;
  char bytes[];
};

struct HostMemory::Segment {
  int64_t layout, size;
  size_t room;  // of a ring

  static size_t stride(size_t room) { return sizeof(Ring) + room; }
  static size_t bytes(size_t n, size_t room) {
    return sizeof(Bell) * (n + 1) + n * n * stride(room);  // the first bell has the place of the fields above
  }
};

HostMemory::Offer::Offer(int size) : number(random_number()), file(memfd_create(name_of(number).c_str(), MFD_CLOEXEC)) {
  if (size > kMostProcesses) throw std::runtime_error("there are more than " + std::to_string(kMostProcesses));
  const size_t room = room_per_ring(size), bytes = Segment::bytes(static_cast<size_t>(size), room);
  const Segment head{kLayout, size, room};
  int problem = file.number < 0 ? errno : EINTR;
  // All of the memory is taken now: if there were none later, the process would end.
  while (problem == EINTR) problem = posix_fallocate(file.number, 0, static_cast<off_t>(bytes));
  if (problem != 0) errno = problem;
  if (problem != 0 || fchmod(file.number, 0600) != 0 || pwrite(file.number, &head, sizeof head, 0) != sizeof head) {
    throw std::runtime_error(system_error("no memory can be shared"));
  }
  where = std::to_string(getpid()) + " " + std::to_string(file.number) + " " + number;
}

HostMemory::HostMemory(const std::string& where, int rank, const std::vector<int>& ranks, Receive receive)
    : ranks_(ranks),
      place_(place_of(rank)),
      size_(static_cast<int>(ranks.size())),
      file_(opened(where)),
      segment_(map()),
      receive_(std::move(receive)),
      outgoing_(ranks.size()),
      incoming_(ranks.size()),
      thread_([this] { serve(); }) {}

HostMemory::~HostMemory() {
  is_over_ = true;
  ring_bell(place_);
  thread_.join();
}

std::shared_ptr<HostMemory::Segment> HostMemory::map() const {
  Segment head{};
  struct flock lock = lock_of(place_);
  if (pread(file_.number, &head, sizeof head, 0) != sizeof head || head.layout != kLayout || head.size != size_ ||
      fcntl(file_.number, F_OFD_SETLK, &lock) != 0) {
    throw std::runtime_error("the memory of the other process is not of this version");
  }
  const size_t bytes = Segment::bytes(ranks_.size(), head.room);
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_.number, 0);
  if (memory == MAP_FAILED) throw std::runtime_error(system_error("the memory cannot be mapped"));
  madvise(memory, bytes, MADV_DONTFORK);
  return {static_cast<Segment*>(memory), [bytes](Segment* mapped) { munmap(mapped, bytes); }};
}

int HostMemory::place_of(int rank) const {
  return static_cast<int>(std::find(ranks_.begin(), ranks_.end(), rank) - ranks_.begin());
}

HostMemory::Bell& HostMemory::bell(int place) const { return reinterpret_cast<Bell*>(segment_.get())[place + 1]; }

HostMemory::Ring& HostMemory::ring(int from, int to) const {
  const size_t place = static_cast<size_t>(from) * static_cast<size_t>(size_) + static_cast<size_t>(to);
  char* const rings = reinterpret_cast<char*>(&bell(size_));
  return *reinterpret_cast<Ring*>(rings + place * Segment::stride(segment_->room));
}

void HostMemory::ring_bell(int place) const {
  bell(place).rung.fetch_add(1);
  if (bell(place).sleeps.load()) futex(bell(place).rung, FUTEX_WAKE, 1, nullptr);
}

void HostMemory::send(const Message& message, const std::vector<int>& ranks) {
  const Header head{message.kind, message.key, message.round, static_cast<int64_t>(message.numbers.size())};
  const auto bytes = std::make_shared<std::vector<char>>(sizeof head + message.numbers.size() * sizeof(double));
  std::memcpy(bytes->data(), &head, sizeof head);
  if (head.numbers > 0) {
    std::memcpy(bytes->data() + sizeof head, message.numbers.data(), bytes->size() - sizeof head);
  }
  for (int rank : ranks) {
    const int to = place_of(rank);
    Outgoing& outgoing = outgoing_[static_cast<size_t>(to)];
    std::lock_guard<std::mutex> lock(outgoing.mutex);
    outgoing.waiting.push_back(bytes);
    write(to, outgoing);
  }
}

void HostMemory::write(int to, Outgoing& outgoing) {
  Ring& way = ring(place_, to);
  const size_t room = segment_->room;
  uint64_t written = way.written.load(std::memory_order_relaxed);
  bool has_written = false;
  while (!outgoing.waiting.empty()) {
    const std::vector<char>& bytes = *outgoing.waiting.front();
    size_t free = room - static_cast<size_t>(written - way.read.load(std::memory_order_acquire));
    if (free == 0) {
      way.is_full.store(1);
      free = room - static_cast<size_t>(written - way.read.load());
      if (free == 0) break;
    }
    const size_t at = static_cast<size_t>(written % room);
    const size_t part = std::min({free, room - at, bytes.size() - outgoing.written});
    std::memcpy(way.bytes + at, bytes.data() + outgoing.written, part);
    written += part;
    way.written.store(written, std::memory_order_release);
    has_written = true;
    outgoing.written += part;
    if (outgoing.written == bytes.size()) {
      outgoing.waiting.pop_front();
      outgoing.written = 0;
    }
  }
  if (has_written) ring_bell(to);
}

// Where there is no memory for a message, noexcept ends the process: it could not go on without the message.
bool HostMemory::look() noexcept {
  if (looks_.fetch_add(1) > 0) return false;  // the thread that is at it looks once more
  uint32_t seen = 1;
  do {
    for (int from = 0; from < size_; ++from) {
      if (from != place_) take_in(from);
    }
  } while (!looks_.compare_exchange_strong(seen, 0));
  return true;
}

void HostMemory::flush(double most) {
  const auto until = Clock::now() + std::chrono::duration<double>(most);
  const auto is_sent = [this](int to) {
    Outgoing& outgoing = outgoing_[static_cast<size_t>(to)];
    std::lock_guard<std::mutex> lock(outgoing.mutex);
    return outgoing.waiting.empty();
  };
  for (int to = 0; to < size_; ++to) {
    while (!is_sent(to) && !is_gone(to) && Clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

void HostMemory::linger(const std::function<bool()>& is_over) {
  static const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  if (size_ > cores) return;
  const auto until = Clock::now() + kLinger;
  // The thread that is looking may be this one, in a callback.
  while (!is_over() && looks_ == 0 && Clock::now() < until) look();
}

void HostMemory::take_in(int from) {
  Ring& way = ring(from, place_);
  Incoming& coming = incoming_[static_cast<size_t>(from)];
  const size_t room = segment_->room;
  uint64_t read = way.read.load(std::memory_order_relaxed);
  for (;;) {
    const auto ready = static_cast<size_t>(way.written.load(std::memory_order_acquire) - read);
    if (ready == 0) return;
    const bool is_head = coming.come < sizeof(Header);
    char* const into = is_head ? reinterpret_cast<char*>(&coming.head) + coming.come
                               : reinterpret_cast<char*>(coming.numbers.data()) + coming.come - sizeof(Header);
    const size_t end = sizeof(Header) + (is_head ? 0 : coming.numbers.size() * sizeof(double));
    const size_t at = static_cast<size_t>(read % room);
    const size_t part = std::min({ready, room - at, end - coming.come});
    std::memcpy(into, way.bytes + at, part);
    read += part;
    way.read.store(read);
    if (way.is_full.exchange(0)) ring_bell(from);
    coming.come += part;
    if (coming.come < end) continue;
    if (is_head) coming.numbers.resize(static_cast<size_t>(coming.head.numbers));
    if (is_head && !coming.numbers.empty()) continue;
    Message message{coming.head.kind, coming.head.key, coming.head.round, std::move(coming.numbers)};
    coming = {};
    receive_(ranks_[static_cast<size_t>(from)], std::move(message));
  }
}

bool HostMemory::is_gone(int place) const {
  struct flock lock = lock_of(place);
  return fcntl(file_.number, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

void HostMemory::serve() {
  Bell& mine = bell(place_);
  while (!is_over_) {
    const uint32_t seen = mine.rung.load();
    look();
    for (int to = 0; to < size_; ++to) {
      Outgoing& outgoing = outgoing_[static_cast<size_t>(to)];
      std::lock_guard<std::mutex> lock(outgoing.mutex);
      write(to, outgoing);
    }
    mine.sleeps.store(1);
    if (mine.rung.load() == seen && !is_over_) futex(mine.rung, FUTEX_WAIT, seen, &kSlice);
    mine.sleeps.store(0);
  }
}

}  // namespace gluon_syncbn
