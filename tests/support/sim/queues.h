// The streams of the simulated device: work that is queued and runs later, in an order that events permit, and memory
// that is used again in stream order. Nothing here knows operations or torch's registration of devices.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <Python.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace sim {

constexpr auto SIM = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(SIM, 0);
constexpr int64_t COMPUTATION = 0;  // the stream that is current at first

thread_local int64_t current_stream = COMPUTATION;

// The holder of the lock never needs the interpreter, and whoever waits for the lock does not hold it.
struct Lock {
  explicit Lock(std::recursive_mutex& mutex) : mutex_(mutex) {
    if (mutex_.try_lock()) return;
    if (Py_IsInitialized() && PyGILState_Check()) {
      auto* state = PyEval_SaveThread();
      mutex_.lock();
      PyEval_RestoreThread(state);
    } else {
      mutex_.lock();
    }
  }
  ~Lock() { mutex_.unlock(); }
  std::recursive_mutex& mutex_;
};

struct Graph;

// A place in a stream, which the device has reached or not.
struct Moment {
  std::atomic<bool> over{false};
  bool captured = false;  // then it is never reached itself
  std::weak_ptr<Graph> graph{};
};
using MomentPtr = std::shared_ptr<Moment>;

struct Task {
  std::string name;
  std::function<void()> run;
  std::function<bool()> ready{};  // none: as soon as those before it in its stream are over
};
using Tasks = std::vector<Task>;

// Work that was queued in a capture, and the order of its streams.
struct Graph {
  struct Node {
    int64_t stream;
    std::function<Tasks()> make{};  // the work of one replay
    MomentPtr recorded{}, awaited{};
  };
  const int64_t number, origin;
  std::vector<Node> nodes{};
  std::map<int64_t, int64_t> streams{};  // of the capture; each with the one that replays its work
  bool open = true, failed = false;
  MomentPtr end{};  // of the last replay

  // Work that the origin does not wait for, by a stream that has it.
  std::optional<int64_t> unjoined() const {
    std::set<int64_t> joined{origin};
    std::set<const Moment*> awaited;
    for (auto node = nodes.rbegin(); node != nodes.rend(); ++node) {
      if (awaited.count(node->recorded.get())) joined.insert(node->stream);
      if (!joined.count(node->stream)) {
        if (node->make) return node->stream;
      } else if (node->awaited) {
        awaited.insert(node->awaited.get());
      }
    }
    return std::nullopt;
  }
};
using GraphPtr = std::shared_ptr<Graph>;

// Every stream has a queue. One task runs at a time: the first one of the stream with the highest priority, among the
// streams whose first task may run. Priorities, and how far the host is ahead, are drawn again and again from a seed.
class Queues {
 public:
  std::recursive_mutex mutex;
  std::atomic<int> patience{50};  // seconds that the host waits for work that cannot run

  Queues() {
    std::thread([this] { help(); }).detach();
  }

  // Seed 0: all work runs as soon as it is queued. Programs run in the same order with the same seed.
  void begin(uint64_t seed) {
    drain_all();
    Lock lock(mutex);
    draws_.seed(seed);
    at_once_ = seed == 0;
    // Of each three seeds one keeps one order: the computation last, the computation first, no order.
    order_ = seed % 3;
    first_stream_ = streams_;
    steps_ = 0;
    draw();
  }

  int64_t new_stream() {
    Lock lock(mutex);
    queues_[++streams_];
    return streams_;
  }

  // Work that is made once, or for each replay of the graph that captures the stream.
  void add(int64_t stream, std::function<Tasks()> make) {
    Lock lock(mutex);
    if (auto graph = graph_of(stream))
      graph->nodes.push_back({stream, std::move(make)});
    else
      for (auto& task : make()) queue(stream, std::move(task));
  }
  void add(int64_t stream, Task task) {
    Lock lock(mutex);
    if (graph_of(stream))
      add(stream, [task = std::move(task)] { return Tasks{task}; });
    else
      queue(stream, std::move(task));
  }

  MomentPtr record(int64_t stream) {
    Lock lock(mutex);
    auto moment = std::make_shared<Moment>();
    if (auto graph = graph_of(stream)) {
      moment->captured = true;
      moment->graph = graph;
      graph->nodes.push_back({stream, {}, moment});
    } else {
      queue(stream, {"record", [moment] { moment->over = true; }});
    }
    return moment;
  }

