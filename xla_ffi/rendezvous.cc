#include "xla_ffi/rendezvous.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace dynaflow {
namespace {

// Held by the one run of the process that is being launched. The thread that gives it back need not be the
// one that took it, which a mutex would insist on.
class Turn {
 public:
  static Turn& Global() {
    static Turn& turn = *new Turn;  // never destroyed, like Registry::Global
    return turn;
  }
  void Take() {
    std::unique_lock lock(mutex_);
    free_again_.wait(lock, [&] { return !taken_; });
    taken_ = true;
  }
  void Give() {
    {
      std::lock_guard lock(mutex_);
      taken_ = false;
    }
    free_again_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable free_again_;
  bool taken_ = false;
};

// Between two looks at runs on the device: a failure is rare, and this is soon enough.
constexpr std::chrono::milliseconds kWatchInterval(500);

}  // namespace

struct Rendezvous::Meeting {
  std::condition_variable changed;
  Stage stage = Stage::kGathering;
  std::vector<Call> calls;  // in the order of arrival; what they point to stays until the meeting is over
  Executors executors;      // from kLaunching on
  size_t launched = 0;
  size_t done = 0;
  SharedRun run;
};

Rendezvous::Rendezvous(size_t participants, double timeout)
    : participants_(participants),
      timeout_(timeout),
      watchdog_(
          [this](const Status& failure) {
            std::lock_guard lock(mutex_);
            Break(failure);
          },
          kWatchInterval, Seconds(timeout)) {}

Status Rendezvous::broken() const {
  std::lock_guard lock(mutex_);
  return broken_;
}

void Rendezvous::Close(const Status& why) {
  std::lock_guard lock(mutex_);
  Break(why);
}

// With mutex_ held. Whoever is still waiting for others waits in vain: they will be turned away.
void Rendezvous::Break(const Status& why) {
  if (broken_.ok()) broken_ = why;
  for (const auto& [run_id, meeting] : gathering_) {
    meeting->run.Fail(broken_);
    meeting->stage = Stage::kOver;
    meeting->changed.notify_all();
  }
  gathering_.clear();
}

Status Rendezvous::Run(Call call, const Prepare& prepare) {
  std::unique_lock lock(mutex_);
  if (!broken_.ok()) return broken_;
  std::shared_ptr<Meeting>& slot = gathering_[call.run_id];
  if (!slot) slot = std::make_shared<Meeting>();
  const std::shared_ptr<Meeting> meeting = slot;
  for (const Call& other : meeting->calls) {
    if (other.device != call.device) continue;
    // Which of the two belongs to which call of the other devices, nothing tells.
    Break(
        FailedPrecondition("device ", call.device,
                           " calls a communicating plan twice at once in one run: give each place that calls "
                           "it a plan of its own"));
    return broken_;
  }
  call.shared = &meeting->run;
  const size_t index = meeting->calls.size();
  meeting->calls.push_back(call);
  if (meeting->calls.size() == participants_) {
    gathering_.erase(call.run_id);
    meeting->stage = Stage::kComplete;
    meeting->changed.notify_all();
    lock.unlock();
    Open(*meeting, prepare);
    lock.lock();
  } else {
    const auto deadline = std::chrono::steady_clock::now() + Seconds(timeout_);
    if (!meeting->changed.wait_until(lock, deadline, [&] { return meeting->stage != Stage::kGathering; })) {
      Break(Internal(Absence(*meeting)));
    }
    // Once all are there, each waits for the others however long their part takes.
    meeting->changed.wait(lock, [&] { return meeting->stage >= Stage::kLaunching; });
  }
  if (meeting->stage == Stage::kLaunching) {
    lock.unlock();
    Launch(*meeting, index);
    lock.lock();
  }
  return meeting->run.status();
}

// Takes the run's turn and lets its participants launch; or ends the meeting with what prevents that.
void Rendezvous::Open(Meeting& meeting, const Prepare& prepare) {
  Turn::Global().Take();
  // A run before this one may have failed, and it may have left flags set that this one would wait for.
  Status status = broken();
  if (status.ok()) {
    Result<Executors> executors = prepare(meeting.calls);
    status = executors.status();
    if (status.ok()) meeting.executors = std::move(*executors);
  }
  if (!status.ok()) {
    meeting.run.Fail(status);
    Turn::Global().Give();
  }
  std::lock_guard lock(mutex_);
  meeting.stage = status.ok() ? Stage::kLaunching : Stage::kOver;
  meeting.changed.notify_all();
}

void Rendezvous::Launch(Meeting& meeting, size_t index) {
  const Call& call = meeting.calls[index];
  Executor& executor = *meeting.executors[index];
  // A device that another one has given up on need not start; but it then owes its peers their flags.
  const Status status = meeting.run.failed() ? meeting.run.status() : executor.Run(call);
  if (!status.ok()) meeting.run.Fail(status.Within([&] { return StrCat("device ", call.device); }));

  std::unique_lock lock(mutex_);
  ++meeting.launched;
  meeting.changed.notify_all();
  if (!status.ok()) {
    // Peers may be waiting on the device, or may be about to, for flags that this one was to set.
    const auto over = [&] {
      return meeting.launched == participants_ &&
             std::all_of(meeting.executors.begin(), meeting.executors.end(),
                         [](const auto& each) { return each->Idle(); });
    };
    const auto deadline = std::chrono::steady_clock::now() + Seconds(timeout_);
    do {
      lock.unlock();
      executor.ReleasePeers();
      lock.lock();
      meeting.changed.wait_for(lock, std::chrono::milliseconds(1));
    } while (!over() && std::chrono::steady_clock::now() < deadline);
  }
  if (++meeting.done == participants_) {
    if (meeting.run.failed()) {
      Break(meeting.run.status());
    } else {
      Watch(meeting);
    }
    meeting.stage = Stage::kOver;
    meeting.changed.notify_all();
    lock.unlock();
    Turn::Global().Give();
    return;
  }
  meeting.changed.wait(lock, [&] { return meeting.stage == Stage::kOver; });
}

// A device may fail once all have launched, and only it will know.
void Rendezvous::Watch(const Meeting& meeting) {
  const Executors& executors = meeting.executors;
  if (std::all_of(executors.begin(), executors.end(), [](const auto& each) { return each->Idle(); })) return;
  std::vector<Watchdog::Part> run;
  for (size_t i = 0; i < executors.size(); ++i) run.push_back({meeting.calls[i].device, executors[i]});
  watchdog_.Watch(std::move(run));
}

std::string Rendezvous::Absence(const Meeting& meeting) const {
  std::vector<int> devices;
  for (const Call& call : meeting.calls) devices.push_back(call.device);
  std::sort(devices.begin(), devices.end());
  std::string came;
  for (int device : devices) came += StrCat(came.empty() ? "" : ", ", device);
  return StrCat("a communicating plan is run by ", participants_, " devices together, but within ", timeout_,
                " s only ", devices.size(),
                devices.size() == 1 ? " has come (device " : " have come (devices ", came,
                "); if the others are only late, create the plan with a timeout_s above ", timeout_);
}

}  // namespace dynaflow
