// Where the devices of a communicating run meet, on the host, before any of them launches.
//
// Each device runs a program of its own, and the programs wait for one another on the device. That ends well
// only if all of them are launched, and if every device launches communicating runs in the same order: else
// one device waits in run A for another, which waits in run B for the first.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "xla_ffi/device.h"
#include "xla_ffi/executor.h"
#include "xla_ffi/peers.h"
#include "xla_ffi/status.h"
#include "xla_ffi/watchdog.h"

namespace dynaflow {

// The meetings of one plan; a run that has met takes its turn among those of all plans.
class Rendezvous {
 public:
  using Executors = std::vector<std::shared_ptr<Executor>>;
  // Is to find or make the program for each of these calls, which is all that a run has. Called without a
  // lock, others may stand in Run meanwhile, but by one thread at a time: of the whole process, or of this
  // plan where it takes its turn by itself (see `across`).
  using Prepare = std::function<Result<Executors>(std::span<const Call>)>;

  // `participants`: of this process. `timeout`: how long, in seconds, those who came wait for those who did
  // not. `across`: whether other processes take part as well. Then a run on the host takes its turn among
  // those of this plan only: it ends with the other processes' runs, and they may be in another plan's first.
  Rendezvous(size_t participants, double timeout, bool across = false);

  // Says who the other processes are; before the first run launches.
  void SetPeers(std::shared_ptr<const Peers> peers);

  // One device's part in a run: waits for the others, runs its program, and returns when all have launched
  // theirs (on the host: finished). Where one fails, all do, with the first error.
  //
  // A run that fails half-way, on the device too, or to which not all come, leaves flags that nobody knows
  // the state of; from then on every run fails at once.
  Status Run(Call call, const Prepare& prepare);

  // Every further run fails with this, and so do those to which not all have come yet.
  void Close(const Status& why);

  // The error that every further run gets; success if there is none.
  Status broken() const;

 private:
  // Held by the one run that is being launched. The thread that gives it back need not be the one that took
  // it, which a mutex would insist on.
  class LaunchTurn {
   public:
    static LaunchTurn& Global();
    void Take();
    void Give();

   private:
    std::mutex mutex_;
    std::condition_variable free_again_;
    bool taken_ = false;
  };
  struct Meeting;
  enum class Stage { kGathering, kComplete, kLaunching, kOver };

  void Break(const Status& why);
  void TurnAway(const Status& why);
  LaunchTurn& TurnOf(const Meeting& meeting);
  void Open(Meeting& meeting, const Prepare& prepare);
  Status Ready(Meeting& meeting, const Prepare& prepare);
  void Launch(Meeting& meeting, size_t index);
  Status Watch(const Meeting& meeting);
  std::string Absence(const Meeting& meeting) const;

  const size_t participants_;
  const double timeout_;
  const bool across_;
  LaunchTurn own_turn_;

  mutable std::mutex mutex_;                               // for what follows, and for all meetings
  std::map<int64_t, std::shared_ptr<Meeting>> gathering_;  // by run
  Status broken_;
  std::shared_ptr<const Peers> peers_;

  Watchdog watchdog_;  // the last member: its thread uses the others
};

}  // namespace dynaflow