  void wait(int64_t stream, MomentPtr moment) {
    if (!moment) return;
    Lock lock(mutex);
    auto graph = graph_of(stream);
    if (moment->captured) {
      auto other = moment->graph.lock();
      TORCH_CHECK(other && other->open, "sim: a stream waits for an event that was recorded in a capture that has ended");
      if (stream == COMPUTATION) refuse(other, "the device's first stream would join the capture");
      if (graph && graph != other) refuse(graph, "two captures would be joined");
      captures_[stream] = other;
      other->nodes.push_back({stream, {}, {}, moment});
    } else if (graph) {
      refuse(graph, "dependency created on uncaptured work in another stream");
    } else if (!moment->over) {
      queue(stream, {"wait", [] {}, [moment] { return moment->over.load(); }});
    }
  }

  // ---- captures, with the rules of CUDA

  GraphPtr graph_of(int64_t stream) {
    Lock lock(mutex);
    auto found = captures_.find(stream);
    return found == captures_.end() ? nullptr : found->second;
  }
  [[noreturn]] static void refuse(const GraphPtr& graph, const std::string& why) {
    graph->failed = true;
    TORCH_CHECK(false, "sim: operation not permitted when stream is capturing: ", why);
  }
  // The host asks for something that is not known in a capture.
  void refuse_in_capture(int64_t stream, const std::string& what) {
    if (auto graph = graph_of(stream)) refuse(graph, what);
  }
  void refuse_in_capture(const MomentPtr& moment, const std::string& what) {
    if (!moment || !moment->captured) return;
    auto graph = moment->graph.lock();
    TORCH_CHECK(graph && graph->open, "sim: ", what, " that was recorded in a capture that has ended");
    refuse(graph, what);
  }

  GraphPtr begin_capture(int64_t stream) {
    Lock lock(mutex);
    TORCH_CHECK(stream != COMPUTATION && !graph_of(stream), "sim: no capture can begin on this stream");
    return captures_[stream] = std::make_shared<Graph>(Graph{++graphs_, stream});
  }
  void end_capture(const GraphPtr& graph) {
    Lock lock(mutex);
    graph->open = false;
    std::erase_if(captures_, [&](auto& each) { return each.second == graph; });
    TORCH_CHECK(!graph->failed, "sim: operation failed due to a previous error during capture");
    auto stream = graph->unjoined();
    TORCH_CHECK(!stream, "sim: the capture has work on stream ", stream.value_or(0), " that was not joined");
    for (auto& node : graph->nodes)
      if (!graph->streams.count(node.stream)) graph->streams[node.stream] = new_stream();
  }
  // After everything in the stream, and before everything that comes into it later.
  void replay(const GraphPtr& graph, int64_t stream) {
    Lock lock(mutex);
    TORCH_CHECK(!graph->open && !graph->failed, "sim: this graph was not captured");
    refuse_in_capture(stream, "a replay in a capture");
    std::map<const Moment*, MomentPtr> moments;
    auto begin = record(stream);
    for (auto& [captured, own] : graph->streams) {
      wait(own, begin);
      wait(own, graph->end);
    }
    for (auto& node : graph->nodes) {
      auto own = graph->streams.at(node.stream);
      if (node.recorded) moments[node.recorded.get()] = record(own);
      if (node.awaited) wait(own, moments.at(node.awaited.get()));
      if (node.make) add(own, node.make);
    }
    for (auto& [captured, own] : graph->streams) wait(stream, record(own));
    graph->end = record(stream);
  }

 private:
  void queue(int64_t stream, Task task) {
    touched_ = std::chrono::steady_clock::now();
    queues_[stream].tasks.push_back(std::move(task));
    ++backlog_;
    ++added_;
    if (at_once_) {
      while (step()) {}
    } else if (backlog_ > ahead_) {
      for (size_t most = ahead_ / 2; backlog_ > most && step();) {}
    }
  }

 public:
  // Runs one task. False: no stream can go on.
  bool step() {
    if (++steps_ >= until_) draw();
    Queue* best = nullptr;
    for (auto& [id, queue] : queues_) {
      if (queue.tasks.empty()) continue;
      auto& first = queue.tasks.front();
      if (first.ready && !first.ready()) continue;
      if (!best || rank_of(id) > rank_of(best_id_)) {
        best = &queue;
        best_id_ = id;
      }
    }
    if (!best) return false;
    Task task = std::move(best->tasks.front());
    best->tasks.pop_front();
    --backlog_;
    try {
      task.run();
    } catch (const std::exception& error) {
      if (failure_.empty()) failure_ = task.name + ": " + error.what();
    }
    return true;
  }

