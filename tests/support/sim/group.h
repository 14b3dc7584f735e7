// Collectives of the simulated device: queued on the current stream, and carried by a group of gloo over the same ranks.
// Those of a group run one after another in the order of their calls, as those of one communicator do. A stream that
// waits for other ranks blocks neither the host nor other streams.
#pragma once

#include "queues.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {

at::Tensor bare(const at::Tensor& t);
void host_waits(const std::string& name);

struct Done final : c10d::Work {
  Done(MomentPtr moment, bool beside) : moment_(std::move(moment)), beside_(beside) {}
  bool isCompleted() override {
    queues().refuse_in_capture(moment_, "a query of a collective");
    return queues().query([&] { return moment_->over.load(); });
  }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    if (beside_) queues().wait(current_stream, moment_);
  }
  bool wait(std::chrono::milliseconds = kNoTimeout) override { return synchronize(), true; }

 private:
  MomentPtr moment_;
  bool beside_;  // whether it runs on a stream of its own
};

using Tensors = std::vector<at::Tensor>;

class Group final : public c10d::Backend {
 public:
  explicit Group(c10::intrusive_ptr<c10d::Backend> host)
      : c10d::Backend(host->getRank(), host->getSize()), host_(std::move(host)) {}

  const std::string getBackendName() const override { return "sim"; }
  bool supportsCoalescing() const override { return false; }

  using Result = c10::intrusive_ptr<c10d::Work>;

