#include "xla_ffi/rendezvous.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace dynaflow {
namespace {

// Between two looks at runs on the device: a failure is rare, and this is soon enough.
constexpr std::chrono::milliseconds kWatchInterval(500);

}  // namespace

Rendezvous::LaunchTurn& Rendezvous::LaunchTurn::Global() {
  static LaunchTurn& turn = *new LaunchTurn;  // never destroyed, like Registry::Global
  return turn;
}

void Rendezvous::LaunchTurn::Take() {
  std::unique_lock lock(mutex_);
  free_again_.wait(lock, [&] { return !taken_; });
  taken_ = true;
}

void Rendezvous::LaunchTurn::Give() {
  {
    std::lock_guard lock(mutex_);
    taken_ = false;
  }
  free_again_.notify_one();
}

struct Rendezvous::Meeting {
  std::condition_variable changed;
  Stage stage = Stage::kGathering;
  std::vector<Call> calls;  // in the order of arrival; what they point to stays until the meeting is over
  Executors executors;      // from kLaunching on
  size_t launched = 0;
  size_t done = 0;
  SharedRun run;
};

Rendezvous::Rendezvous(size_t participants, double timeout, bool across)
    : participants_(participants),
      timeout_(timeout),
      across_(across),
      watchdog_(
          [this](const Status& failure) {
            std::lock_guard lock(mutex_);
            Break(failure);
          },
          kWatchInterval, Seconds(timeout)) {}

void Rendezvous::SetPeers(std::shared_ptr<const Peers> peers) {
  std::lock_guard lock(mutex_);
  peers_ = std::move(peers);
}

Status Rendezvous::broken() const {
  std::lock_guard lock(mutex_);
  return broken_;
}

void Rendezvous::Close(const Status& why) {
  std::lock_guard lock(mutex_);
  TurnAway(why);  // runs under way go on, and other processes get their part of them
}

// With mutex_ held.
void Rendezvous::Break(const Status& why) {
  TurnAway(why);
  if (peers_) peers_->Fail(broken_);
}

// With mutex_ held. Whoever is still waiting for others waits in vain.
void Rendezvous::TurnAway(const Status& why) {
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

// On CUDA, runs have to be enqueued in one order on all devices, whatever they belong to.
Rendezvous::LaunchTurn& Rendezvous::TurnOf(const Meeting& meeting) {
  return across_ && meeting.calls[0].stream == nullptr ? own_turn_ : LaunchTurn::Global();
}

// Takes the run's turn and lets its participants launch; or ends the meeting with what prevents that.
void Rendezvous::Open(Meeting& meeting, const Prepare& prepare) {
  TurnOf(meeting).Take();
  const Status status = Caught([&] { return Ready(meeting, prepare); });
  if (!status.ok()) {
    meeting.run.Fail(status);
    TurnOf(meeting).Give();
  }
  std::lock_guard lock(mutex_);
  // The other processes launch their part, and no later run could make up for this one.
  if (!status.ok() && across_) Break(status);
  meeting.stage = status.ok() ? Stage::kLaunching : Stage::kOver;
  meeting.changed.notify_all();
}

Status Rendezvous::Ready(Meeting& meeting, const Prepare& prepare) {
  // A run before this one may have failed, and it may have left flags set that this one would wait for.
  DYNAFLOW_RETURN_IF_ERROR(broken());
  DYNAFLOW_ASSIGN(meeting.executors, prepare(meeting.calls));
  std::lock_guard lock(mutex_);
  if (!peers_) return {};
  DYNAFLOW_RETURN_IF_ERROR(peers_->Check());
  for (Call& call : meeting.calls) call.peers = peers_.get();
  return {};
}

void Rendezvous::Launch(Meeting& meeting, size_t index) {
  const Call& call = meeting.calls[index];
  Executor& executor = *meeting.executors[index];
  // A device that another one has given up on need not start; but it then owes its peers their flags.
  const Status status =
      meeting.run.failed() ? meeting.run.status() : Caught([&] { return executor.Run(call); });
  if (!status.ok()) meeting.run.Fail(status.Within([&] { return StrCat("device ", call.device); }));

  std::unique_lock lock(mutex_);
  ++meeting.launched;
  meeting.changed.notify_all();
  if (!status.ok()) {
    // All may be waiting on the device, or may be about to, for flags that this one was to set.
    if (peers_) peers_->Fail(meeting.run.status());
    const auto over = [&] {
      return meeting.launched == participants_ &&
             std::all_of(meeting.executors.begin(), meeting.executors.end(),
                         [](const auto& each) { return each->Idle(); });
    };
    const auto deadline = std::chrono::steady_clock::now() + Seconds(timeout_);
    do {
      lock.unlock();
      for (const auto& each : meeting.executors) each->Release();
      lock.lock();
      meeting.changed.wait_for(lock, std::chrono::milliseconds(1));
    } while (!over() && std::chrono::steady_clock::now() < deadline);
  }
  if (++meeting.done == participants_) {
    if (!meeting.run.failed()) {
      if (const Status watched = Watch(meeting); !watched.ok()) meeting.run.Fail(watched);
    }
    if (meeting.run.failed()) Break(meeting.run.status());
    meeting.stage = Stage::kOver;
    meeting.changed.notify_all();
    lock.unlock();
    TurnOf(meeting).Give();
    return;
  }
  meeting.changed.wait(lock, [&] { return meeting.stage == Stage::kOver; });
}

// A device may fail once all have launched, and only it will know.
Status Rendezvous::Watch(const Meeting& meeting) {
  const Executors& executors = meeting.executors;
  if (std::all_of(executors.begin(), executors.end(), [](const auto& each) { return each->Idle(); }))
    return {};
  std::vector<Watchdog::Part> run;
  for (size_t i = 0; i < executors.size(); ++i) run.push_back({meeting.calls[i].device, executors[i]});
  return watchdog_.Watch(std::move(run), peers_);
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