  // The host waits until `over`; what else runs meanwhile is drawn.
  void run_until(const std::function<bool()>& over) {
    auto begin = std::chrono::steady_clock::now();
    while (true) {
      bool went;
      {
        Lock lock(mutex);
        touched_ = std::chrono::steady_clock::now();
        if (over()) break;
        went = step();
      }
      if (went) continue;
      WithoutInterpreter without;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      TORCH_CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(patience),
                  "sim: the host waits for work that cannot run:", heads());
    }
    raise_failure();
  }
  void drain(int64_t stream) {
    run_until([&] { return queues_[stream].tasks.empty(); });
  }
  void drain_all() {
    run_until([&] { return backlog_ == 0; });
  }
  void reach(const MomentPtr& moment) {
    if (moment) run_until([&] { return moment->over.load(); });
  }
  // Whoever asks again and again sees the device go on.
  bool query(const std::function<bool()>& over) {
    Lock lock(mutex);
    for (uint64_t most = draws_() % 4; most && !over() && step(); --most) {}
    return over();
  }
  bool is_empty(int64_t stream) {
    return query([&] { return queues_[stream].tasks.empty(); });
  }

  void raise_failure() {
    std::string failure;
    {
      Lock lock(mutex);
      std::swap(failure, failure_);
    }
    TORCH_CHECK(failure.empty(), "sim: an operation that was queued has failed: ", failure);
  }

  // Forgets what is queued, as after a failure of the test itself.
  void forget() {
    Lock lock(mutex);
    for (auto& [id, queue] : queues_) queue.tasks.clear();
    captures_.clear();
    backlog_ = 0;
    failure_.clear();
  }

  uint64_t draw_below(uint64_t n) {
    Lock lock(mutex);
    return at_once_ ? 0 : draws_() % n;
  }
  int64_t added() const { return added_; }
  void stop() { stopped_ = true; }

 private:
  struct Queue {
    std::deque<Task> tasks;
  };
  struct WithoutInterpreter {
    PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    ~WithoutInterpreter() {
      if (state) PyEval_RestoreThread(state);
    }
  };

  std::pair<int, uint64_t> rank_of(int64_t id) const {
    int first = id != COMPUTATION ? 0 : order_ == 1 ? -1 : order_ == 2 ? 1 : 0;
    uint64_t number = id <= first_stream_ ? id : id - first_stream_ + 1000;  // of streams made before and since
    return {first, (number + 1) * priorities_ >> 17};
  }

  void draw() {
    priorities_ = draws_() | 1;
    constexpr size_t choices[] = {0, 3, 30, 300, 3000};
    ahead_ = choices[draws_() % 5];
    until_ = steps_ + 10 + draws_() % 300;
  }

  // A device goes on while the host does something else, such as waiting for another rank.
  void help() {
    while (true) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      if (stopped_) return;
      if (!backlog_ || !mutex.try_lock()) continue;
      if (std::chrono::steady_clock::now() - touched_ > std::chrono::milliseconds(500)) {
        while (!stopped_ && step()) {}
      }
      mutex.unlock();
    }
  }

  std::string heads() {
    Lock lock(mutex);
    std::string text;
    for (auto& [id, queue] : queues_)
      if (!queue.tasks.empty()) text += " stream " + std::to_string(id) + " at " + queue.tasks.front().name + ";";
    return text;
  }

  std::map<int64_t, Queue> queues_{{COMPUTATION, {}}};
  std::map<int64_t, GraphPtr> captures_;  // by stream
  int64_t graphs_ = 0;
  std::mt19937_64 draws_{0};
  bool at_once_ = true;
  int order_ = 0;
  int64_t streams_ = COMPUTATION, first_stream_ = COMPUTATION, best_id_ = 0, added_ = 0;
  uint64_t steps_ = 0, until_ = 0, priorities_ = 1;
  size_t ahead_ = 0;
  std::atomic<size_t> backlog_{0};
  std::atomic<bool> stopped_{false};
  std::chrono::steady_clock::time_point touched_{};
  std::string failure_;
};

Queues& queues() {
  static auto* made = new Queues;  // never destroyed: threads may use it until the process ends
  return *made;
}

// Memory of a stream: what it frees it may take again at once, because its own work is in order. Each time that it
// takes memory, NaN is written on that stream into all that was freed: any of it may have been taken. Other streams
// that were recorded must first come to the end of what they had queued. A graph keeps what was taken in its capture;
// there only the capture itself takes it again.
struct Block {
  char* data;
  size_t size;
  int64_t home;
  int64_t graph = 0;  // 0: none
  bool was_freed = false;  // and may hold what was there before
  std::set<int64_t> users{};
  std::vector<MomentPtr> uses{};
};