  Result allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto targets = all_bare(tensors);
    refuse_sums(tensors, options.reduceOp);
    return launch("allreduce", tensors, tensors, options.asyncOp, [=, op = options.reduceOp](const Rows& rows) {
      for (size_t i = 0; i < targets.size(); ++i) targets[i].copy_(reduced(rows[i], op));
    });
  }
  Result allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  Result broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto targets = all_bare(tensors);
    return launch("broadcast", tensors, tensors, options.asyncOp, [=, root = options.rootRank](const Rows& rows) {
      for (size_t i = 0; i < targets.size(); ++i) targets[i].copy_(rows[i][root]);
    });
  }
  Result allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Tensors flat;
    for (auto& list : outputs) flat.insert(flat.end(), list.begin(), list.end());
    auto targets = all_bare(flat);
    auto n = static_cast<size_t>(size_);
    return launch("allgather", flat, inputs, options.asyncOp, [=](const Rows& rows) {
      for (size_t i = 0; i < targets.size(); ++i) targets[i].copy_(rows[i / n][i % n]);
    });
  }
  Result _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  Result allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& options) override {
    auto targets = all_bare(outputs);
    return launch("allgather", outputs, inputs, options.asyncOp, [=](const Rows& rows) {
      for (size_t i = 0; i < targets.size(); ++i) targets[i].view({size_, -1}).copy_(rows[i].view({size_, -1}));
    });
  }
  Result _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                              const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  Result reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                         const c10d::ReduceScatterOptions& options) override {
    auto targets = all_bare(outputs);
    refuse_sums(inputs, options.reduceOp);
    auto work = [=, this, op = options.reduceOp](const Rows& rows) {
      for (size_t i = 0; i < targets.size(); ++i)
        targets[i].view({-1}).copy_(reduced(rows[i].view({size_, size_, -1}).select(1, rank_), op).view({-1}));
    };
    return launch("reduce_scatter", outputs, inputs, options.asyncOp, work);
  }
  Result alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to, std::vector<int64_t>& from,
                       const c10d::AllToAllOptions& options) override {
    // Parts may have other sizes on every rank. First all ranks send theirs; then all send as much as the longest has.
    auto sizes_of = [this](const at::Tensor& t, const std::vector<int64_t>& rows) {
      auto n = t.dim() ? t.size(0) : 0;
      auto sizes = rows.empty() ? std::vector<int64_t>(size_, n / size_) : rows;
      for (auto& size : sizes) size *= n ? t.numel() / n : 0;
      return sizes;
    };
    auto longest = std::make_shared<int64_t>(0);
    auto begins = std::make_shared<std::vector<int64_t>>();
    auto taken = sizes_of(output, to);
    auto target = bare(output);
    launch("alltoall", {}, {}, options.asyncOp, [=, this](const Rows& rows) {
      auto sent = rows[0];
      *longest = sent.sum(1).max().item<int64_t>();
      begins->clear();
      for (int64_t peer = 0; peer < size_; ++peer)
        begins->push_back(sent[peer].narrow(0, 0, rank_).sum().item<int64_t>());
    }, at::tensor(sizes_of(input, from), at::kLong));
    return launch("alltoall", {output}, {input}, options.asyncOp, [=, this](const Rows& rows) {
      int64_t place = 0;
      for (int64_t peer = 0; peer < size_; place += taken[peer++])
        if (taken[peer])
          target.view({-1}).narrow(0, place, taken[peer]).copy_(rows[0][peer].narrow(0, (*begins)[peer], taken[peer]));
    }, {}, longest);
  }
  Result barrier(const c10d::BarrierOptions&) override {
    queues().refuse_in_capture(current_stream, "a barrier");
    host_waits("a barrier");
    Tensors none;
    auto done = launch("barrier", none, none, false, [](const Rows&) {}, at::zeros({1}));
    queues().drain(current_stream);
    return done;
  }

 private:
  using Rows = Tensors;  // for each input: what all ranks gave, with a first dimension of ranks

  static Tensors all_bare(const Tensors& tensors) {
    Tensors made;
    for (auto& t : tensors) made.push_back(bare(t));
    return made;
  }

  // The dtypes of NCCL: those that torch's group for NCCL carries, and those that it sums.
  static void refuse_dtypes(const char* name, const Tensors& tensors) {
    for (auto& t : tensors)
      TORCH_CHECK(!t.is_complex() && t.scalar_type() != at::kShort && !at::isBarebonesUnsignedType(t.scalar_type()),
                  "sim: ", name, ": NCCL has no ", t.scalar_type());
  }
  static void refuse_sums(const Tensors& tensors, const c10d::ReduceOp& op) {
    for (auto& t : tensors)
      TORCH_CHECK(!at::isFloat8Type(t.scalar_type()) && (t.scalar_type() != at::kBool || op != c10d::ReduceOp::AVG),
                  "sim: NCCL reduces no ", t.scalar_type());
  }

  static at::Tensor reduced(const at::Tensor& rows, const c10d::ReduceOp& op) {
    auto wide = rows.scalar_type() == at::kHalf || rows.scalar_type() == at::kBFloat16 ? rows.to(at::kFloat) : rows;
    switch (op.op_) {
      case c10d::ReduceOp::SUM: return wide.sum(0).to(rows.scalar_type());
      case c10d::ReduceOp::AVG: return (wide.sum(0) / rows.size(0)).to(rows.scalar_type());
      case c10d::ReduceOp::PRODUCT: return wide.prod(0).to(rows.scalar_type());
      case c10d::ReduceOp::MAX: return rows.amax(0);
      case c10d::ReduceOp::MIN: return rows.amin(0);
      default: TORCH_CHECK(false, "sim: a reduction that is not known");
    }
  }

  // One gather of all inputs' bytes, and of what the host adds, carries every collective. `longest`: the elements that
  // each rank sends, where inputs have other sizes on other ranks.
  Result launch(const char* name, const Tensors& outputs, const Tensors& inputs, bool beside,
                std::function<void(const Rows&)> finish, at::Tensor added = {}, std::shared_ptr<int64_t> longest = {}) {
    refuse_dtypes(name, inputs);
    auto stream = current_stream;
    if (beside) {
      if (!beside_) beside_ = queues().new_stream();
      queues().wait(beside_, queues().record(stream));
      stream = beside_;
    }
    Tensors given = all_bare(inputs), targets = all_bare(outputs);
    auto self = c10::intrusive_ptr<Group>::reclaim_copy(this);
    queues().add(stream, [=]() -> Tasks { return self->tasks(name, given, targets, finish, added, longest); });
    return c10::make_intrusive<Done>(queues().record(stream), beside);
  }

  // A collective's work, once for each replay of a graph.
  Tasks tasks(const std::string& name, const Tensors& given, const Tensors& targets,
              const std::function<void(const Rows&)>& finish, const at::Tensor& added,
              const std::shared_ptr<int64_t>& longest) {
    struct State {
      Result work;
      at::Tensor mine, all;
    };
    auto state = std::make_shared<State>();
    auto number = issued_++;
    auto self = c10::intrusive_ptr<Group>::reclaim_copy(this);
    auto start = [=] {
      Tensors parts;
      for (auto t : given) {
        t = t.contiguous().view({-1});
        if (longest) t = at::cat({t, t.new_zeros({*longest - t.numel()})});
        parts.push_back(t.is_complex() || t.scalar_type() == at::kBool ? bytes(t) : t.view(at::kByte));
      }
      if (added.defined()) parts.push_back(added.view({-1}).view(at::kByte));
      state->mine = parts.empty() ? at::zeros({0}, at::kByte) : at::cat(parts);
      state->all = at::empty({self->size_, state->mine.numel()}, at::kByte);
      auto all = state->all.view({-1});
      if (self->size_ > 1)
        state->work = self->host_->_allgather_base(all, state->mine);
      else
        state->all.copy_(state->mine.view({1, -1}));
      for (auto& t : targets)
        if (t.numel() && t.is_floating_point()) t.fill_(std::numeric_limits<double>::quiet_NaN());
    };
    auto end = [=] {
      if (state->work) state->work->wait();
      Rows rows;
      int64_t place = 0;
      auto take = [&](int64_t nbytes, at::ScalarType dtype, std::vector<int64_t> sizes) {
        auto row = state->all.narrow(1, place, nbytes).contiguous().view({-1}).view(dtype);
        sizes.insert(sizes.begin(), self->size_);
        rows.push_back(row.view(sizes));
        place += nbytes;
      };
      for (auto& t : given) {
        auto n = longest ? *longest : t.numel();
        take(n * t.element_size(), t.scalar_type(), longest ? std::vector<int64_t>{n} : t.sizes().vec());
      }
      if (added.defined()) take(added.nbytes(), added.scalar_type(), {added.numel()});
      finish(rows);
      ++self->ended_;
    };
    auto alone = [](auto work) { return [work] { AloneHere guard; work(); }; };
    return {{name + " begins", alone(start), [self, number] { return self->ended_ == number; }},
            {name + " ends", alone(end), [state] { return !state->work || state->work->isCompleted(); }}};
  }

  struct AloneHere {
    c10::impl::ForceDispatchKeyGuard guard{
        c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
        c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset | c10::python_ks};
  };
  static at::Tensor bytes(const at::Tensor& t) {
    auto made = at::empty({static_cast<int64_t>(t.nbytes())}, at::kByte);
    std::memcpy(made.data_ptr(), t.data_ptr(), t.nbytes());
    return made;
  }

  c10::intrusive_ptr<c10d::Backend> host_;
  int64_t issued_ = 0, beside_ = 0;
  std::atomic<int64_t> ended_{0};  // collectives: a communicator runs one after another
};

}  // namespace sim