struct Allocator final : c10::Allocator {
  std::atomic<int64_t> allocated{0}, peak{0};
  using Pool = std::pair<int64_t, int64_t>;  // a stream, and the graph that captured it
  std::map<Pool, std::vector<Block*>> pools;  // the block that was freed last is at the end
  std::vector<Block*> leaving;
  std::map<size_t, std::vector<Block*>> reserve;  // of earlier runs

  static size_t round(size_t n) {
    size_t size = 512;
    while (size < n) size *= 2;
    return size;
  }
  static void scribble(Block* block) {
    queues().add(block->home, {"memory", [data = block->data, size = block->size] { std::memset(data, 0xFF, size); }});
  }

  c10::DataPtr allocate(size_t n) override {
    if (!n) return {nullptr, nullptr, &free_, DEVICE};
    Lock lock(queues().mutex);
    std::erase_if(leaving, [&](Block* block) {
      for (auto& use : block->uses)
        if (!use->over) return false;
      block->uses.clear();
      put_back(block);
      return true;
    });
    auto captured = queues().graph_of(current_stream);
    auto graph = captured ? captured->number : 0;
    auto& pool = pools[{current_stream, graph}];
    for (auto* each : pool) {
      if (each->was_freed) scribble(each);
      each->was_freed = false;
    }
    Block* block = nullptr;
    // The last one, or the last one that fits well: other tensors get the memory than before.
    size_t most = queues().draw_below(2) ? round(n) : 64 * round(n);
    for (auto it = pool.rbegin(); it != pool.rend() && !block; ++it) {
      if ((*it)->size < n || (*it)->size > most) continue;
      block = *it;
      pool.erase(std::next(it).base());
    }
    if (!block) block = new_block(round(n));
    block->graph = graph;
    scribble(block);
    int64_t now = allocated += block->size;
    peak = std::max(peak.load(), now);
    return {block->data, block, &free_, DEVICE};
  }
  Block* new_block(size_t size) {
    auto& blocks = reserve[size];
    if (blocks.empty()) return new Block{static_cast<char*>(std::aligned_alloc(512, size)), size, current_stream};
    auto* block = blocks.back();
    blocks.pop_back();
    *block = Block{block->data, size, current_stream};
    return block;
  }
  // What is free now is as good as new, so that runs do not depend on earlier ones. All work must be over.
  void restart() {
    Lock lock(queues().mutex);
    std::erase_if(pools, [&](auto& each) {
      if (each.first.second) return false;
      for (auto* block : each.second) reserve[block->size].push_back(block);
      return true;
    });
  }
  static void free_(void* context);
  void put_back(Block* block) {
    block->was_freed = true;
    pools[{block->home, block->graph}].push_back(block);
  }
  void record(const c10::DataPtr& data, int64_t stream) {
    Lock lock(queues().mutex);
    auto* block = data.cast_context<Block>(&free_);
    if (block && stream != block->home) block->users.insert(stream);
  }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    queues().drain_all();
    std::memcpy(to, from, n);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
};

Allocator& allocator() {
  static auto* made = new Allocator;
  return *made;
}

inline void Allocator::free_(void* context) {
  auto* block = static_cast<Block*>(context);
  if (!block) return;
  Lock lock(queues().mutex);
  auto& all = allocator();
  all.allocated -= block->size;
  if (block->users.empty()) {
    all.put_back(block);
    return;
  }
  for (auto stream : block->users) block->uses.push_back(queues().record(stream));
  block->users.clear();
  all.leaving.push_back(block);
}

// Memory of the host that copies may use without waiting. It lives as long as they need it.
struct Pinned final : c10::Allocator {
  std::mutex mutex;
  std::map<const char*, size_t> blocks;

  c10::DataPtr allocate(size_t n) override {
    auto* data = static_cast<char*>(std::aligned_alloc(64, (n + 127) / 64 * 64));
    std::memset(data, 0xFF, n);
    std::lock_guard lock(mutex);
    blocks[data] = n;
    return {data, data, &free_, c10::Device(c10::kCPU)};
  }
  static void free_(void* data);
  bool has(const void* address) {
    std::lock_guard lock(mutex);
    auto* data = static_cast<const char*>(address);
    auto after = blocks.upper_bound(data);
    if (after == blocks.begin()) return false;
    auto [start, size] = *std::prev(after);
    return data <= start + size;
  }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_; }
};

Pinned& pinned() {
  static auto* made = new Pinned;
  return *made;
}

inline void Pinned::free_(void* data) {
  std::lock_guard lock(pinned().mutex);
  pinned().blocks.erase(static_cast<const char*>(data));
  std::free(data);
}

}  // namespace sim
